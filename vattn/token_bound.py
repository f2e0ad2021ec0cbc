"""Computes how many characters one token can cover at most. With it, a text that is too long can be refused
without tokenizing it.

There is a bound only if the parts of the tokenizer prove it. Each part must keep every character (a
normalizer may join a known number of characters into one), and every token of the model must have its own
text. Then a text of n characters has at least n / (longest token x joined) tokens. Byte vocabularies may lack
some control characters, which vanish from a text. These are not counted.
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
"""Normalizers that drop no characters, and how many characters each joins into one at most."""

_KEEPING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
"""Pre-tokenizers that split text and drop no characters."""


class TokenBound(NamedTuple):
    """No token covers more than `characters` characters. Those in `dropped` may have no token at all."""

    characters: int
    dropped: str = ""

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens in `text`."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.characters)


def token_bound(tokenizer: Any) -> TokenBound | None:
    """The bound of a transformers tokenizer; None if none can be proven."""
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
        return None  # such a token also takes all white space around it
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
    """The ASCII characters that a byte vocabulary has no token for; None if it lacks other bytes too.

    A character outside ASCII has a continuation byte, so it gives a token if all of those bytes have one.
    """

    def last_byte(character: str) -> str:
        return ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0][-1]

    if not all(last_byte(chr(code)) in vocab for code in range(0x80, 0xC0)):
        return None
    return "".join(chr(code) for code in range(0x80) if last_byte(chr(code)) not in vocab)


def _joined(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters a normalizer joins into one at most; None if it may drop characters."""
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
