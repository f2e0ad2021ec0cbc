"""Turns conversations into prompts with the tokenizer's chat template.

    messages ── checked, content as text ── template ── text ── PromptReader (no special tokens added)

transformers renders the template (`apply_chat_template`), so arguments mean the same as there. If the
template fails, a RequestError carries its own message.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vattn.checks import each, flag, length, shown, text
from vattn.errors import RequestError
from vattn.prompts import PromptReader, TokenizedPrompt, checked_salt, read_each

Message = Mapping[str, Any]
"""Keys: `role` (text), `content` (text, or parts `{"type": "text", "text": …}`), and others that the template
reads."""

_PROBE = "vattn-probe"
_LONGEST = 400
"""Show at most this many characters of a template's error, because some contain the whole conversation."""


def is_conversation(prompt: object) -> bool:
    """True if this is a list of messages and not a prompt."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and bool(prompt)
        and isinstance(prompt[0], Mapping)
        and "role" in prompt[0]
    )


class ChatReader:
    """Reads conversations for one model."""

    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts
        self._wants_parts: dict[str, bool] = {}

    def read_all(
        self,
        messages: Any,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | Sequence[str] = "",
    ) -> list[TokenizedPrompt]:
        """Read one conversation or several. Takes the arguments of `LLM.chat` and raises the same errors."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                f"chat takes a list of messages, or a list of such lists, not {shown(messages)}"
            )
        flag("add_generation_prompt", add_generation_prompt)
        if not isinstance(continue_final_message, (bool, str)):
            raise RequestError(
                "continue_final_message must be True, False or the name of a field, got "
                f"{shown(continue_final_message)}"
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new "
                "one: set add_generation_prompt=False"
            )
        template = self._template(chat_template, tools)
        options: dict[str, Any] = {
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": _tools(tools, template),
            **_variables(chat_template_kwargs, template, self._prompts.tokenizer),
        }

        def read(conversation: Any) -> TokenizedPrompt:
            written = self._render(_checked(conversation, self._takes_parts(template)), options)
            # The template writes its own special tokens: the tokenizer must not add them again.
            return self._prompts.read_text(written, add_special_tokens=False)

        first = messages[0] if length(messages) else None
        several = isinstance(first, Sequence) and not isinstance(first, (str, bytes))
        conversations = list(messages) if several else [messages]
        salts = each("cache_salt", cache_salt, len(conversations))
        read_prompts = read_each("messages", conversations, read)
        return [
            prompt._replace(cache_salt=checked_salt(salt))
            for prompt, salt in zip(read_prompts, salts, strict=True)
        ]

    def _template(self, chat_template: Any, tools: Any) -> str:
        """The given template, or the tokenizer's. Some tokenizers have a separate template for tools."""
        if chat_template is not None:
            text("chat_template", chat_template)
        tokenizer = self._prompts.tokenizer
        if not chat_template and not getattr(tokenizer, "chat_template", None):
            raise RequestError("the model has no chat template: pass chat_template=, or use generate")
        if tokenizer is None:
            raise RequestError("the model came without a tokenizer: chat needs one, pass tokenizer= to LLM")
        try:
            return str(tokenizer.get_chat_template(chat_template or None, tools))
        except Exception as why:
            raise RequestError(f"the model has no such chat template: {why}") from why

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        tokenizer: Any = self._prompts.tokenizer
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as why:  # the template refused the conversation, or failed
            kind = type(why).__name__
            said = " ".join(str(why).split()) or kind
            said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"
            raise RequestError(f"the chat template refused the conversation: {said} ({kind})") from why
        return text("the rendered conversation", rendered)

    def _takes_parts(self, template: str) -> bool:
        """True if the template needs content as a list of parts.

        Most templates take text. A few read only parts and silently leave text out. Rendering one message
        in each form shows which kind this is.
        """
        if template not in self._wants_parts:

            def appears(content: Any) -> bool:
                message = {"role": "user", "content": content}
                try:
                    return _PROBE in self._render([message], {"chat_template": template})
                except RequestError:
                    return False

            self._wants_parts[template] = not appears(_PROBE) and appears([{"type": "text", "text": _PROBE}])
        return self._wants_parts[template]


def _checked(messages: Any, as_parts: bool) -> list[dict[str, Any]]:
    """The messages as plain dicts, with content in the form that the template needs."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages, not {shown(messages)}")
    if not length(messages):
        raise RequestError("the conversation is empty")
    found = []
    for index, message in enumerate(messages):
        name = f"message {index}"
        if not isinstance(message, Mapping):
            raise RequestError(f"{name} must be a dict with 'role' and 'content', got {shown(message)}")
        if not all(isinstance(key, str) for key in message):
            raise RequestError(f"{name} has a key that is no text: {shown(list(message))}")
        if "role" not in message:
            raise RequestError(f"{name} has no 'role': write e.g. 'user', 'assistant' or 'system'")
        text(f"'role' of {name}", message["role"])
        plain = dict(message)
        content = plain.get("content")
        if content is not None:
            written = _content(name, content)
            plain["content"] = [{"type": "text", "text": written}] if as_parts else written
        elif not plain.get("tool_calls"):  # a message with tool calls needs no content
            raise RequestError(f"{name} has no 'content'")
        found.append(plain)
    return found


def _content(name: str, content: Any) -> str:
    """Content as text. The texts of several parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return text(f"'content' of {name}", content)
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise RequestError(f"'content' of {name} must be text or a list of parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        where = f"part {index} of {name}"
        if isinstance(part, str):
            texts.append(text(where, part))
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"{where} must be {{'type': 'text', 'text': …}}, got {shown(part)}")
        kind = part.get("type", "text" if "text" in part else None)
        if not isinstance(kind, str) or kind != "text":
            raise RequestError(f"{where} is of type {shown(kind)}: this engine reads 'text' only")
        texts.append(text(f"'text' of {where}", part.get("text")))
    return "\n".join(texts)


def _tools(tools: Any, template: str) -> list[Any] | None:
    """Check the tools. The template must use them, or the model would never see them."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of JSON schemas or functions, got {shown(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) and not inspect.isfunction(tool) and not inspect.ismethod(tool):
            raise RequestError(f"tools[{index}] must be a JSON schema or a function, got {shown(tool)}")
    if tools and not re.search(r"\btools\b", template):
        raise RequestError("the chat template has no place for tools: the model would not be told of them")
    return [dict(tool) if isinstance(tool, Mapping) else tool for tool in tools] or None


def _variables(variables: Any, template: str, tokenizer: Any) -> dict[str, Any]:
    """Check the template's variables. Names that the template does not read are refused as likely typos."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(f"chat_template_kwargs must map names to values, got {shown(variables)}")
    taken = {"self", "messages", "add_generation_prompt", "continue_final_message", "tools"}
    taken |= set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"}
    for name in variables:
        if name in taken:
            raise RequestError(f"chat_template_kwargs can't hold {name!r}: chat sets that itself")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise RequestError(f"chat_template_kwargs holds {name!r}, which the chat template does not read")
    return dict(variables)
