"""Epochs: what a submitted step may still touch is taken away only when it is done.

Driver calls are not ordered with work on a stream, so unmapping a page under a running kernel is fatal. Each
submitted step is an epoch with an event; clean-up registered now waits for the last step submitted so far.

    submit ─ 1 ────── 2 ────── 3 ───────────────────> time
                 retire(a)  retire(b)   retire(c)
    runs after:       1        2            3
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """What `torch.cuda.Event` offers."""

    def query(self) -> bool:
        """Whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait for it."""


class Retirement:
    """Clean-up that waits for the device. Thread-safe; functions run outside its lock, in order of `retire`.

    A step counts as done only when every earlier one is. A function that raises is not run again: whoever
    registered it keeps books that stay true (see `AddressSpace`). The others still run, then the first error
    is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._in_flight: deque[tuple[int, Event]] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def submit(self, event: Event | None) -> int:
        """A step was handed to the device; returns its epoch. `event` None: it is complete already."""
        with self._lock:
            self._epoch += 1
            if event is not None:
                self._in_flight.append((self._epoch, event))
            return self._epoch

    def retire(self, clean_up: Callable[[], None]) -> None:
        """Run `clean_up` once every step submitted so far is done: now, or in a later `poll` or `drain`."""
        with self._lock:
            idle = not self._in_flight and not self._waiting
            if not idle:
                self._waiting.append((self._epoch, clean_up))
        if idle:
            clean_up()
        else:
            self.poll()

    def poll(self) -> int:
        """Run what is due without waiting; the number of functions run."""
        with self._lock:
            while self._in_flight and self._in_flight[0][1].query():
                self._in_flight.popleft()
        return self._run()

    def drain(self) -> None:
        """Wait for every step submitted so far and run everything registered so far."""
        with self._lock:
            last = self._epoch
        while True:
            with self._lock:
                event = self._in_flight[0] if self._in_flight and self._in_flight[0][0] <= last else None
            if event is None:
                break
            event[1].synchronize()
            with self._lock:
                if self._in_flight and self._in_flight[0] is event:
                    self._in_flight.popleft()
        self._run()

    @property
    def pending(self) -> int:
        """Functions that wait."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Submitted steps not known to be done."""
        return len(self._in_flight)

    def check(self) -> None:
        """Epochs rise in both queues and nothing waits for a step that never was."""
        with self._lock:
            for queue in (self._in_flight, self._waiting):
                epochs = [epoch for epoch, _ in queue]
                assert epochs == sorted(epochs), "epochs out of order"
                assert not epochs or epochs[-1] <= self._epoch, "an epoch nobody submitted"

    def _run(self) -> int:
        count = 0
        first_error: BaseException | None = None
        while True:
            with self._lock:
                done = self._in_flight[0][0] if self._in_flight else self._epoch + 1
                if not self._waiting or self._waiting[0][0] >= done:
                    break
                _, clean_up = self._waiting.popleft()
            count += 1
            try:
                clean_up()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return count
