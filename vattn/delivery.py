"""Who gets which output: many threads, one engine, one batch.

    thread 1   generate ──┐                        ┌── mailbox of request 0
    thread 2   stream   ──┼── lock ── Engine.step ─┼── mailbox of request 1
    thread 3   generate ──┘                        └── …

Whoever waits for an output steps the engine, for all; the outputs of others wait in their mailboxes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vattn.engine.engine import Engine
from vattn.engine.service import Service
from vattn.errors import RequestError
from vattn.interrupts import interrupts_held
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, SamplingParams
from vattn.prompts import TokenizedPrompt


class Delivery:
    """Lets threads share an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._inside = 0
        self._abandoned: deque[str] = deque()
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self.closed = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One thread in the engine at a time; streams that were dropped unread end when it leaves."""
        with interrupts_held(), self._lock:
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1
                self._reap()

    def require_open(self) -> None:
        if self.closed:
            raise RequestError("the engine is closed")

    def _reap(self) -> None:
        while not self._inside and self._abandoned:
            request_id = self._abandoned.popleft()
            self._mailboxes.pop(request_id, None)
            self._engine.abort(request_id)

    def abandon(self, request_id: str) -> None:
        """End a request from a finaliser, which the garbage collector may run in the middle of a step."""
        self._abandoned.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def add(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        services: Sequence[Service],
        added: list[str],
        *,
        stream: bool = False,
    ) -> None:
        """Accept all of the prompts, or none; their ids go to `added`.

        They are there even if a Ctrl-C, held back meanwhile, is raised at the end.
        """
        with self.exclusive():
            self.require_open()
            if self._engine.asleep:
                raise RequestError("the engine sleeps: call wake_up() first")
            for prompt, p in zip(prompts, params, strict=True):
                self._engine.validate(prompt.token_ids, p)
            self._engine.make_room(services)
            for prompt, p, service in zip(prompts, params, services, strict=True):
                request_id = str(next(self._ids))
                self._engine.add_request(
                    request_id,
                    prompt.token_ids,
                    p,
                    prompt=prompt.text,
                    stream=stream,
                    service=service,
                    cache_salt=prompt.cache_salt,
                )
                self._mailboxes[request_id] = deque()
                added.append(request_id)

    def drop(self, request_ids: Sequence[str]) -> None:
        with self.exclusive():
            for request_id in request_ids:
                self._mailboxes.pop(request_id, None)
                self._engine.abort(request_id)

    def pump(self, request_id: str) -> RequestOutput:
        """The next output of a request, stepping the engine until there is one."""
        while True:
            with self.exclusive():
                if self.closed:
                    raise RequestError("the engine was closed while the request ran")
                mailbox = self._mailboxes.get(request_id)
                if mailbox is None:
                    raise RequestError("the stream was closed while it waited")
                if mailbox:
                    return mailbox.popleft()
                if not self._engine.knows(request_id):
                    raise RequestError("the request was aborted")
                asleep = self._engine.asleep
                for output in self._engine.step():
                    if output.request_id in self._mailboxes:
                        self._mailboxes[output.request_id].append(output)
            if asleep:
                time.sleep(0.01)  # another thread has to wake it

    def complete(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        services: Sequence[Service],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        request_ids: list[str] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, disable=not use_tqdm, transient=True)
        try:
            self.add(prompts, params, services, request_ids)
            with progress:
                task = progress.add_task("generating", total=len(request_ids))
                finished = []
                for request_id in request_ids:
                    finished.append(self.pump(request_id))
                    progress.advance(task)
                return finished
        finally:
            self.drop(request_ids)

    def abort(self, request_id: str) -> bool:
        """End a request now; whoever waits for it gets what it has. False: it does not run."""
        with self.exclusive():
            output = self._engine.abort(request_id)
            if output is not None and request_id in self._mailboxes:
                self._mailboxes[request_id].append(output)
            return output is not None
