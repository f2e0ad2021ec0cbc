"""One thread owns the engine. Everybody else sends it commands and receives what is new.

    thread 1   generate ──┐ commands ┌──────────────────────┐ deltas ┌──> mailbox 1
    thread 2   stream   ──┼─────────>│ EngineLoop: a thread │────────┼──> mailbox 2
    asyncio    AsyncLLM ──┘          └──── Engine.step ─────┘        └──> mailbox 3

The thread runs commands between two steps, and steps as long as somebody waits for an output. Without work it
sleeps. A client that is gone, for whatever reason, has its requests aborted before the next step.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from vattn.engine.deltas import RequestDelta
from vattn.engine.engine import Engine
from vattn.engine.mailbox import Mailbox
from vattn.engine.service import Service
from vattn.errors import RequestError, StepError
from vattn.outputs import RequestMetrics
from vattn.params import BeamSearchParams, SamplingParams
from vattn.vmm.owner import OwnerProcess

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Submission(NamedTuple):
    """One request to be added."""

    token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    service: Service
    cache_salt: str = ""
    stream: bool = False
    """Report each token, not only the end."""


class EngineLoop:
    """Runs `engine` in a thread of its own, until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.owner = OwnerProcess("LLM")
        """A forked child has the loop, but not its thread."""
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._ids = itertools.count()
        self._clients: dict[str, weakref.ref[Mailbox]] = {}
        """By request id, who waits for its outputs."""
        self._stopping = False
        self._then: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="vattn-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for clients, from any thread
    def call(self, command: Callable[[], T]) -> T:
        """Run a command between two steps, in the engine's thread; its result, or what it raises.

        Raises RequestError when the engine is closed.
        """
        self.owner.require()
        if self.is_current:
            return command()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        def refuse() -> None:
            future.set_exception(RequestError("the engine is closed"))

        self._send(run, refuse)
        return future.result()

    def look(self, command: Callable[[], T]) -> T:
        """`call`, also when the engine is closed: there is nothing then that could change meanwhile."""
        self.owner.require()
        if self._stopping and not self.is_current:
            self._thread.join()
            return command()
        return self.call(command)

    def submit(
        self, submissions: Sequence[Submission], mailbox: Mailbox, *, wait: bool = True
    ) -> list[str]:
        """Add all of these requests, or none; their ids. Their reports go to `mailbox`.

        Raises RequestError or CapacityError (QueueFull: too many wait) if any is refused. With `wait=False`
        it returns before the engine has looked at them, and a refusal comes as the report of a failure.
        While the engine sleeps they wait.
        """
        ids = [str(next(self._ids)) for _ in submissions]
        if wait:
            self.call(lambda: self._add(ids, submissions, mailbox))
            return ids

        def refuse(error: Exception) -> None:
            mailbox.put([_failure(request_id, error) for request_id in ids])

        def add() -> None:
            try:
                self._add(ids, submissions, mailbox)
            except Exception as error:
                refuse(error)

        self.owner.require()
        self._send(add, lambda: refuse(RequestError("the engine is closed")))
        return ids

    def abort(self, request_id: str) -> bool:
        """End a request now; whoever waits for it gets what it has. False: it does not run."""
        return self.call(lambda: self._abort(request_id))

    def leave(self, mailbox: Mailbox) -> None:
        """The client does not want any more reports: its requests end. Does not wait."""
        mailbox.closed = True
        with self._wake:
            self._wake.notify()

    def stop(self, then: Callable[[], None] | None = None) -> None:
        """End every request with an error, and the thread. Idempotent.

        Does not wait when it is called in that thread; `then` is called at its end.
        """
        with self._wake:
            self._stopping = True
            self._then = then or self._then
            self._wake.notify()
        if not self.is_current:
            self._thread.join()

    @property
    def is_current(self) -> bool:
        """True in the engine's thread."""
        return threading.current_thread() is self._thread

    def _send(self, command: Callable[[], None], refuse: Callable[[], None]) -> None:
        with self._wake:
            if not self._stopping:
                self._commands.append(command)
                self._wake.notify()
                return
        refuse()

    # ------------------------------------------------------------------ in the engine's thread
    def _run(self) -> None:
        while self._wait():
            self._obey()
            if self._has_work:
                self._step()
        self._close()

    @property
    def _has_work(self) -> bool:
        """Requests that were added to the engine by hand are not the loop's business."""
        engine = self._engine
        return bool(self._clients) and (not engine.asleep or self._overdue() <= 0)

    def _overdue(self) -> float:
        """Seconds until the next request times out, while the engine sleeps."""
        deadline = self._engine.next_deadline
        return float("inf") if deadline is None else deadline - self._engine.executor.clock()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: the end."""
        with self._wake:
            while not (self._stopping or self._commands or self._has_work or self._any_gone()):
                seconds = self._overdue() if self._clients else float("inf")
                self._wake.wait(None if seconds == float("inf") else max(0.0, seconds))
            return not self._stopping

    def _obey(self) -> None:
        """Run what was sent. A client that left before it sent a command is gone when that runs."""
        self._drop_gone()
        while self._commands:
            command = self._commands.popleft()
            self._drop_gone()
            command()

    def _any_gone(self) -> bool:
        return any(_gone(client) for client in self._clients.values())

    def _drop_gone(self) -> None:
        gone = [request_id for request_id, client in self._clients.items() if _gone(client)]
        for request_id in gone:
            del self._clients[request_id]
            self._engine.abort(request_id)
        if gone:
            self._deliver(self._engine.take_deltas())

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except StepError as error:
            self._step_failed(error)
            deltas = self._engine.take_deltas()
        except Exception as error:
            # A step that failed outside the model: nobody in particular is to blame, so all are told.
            logger.exception("a step of the engine failed")
            self._step_failed(StepError(list(self._clients), error))
            deltas = self._engine.take_deltas()
        self._deliver(deltas)

    def _step_failed(self, error: StepError) -> None:
        """End the requests that were in a failed step, so that it is not tried for ever."""
        told: dict[Mailbox, list[RequestDelta]] = {}
        for request_id in error.request_ids:
            self._engine.abort(request_id, "error", str(error))
            mailbox = self._mailbox(request_id)
            if mailbox is not None:
                told.setdefault(mailbox, []).append(_failure(request_id, error))
                del self._clients[request_id]
        for mailbox, deltas in told.items():
            mailbox.put(deltas)

    def _deliver(self, deltas: Sequence[RequestDelta]) -> None:
        """Hand every client what is new, once a step."""
        batches: dict[Mailbox, list[RequestDelta]] = {}
        for delta in deltas:
            mailbox = self._mailbox(delta.request_id)
            if mailbox is not None:
                batches.setdefault(mailbox, []).append(delta)
            if delta.finished:
                self._clients.pop(delta.request_id, None)
        for mailbox, news in batches.items():
            mailbox.put(news)

    def _mailbox(self, request_id: str) -> Mailbox | None:
        client = self._clients.get(request_id)
        return None if client is None else client()

    def _add(self, ids: Sequence[str], submissions: Sequence[Submission], mailbox: Mailbox) -> None:
        for one in submissions:
            self._engine.validate(one.token_ids, one.params)
        self._engine.make_room([one.service for one in submissions])
        for request_id, one in zip(ids, submissions, strict=True):
            self._engine.add_request(
                request_id,
                one.token_ids,
                one.params,
                stream=one.stream,
                service=one.service,
                cache_salt=one.cache_salt,
            )
            self._clients[request_id] = weakref.ref(mailbox)

    def _abort(self, request_id: str) -> bool:
        aborted = self._engine.abort(request_id)
        self._deliver(self._engine.take_deltas())
        return aborted

    def _close(self) -> None:
        self._obey()  # those that were accepted before the end was decided
        error = RequestError("the engine was closed while the request ran")
        mailboxes = {client() for client in self._clients.values()}
        self._clients.clear()
        self._engine.abort_all()
        self._engine.take_deltas()
        for mailbox in mailboxes:
            if mailbox is not None:
                mailbox.fail(error)
        if self._then is not None:
            self._then()


def _failure(request_id: str, error: Exception) -> RequestDelta:
    return RequestDelta(request_id, (), True, RequestMetrics(0.0), error=str(error), failure=error)


def _gone(client: weakref.ref[Mailbox]) -> bool:
    mailbox = client()
    return mailbox is None or mailbox.gone
