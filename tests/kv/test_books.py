"""Books without memory: decisions need neither torch nor a device, and are the same everywhere."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from vattn.errors import OutOfMemory
from vattn.kv.books import report
from vattn.kv.books.books import Books
from vattn.kv.books.operations import (
    Copy,
    Decision,
    Grant,
    Map,
    Move,
    NoMemory,
    Operation,
    carry_out,
)
from vattn.kv.books.rows import MappedBooks
from vattn.kv.books.units import UnitLayout

TOKEN, UNIT, ROWS = 100, 1600, 4
LAYOUTS = {
    "blocks": UnitLayout(TOKEN, UNIT, ranges=1, max_tokens=96),
    "rows": UnitLayout(TOKEN, UNIT - 50, ranges=3, max_tokens=96),  # tokens straddle units
    "reserved": UnitLayout(TOKEN, 96 * TOKEN, ranges=1, max_tokens=96),
}


def make(kind: str, limit: int, fingerprint: str | None = "model") -> Books:
    layout = LAYOUTS[kind]
    if kind == "rows":
        addresses = ROWS * layout.width * layout.bytes
        return MappedBooks(
            layout, limit, rows=ROWS, address_bytes=addresses, fingerprint=fingerprint
        )
    if kind == "reserved":
        return Books(layout, limit, reserves=True)
    return Books(layout, limit, fingerprint=fingerprint)


class Recorder:
    """A memory that notes what it is told, and fails where it is told to."""

    def __init__(self) -> None:
        self.told: list[Operation] = []
        self.fail_at: int | None = None
        self.failure: Exception = RuntimeError("planted")

    def apply(self, operation: Operation) -> None:
        if self.fail_at is not None and len(self.told) == self.fail_at:
            self.fail_at = None
            raise self.failure
        self.told.append(operation)


def kinds(told: list[Operation]) -> list[str]:
    return [type(operation).__name__ for operation in told]


class Life:
    """Random requests: what is decided, and what the memory is told."""

    def __init__(self, books: Books, memory: Recorder, seed: int) -> None:
        self.books, self.memory = books, memory
        self.random = random.Random(seed)
        self.texts: dict[str, list[int]] = {}
        self.decided: list[object] = []
        self.count = 0
        self.failed = 0

    def run(self, decision: Decision[object]) -> object:
        """What it decides; an error of the memory is noted, and nothing else happens."""
        before = dict(self.books.live)
        try:
            result = carry_out(decision, self.memory)
        except RuntimeError as error:
            assert "planted" in str(error) or isinstance(error, OutOfMemory)
            self.failed += 1
            assert self.books.live == before, "a failed decision changed who lives"
            result = None
        report.check(self.books)
        report.usage(self.books, TOKEN * self.books.layout.ranges).check()
        self.decided.append(result)
        return result

    def step(self) -> None:
        roll, books = self.random.random(), self.books
        name, self.count = f"r{self.count}", self.count + 1
        if roll < 0.35 or not self.texts:
            text = [self.random.choice([1, 1, 2])] * self.random.randint(1, 60) + [self.count]
            if self.run(books.attach(name, text, "", resumed=False)) is not None:
                self.texts[name] = text
                books.computed(books.live[name], text, len(text))
            return
        other = self.random.choice(sorted(self.texts))
        live, text = books.live[other], self.texts[other]
        if roll < 0.55:
            more = self.random.randint(1, 20)
            if len(text) + more > live.tokens and self.run(books.grow(live, len(text) + more)):
                text += [self.count] * more
                books.computed(live, text, len(text))
        elif roll < 0.7:
            tokens = self.random.randint(1, len(text))
            if self.run(books.fork(other, name, tokens)):
                self.texts[name] = text[:tokens]
        elif roll < 0.95:
            if self.run(books.free(other)) is None and other not in books.live:
                del self.texts[other]
        else:
            self.run(books.resize(self.random.randint(4, 30)))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_another_rank_decides_the_same(kind: str) -> None:
    for seed in range(8):
        lives = [Life(make(kind, 20), Recorder(), seed) for _ in range(2)]
        for life in lives:
            for _ in range(60):
                life.step()
        assert lives[0].decided == lives[1].decided and lives[0].memory.told == lives[1].memory.told


@pytest.mark.parametrize("failure", [RuntimeError("planted"), OutOfMemory("map")], ids=["error", "short"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_failed_operation_is_taken_back(kind: str, failure: Exception) -> None:
    """Whichever operation it is: the books balance, and who lives is as before (checked after each step)."""
    met = 0
    for seed in range(3):
        for fail_at in range(0, 40, 2):
            life = Life(make(kind, 14), Recorder(), seed)
            life.memory.fail_at, life.memory.failure = fail_at, failure
            for _ in range(40):
                life.step()
            met += life.memory.fail_at is None
            for name in list(life.texts):
                life.run(life.books.free(name))
            assert life.books.counts.num_needed == 0
    assert met > 20


def test_a_request_of_rows_is_mapped_granted_copied_and_kept() -> None:
    books, memory = make("rows", 20), Recorder()
    text = [1] * 40
    assert carry_out(books.attach("a", text, "", resumed=False), memory) == 0
    assert memory.told == [Map(0, 0, (0, 1, 2), (0, 1, 2))]
    books.computed(books.live["a"], text, 40)
    memory.told.clear()
    assert carry_out(books.attach("b", [*text, 2], "", resumed=False), memory) == 32
    assert memory.told == [
        Grant(1, (0, 1)),
        Map(1, 2, (3,), (3,)),
        Copy(2, 3, 32 * TOKEN - 2 * (UNIT - 50)),
    ]
    memory.told.clear()
    carry_out(books.free("a"), memory)
    carry_out(books.free("b"), memory)
    assert memory.told == [] and report.usage(books, 300).cached > 0, "rows stay mapped"
    assert carry_out(books.resize(0), memory)
    assert kinds(memory.told) == ["Unmap", "Unmap", "Discard"]
    assert report.usage(books, 300).physical == 0
    report.check(books)


def test_blocks_are_told_of_and_move_by_number() -> None:
    books, memory = make("blocks", 8), Recorder()
    text = [1] * 40
    carry_out(books.attach("a", text, "", resumed=False), memory)
    books.computed(books.live["a"], text, 40)
    carry_out(books.attach("b", [2] * 20, "", resumed=False), memory)
    carry_out(books.free("a"), memory)
    assert memory.told == [Map(0, 0, (0, 1, 2), ()), Map(1, 0, (3, 4), ())]
    assert carry_out(books.resize(4), memory)
    assert memory.told[2:] == [Move(4, {0: 0, 1: 1, 3: 2, 4: 3})]
    assert not carry_out(books.resize(1), memory)


def test_a_text_is_forgotten_with_its_request() -> None:
    books = make("blocks", 8)
    text = [1] * 64
    for name in ("waits", "runs"):
        assert books.can_admit(65, books.text(name, text, ""))
        assert books.text(name, text, "") is books.text(name, text, ""), "it is kept while the request waits"
    carry_out(books.attach("runs", text, "", resumed=False), NoMemory())
    carry_out(books.free("runs"), NoMemory())
    books.forget("waits")
    assert not books._looked_up


TORCH_FREE = """
import sys
from vattn.config import KVCacheConfig
from vattn.kv.books import report
from vattn.kv.books.books import Books
from vattn.kv.books.rows import MappedBooks
from vattn.kv.books.operations import NoMemory, carry_out
from vattn.kv.layout import KVLayout, KVShape, RowLayout
import numpy as np

shape = KVShape(2, 2, 12, np.dtype("float32"))
rows = RowLayout(KVLayout.INTERLEAVED, shape, 4, 96, 4096)
blocks = RowLayout(KVLayout.INTERLEAVED, shape, 1, 96, 16 * shape.token_bytes)
paged = Books(blocks.units, 20, fingerprint="m")
for books in (MappedBooks(rows.units, 20, rows=4, fingerprint="m"), paged):
    text = list(range(40))
    assert carry_out(books.attach("a", text, "", resumed=False), NoMemory()) == 0
    books.computed(books.live["a"], text, 40)
    assert carry_out(books.fork("a", "b", 33), NoMemory())
    assert carry_out(books.grow(books.live["b"], 90), NoMemory())
    carry_out(books.free("a"), NoMemory())
    report.check(books)
    report.page_map(books, "x", "page", 1, report.usage(books, shape.token_bytes)).check()
    assert carry_out(books.resize(10), NoMemory())
KVCacheConfig(backend="paged")
assert not {"torch", "vattn.vmm.host", "vattn.vmm.cuda", "transformers"} & set(sys.modules), "heavy"
"""


def test_books_import_no_torch_and_no_driver() -> None:
    child = subprocess.run([sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
