"""Rules about sharing memory with another process through a file descriptor."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .process import python
from .rule import Violation, expect, refused, rule, supported
from .sandbox import Sandbox


class Peer:
    """A process that imports one descriptor. `peer.py` says which commands it knows."""

    def __init__(self, box: Sandbox, fd: int, pages: int) -> None:
        arguments = [box.spec.device, json.dumps(dict(box.spec.options)), str(fd), str(pages * box.page)]
        self._process = python("peer", *arguments, pass_fds=(fd,), stdout=subprocess.PIPE)

    def ask(self, *words: object) -> int:
        """Send a command and return the number that the process answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.strip().isdigit():
            raise Violation(f"the other process could not do it: {answer.strip() or 'it died'}")
        return int(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextmanager
def shared(box: Sandbox, pages: int = 2) -> Iterator[tuple[int, int, Peer]]:
    """(address, handle, peer) of memory that a second process has imported too."""
    va, handle = box.reserve(pages), box.adopt(supported(box.driver.create, pages * box.page, True))
    box.map(va, handle, pages)
    box.grant(va, pages)
    fd = supported(box.driver.export_handle, handle)
    try:
        peer = Peer(box, fd, pages)
    finally:
        os.close(fd)
    try:
        yield va, handle, peer
    finally:
        peer.close()


@rule(
    "Exported memory is the same memory in another process: each sees what the other writes.",
    "cuMemExportToShareableHandle, cuMemImportFromShareableHandle",
)
def exported_memory_is_shared(box: Sandbox) -> None:
    with shared(box) as (va, _, peer):
        box.write(va, 71, 2)
        box.driver.synchronize()
        seen = peer.ask("read")
        expect(seen == 71, f"71 was written here, {seen} is read there")
        peer.ask("write", 72)
        box.expect_value(va, 72, "written by the other process", 2)


@rule("Exported memory lives in the importing process after the exporter has let go of it.", "cuMemRelease")
def exported_memory_outlives_the_exporter(box: Sandbox) -> None:
    with shared(box) as (va, handle, peer):
        box.write(va, 73, 2)
        box.driver.synchronize()
        peer.ask("read")
        box.unmap(va, 2)
        box.release(handle)
        box.create(2)  # takes the place if it is free
        seen = peer.ask("read")
        expect(seen == 73, f"73 was written, {seen} is read after release")


@rule(
    "Imported memory is an alias in the same process too, under a handle of its own.",
    "cuMemImportFromShareableHandle",
)
def imported_memory_is_an_alias(box: Sandbox) -> None:
    va, handle = box.reserve(2), box.adopt(supported(box.driver.create, box.page, True))
    fd = supported(box.driver.export_handle, handle)
    try:
        imported = box.driver.import_handle(fd, box.page)
    finally:
        os.close(fd)
    box.map(va, handle)
    box.map(va + box.page, imported)
    box.grant(va, 2)
    box.write(va, 15)
    box.expect_value(va + box.page, 15, "through the imported handle")
    box.unmap(va + box.page)
    box.driver.release(imported)
    box.expect_value(va, 15, "after the imported handle is gone")


@rule("Only memory created to be shared is exported.", "cuMemCreate: requestedHandleTypes")
def export_refuses_memory_that_is_private(box: Sandbox) -> str:
    box.release(box.adopt(supported(box.driver.create, box.page, True)))
    return refused("plain memory", box.driver.export_handle, box.create())


RULES = (
    exported_memory_is_shared,
    exported_memory_outlives_the_exporter,
    imported_memory_is_an_alias,
    export_refuses_memory_that_is_private,
)
