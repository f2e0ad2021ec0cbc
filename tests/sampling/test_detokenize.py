"""Text from tokens as they come, against decoding them all at once; and when an output ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from vattn.outputs import Logprob
from vattn.params import SamplingParams
from vattn.sampling.detokenize import (
    Finish,
    IncrementalDetokenizer,
    StopChecker,
    TokenDecoder,
    TokenText,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs on.",
    "Grüße aus Köln – naïve façade, “quoted” … and a dash.",
    "你好世界，今天天气很好。世界很大。",
    "🎉 party 👩‍👩‍👧 family 🇩🇪 flag 🎉🎉",
    "def f(x):\n    return x + 1  # spaces   and\ttabs\n",
]


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen, SmolLM2: tokens are byte strings, characters may be split anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2 and Mistral: words begin with a ▁, unknown characters are runs of <0x..> tokens."""
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXTS[:1], trainer)
    vocab = trained.get_vocab()
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Like T5 and Gemma 1: words begin with a ▁, and the text's first space is dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK, METASPACE = byte_level(), byte_fallback(), metaspace()
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": BYTE_FALLBACK, "metaspace": METASPACE}
BYTES = TokenText(BYTE_LEVEL)


def ids_of(text: str, tokenizer: Tokenizer = BYTE_LEVEL) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def single_bytes(data: bytes) -> list[int]:
    """One token per byte, as a model may write characters that are not in its vocabulary."""
    alphabet = {b: c for c, b in zip(*_byte_alphabet(), strict=True)}
    return [BYTE_LEVEL.token_to_id(alphabet[byte]) for byte in data]


def _byte_alphabet() -> tuple[list[str], list[int]]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(rest))], printable + rest


def pieces(decoder: TokenDecoder, ids: Sequence[int]) -> Iterator[str]:
    for token in ids:
        yield decoder.push(token)
    yield decoder.flush()


# ---------------------------------------------------------------------- tokens to text
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = ids_of(text, tokenizer)
    assert "".join(pieces(TokenDecoder(TokenText(tokenizer)), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_continues_the_prompt_seamlessly(name: str) -> None:
    """The first word keeps its space although decoding it alone would drop it."""
    tokenizer = TOKENIZERS[name]
    ids = ids_of("The quick brown fox jumps over the lazy dog.", tokenizer)
    for cut in range(len(ids) + 1):
        decoder = TokenDecoder(TokenText(tokenizer), prompt_token_ids=ids[:cut])
        whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
        assert "".join(pieces(decoder, ids[cut:])) == whole[len(prompt) :]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, BYTES.size + 3), max_size=40),
    st.lists(st.integers(0, BYTES.size + 3), max_size=10),
    st.booleans(),
)
def test_any_tokens_at_all_give_the_text_of_decode(ids: list[int], prompt: list[int], skip: bool) -> None:
    """Random tokens of a byte-level vocabulary are mostly broken UTF-8, with special and unknown ids."""
    decoder = TokenDecoder(BYTES, skip_special_tokens=skip, prompt_token_ids=prompt)
    before = BYTE_LEVEL.decode(prompt, skip_special_tokens=skip)
    whole = BYTE_LEVEL.decode(prompt + ids, skip_special_tokens=skip)
    # A character begun in the prompt is shown by the output that ends it.
    shown = len(before) - before.endswith("\ufffd")
    assert "".join(pieces(decoder, ids)) == whole[shown:]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=30), st.sampled_from(sorted(TOKENIZERS)))
def test_any_text_survives(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = ids_of(text, tokenizer)
    assert "".join(pieces(TokenDecoder(TokenText(tokenizer)), ids)) == tokenizer.decode(ids)


def test_a_character_appears_when_its_last_byte_does() -> None:
    decoder = TokenDecoder(BYTES)
    got = [decoder.push(token) for token in single_bytes("a🎉é世".encode())]
    assert got == ["a", "", "", "", "🎉", "", "é", "", "", "世"]
    assert decoder.flush() == ""


def test_byte_fallback_characters_appear_whole() -> None:
    decoder = TokenDecoder(TokenText(BYTE_FALLBACK))
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in "你好".encode()]
    assert [decoder.push(token) for token in ids] == ["", "", "你", "", "", "好"]


def test_an_incomplete_character_at_the_end_is_shown_as_replacement() -> None:
    decoder = TokenDecoder(BYTES)
    got = [decoder.push(token) for token in single_bytes("é🎉".encode()[:-1])]
    assert got == ["", "é", "", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_endless_broken_bytes_neither_pile_up_nor_stall() -> None:
    """Work per token stays bounded: the tokens decoded at once never exceed a small window."""
    widest = 0

    class Watched(TokenText):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            nonlocal widest
            widest = max(widest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    ids = single_bytes(b"\x80" * 500 + b"ok" + b"\xe4" * 100 + "世".encode())
    decoder = TokenDecoder(Watched(BYTE_LEVEL))
    assert "".join(pieces(decoder, ids)) == BYTE_LEVEL.decode(ids)
    assert widest <= 20


@pytest.mark.parametrize("broken", range(20))
def test_a_character_right_behind_broken_bytes_is_whole(broken: int) -> None:
    ids = single_bytes(b"\x80" * broken + "🎉世".encode())
    assert "".join(pieces(TokenDecoder(BYTES), ids)) == "\ufffd" * broken + "🎉世"


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [*ids_of("The dog"), BYTE_LEVEL.token_to_id("<|user|>"), *ids_of(" runs")]
    hidden = "".join(pieces(TokenDecoder(BYTES), ids))
    shown = "".join(pieces(TokenDecoder(BYTES, skip_special_tokens=False), ids))
    assert (hidden, shown) == ("The dog runs", "The dog<|user|> runs")


def test_a_hidden_token_inside_a_word_boundary_costs_no_space() -> None:
    ids = ids_of("The quick fox", METASPACE)
    end = METASPACE.token_to_id("</s>")
    mixed = [token for pair in zip(ids, [end] * len(ids), strict=True) for token in pair]
    assert "".join(pieces(TokenDecoder(TokenText(METASPACE)), mixed)) == "The quick fox"


def test_spaces_between_added_tokens_can_be_left_out() -> None:
    """A word-level decoder joins tokens with spaces; two added tokens side by side need none."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<x>", "<y>"])
    ids = [1, 3, 4, 2]

    def text(spaces: bool) -> str:
        decoder = TokenDecoder(
            TokenText(tokenizer), skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        return "".join(pieces(decoder, ids))

    assert text(True) == tokenizer.decode(ids, skip_special_tokens=False) == "a <x> <y> b"
    assert text(False) == "a <x><y> b"


def test_a_transformers_tokenizer_gives_the_same() -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    vocabulary = TokenText(wrapped)
    assert vocabulary.special >= {wrapped.eos_token_id}
    for text in TEXTS:
        ids = [*wrapped.encode(text), wrapped.eos_token_id]
        expected = wrapped.decode(ids, skip_special_tokens=True)
        assert "".join(pieces(TokenDecoder(vocabulary), ids)) == expected
    assert vocabulary.bad_words(["dog"]) == BYTES.bad_words(["dog"])


# ---------------------------------------------------------------------- what else a tokenizer is asked
def test_logprob_entries_get_their_tokens_text() -> None:
    dog = ids_of(" dog")[0]
    entries = {dog: Logprob(-0.1, 1), BYTES.size + 7: Logprob(-3.0, 2)}
    assert BYTES.annotate(entries) == {
        dog: Logprob(-0.1, 1, BYTE_LEVEL.decode([dog])),
        BYTES.size + 7: Logprob(-3.0, 2, ""),
    }


def test_bad_words_come_with_and_without_a_space_before_them() -> None:
    assert BYTES.bad_words(["dog", " fox"]) == [
        ids_of("dog"),
        ids_of(" dog"),
        ids_of("fox"),
        ids_of(" fox"),
    ]


# ---------------------------------------------------------------------- stop strings
def stream(text: str, tokens: Sequence[int], **params: Any) -> tuple[list[str], str, str | None]:
    """Visible deltas, final text and the stop string, token by token."""
    detokenizer = IncrementalDetokenizer(BYTES, SamplingParams(**params))
    assert BYTE_LEVEL.decode(list(tokens)) == text
    deltas = []
    stop = None
    for token in tokens:
        stop = detokenizer.append(token)
        deltas.append(detokenizer.take())
        assert "".join(deltas) == detokenizer.text
        if stop is not None:
            break
    stop = stop or detokenizer.close()
    deltas.append(detokenizer.take())
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer.text, stop


def letters(text: str) -> list[int]:
    return single_bytes(text.encode())


def test_a_stop_string_is_found_across_tokens_and_never_shown() -> None:
    deltas, text, stop = stream("one END two", letters("one END two"), stop="END")
    assert (text, stop) == ("one ", "END")
    assert deltas == ["o", "n", "e", " ", "", "", "", ""]


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    deltas, text, stop = stream("a ENjoy EN", letters("a ENjoy EN"), stop=["END"])
    assert (text, stop) == ("a ENjoy EN", None)
    assert deltas == ["a", " ", "", "", "ENj", "o", "y", " ", "", "", "EN"]


def test_held_back_text_is_the_longest_possible_beginning() -> None:
    deltas, text, stop = stream("aabaac", letters("aabaac"), stop=["aabaad", "aac"])
    assert (text, stop) == ("aab", "aac")
    assert "".join(deltas) == "aab"


def test_a_stop_string_can_be_kept() -> None:
    deltas, text, stop = stream(
        "one END two", letters("one END two"), stop="END", include_stop_str_in_output=True
    )
    assert (text, stop) == ("one END", "END")
    assert deltas == ["o", "n", "e", " ", "E", "N", "D", ""]


def test_a_stop_string_inside_one_token_ends_the_text_there() -> None:
    ids = ids_of("The dog")
    assert len(ids) < len("The dog")
    assert stream("The dog", ids, stop="h")[1:] == ("T", "h")
    assert stream("The dog", ids, stop="h", include_stop_str_in_output=True)[1:] == ("Th", "h")


def test_the_first_to_be_complete_counts_then_the_order() -> None:
    assert stream("xabcd", letters("xabcd"), stop=["abcd", "bc"])[1:] == ("xa", "bc")
    assert stream("xabc", letters("xabc"), stop=["bc", "abc"])[1:] == ("xa", "bc")
    assert stream("xabc", letters("xabc"), stop=["abc", "bc"])[1:] == ("x", "abc")


def test_a_stop_string_in_the_incomplete_rest_still_counts() -> None:
    """The last token ends inside a character, so its text only comes out at the end."""
    detokenizer = IncrementalDetokenizer(TokenText(BYTE_FALLBACK), SamplingParams(stop="\ufffd"))
    detokenizer.append(BYTE_FALLBACK.token_to_id("<0xE4>"))
    assert detokenizer.close() == "\ufffd"
    assert detokenizer.text == ""


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text("abé", max_size=25),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_stopping_equals_a_search_letter_by_letter(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    """However the text is cut into tokens, the result is that of the plainest search."""
    expected, reason = text, None
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            reason = found[0]
            expected = text[:end] if include else text[: end - len(reason)]
            break
    tokens = letters(text) if data.draw(st.booleans()) else ids_of(text)
    _, got, stop = stream(text, tokens, stop=stops, include_stop_str_in_output=include)
    assert (got, stop) == (expected, reason)


END = BYTE_LEVEL.token_to_id("<|end|>")
USER = BYTE_LEVEL.token_to_id("<|user|>")


@pytest.mark.parametrize(
    ("stop", "before", "behind"),
    [
        ("<|end|>", "", ""),
        ("<|end|>\n", "", "\n"),
        ("\n<|end|>", "\n", ""),
        ("a<|end|>b", "a", "b"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_name_a_token_that_is_skipped(
    stop: str, before: str, behind: str, include: bool
) -> None:
    tokens = [*letters("one" + before), END, *letters(behind)]
    almost = [END, *letters("x"), USER]  # named, but not the stop string: hidden as ever
    params = SamplingParams(stop=[stop + "!", stop], include_stop_str_in_output=include)
    detokenizer = IncrementalDetokenizer(BYTES, params)
    if behind or before:
        assert [detokenizer.append(token) for token in almost] == [None] * 3
    found = [detokenizer.append(token) for token in tokens]
    assert found == [None] * (len(tokens) - 1) + [stop]
    shown = ("x" if behind or before else "") + "one" + (stop if include else "")
    assert detokenizer.text == detokenizer.take() == shown


def test_a_skipped_token_that_ends_nothing_stays_hidden() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, SamplingParams(stop="<|end|>"))
    tokens = [*letters("a"), USER, *letters("<|end|"), *letters("b")]
    assert [detokenizer.append(token) for token in tokens] == [None] * len(tokens)
    assert detokenizer.append(END, match_stops=False) is None  # before min_tokens
    assert detokenizer.close() is None
    assert detokenizer.text == "a<|end|b"


def test_an_incomplete_character_before_a_skipped_token() -> None:
    """It is completed behind the token, unless the output ends there."""
    first, second = single_bytes("é".encode())
    whole = IncrementalDetokenizer(BYTES, SamplingParams(stop="<|end|>!"))
    assert [whole.append(token) for token in (first, END, second)] == [None] * 3
    whole.close()
    assert whole.text == "é"
    cut = IncrementalDetokenizer(BYTES, SamplingParams(stop="<|end|>"))
    assert [cut.append(token) for token in (first, END)] == [None, "<|end|>"]
    assert cut.text == "\ufffd"


def test_a_stream_of_the_tokenizers_library_keeps_back_what_is_never_completed() -> None:
    """Why text is not made by `tokenizers.DecodeStream`: our decoder gives out all that `decode` does."""
    ids = single_bytes(b"\x80" * 20 + "é".encode()[:1])
    stream = DecodeStream(skip_special_tokens=True)
    assert [stream.step(BYTE_LEVEL, token) for token in ids] == [None] * len(ids)
    assert "".join(pieces(TokenDecoder(BYTES), ids)) == BYTE_LEVEL.decode(ids) == "\ufffd" * 21


def test_nothing_is_decoded_without_a_tokenizer_or_when_not_wanted() -> None:
    for vocabulary, params in ((None, SamplingParams(stop="a")), (BYTES, SamplingParams(detokenize=False))):
        detokenizer = IncrementalDetokenizer(vocabulary, params, [1, 2])
        for token in letters("banana"):
            assert detokenizer.append(token) is None
        assert detokenizer.close() is None
        assert (detokenizer.text, detokenizer.take()) == ("", "")


# ---------------------------------------------------------------------- when an output ends
EOS = BYTE_LEVEL.token_to_id("<|end|>")


def finish(text: str, *, max_tokens: int = 100, **params: Any) -> tuple[int, str, Finish | None]:
    """Tokens taken, text and reason; EOS is written as $."""
    tokens = [EOS if char == "$" else letters(char)[0] for char in text]
    asked = SamplingParams(max_tokens=None, **params)
    checker = StopChecker(
        asked, IncrementalDetokenizer(BYTES, asked), max_tokens=max_tokens, eos_token_ids=[EOS]
    )
    for token in tokens:
        result = checker.push(token)
        if result is not None:
            return checker.num_tokens, checker.detokenizer.text, result
    return checker.num_tokens, checker.detokenizer.text, None


A = letters("a")[0]


def test_eos_ends_without_a_reason_and_shows_nothing() -> None:
    assert finish("ab$c") == (3, "ab", Finish("stop", None))
    assert finish("ab$c", skip_special_tokens=False) == (3, "ab", Finish("stop", None))
    assert finish("ab$c", skip_special_tokens=False, include_stop_str_in_output=True)[1] == "ab<|end|>"


def test_eos_can_be_ignored() -> None:
    assert finish("ab$c", ignore_eos=True) == (4, "abc", None)
    assert finish("ab$c", ignore_eos=True, stop_token_ids=[EOS]) == (3, "ab", Finish("stop", EOS))


def test_a_stop_token_is_the_reason_and_its_text_is_left_out() -> None:
    assert finish("bba", stop_token_ids=[A]) == (3, "bb", Finish("stop", A))
    assert finish("bba", stop_token_ids=[A], include_stop_str_in_output=True)[1] == "bba"


def test_the_length_ends_with_everything_shown() -> None:
    assert finish("abcdef", max_tokens=3) == (3, "abc", Finish("length", None))
    assert finish("abEdef", max_tokens=3, stop="END") == (3, "abE", Finish("length", None))


def test_a_stop_string_is_the_reason_and_beats_the_length() -> None:
    assert finish("abEND", max_tokens=5, stop=["END"]) == (5, "ab", Finish("stop", "END"))


def test_eos_beats_the_length_and_shows_what_was_held() -> None:
    assert finish("abEN$", max_tokens=5, stop=["END"]) == (5, "abEN", Finish("stop", None))


def test_an_end_token_that_is_also_a_stop_string_says_so() -> None:
    for include, text in ((False, "ab"), (True, "ab<|end|>")):
        params = SamplingParams(stop="<|end|>", max_tokens=9, include_stop_str_in_output=include)
        checker = StopChecker(
            params, IncrementalDetokenizer(BYTES, params), max_tokens=9, eos_token_ids=[END]
        )
        assert [checker.push(token) for token in letters("ab")] == [None, None]
        assert checker.push(END) == Finish("stop", "<|end|>")
        assert checker.detokenizer.text == text


def test_nothing_but_the_length_ends_before_min_tokens() -> None:
    assert finish("a$a$", min_tokens=3, stop_token_ids=[A])[::2] == (3, Finish("stop", A))
    assert finish("xENDxxEND", min_tokens=4, stop="END") == (9, "xENDxx", Finish("stop", "END"))
    assert finish("xxEND", min_tokens=4, stop="END") == (5, "xx", Finish("stop", "END"))
    assert finish("xabcx", min_tokens=4, stop=["abcd", "b"]) == (5, "xabcx", None)
    assert finish("abc", min_tokens=9, max_tokens=2) == (2, "ab", Finish("length", None))


def test_an_abort_shows_what_was_held() -> None:
    params = SamplingParams(stop="END")
    checker = StopChecker(params, IncrementalDetokenizer(BYTES, params), max_tokens=9)
    for token in letters("aEN"):
        assert checker.push(token) is None
    assert checker.detokenizer.text == "a"
    assert checker.abort() == Finish("abort")
    assert checker.detokenizer.text == "aEN"
    assert checker.detokenizer.take() == "aEN"


def test_lengths_count_without_a_tokenizer() -> None:
    params = SamplingParams(stop_token_ids=[5])
    checker = StopChecker(params, IncrementalDetokenizer(None, params), max_tokens=3, eos_token_ids=[1])
    assert [checker.push(token) for token in (7, 8, 9)] == [None, None, Finish("length")]
