"""Turns all forms of prompts into one: token ids, and the text if there is one.

    text ── certainly too long? ── tokenizer ──┐
    ids, array, range ─────────────────────────┴── too long? ── ids of the vocabulary? ── TokenizedPrompt

Prompts are checked here, once, before they reach the engine: first the length, then all ids as one array.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NotRequired, SupportsIndex, TypedDict

import numpy as np

from vattn.checks import is_array, length, nearest, shown, text
from vattn.errors import CapacityError, RequestError
from vattn.token_bound import TokenBound, token_bound


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_BYTES = (bytes, bytearray, memoryview)


class TokenizedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""


class PromptReader:
    """Reads prompts for one model.

    Token ids must be less than `vocab_size`. A prompt must have fewer than `max_model_len` tokens.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def read_all(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        """Read one prompt or many. The first item decides: a whole number means a single prompt of token ids.

        Raises RequestError for what is not a prompt and CapacityError for a prompt that is too long. The
        message names the prompt.
        """
        many = _many(prompts)
        if many is None:
            return [self.read(prompts)]
        return read_each("prompts", many, self.read)

    def read(self, prompt: Any) -> TokenizedPrompt:
        """Read one prompt. Raises RequestError, or CapacityError if it is too long."""
        if not isinstance(prompt, Mapping):
            if isinstance(prompt, str):
                return self.read_text(prompt)
            return TokenizedPrompt(None, self._ids(prompt))
        for key in prompt:
            if key not in _KEYS:
                raise RequestError(
                    f"a prompt dict has no key {shown(key)}: it has 'prompt' (text) or 'prompt_token_ids', "
                    f"and may have 'cache_salt'{nearest(key, _KEYS)}"
                )
        salt = checked_salt(prompt.get("cache_salt", ""))
        written = prompt.get("prompt")
        if written is not None and not isinstance(written, str):
            raise RequestError(f"'prompt' is text, not {type(written).__name__}")
        if "prompt_token_ids" in prompt:
            written = written if written is None else text("'prompt'", written)
            return TokenizedPrompt(written, self._ids(prompt["prompt_token_ids"]), salt)
        if written is None:
            raise RequestError("a prompt dict needs 'prompt' (text) or 'prompt_token_ids'")
        return self.read_text(written)._replace(cache_salt=salt)

    def read_text(self, prompt: str, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Read a prompt from its text. Raises RequestError if the tokenizer can't read it."""
        if self.tokenizer is None:
            raise RequestError("the model came without a tokenizer: pass token ids, or tokenizer= to LLM")
        text("the prompt", prompt)
        self._refuse_long_text(prompt)
        try:
            ids = self.tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
        except Exception as why:
            raise RequestError(f"the tokenizer can't read the prompt: {why}") from why
        return TokenizedPrompt(prompt, self._ids(ids))

    # ------------------------------------------------------------------ lengths
    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self.tokenizer)

    def _refuse_long_text(self, prompt: str) -> None:
        """Refuse a text that can't fit however it is tokenized, without tokenizing it."""
        if len(prompt) < 4 * self._max_model_len or self._bound is None:
            return
        fewest = self._bound.fewest_tokens(prompt)
        if fewest >= self._max_model_len:
            raise CapacityError(
                f"the prompt has {len(prompt):,} characters, so at least {fewest:,} tokens; with at least "
                f"one output token it must fit max_model_len={self._max_model_len:,}"
            )

    def _refuse_length(self, length: int) -> None:
        if not length:
            raise RequestError("the prompt is empty: it needs at least one token")
        if length >= self._max_model_len:
            raise CapacityError(
                f"the prompt has {length:,} tokens; with at least one output token it must fit "
                f"max_model_len={self._max_model_len:,}"
            )

    # ------------------------------------------------------------------ token ids
    def _ids(self, ids: Any) -> list[int]:
        """Token ids as a list of ints. No Python code runs per token, so long prompts are quick to read."""
        array = _array(ids)
        if array is not None:
            if array.ndim != 1:
                raise RequestError(f"a prompt's token ids are one row, not an array of shape {array.shape}")
            self._refuse_length(len(array))
            if array.dtype.kind in "iu":
                self._refuse_strangers(array, array)
                return list(array.tolist())
            if array.dtype.kind != "O":
                raise RequestError(f"prompt token 0 is {shown(array[0])}: token ids are whole numbers")
            ids = array.tolist()
        if isinstance(ids, (str, *_BYTES)) or not isinstance(ids, Sequence):
            raise RequestError(f"a prompt is text, token ids or a dict of either, not {type(ids).__name__}")
        self._refuse_length(length(ids))
        items = list(ids)
        kinds = set(map(type, items))
        if kinds != {int}:
            items = _as_ints(items, kinds)
        try:
            array = np.array(items, dtype=np.int64)
        except OverflowError:
            array = np.array([-1 if abs(token) >= 2**63 else token for token in items], dtype=np.int64)
        self._refuse_strangers(array, items)
        return items

    def _refuse_strangers(self, array: np.ndarray[Any, Any], shown_as: Any) -> None:
        strange = (array < 0) | (array >= self._vocab_size)
        if strange.any():
            position = int(strange.argmax())
            token = shown(int(shown_as[position]))
            raise RequestError(
                f"prompt token {position} is {token}: the model's vocabulary is 0 to {self._vocab_size - 1}"
            )


def checked_salt(salt: Any) -> str:
    """Check a cache salt. Raises RequestError for anything but text."""
    if not isinstance(salt, str):
        raise RequestError(f"'cache_salt' is text, not {type(salt).__name__}")
    return text("'cache_salt'", salt)


def read_each(name: str, items: Iterable[Any], read: Any) -> list[Any]:
    """Call `read` on each item. If there are several items, an error names the item it is about."""
    items = list(items)
    done = []
    for index, item in enumerate(items):
        try:
            done.append(read(item))
        except (RequestError, CapacityError) as error:
            if len(items) == 1:
                raise
            raise type(error)(f"{name}[{index}]: {error}") from error
    return done


def _many(prompts: Any) -> list[Any] | None:
    """The prompts in a list of prompts; None if this is a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return None
    array = _array(prompts)
    if array is not None:
        if array.ndim == 2:
            return list(array)
        if array.ndim != 1 or array.dtype.kind not in "OUS":
            return [] if array.shape == (0,) else None
        prompts = array.tolist()
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        raise RequestError(f"a prompt is text, token ids or a dict of either, not {type(prompts).__name__}")
    try:
        first = prompts[0]
    except IndexError:
        return []
    if isinstance(first, (str, Mapping, Sequence, *_BYTES)) or is_array(first):
        return list(prompts)
    if first is None or not isinstance(first, (SupportsIndex, float)):
        return list(prompts)
    return None


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """An array or tensor as an array on the host; None if it is neither."""
    if not hasattr(value, "__array__"):
        return None
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except Exception as why:
        raise RequestError(f"token ids can't be read from {shown(value)}: {why}") from why


def _as_ints(items: list[Any], kinds: set[type]) -> list[int]:
    """Items of several types as ints. Raises RequestError at the first that is not a whole number."""
    if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        return list(map(int, items))
    for position, token in enumerate(items):
        try:
            if isinstance(token, (bool, np.bool_)) or is_array(token):
                raise TypeError
            items[position] = operator.index(token)
        except Exception:
            raise RequestError(
                f"prompt token {position} is {shown(token)}: token ids are whole numbers"
            ) from None
    return items
