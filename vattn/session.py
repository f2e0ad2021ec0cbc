"""Clients of the engine's loop that wait for their outputs in a thread.

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
    """Requests of one client, and their outputs as they come.

    The client holds `lease` while it uses the session (`with session.lease:`), or calls `keep` if that is
    longer than one call. When it leaves, for whatever reason, its requests are aborted.
    """

    def __init__(self, loop: EngineLoop, vocabulary: TokenText | None) -> None:
        self._loop = loop
        self._vocabulary = vocabulary
        self._mailbox = QueueMailbox()
        self._collectors: dict[str, OutputCollector] = {}
        self.lease = self._mailbox.lease

    @property
    def running(self) -> int:
        """Requests whose last output has not come yet."""
        return len(self._collectors)

    def keep(self) -> None:
        """From here on the session lasts until `leave`, or until nobody refers to it."""
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
        """Start all of these requests, or none; their ids.

        `stream`: an output comes with each token, not only at the end. `wait`: until the engine has accepted
        them; False: `wait` of the session tells of a refusal. Raises RequestError or CapacityError if any is
        refused, QueueFull if too many would wait.
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
        """The next outputs of the requests of this session; empty when the time is up.

        Raises StepError when a step of theirs failed (`raises=False`: the output says so), RequestError when
        the engine was closed.
        """
        return [output for delta in self._mailbox.get(timeout_s) for output in self._absorb(delta, raises)]

    def _absorb(self, delta: RequestDelta, raises: bool) -> list[RequestOutput]:
        if delta.failure is not None and raises:
            raise delta.failure
        collector = self._collectors.get(delta.request_id)
        if collector is None:
            return []  # its text broke, and what it still got is dropped
        if not collector.add(delta):
            self._loop.abort(delta.request_id)
        if collector.finished:
            del self._collectors[delta.request_id]
        return [collector.output()]

    def leave(self) -> None:
        """Abort what still runs. Idempotent; does not wait."""
        self._loop.leave(self._mailbox)

    def wake(self, error: Exception) -> None:
        """Have whoever waits raise this error."""
        self._mailbox.fail(error)


class OutputStream(Iterator[RequestOutput]):
    """The moments of one request; made by `LLM.stream`. Also a context manager."""

    def __init__(
        self,
        session: Session,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        service: Service,
        owner: object,
    ) -> None:
        """Starts the request. `owner`: kept alive by the stream."""
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
        """Abort the request if it still runs. Idempotent; from any thread."""
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
    """Run these prompts to their ends; outputs in their order. Whatever ends the wait ends them too."""
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
