"""One thread owns the engine. All other threads send it commands and receive what is new.

    thread 1   generate ──┐ commands ┌──────────────────────┐ deltas ┌──> mailbox 1
    thread 2   stream   ──┼─────────>│ EngineLoop: a thread │────────┼──> mailbox 2
    asyncio    AsyncLLM ──┘          └──── Engine.step ─────┘        └──> mailbox 3

The thread runs commands between steps. It steps the engine as long as a client waits for an output, and
sleeps when there is no work. If a client goes away for any reason, its requests are aborted before the next
step.
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
    """A request that a client wants to add."""

    token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    service: Service
    cache_salt: str = ""
    stream: bool = False
    """Report each token and not only the end."""


class EngineLoop:
    """Runs `engine` in its own thread until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.owner = OwnerProcess("LLM")
        """Detects a forked child: it inherits the loop, but not the thread."""
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._ids = itertools.count()
        self._clients: dict[str, weakref.ref[Mailbox]] = {}
        """The mailbox of the client that waits for each request, by request id."""
        self._stopping = False
        self._then: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="vattn-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for clients, from any thread
    def call(self, command: Callable[[], T]) -> T:
        """Run a command in the engine's thread, between steps. Returns its result or raises its exception.

        Raises RequestError if the engine is closed.
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
        """Like `call`, but works on a closed engine too: nothing can change it then."""
        self.owner.require()
        if self._stopping and not self.is_current:
            self._thread.join()
            return command()
        return self.call(command)

    def submit(
        self, submissions: Sequence[Submission], mailbox: Mailbox, *, wait: bool = True
    ) -> list[str]:
        """Add all of these requests, or none of them. Returns their ids. Their reports go to `mailbox`.

        Raises RequestError or CapacityError if any is refused; QueueFull, a CapacityError, means that too
        many requests are waiting. With `wait=False` it returns before the engine has checked the requests,
        and a refusal arrives as the report of a failed request. While the engine sleeps, the requests wait.
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
        """End a request now. Its client gets the output so far. Returns False if it is not running."""
        return self.call(lambda: self._abort(request_id))

    def leave(self, mailbox: Mailbox) -> None:
        """End the requests of a client that wants no more reports. Does not wait."""
        if not self.owner.here:
            return  # the requests are the parent's, and the lock may have been inherited locked
        mailbox.closed = True
        with self._wake:
            self._wake.notify()

    def stop(self, then: Callable[[], None] | None = None) -> None:
        """End every request with an error, then end the thread. Idempotent.

        Waits for the thread, unless it is called in that thread. The thread calls `then` at its end.
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
        """True if a client waits for an output. Requests added directly to the engine don't count."""
        engine = self._engine
        return bool(self._clients) and (not engine.asleep or self._overdue() <= 0)

    def _overdue(self) -> float:
        """Seconds until the next request times out. Used while the engine sleeps."""
        deadline = self._engine.next_deadline
        return float("inf") if deadline is None else deadline - self._engine.executor.clock()

    def _wait(self) -> bool:
        """Sleep until there is something to do. Returns False if the loop must end."""
        with self._wake:
            while not (self._stopping or self._commands or self._has_work or self._any_gone()):
                seconds = self._overdue() if self._clients else float("inf")
                self._wake.wait(None if seconds == float("inf") else max(0.0, seconds))
            return not self._stopping

    def _obey(self) -> None:
        """Run the commands that were sent, in order. If a client left before a command was sent, it counts
        as gone when that command runs."""
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
            # The step failed outside the model. No single request caused it, so all clients are told.
            logger.exception("a step of the engine failed")
            self._step_failed(StepError(list(self._clients), error))
            deltas = self._engine.take_deltas()
        self._deliver(deltas)

    def _step_failed(self, error: StepError) -> None:
        """End the requests of a failed step, so that the engine does not retry it forever."""
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
        """Give every client what is new, once per step."""
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
        self._obey()  # run the commands that were accepted before `stop`
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
