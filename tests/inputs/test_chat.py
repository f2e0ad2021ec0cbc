"""`LLM.chat`: which conversations it reads, and the words in which it refuses the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.inputs.written import TEMPLATE, fast, make_llm, model
from tests.names import name_of
from vattn import LLM, SamplingParams
from vattn.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def prompt_of(llm: LLM, messages: Any, **options: Any) -> str:
    [output] = llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert output.prompt is not None
    return output.prompt


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# ---------------------------------------------------------------------- content
def test_parts_are_joined_as_lines_of_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three", {"text": "four"}]
    assert prompt_of(llm, user(parts)) == prompt_of(llm, user("one\ntwo\nthree\nfour"))
    assert "<user>one\ntwo" in prompt_of(llm, user(parts))


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
def test_a_template_that_walks_over_parts_gets_parts(llm: LLM, content: Any) -> None:
    assert prompt_of(llm, user(content), chat_template=PARTS_ONLY) == "<user>hello"


def test_a_message_that_calls_tools_needs_no_content(llm: LLM) -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    template = "{% for m in messages %}{{ m.role }}{% if m.tool_calls %} calls{% endif %};{% endfor %}"
    assert prompt_of(llm, [*HELLO, calls], chat_template=template) == "user;assistant calls;"


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            user([{"type": "image_url", "image_url": {"url": "x"}}]),
            "part 0 of message 0 is of type 'image_url'",
        ),
        (
            user([{"type": "text", "text": "a"}, {"type": "input_audio"}]),
            "part 1 of message 0 is of type 'inp",
        ),
        (user([{"type": "text"}]), "'text' of part 0 of message 0 must be text, got None"),
        (user([{"type": "text", "text": 5}]), "must be text, got 5"),
        (user([5]), "part 0 of message 0 must be"),
        (user([{}]), "is of type None"),
        (user(5), "'content' of message 0 must be text or a list of parts, got 5"),
        (user(b"bytes"), "'content' of message 0 must be text"),
        (user({"type": "text", "text": "x"}), "'content' of message 0 must be text"),
        (user("half \ud83d"), "'content' of message 0 has '.ud83d' at character 5"),
        (user([{"type": "text", "text": "\udce9"}]), "'text' of part 0 of message 0 has '.udce9'"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": "user", "content": None}], "message 0 has no 'content'"),
        ([{"content": "hello"}], "message 0 has no 'role'"),
        ([{"role": 5, "content": "hello"}], "'role' of message 0 must be text, got 5"),
        ([{"role": "pirate", "content": "hello"}], "this template knows no role pirate"),
        ([*HELLO, "hello"], "message 1 must be a dict"),
        ([*HELLO, None], "message 1 must be a dict"),
        ([{5: 6}], "has a key that is no text"),
        ([], "the conversation is empty"),
        ([[]], "the conversation is empty"),
        ([HELLO, []], r"messages\[1\]: the conversation is empty"),
        ([HELLO, user(5)], r"messages\[1\]: 'content' of message 0"),
        ("hello", "chat takes a list of messages"),
        (HELLO[0], "chat takes a list of messages"),
        (None, "chat takes a list of messages"),
        (5, "chat takes a list of messages"),
        ((m for m in HELLO), "chat takes a list of messages"),
        (["hello"], "message 0 must be a dict with 'role' and 'content', got 'hello'"),
        ([5], "message 0 must be a dict with 'role' and 'content', got 5"),
        ([HELLO, "hello"], "a conversation is a list of messages, not 'hello'"),
    ],
    ids=name_of,
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system message, please') }}", "no system message, please"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].nothing.there }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ {}['x'].y }}", "UndefinedError"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{% include 'x' %}", "refused the conversation"),
        ("{{ '\ud83d' }}", "chat_template has"),
        (5, "chat_template must be text"),
        (b"{{ x }}", "chat_template must be text"),
    ],
    ids=name_of,
)
def test_what_a_template_raises_is_a_refusal_in_its_words(llm: LLM, template: Any, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        llm.chat(HELLO, GREEDY, chat_template=template, use_tqdm=False)


# ---------------------------------------------------------------------- tools, variables, continuation
def test_tools_reach_the_template(llm: LLM) -> None:
    schema = {"type": "function", "function": {"name": "weather", "parameters": {}}}

    def clock(zone: str) -> str:
        """Tell the time.

        Args:
            zone: where
        """
        return zone

    shown = prompt_of(llm, HELLO, chat_template=TOOLS, tools=[schema, clock])
    assert shown.startswith("[weather][clock]<user>")


@pytest.mark.parametrize(
    ("tools", "template", "says"),
    [
        ([{"type": "function"}], TEMPLATE, "no place for tools"),
        ([5], TOOLS, r"tools\[0\] must be a JSON schema or a function"),
        ("weather", TOOLS, "tools must be a list"),
        ({"type": "function"}, TOOLS, "tools must be a list"),
        ([lambda x: x], TOOLS, "refused the conversation"),
    ],
)
def test_tools_that_the_model_would_not_hear_of_are_refused(
    llm: LLM, tools: Any, template: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        llm.chat(HELLO, GREEDY, tools=tools, chat_template=template, use_tqdm=False)


def test_variables_reach_the_template_and_mistyped_ones_are_refused(llm: LLM) -> None:
    template = "{% if think %}hmm {% endif %}{{ messages[0].content }}"
    assert prompt_of(llm, HELLO, chat_template=template, chat_template_kwargs={"think": True}) == "hmm hello"
    for variables, says in (
        ({"thnik": True}, "'thnik', which the chat template does not read"),
        ({"tokenize": True}, "chat sets that itself"),
        ({"messages": []}, "chat sets that itself"),
        ({5: True}, "must map names to values"),
        (["think"], "must map names to values"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.chat(HELLO, GREEDY, chat_template=template, chat_template_kwargs=variables, use_tqdm=False)  # type: ignore[arg-type]


def test_the_last_message_is_continued_as_transformers_does(llm: LLM) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    shown = prompt_of(llm, talk, continue_final_message=True, add_generation_prompt=False)
    assert shown == "<user>hello</user><assistant>The answer is"
    assert shown == llm.get_tokenizer().apply_chat_template(talk, tokenize=False, continue_final_message=True)
    with pytest.raises(RequestError, match="set add_generation_prompt=False"):
        llm.chat(talk, GREEDY, continue_final_message=True, use_tqdm=False)
    with pytest.raises(RequestError, match="True, False or the name of a field"):
        llm.chat(talk, GREEDY, continue_final_message=5, use_tqdm=False)  # type: ignore[arg-type]
    hides = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="continue_final_message is set but"):
        llm.chat(
            talk,
            GREEDY,
            chat_template=hides,
            continue_final_message=True,
            add_generation_prompt=False,
            use_tqdm=False,
        )


# ---------------------------------------------------------------------- salts
def test_conversations_share_cached_prefixes_within_a_salt_only() -> None:
    long = user("the same long beginning of a conversation, " * 4)
    with make_llm(kv_backend="paged", block_size=16) as llm:

        def cached(**options: Any) -> list[bool]:
            outputs = llm.chat(options.pop("messages", long), GREEDY, use_tqdm=False, **options)
            return [(output.num_cached_tokens or 0) > 0 for output in outputs]

        assert cached(cache_salt="mine") == [False]
        assert cached(cache_salt="mine") == [True]
        assert cached(cache_salt="yours") == [False]
        assert cached() == [False]
        assert cached(messages=[long, long], cache_salt=["mine", "theirs"]) == [True, False]
        for salt, says in (
            (["a", "b"], "1 prompts came with 2 values of cache_salt"),
            (5, "'cache_salt' is text"),
            (None, "'cache_salt' is text"),
        ):
            with pytest.raises(RequestError, match=says):
                llm.chat(long, GREEDY, cache_salt=salt, use_tqdm=False)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- models without
def test_a_model_without_template_or_tokenizer_says_so() -> None:
    for tokenizer, says in ((fast(template=None), "no chat template"), (None, "no chat template|tokenizer")):
        with LLM(model(), tokenizer=tokenizer, kv_cache_memory_bytes=8 << 20) as llm:
            with pytest.raises(RequestError, match=says):
                llm.chat(HELLO, GREEDY, use_tqdm=False)
            assert llm.generate([5, 6], GREEDY, use_tqdm=False)


def test_a_template_may_be_named_where_there_are_several() -> None:
    tokenizer = fast()
    tokenizer.chat_template = {"default": TEMPLATE, "loud": "{{ messages[0].content.upper() }}"}
    with LLM(model(), tokenizer=tokenizer, kv_cache_memory_bytes=8 << 20) as llm:
        assert prompt_of(llm, HELLO) == "<user>hello</user><assistant>"
        assert prompt_of(llm, HELLO, chat_template="loud") == "HELLO"
