"""Clients of the engine's loop that wait for outputs in their own thread.

    prompts ── Submission ──> EngineLoop ── RequestDelta ──> mailbox ── OutputCollector ──> RequestOutput
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vattn.engine.deltas import RequestDelta
from vattn.engine.loop import EngineLoop, Submission
from vattn.engine.mailbox import QueueMailbox
from vattn.engine.output_collector import OutputCollector
from vattn.engine.service import Service
from vattn.errors import RequestError
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, RequestOutputKind, SamplingParams
from vattn.prompts import TokenizedPrompt
from vattn.sampling.detokenize import TokenText


class Session:
    """The requests of one client, and their outputs as they arrive.

    The client holds `lease` while it uses the session (`with session.lease:`). If it needs the session for
    longer than one call, it calls `keep`. When the client leaves for any reason, its requests are aborted.
    """

    def __init__(self, loop: EngineLoop, vocabulary: TokenText | None) -> None:
        self._loop = loop
        self._vocabulary = vocabulary
        self._mailbox = QueueMailbox()
        self._collectors: dict[str, OutputCollector] = {}
        self.lease = self._mailbox.lease

    @property
    def running(self) -> int:
        """Number of requests whose last output has not arrived yet."""
        return len(self._collectors)

    def keep(self) -> None:
        """Keep the session until `leave` is called or nothing refers to it any more."""
        self._mailbox.kept = True

    def add(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        services: Sequence[Service],
        *,
        stream: bool = False,
        wait: bool = True,
    ) -> list[str]:
        """Start all of these requests, or none of them. Returns their ids.

        With `stream` an output arrives with each token and not only at the end. With `wait` this returns
        when the engine has accepted the requests; with `wait=False`, `Session.wait` reports a refusal.
        Raises RequestError or CapacityError if any is refused, QueueFull if too many would wait.
        """
        submissions = [
            Submission(prompt.token_ids, one, service, prompt.cache_salt, stream)
            for prompt, one, service in zip(prompts, params, services, strict=True)
        ]
        ids = self._loop.submit(submissions, self._mailbox, wait=wait)
        for request_id, prompt, one in zip(ids, prompts, params, strict=True):
            self._collectors[request_id] = OutputCollector(
                request_id, prompt.text, prompt.token_ids, one, self._vocabulary
            )
        return ids

    def wait(self, timeout_s: float | None = None, *, raises: bool = True) -> list[RequestOutput]:
        """Wait for the next outputs of this session's requests. Returns an empty list if the time is up.

        Raises StepError if a step with one of them failed; with `raises=False` the output has the error
        instead. Raises RequestError if the engine was closed, WrongProcess in a forked child.
        """
        self._loop.owner.require()  # in a forked child nothing would ever arrive
        return [output for delta in self._mailbox.get(timeout_s) for output in self._absorb(delta, raises)]

    def _absorb(self, delta: RequestDelta, raises: bool) -> list[RequestOutput]:
        if delta.failure is not None and raises:
            raise delta.failure
        collector = self._collectors.get(delta.request_id)
        if collector is None:
            return []  # its text could not be made, so its later reports are dropped
        if not collector.add(delta):
            self._loop.abort(delta.request_id)
        if collector.finished:
            del self._collectors[delta.request_id]
        return [collector.output()]

    def leave(self) -> None:
        """Abort the requests that still run. Idempotent. Does not wait."""
        self._loop.leave(self._mailbox)

    def wake(self, error: Exception) -> None:
        """Make a waiting call of `wait` raise this error."""
        self._mailbox.fail(error)


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one streamed request. `LLM.stream` makes it. Also a context manager."""

    def __init__(
        self,
        session: Session,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        service: Service,
        owner: object,
    ) -> None:
        """Start the request. The stream keeps `owner` alive."""
        self._session = session
        self._owner = owner
        self._moments: deque[RequestOutput] = deque()
        self._open = True
        every = params.output_kind is not RequestOutputKind.FINAL_ONLY
        with session.lease:
            [self.request_id] = session.add([prompt], [params], [service], stream=every)
            session.keep()

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        try:
            while not self._moments:
                self._moments.extend(self._session.wait())
        except BaseException:
            self.close()
            raise
        output = self._moments.popleft()
        if output.finished:
            self._shut()
        return output

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent. May be called from any thread."""
        if self._open:
            self._shut()
            self._session.wake(RequestError("the stream was closed while it waited"))

    def _shut(self) -> None:
        self._open = False
        self._session.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_all(
    session: Session,
    prompts: Sequence[TokenizedPrompt],
    params: Sequence[SamplingParams | BeamSearchParams],
    services: Sequence[Service],
    use_tqdm: bool,
) -> list[RequestOutput]:
    """Run these prompts to the end and return outputs in the same order. If the wait ends early, for any
    reason, the requests are aborted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, disable=not use_tqdm, transient=True)
    finished: dict[str, RequestOutput] = {}
    with session.lease:
        ids = session.add(prompts, params, services)
        try:
            with progress:
                task = progress.add_task("generating", total=len(ids))
                while session.running:
                    for output in session.wait():
                        finished[output.request_id] = output
                        progress.advance(task)
        finally:
            session.leave()
    return [finished[request_id] for request_id in ids]
