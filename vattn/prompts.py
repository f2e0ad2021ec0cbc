"""What users pass as prompts, in one form: token ids, and the text where there is one."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, SupportsIndex, TypedDict

from vattn.errors import RequestError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


class TokenizedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    """Cached prefixes are shared among requests of one salt."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a string, a dict or a list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = _as_list(prompts)
    if items and all(isinstance(item, SupportsIndex) for item in items):
        return [items]
    return items


def tokenize(prompt: Prompt, tokenizer: Any | None) -> TokenizedPrompt:
    """Turn a prompt into token ids. Raises RequestError for anything that is not a prompt."""
    text: str | None = None
    salt: Any = ""
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        salt = prompt.get("cache_salt", "")
        if not isinstance(salt, str):
            raise RequestError(f"'cache_salt' is text, not {type(salt).__name__}")
        keys = set(prompt) & {"prompt", "prompt_token_ids"}
        if not keys:
            raise RequestError(
                "a prompt dict needs 'prompt' (text) or 'prompt_token_ids'; "
                f"it has {sorted(map(str, prompt))}"
            )
        text = prompt.get("prompt")  # type: ignore[assignment]
        if text is not None and not isinstance(text, str):
            raise RequestError(f"'prompt' is text, not {type(text).__name__}")
        ids = prompt.get("prompt_token_ids", text)
    if isinstance(ids, str):
        if tokenizer is None:
            raise RequestError("the model came without a tokenizer: pass token ids, or tokenizer= to LLM")
        text, ids = ids, tokenizer(ids)["input_ids"]
    items = _as_list(ids)
    if not items:
        raise RequestError("the prompt is empty: it needs at least one token")
    for position, token in enumerate(items):
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise RequestError(f"prompt token {position} is {token!r}: token ids are whole numbers")
    return TokenizedPrompt(text, [operator.index(token) for token in items], salt)


def render(
    messages: Sequence[Message], tokenizer: Any | None, chat_template: str | None, add_generation_prompt: bool
) -> TokenizedPrompt:
    """A conversation through the model's chat template. Raises RequestError where there is none."""
    if tokenizer is None or not (chat_template or tokenizer.chat_template):
        raise RequestError("the model has no chat template: pass chat_template=, or use generate")
    if not messages:
        raise RequestError("the conversation is empty")
    text = tokenizer.apply_chat_template(
        list(messages),
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )
    # The template writes its own special tokens: the tokenizer must not add them again.
    return TokenizedPrompt(text, tokenizer(text, add_special_tokens=False)["input_ids"])


def _as_list(prompt: Any) -> list[Any]:
    """A sequence of prompts or tokens as a list; numpy arrays and tensors too."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise RequestError(f"a prompt is text, token ids or a dict of either, not {type(prompt).__name__}")
    return list(prompt)
