"""How many characters a token can stand for at most: it refuses a text that is too long without reading it.

The bound is only given where it can be proven from the parts of the tokenizer. Each part must keep every
character (a normalizer may join a few into one, by a known number), and the model must give every token its
own text: then a text of n characters has at least n / (longest token x joined) tokens. Vocabularies of bytes
may lack some control characters, which vanish from a text: these do not count.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

_JOINED = {
    "NFC": 4,  # U+1F82 is one character and four when it is decomposed
    "NFKC": 18,  # U+FDFA
    "NFD": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Normalizers that drop nothing: so many characters become one at most."""

_KEEPING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
"""Pre-tokenizers that cut and drop nothing."""


class TokenBound(NamedTuple):
    """No token stands for more than `characters`; the characters in `dropped` may have no token at all."""

    characters: int
    dropped: str = ""

    def fewest_tokens(self, text: str) -> int:
        """No text has fewer tokens."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.characters)


def token_bound(tokenizer: Any) -> TokenBound | None:
    """The bound of a transformers tokenizer; None where there is no proof."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        return _bound(json.loads(backend.to_str()))
    except Exception:  # a part written in Python can't be described
        return None


def _bound(parts: dict[str, Any]) -> TokenBound | None:
    model, joined = parts["model"], _joined(parts["normalizer"])
    if joined is None or not _keeps(parts["pre_tokenizer"]) or model.get("type") != "BPE":
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None  # such a token takes all white space around it
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    dropped: str | None = None
    if model.get("unk_token") is not None and not model.get("fuse_unk"):
        dropped = ""
    elif model.get("byte_fallback"):
        dropped = "" if all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)) else None
    elif "ByteLevel" in json.dumps([parts["pre_tokenizer"], parts["normalizer"]]):
        dropped = _without_token(model["vocab"])
    if dropped is None or (dropped and joined > 1):
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in parts["added_tokens"])]))
    return TokenBound(longest * joined, dropped)


def _without_token(vocab: dict[str, int]) -> str | None:
    """The characters that a vocabulary of bytes has no token for; None: not only among ASCII.

    Any other character has a continuation byte, so it leaves a token if those are all there.
    """

    def last_byte(character: str) -> str:
        return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0][-1]

    if not all(last_byte(chr(code)) in vocab for code in range(0x80, 0xC0)):
        return None
    return "".join(chr(code) for code in range(0x80) if last_byte(chr(code)) not in vocab)


def _joined(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters a normalizer can make one; None: it drops some."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        total = 1
        for part in normalizer["normalizers"]:
            step = _joined(part)
            if step is None:
                return None
            total *= step
        return total
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(pattern) == 1 and normalizer["content"] else None
    return _JOINED.get(kind)


def _keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _KEEPING
