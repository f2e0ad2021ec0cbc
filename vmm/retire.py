"""Epochs: memory that a submitted step may touch is taken away only after the step is done.

Driver calls are not ordered with work on a stream, so unmapping a page under a running kernel is fatal. Each
submitted step is an epoch with an event. Clean-up waits for all steps submitted before it was registered.

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
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool:
        """Whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""


class Retirement:
    """Clean-up that waits for the device. Thread-safe; functions run outside its lock, in order of `retire`.

    A step counts as done only if every earlier one is done. A function that raises is not run again; its
    owner must keep its own books correct (see `AddressSpace`). The other functions still run, then the first
    error is raised.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._in_flight: deque[tuple[int, Event]] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def submit(self, event: Event | None) -> int:
        """Record a step submitted to the device and return its epoch. `event` is None if it is done."""
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
        """Run the functions that are due, without waiting. Returns how many ran."""
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
        """Number of functions that wait."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Number of submitted steps that are not known to be done."""
        return len(self._in_flight)

    def check(self) -> None:
        """Raise AssertionError unless epochs rise in both queues and all of them were submitted."""
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
