"""Prefix cache: which prefixes have their K and V in memory, and which of them to evict first.

Text is cut into units of `unit` tokens. A unit's key is a chain hash, so it names the unit AND all text
before it. vLLM's automatic prefix caching has the same idea; SGLang's RadixAttention keeps a tree instead.

    root = H(fingerprint, salt)      key[0] = H(root, tokens[0:u])      key[1] = H(key[0], tokens[u:2u])

                    ┌─ "You are a bot." ─┬─ "Hello!"        the least recently used
    fingerprint,salt┤                    └─ "What is 2+2?"  leaf is evicted first
                    └─ "Translate:" ───────  …

Equal text does not mean equal KV. The fingerprint identifies weights, dtype, rope and adapters; only requests
with equal salts share. Hashes find entries, then tokens, parents and salts are compared, so a collision is a
miss. What an entry holds (units of memory) is up to the caller: this module does not know what it is.

Work is done once. A `Text` keeps the keys of a text and the entries found for it, and lives as long as its
request. Looking it up again only costs work for what has changed since.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

M = TypeVar("M")

Hasher = Callable[[bytes], bytes]

def chain_hash(data: bytes) -> bytes:
    """16 bytes of BLAKE2b. Accidental collisions don't happen; forged ones fail the comparison of tokens."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(eq=False)
class Entry(Generic[M]):
    """One unit of text and the memory that holds its K and V."""

    key: bytes
    parent: Entry[M] | None
    tokens: tuple[int, ...]
    salt: str
    memory: M
    children: int = 0
    stamp: int = 0
    """When it was last used; larger is later. A later use of its children is added when they are evicted."""
    alive: bool = True
    """Whether it is still in the cache."""


@dataclass(eq=False)
class Text(Generic[M]):
    """The tokens of one request, a list that only grows, and its lookup in the prefix cache."""

    token_ids: Sequence[int]
    salt: str
    """Only texts with equal salts share entries."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its whole units so far."""
    found: list[Entry[M]] = field(default_factory=list)
    """The entries that `match` found last time. Some at the end may have been evicted since."""
    unchanged: int = 0
    """How many leading entries of `found` have not changed since the caller last derived data from them."""
    tip: tuple[int, Entry[M]] | None = None
    """(units, the last entry of these units). While that entry is alive, the whole chain is cached."""


class PrefixCache(Generic[M]):
    """Entries by chain hash.

    Args:
        unit: number of tokens in an entry.
        fingerprint: identifies the model. KV is never shared between different fingerprints.
        drop: called with the memory of every entry that is removed.
        hasher: maps bytes to a hash; a test may pass one that collides.
    """

    def __init__(
        self, unit: int, fingerprint: str, drop: Callable[[M], None], hasher: Hasher = chain_hash
    ) -> None:
        assert unit > 0
        self.unit = unit
        self._fingerprint = fingerprint
        self._drop = drop
        self._hash = hasher
        self._entries: dict[bytes, Entry[M]] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap of (stamp, key), some outdated
        self._clock = 0
        self._claims: dict[bytes, Hashable] = {}
        self._claimed: dict[Hashable, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------------ keys
    def root(self, salt: str) -> bytes:
        """The key from which all chains of a salt begin."""
        return self._hash(f"{len(self._fingerprint)}:{self._fingerprint}{salt}".encode())

    def keys(self, text: Text[M]) -> list[bytes]:
        """The keys of all whole units of a text. Returns `text.keys`, extended by the units that are new."""
        keys, units = text.keys, len(text.token_ids) // self.unit
        if len(keys) < units:
            key = keys[-1] if keys else self.root(text.salt)
            start = len(keys) * self.unit
            data = np.asarray(text.token_ids[start : units * self.unit], np.int64).tobytes()
            step = 8 * self.unit
            for at in range(0, len(data), step):
                key = self._hash(key + data[at : at + step])
                keys.append(key)
        return keys

    # ------------------------------------------------------------------ finding
    def match(self, text: Text[M]) -> list[Entry[M]]:
        """The entries of the longest cached prefix, in order. Returns `text.found`, brought up to date.

        An entry never outlives its prefix. So if the last entry found before is alive, all of them are.
        """
        found = text.found
        while found and not found[-1].alive:
            found.pop()
            text.unchanged = min(text.unchanged, max(len(found) - 1, 0))
        keys = self.keys(text)
        for index in range(len(found), len(keys)):
            entry = self._entries.get(keys[index])
            parent = found[-1] if found else None
            if entry is None or not self._same(entry, parent, self._tokens(text.token_ids, index), text.salt):
                break
            found.append(entry)
        return found

    def touch(self, text: Text[M]) -> None:
        """Record that the entries found for a text were used now. Evicted entries are skipped."""
        self._clock += 1
        last = next((entry for entry in reversed(text.found) if entry.alive), None)
        if last is not None:
            self._stamp(last)

    def _stamp(self, last: Entry[M]) -> None:
        """Record that a chain was used now. Only its last entry is stamped; `_remove` passes stamps up."""
        last.stamp = self._clock
        if not last.children:
            self._push(last)

    # ------------------------------------------------------------------ filling
    def insert(self, text: Text[M], units: int, hold: Callable[[int], M], start: int = 0) -> None:
        """Enter the first `units` units of a text. For a new unit i, `hold(i)` returns its memory.

        The units before `start` should be there already; if one was evicted, it is entered again. Entries
        that exist already keep their memory. Stops at a collision, since nothing behind it could be found.
        """
        keys, salt = self.keys(text), text.salt
        parent = self._last(text, start)
        if parent is None:
            start = 0
        self._clock += 1
        for index in range(start, units):
            tokens = self._tokens(text.token_ids, index)
            entry = self._entries.get(keys[index])
            if entry is None:
                entry = Entry(keys[index], parent, tokens, salt, hold(index))
                self._entries[entry.key] = entry
                if parent is not None:
                    parent.children += 1
                self._settle_claim(entry.key)
            elif not self._same(entry, parent, tokens, salt):
                break
            parent, start = entry, index + 1
        if parent is not None:
            text.tip = (start, parent)
            self._stamp(parent)

    def _tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of unit `index`."""
        return tuple(token_ids[index * self.unit : (index + 1) * self.unit])

    def _last(self, text: Text[M], units: int) -> Entry[M] | None:
        """The last entry of the text's first `units` units, or None unless all of them are entered."""
        if not units:
            return None
        if text.tip is not None and text.tip[0] == units and text.tip[1].alive:
            return text.tip[1]
        entry = last = self._entries.get(self.keys(text)[units - 1])
        for index in range(units - 1, -1, -1):  # compare them all: another text may have the same key
            tokens = self._tokens(text.token_ids, index)
            if entry is None or entry.tokens != tokens or entry.salt != text.salt:
                return None
            entry = entry.parent
        return last if entry is None else None

    @staticmethod
    def _same(entry: Entry[M], parent: Entry[M] | None, tokens: tuple[int, ...], salt: str) -> bool:
        return entry.tokens == tokens and entry.parent is parent and entry.salt == salt

    # ------------------------------------------------------------------ work under way
    def claim(self, owner: Hashable, text: Text[M]) -> None:
        """Record that `owner` is about to compute these tokens, so that others with the prefix can wait.

        A claim ends when its unit is entered, or with `unclaim`.
        """
        mine = [k for k in self.keys(text) if k not in self._entries and k not in self._claims]
        for key in mine:
            self._claims[key] = owner
        self._claimed[owner] = dict.fromkeys(mine)

    def unclaim(self, owner: Hashable) -> None:
        for key in self._claimed.pop(owner, ()):
            del self._claims[key]

    def _settle_claim(self, key: bytes) -> None:
        if key in self._claims:
            del self._claimed[self._claims.pop(key)][key]

    def awaits(self, text: Text[M]) -> bool:
        """Whether the first unit of this text that is not cached is being computed now."""
        known = len(self.match(text))
        if known >= (len(text.token_ids) - 1) // self.unit:  # the last token is computed in any case
            return False
        return text.keys[known] in self._claims

    # ------------------------------------------------------------------ eviction
    def evict(self, frees: Callable[[M], bool]) -> bool:
        """Evict the least recently used leaf, preferably one that `frees` memory. False if there is none."""
        passed: list[tuple[int, bytes]] = []
        victim: Entry[M] | None = None
        while self._leaves and victim is None:
            stamp, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or entry.children or entry.stamp != stamp:
                continue
            if frees(entry.memory):
                victim = entry
            else:
                passed.append((stamp, key))
        if victim is None and passed:
            victim = self._entries[passed.pop(0)[1]]
        for item in passed:
            heapq.heappush(self._leaves, item)
        if victim is None:
            return False
        self._remove(victim)
        return True

    def clear(self) -> None:
        """Drop every entry."""
        entries, self._entries, self._leaves = list(self._entries.values()), {}, []
        for entry in entries:
            entry.alive = False
            self._drop(entry.memory)

    def _remove(self, entry: Entry[M]) -> None:
        del self._entries[entry.key]
        entry.alive = False
        if entry.parent is not None:
            entry.parent.children -= 1
            entry.parent.stamp = max(entry.parent.stamp, entry.stamp)
            if not entry.parent.children:
                self._push(entry.parent)
        self._drop(entry.memory)

    def _push(self, leaf: Entry[M]) -> None:
        heapq.heappush(self._leaves, (leaf.stamp, leaf.key))
        if len(self._leaves) > 64 + 4 * len(self._entries):  # mostly outdated: rebuild
            self._leaves = [(e.stamp, e.key) for e in self._entries.values() if not e.children]
            heapq.heapify(self._leaves)

    def replace_memory(self, new: Callable[[M], M]) -> None:
        """Replace the memory of every entry, after it has moved."""
        for entry in self._entries.values():
            entry.memory = new(entry.memory)

    # ------------------------------------------------------------------ books
    def memories(self) -> list[M]:
        """The memory of every entry."""
        return [entry.memory for entry in self._entries.values()]

    def check(self, owners: Sequence[Hashable] = ()) -> None:
        """Raise AssertionError unless the tree is consistent. Only `owners` may have claims."""
        children: dict[int, int] = {}
        for key, entry in self._entries.items():
            assert entry.key == key and len(entry.tokens) == self.unit and entry.alive
            parent = entry.parent
            if parent is not None:
                assert self._entries.get(parent.key) is parent, "an entry outlives its prefix"
                assert parent.alive, "an entry outlives its prefix"
                children[id(parent)] = children.get(id(parent), 0) + 1
                assert parent.salt == entry.salt, "a chain changes its salt"
            data = np.asarray(entry.tokens, np.int64).tobytes()
            before = parent.key if parent is not None else self.root(entry.salt)
            assert key == self._hash(before + data), "a key is wrong"
        heap = set(self._leaves)
        for entry in self._entries.values():
            assert entry.children == children.get(id(entry), 0), "children miscounted"
            assert entry.children or (entry.stamp, entry.key) in heap, "a leaf can't be evicted"
        assert set(self._claimed) <= set(owners), "a claim outlives its owner"
        claims = {key: owner for owner, keys in self._claimed.items() for key in keys}
        assert claims == self._claims and not claims.keys() & self._entries.keys(), "claims miscounted"
