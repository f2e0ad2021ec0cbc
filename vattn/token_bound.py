"""How many characters a token can stand for at most: it refuses a text that is too long without reading it.

The bound is only given where it can be proven from the parts of the tokenizer. Each part must keep every
character (a normalizer may join a few into one, by a known number), and the model must give every token its
own text: then a text of n characters has at least n / (longest token x joined) tokens.
"""

from __future__ import annotations

import json
from typing import Any

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


def characters_per_token(tokenizer: Any) -> float | None:
    """The most characters of a text that one token can stand for; None where there is no proof."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        parts = json.loads(backend.to_str())
        return _bound(parts)
    except Exception:  # a part written in Python can't be described
        return None


def _bound(parts: dict[str, Any]) -> float | None:
    model = parts["model"]
    joined = _joined(parts["normalizer"])
    if joined is None or not _keeps(parts["pre_tokenizer"]) or model.get("type") != "BPE":
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None  # such a token takes all white space around it
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    bytes_as_text = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else None
    if "ByteLevel" in json.dumps([parts["pre_tokenizer"], parts["normalizer"]]):
        bytes_as_text = set(ByteLevel.alphabet())
    if (bytes_as_text is None or not bytes_as_text <= model["vocab"].keys()) and (
        model.get("unk_token") is None or model.get("fuse_unk")
    ):
        return None  # what it does not know it drops, or makes one token
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in parts["added_tokens"])]))
    return float(longest * joined)


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
