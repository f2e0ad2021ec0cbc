"""Lets one process or thread at a time read and replace a small file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock file of `path` (`path.lock`). Yields False if the lock is not free within `timeout_s`.

    The kernel releases the lock of a process that has died. If a process is stopped while it holds the lock,
    others wait for the whole timeout. The lock file is never deleted, because a lock on a deleted file would
    keep no other process out.
    """
    lock = path.with_name(path.name + ".lock")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.002)
        yield True
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Replace the whole file, so that a reader sees the old text or the new. Call it under the lock."""
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(fresh, path)
