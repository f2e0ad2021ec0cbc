"""The prefix cache: what is found, what is never found, what goes first, who waits for whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from vattn.kv.books.prefix import Entry, PrefixCache, Text, chain_hash

UNIT = 4
HASHERS: dict[str, Callable[[bytes], bytes]] = {
    "blake2b": chain_hash,
    "one bit": lambda data: bytes([sum(data) % 2]),
    "constant": lambda data: b"",
}


class Memory:
    """Stands for the memory of the units of a text: entry i holds (text, i)."""

    def __init__(self, hasher: Callable[[bytes], bytes] = chain_hash) -> None:
        self.dropped: list[str] = []
        self.texts: dict[tuple[int, str], Text[str]] = {}
        self.cache: PrefixCache[str] = PrefixCache(UNIT, "model", self.dropped.append, hasher)

    def enter(self, name: str, text: list[int], salt: str = "", start: int = 0) -> None:
        known = self.text(text, salt)
        self.cache.insert(known, len(text) // UNIT, lambda i: f"{name}{i}", start=start)
        self.cache.check()

    def text(self, text: list[int], salt: str = "") -> Text[str]:
        """What is known of a list: the same for the same list, which may have grown."""
        known = self.texts.get((id(text), salt))
        if known is None:
            known = self.texts[id(text), salt] = Text(text, salt)
        return known

    def match(self, text: list[int], salt: str = "") -> list[Entry[str]]:
        return list(self.cache.match(self.text(text, salt)))

    def found(self, text: list[int], salt: str = "") -> list[str]:
        """Looked up anew, and by who has looked before: the same."""
        fresh = [entry.memory for entry in self.cache.match(Text(text, salt))]
        assert fresh == [entry.memory for entry in self.match(text, salt)]
        return fresh

    def touch(self, text: list[int], salt: str = "") -> None:
        self.match(text, salt)
        self.cache.touch(self.text(text, salt))

    def evict(self, frees: Callable[[str], bool] = lambda _: True) -> str:
        assert self.cache.evict(frees)
        self.cache.check()
        return self.dropped[-1]


def units(*values: int) -> list[int]:
    """A text of one unit per value."""
    return [value for value in values for _ in range(UNIT)]


# ---------------------------------------------------------------------------- finding
def test_whole_units_of_the_longest_common_beginning_are_found() -> None:
    m = Memory()
    m.enter("a", [*units(1, 2, 3), 9])
    assert m.found(units(1, 2, 3)) == ["a0", "a1", "a2"]
    assert m.found(units(1, 2, 4)) == ["a0", "a1"]
    assert m.found([*units(1), 2, 2, 2]) == ["a0"]
    assert m.found(units(2, 3)) == []
    assert m.found([1] * (UNIT - 1)) == m.found([]) == []


def test_what_is_entered_first_stays_and_later_texts_go_on_from_it() -> None:
    m = Memory()
    m.enter("a", units(1, 2))
    m.enter("b", units(1, 2, 3))
    assert m.found(units(1, 2, 3)) == ["a0", "a1", "b2"]
    assert len(m.cache) == 3


def test_an_evicted_beginning_is_entered_again() -> None:
    m = Memory()
    text = units(1, 2)
    m.enter("a", text)
    assert [m.evict(), m.evict()] == ["a1", "a0"]
    text += units(3)
    m.enter("b", text, start=2)
    assert m.found(text) == ["b0", "b1", "b2"]


def test_salts_do_not_see_each_other() -> None:
    m = Memory()
    m.enter("a", units(1, 2), "mine")
    assert m.found(units(1, 2)) == m.found(units(1, 2), "yours") == []
    m.enter("b", units(1, 2), "yours")
    assert m.found(units(1, 2), "mine") == ["a0", "a1"]
    assert m.found(units(1, 2), "yours") == ["b0", "b1"]


def test_models_do_not_see_each_other_however_names_and_salts_are_cut() -> None:
    roots = {
        PrefixCache[str](UNIT, model, print).root(salt)
        for model, salt in [("m", ""), ("m", "n"), ("mn", ""), ("", "mn"), ("1:m", ""), ("", "1:m")]
    }
    assert len(roots) == 6


# ---------------------------------------------------------------------------- collisions
@pytest.mark.parametrize("hasher", ["one bit", "constant"])
def test_a_collision_is_a_miss(hasher: str) -> None:
    m = Memory(HASHERS[hasher])
    m.enter("a", units(2))
    for text, salt in [(units(4), ""), (units(2), "other"), (units(2), "ab")]:
        assert m.found(text, salt) == []
        m.enter("b", text, salt)  # one with the same key can't be entered beside it
        assert m.found(text, salt) in ([], ["b0"])
    assert m.found(units(2)) == ["a0"]


def test_a_text_that_collided_does_not_continue_the_other_text() -> None:
    """[1][7] and [2][7] have the same keys: what follows [2][7] must not be found behind [1][7]."""
    m = Memory(_blind_to_the_first_unit)
    m.enter("a", units(1, 7))
    text = units(2)
    m.enter("b", text)
    text += units(7)
    m.enter("b", text, start=1)
    text += units(8)
    m.enter("b", text, start=2)
    assert m.found(text) == []
    assert m.found(units(1, 7, 8)) == ["a0", "a1"], "b2 was computed behind another text"


def _blind_to_the_first_unit(data: bytes) -> bytes:
    """Keys that do not tell units of 1 from units of 2."""
    return chain_hash(data.replace((1).to_bytes(8, "little"), (2).to_bytes(8, "little")))


def test_a_text_that_is_replaced_by_a_colliding_one_does_not_continue_it() -> None:
    m = Memory(_blind_to_the_first_unit)
    text = units(2, 7)
    m.enter("b", text)
    assert m.evict() + m.evict() == "b1b0"
    m.enter("a", units(1, 7))
    text += units(8)
    m.enter("b", text, start=2)
    assert m.found(units(1, 7, 8)) == ["a0", "a1"] and m.found(text) == []


# ---------------------------------------------------------------------------- giving way
def test_the_least_recently_used_leaf_goes_first() -> None:
    m = Memory()
    m.enter("a", units(1, 2))
    m.enter("b", units(1, 3))
    m.enter("c", units(4))
    m.touch(units(1, 2))
    assert [m.evict() for _ in range(4)] == ["b1", "c0", "a1", "a0"]
    assert not m.cache.evict(lambda _: True) and len(m.cache) == 0


def test_a_prefix_outlives_what_is_built_on_it() -> None:
    m = Memory()
    m.enter("a", units(1, 2, 3))
    m.enter("b", units(5))
    m.touch(units(1))  # its leaf is older than b all the same
    assert [m.evict() for _ in range(4)] == ["a2", "a1", "b0", "a0"]


def test_a_leaf_that_frees_nothing_goes_only_when_none_does() -> None:
    m = Memory()
    m.enter("a", units(1))
    m.enter("b", units(2))
    m.enter("c", units(3))
    assert m.evict(lambda memory: memory == "b0") == "b0"
    assert m.evict(lambda memory: False) == "a0"
    assert m.evict() == "c0"


def test_touching_what_is_gone_changes_nothing() -> None:
    m = Memory()
    m.enter("a", units(1, 2))
    text = Text[str](units(1, 2), "")
    m.cache.match(text)
    assert m.evict() == "a1"
    m.enter("b", units(1, 2))
    m.cache.touch(text)
    m.cache.check()
    assert m.found(units(1, 2)) == ["a0", "b1"]


def test_clear_drops_everything_once() -> None:
    m = Memory()
    m.enter("a", units(1, 2))
    m.enter("b", units(1, 3))
    m.cache.clear()
    m.cache.check()
    assert sorted(m.dropped) == ["a0", "a1", "b1"] and m.found(units(1, 2)) == []


# ---------------------------------------------------------------------------- work under way
def test_who_could_share_what_is_being_computed_waits() -> None:
    m = Memory()
    text = units(1, 2)
    m.cache.claim("r", m.text(text))
    assert m.cache.awaits(Text(units(1, 3), ""))
    assert not m.cache.awaits(Text(units(3, 1), "")) and not m.cache.awaits(Text(units(1, 3), "other"))
    m.cache.insert(m.text(text), 1, lambda i: f"a{i}")
    assert not m.cache.awaits(Text(units(1, 3), "")) and m.cache.awaits(Text(units(1, 2, 3), ""))
    m.cache.check(["r"])
    m.cache.unclaim("r")
    assert not m.cache.awaits(Text(units(1, 2, 3), ""))
    m.cache.check()


def test_nobody_waits_for_a_unit_that_holds_the_last_token() -> None:
    m = Memory()
    m.cache.claim("r", m.text(units(1)))
    assert not m.cache.awaits(Text(units(1), "")) and m.cache.awaits(Text([*units(1), 5], ""))


def test_nobody_waits_for_what_was_computed_and_evicted() -> None:
    m = Memory()
    text = units(1, 2)
    m.cache.claim("r", m.text(text))
    m.cache.insert(m.text(text), 2, lambda i: f"a{i}")
    assert m.cache.evict(lambda _: True) and m.cache.evict(lambda _: True)
    assert not m.cache.awaits(Text(units(1, 2, 3), "")), "its owner may live for long"
    m.cache.check(["r"])


def test_claims_of_others_stay_theirs() -> None:
    m = Memory()
    m.cache.claim("r", m.text(units(1)))
    m.cache.claim("s", m.text(units(1, 2)))
    m.cache.unclaim("s")
    assert m.cache.awaits(Text(units(1, 2, 3), "")), "r computes the first unit still"
    m.cache.check(["r"])
    with pytest.raises(AssertionError, match="outlives"):
        m.cache.check([])


# ---------------------------------------------------------------------------- keys
class Counting(list[int]):
    """A text that counts how many of its tokens are read."""

    read = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


class CountingHasher:
    calls = 0

    def __call__(self, data: bytes) -> bytes:
        self.calls += 1
        return chain_hash(data)


def test_a_growing_list_is_hashed_once() -> None:
    hasher = CountingHasher()
    cache = PrefixCache[str](UNIT, "model", print, hasher)
    tokens: list[int] = []
    text = Text[str](tokens, "")
    for n in range(1, 10 * UNIT + 1):
        tokens.append(n)
        keys = cache.keys(text)
        assert len(keys) == n // UNIT
        assert keys == PrefixCache[str](UNIT, "model", print).keys(Text(list(tokens), ""))
    assert hasher.calls == 10 + 1, "the root and each unit"
    assert cache.keys(Text(tokens, "other")) != keys, "the same list under another salt is another chain"


def test_entering_a_growing_text_unit_by_unit_reads_each_token_twice() -> None:
    """Once for its key, once for its entry: not all of the chain again for each unit."""
    cache = PrefixCache[str](UNIT, "model", print)
    tokens = Counting()
    text = Text[str](tokens, "")
    stamped: list[int] = []
    for unit in range(100):
        tokens += [unit] * UNIT
        cache.insert(text, unit + 1, lambda i: f"a{i}", start=unit)
        stamped.append(sum(entry.stamp == unit + 1 for entry in cache.match(Text(list(tokens), ""))))
    assert tokens.read == 2 * len(tokens)
    assert stamped == [1] * 100, "only the last entry is marked as used"
    cache.check()


def test_looking_again_reads_nothing_and_hashes_nothing() -> None:
    hasher = CountingHasher()
    m = Memory(hasher)
    prompt = units(*range(200))
    m.enter("a", prompt)
    text = Text[str](Counting([*prompt, 1]), "")
    assert len(m.cache.match(text)) == 200
    hashed = hasher.calls
    text.token_ids.read = 0  # type: ignore[attr-defined]
    for n in range(50):  # others come and go meanwhile
        m.cache.insert(Text(units(1000 + n), ""), 1, lambda i: "b0")
        assert not m.cache.awaits(text) and len(m.cache.match(text)) == 200
    assert text.token_ids.read == 0  # type: ignore[attr-defined]
    assert hasher.calls == hashed + 2 * 50, "the root and one unit of each of the others"
    assert m.evict() == "a199"
    assert len(m.cache.match(text)) == 199


# ---------------------------------------------------------------------------- check
@pytest.mark.parametrize("wrong", ["tokens", "parent", "children", "key", "stamp", "salt"])
def test_check_finds_a_broken_tree(wrong: str) -> None:
    m = Memory()
    m.enter("a", units(1, 2))
    first, second = m.match(units(1, 2))
    if wrong == "tokens":
        second.tokens = (9,) * UNIT
    elif wrong == "parent":
        second.parent = None
    elif wrong == "children":
        first.children = 0
    elif wrong == "key":
        second.key = b"else"
    elif wrong == "stamp":
        second.stamp = -1
    else:
        second.salt = "other"
    with pytest.raises(AssertionError):
        m.cache.check()


# ---------------------------------------------------------------------------- against a plain model
class AgainstADictOfPrefixes(RuleBasedStateMachine):
    """Every prefix that is entered, with its text and salt in full, in a dict."""

    hasher: Callable[[bytes], bytes]

    @initialize()
    def open(self) -> None:
        self.model: dict[tuple[str, tuple[int, ...]], str] = {}
        self.cache: PrefixCache[str] = PrefixCache(UNIT, "model", self.drop, self.hasher)
        self.texts: list[tuple[Text[str], int]] = []
        self.asked: dict[tuple[str, tuple[int, ...]], Text[str]] = {}
        self.count = 0

    def drop(self, memory: str) -> None:
        [key] = [key for key, held in self.model.items() if held == memory]
        del self.model[key]

    @rule(
        values=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5),
        salt=st.sampled_from(["", "", "s"]),
        rest=st.integers(0, UNIT - 1),
    )
    def begin(self, values: list[int], salt: str, rest: int) -> None:
        self.texts.append((Text([*units(*values), *[5] * rest], salt), 0))

    @rule(data=st.data(), more=st.lists(st.sampled_from([1, 2]), max_size=3))
    def enter(self, data: st.DataObject, more: list[int]) -> None:
        """A text grows, and is entered from where it was the last time."""
        if not self.texts:
            return
        which = data.draw(st.integers(0, len(self.texts) - 1))
        known, entered = self.texts[which]
        text, salt = known.token_ids, known.salt
        assert isinstance(text, list)
        text += units(*more)

        def hold(index: int) -> str:
            self.count += 1
            prefix = tuple(text[: (index + 1) * UNIT])
            assert (salt, prefix) not in self.model, "entered twice"
            memory = self.model[salt, prefix] = f"m{self.count}"
            return memory

        many = len(text) // UNIT
        self.cache.insert(known, many, hold, start=entered)
        self.texts[which] = (known, many)

    @rule(
        values=st.lists(st.sampled_from([1, 2]), max_size=5),
        salt=st.sampled_from(["", "s"]),
        use=st.booleans(),
    )
    def look(self, values: list[int], salt: str, use: bool) -> None:
        text = units(*values)
        known = self.asked.setdefault((salt, tuple(text)), Text(text, salt))  # asked before, perhaps
        found = [entry.memory for entry in self.cache.match(known)]
        want = []
        for index in range(len(values)):
            memory = self.model.get((salt, tuple(text[: (index + 1) * UNIT])))
            if memory is None:
                break
            want.append(memory)
        assert found == want
        if use:
            self.cache.touch(known)

    @rule(one=st.booleans())
    def evict(self, one: bool) -> None:
        before = len(self.model)
        assert self.cache.evict(lambda _: one) == (before > 0)
        assert len(self.model) == max(0, before - 1)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert sorted(self.cache.memories()) == sorted(self.model.values())


@pytest.mark.parametrize("hasher", HASHERS)
def test_against_a_plain_dict_of_prefixes(hasher: str) -> None:
    machine = type("Machine", (AgainstADictOfPrefixes,), {"hasher": staticmethod(HASHERS[hasher])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
