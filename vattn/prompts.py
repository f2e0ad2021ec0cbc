"""What users pass as prompts, in one form: token ids, and the text where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from vattn.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class TokenizedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a string, a dict or a list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def tokenize(prompt: Prompt, tokenizer: Any | None) -> TokenizedPrompt:
    """Turn a prompt into token ids. Raises RequestError for anything that is not a prompt."""
    text: str | None = None
    if isinstance(prompt, Mapping):
        keys = set(prompt) & {"prompt", "prompt_token_ids"}
        if not keys:
            raise RequestError(
                f"a prompt dict needs 'prompt' (text) or 'prompt_token_ids'; it has {sorted(prompt)}"
            )
        if "prompt_token_ids" in keys:
            text = prompt.get("prompt")  # type: ignore[assignment]
            prompt = prompt["prompt_token_ids"]  # type: ignore[typeddict-item]
        else:
            prompt = prompt["prompt"]  # type: ignore[typeddict-item]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("the model came without a tokenizer: pass token ids, or tokenizer= to LLM")
        text = prompt
        prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise RequestError(f"a prompt is text, token ids or a dict of either, not {type(prompt).__name__}")
    token_ids: list[int] = list(prompt)  # type: ignore[arg-type]
    if not token_ids:
        raise RequestError("the prompt is empty: it needs at least one token")
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"prompt token {position} is {token!r}: token ids are whole numbers")
    return TokenizedPrompt(text, token_ids)
