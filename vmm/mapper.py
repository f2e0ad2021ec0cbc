"""Look-ahead: map in the background the pages that the next step needs, and count the waits that remain.

Driver calls release the GIL, so one thread maps the pages of step n + 1 while step n computes. A step waits
only if its own pages are missing. That wait is the cost of virtual memory, so it is counted.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from time import perf_counter

Work = Callable[[], object]


class _Queue:
    """State shared with the thread. It is apart from `Mapper` so that the thread does not keep that alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queued: OrderedDict[Hashable, Work] = OrderedDict()
        self.running: set[Hashable] = set()
        self.errors: dict[Hashable, BaseException] = {}
        self.closing = False

    def busy(self, key: Hashable) -> bool:
        return key in self.queued or key in self.running

    def run(self, key: Hashable, work: Work) -> None:
        """Run work taken from the queue. Its key must be in `running`."""
        error = None
        try:
            work()
        except BaseException as caught:
            error = caught
        with self.changed:
            self.running.discard(key)
            if error is not None:
                self.errors[key] = error
            self.changed.notify_all()


class Mapper:
    """One daemon thread that runs small pieces of work, at most one per key at a time.

    Work must be safe on any thread: a caller that waits for a piece that has not started runs it itself. An
    error is kept with its key until `wait` or `drain` raises it.
    """

    def __init__(self, name: str = "vattn-mapper") -> None:
        self._queue = _Queue()
        self._stall_lock = threading.Lock()
        self._stall_seconds = 0.0
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue)
        self._finalizer.atexit = False

    @property
    def stall_seconds(self) -> float:
        """Seconds spent in `wait` so far, by all callers together."""
        return self._stall_seconds

    @property
    def pending(self) -> int:
        """Pieces of work queued or running."""
        with self._queue.changed:
            return len(self._queue.queued) + len(self._queue.running)

    def submit(self, key: Hashable, work: Work) -> None:
        """Queue work under a key. It replaces earlier work of the key that has not started.

        Raises `RuntimeError` after `close`.
        """
        with self._queue.changed:
            if self._queue.closing:
                raise RuntimeError("the mapper is closed")
            self._queue.queued[key] = work
            self._queue.changed.notify_all()

    def wait(self, keys: Iterable[Hashable]) -> float:
        """Wait until no work of these keys is queued or running. Returns the seconds waited, 0.0 if none.

        Raises the first error among these keys, once. Errors of other keys are kept.
        """
        keys = list(dict.fromkeys(keys))
        queue = self._queue
        with queue.changed:
            missing = [key for key in keys if queue.busy(key)]
        elapsed = 0.0
        if missing:
            start = perf_counter()
            for key in missing:
                self._finish(key)
            elapsed = perf_counter() - start
            with self._stall_lock:
                self._stall_seconds += elapsed
        self._raise(keys)
        return elapsed

    def drain(self) -> None:
        """Wait for all work and raise the first error of any key. The time does not count as stall."""
        queue = self._queue
        with queue.changed:
            queue.changed.wait_for(lambda: not queue.queued and not queue.running)
            keys = list(queue.errors)
        self._raise(keys)

    def close(self) -> None:
        """Finish queued work, then stop the thread. Errors that were not waited for are lost. Idempotent."""
        _stop(self._queue)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _finish(self, key: Hashable) -> None:
        queue = self._queue
        while True:
            with queue.changed:
                queue.changed.wait_for(lambda: key not in queue.running)
                work = queue.queued.pop(key, None)
                if work is None:
                    return
                queue.running.add(key)
            queue.run(key, work)

    def _raise(self, keys: Iterable[Hashable]) -> None:
        with self._queue.changed:
            for key in keys:
                error = self._queue.errors.pop(key, None)
                if error is not None:
                    raise error


def _serve(queue: _Queue) -> None:
    while True:
        with queue.changed:
            queue.changed.wait_for(lambda: queue.closing or any(k not in queue.running for k in queue.queued))
            key = next((key for key in queue.queued if key not in queue.running), None)
            if key is None:
                if not queue.queued:  # closing
                    return
                queue.changed.wait()  # earlier work of the key still runs in another thread
                continue
            work = queue.queued.pop(key)
            queue.running.add(key)
        queue.run(key, work)


def _stop(queue: _Queue) -> None:
    with queue.changed:
        queue.closing = True
        queue.changed.notify_all()
