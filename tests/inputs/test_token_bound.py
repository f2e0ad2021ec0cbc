"""The bound on characters per token holds for every text, or there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vattn.token_bound import token_bound

TEXTS = ["the user and the assistant", "    deep   indent", "ééé née", "11 22 33"]


def trained(model: models.Model, pre: Any, normalizer: Any = None, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, **options)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def bytes_of(normalizer: Any = None) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer, initial_alphabet=alphabet
    )


def sentencepiece() -> Tokenizer:
    learned = trained(models.BPE(), pre_tokenizers.Metaspace())
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in learned.get_vocab():
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def bytes_without(missing: str) -> Tokenizer:
    """As SmolLM2's, whose vocabulary lacks some control characters: they vanish."""
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in missing]
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), pre, initial_alphabet=alphabet)


BOUNDED = {
    "byte level": bytes_of(),
    "byte level, control characters vanish": bytes_without("ēñÀ"),
    "byte level, NFC": bytes_of(normalizers.NFC()),
    "byte level, NFKC": bytes_of(normalizers.NFKC()),
    "sentencepiece with byte fallback": sentencepiece(),
    "every unknown character a token": trained(
        models.BPE(unk_token="<unk>"), pre_tokenizers.Metaspace(), special_tokens=["<unk>"]
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200) | st.text(alphabet="the \x13 u\u0301é\ufdfa\u1f82", max_size=300))
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BOUNDED[name])
    bound = token_bound(tokenizer)
    assert bound is not None
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert len(tokenizer(text)["input_ids"]) >= bound.fewest_tokens(text)


def added(**options: Any) -> Tokenizer:
    tokenizer = bytes_of()
    tokenizer.add_special_tokens([AddedToken("<x>", **options)])
    return tokenizer


UNBOUNDED = {
    "white space is dropped": trained(models.BPE(), pre_tokenizers.Whitespace(), special_tokens=["<unk>"]),
    "white space is stripped": bytes_of(normalizers.Strip()),
    "accents are stripped": bytes_of(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "a run of blanks becomes one": bytes_of(normalizers.Replace("  ", " ")),
    "a token takes the blanks before it": added(lstrip=True),
    "a token takes the blanks behind it": added(rstrip=True),
    "unknown bytes are dropped": bytes_without("Ģ"),
    "words are tokens": Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "unknown characters are joined": trained(
        models.BPE(unk_token="<unk>", fuse_unk=True), pre_tokenizers.Metaspace(), special_tokens=["<unk>"]
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_that_drop_or_join_text_have_no_bound(name: str) -> None:
    assert token_bound(PreTrainedTokenizerFast(tokenizer_object=UNBOUNDED[name])) is None
