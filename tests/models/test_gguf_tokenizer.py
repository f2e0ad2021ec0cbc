"""Tokenizers of GGUF files: text is cut as the file says, or the tokenizer is refused by name.

`TABLE` repeats the regexes of llama.cpp's public table as they stand there (reworded for C++), and
`cut_plainly` applies them with Python's `regex`. vattn's own table has the regexes of the models'
tokenizers, and runs them in `tokenizers`. Both must cut alike.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import regex

from tests.models.gguf_files import MERGES, sentencepiece, tiny_llama, vocabulary, write_gguf
from vattn import LLM, SamplingParams
from vattn.models.gguf_pretokenizers import NOT_BYTE_LEVEL, PRE_TOKENIZERS
from vattn.models.loader import load_model

S = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+{S}?|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*{S}?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = CASED + r"|\p{N}{1,3}" + REST
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
HAN, NOT_HAN = r"\p{Han}", r"(?!\p{Han})"
TABLE: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "glm4": [LLAMA3],
    "minicpm5": [r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")],
    "jais-2": [
        S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)"
        r"|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
    "qwen2": [QWEN2],
    "qwen35": [
        S + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "ufakzeka": [r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "seed-coder": [S + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "bailingmoe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        S + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "tekken": [CASED.replace(S + "?", "") + r"|\p{N}" + REST],
    "gpt-4o": [GPT4O],
    "granite-embed-multi-97m": [GPT4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "kimi-k2": [
        rf"{HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:{NOT_HAN}{UP})*(?:{NOT_HAN}{LOW})+{S}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?(?:{NOT_HAN}{UP})+(?:{NOT_HAN}{LOW})*{S}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "youtu": [
        "[가-힣\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+"
        "|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        CASED + r"|\p{N}" + REST,
    ],
    "deepseek-coder": [
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-v3": DEEPSEEK3,
    "spark2_5": [*DEEPSEEK3[:2], DEEPSEEK3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "bloom": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ],
}
TEXTS = [
    "\n\n1. First\n2. Second\r\n\r\n  3)\tThird  ",
    "I'll, HE'LL, we've, it's, IT'S 'tis don''t O'Neil's",
    "1234567 + 89.10 = 3,141,592; x1y22z333 ²³ ½ Ⅷ ٣٤٥",
    "helloWorld HTTPServer camelCase snake_case kebab-case path/to//file\n/",
    "naïve café cafe\u0301 Ελληνικά Русский हिन्दी ไทย עברית العربية",
    "東京タワーは333mです。中文，标点！한국어 ㄱㄴ ㄅㄆ",
    "   leading and    inner     and trailing   \n \n\t\n",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # ok?!\n",
    "emoji 👩‍👩‍👧 ☕️ ✓ $€£ <sentinel:12> IMGIMGABZ <|x|> \u00a0nbsp\u2003em\u3000wide",
    "",
    " ",
    "\n",
]


def cut_plainly(text: str, regexes: list[str]) -> list[str]:
    """Each regex cuts each piece; matches are pieces, and so is what lies between them."""
    pieces = [text]
    for pattern in regexes:
        finer = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                finer += [piece[at : match.start()], match.group()]
                at = match.end()
            finer.append(piece[at:])
        pieces = [piece for piece in finer if piece]
    return pieces


def cut(name: str, text: str) -> list[str]:
    return [text[a:b] for _, (a, b) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", TABLE)
def test_text_is_cut_as_the_public_table_says(name: str) -> None:
    for text in TEXTS:
        assert cut(name, text) == cut_plainly(text, TABLE[name]), text


SAMPLE = "I'll pay $1234567 in\n\n1. HelloWORLD'S  東京12 x"
BY_HAND = {
    "gpt-2": "I|'ll| pay| $|1234567| in|\n|\n|1|.| HelloWORLD|'|S| | 東京|12| x",
    "smollm": "I|'ll| pay| $|1|2|3|4|5|6|7| in|\n\n|1|.| HelloWORLD|'|S| | 東京|1|2| x",
    "llama-bpe": "I|'ll| pay| $|123|456|7| in|\n\n|1|.| HelloWORLD|'S| | 東京|12| x",
    "qwen2": "I|'ll| pay| $|1|2|3|4|5|6|7| in|\n\n|1|.| HelloWORLD|'S| | 東京|1|2| x",
    "tekken": "I|'ll| pay| $|1|2|3|4|5|6|7| in|\n\n|1|.| Hello|WORLD|'S| | 東京|1|2| x",
    "gpt-4o": "I'll| pay| $|123|456|7| in|\n\n|1|.| Hello|WORLD'S| | 東京|12| x",
    "tiny_aya": "I'll| pay| $|1|234|567| in|\n\n|1|.| Hello|WORLD'S| | 東京|12| x",
    "kimi-k2": "I'll| pay| $|123|456|7| in|\n\n|1|.| Hello|WORLD'S| | |東京|12| x",
    "deepseek-llm": "I|'|ll| pay| $|1234567| in|\n|\n|1|.| HelloWORLD|'|S|  |東京|12| x",
    "deepseek-v3": "I|'ll| pay| $|123|456|7| in|\n\n|1|.| HelloWORLD|'S|  |東京|12| x",
    "afmoe": "I|'ll| pay| $|1|234|567| in|\n\n|1|.| HelloWORLD|'S|  |東京|12| x",
    "falcon": "I|'|ll| pay| |$|123|456|7| in|\n|\n|1|.| HelloWORLD|'|S| | 東京|12| x",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_sample_is_cut_as_worked_out_by_hand(name: str) -> None:
    assert cut(name, SAMPLE) == BY_HAND[name].split("|")


def test_names_of_one_family_cut_alike() -> None:
    """Every name is in the table above, or cuts as one that is."""
    known = {"deepseek-llm", "afmoe", *TABLE}
    cuts = {tuple(map(tuple, (cut(name, text) for text in TEXTS))) for name in known}
    for name in PRE_TOKENIZERS:
        assert tuple(map(tuple, (cut(name, text) for text in TEXTS))) in cuts, name


# ------------------------------------------------------------------ through the loader
@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(folder: Path, **fields: Any) -> Any:
    """The tokenizer that comes with a tiny file whose `tokenizer.ggml` keys are these."""
    keys = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    path = write_gguf(folder / "tiny.gguf", tiny_llama(), keys=keys)
    return load_model(path, device="cpu", prepare=False, progress=lambda line: None).tokenizer


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def with_merges(*merges: str) -> dict[str, Any]:
    """A vocabulary with these merges and no others."""
    words = [merge.replace(" ", "") for merge in merges]
    fillers = [f"filler{index}" for index in range(len(MERGES) - len(words))]
    return {"merges": [*merges], "tokens": [*vocabulary()[: -len(MERGES)], *words, *fillers]}


def test_the_pre_tokenizer_that_the_file_names_is_used(tmp_path: Path) -> None:
    vocabulary_with_digits = with_merges("Ċ Ċ", "1 2")
    assert pieces(load(tmp_path, pre="gpt-2", **vocabulary_with_digits), "\n\n12") == ["Ċ", "Ċ", "12"]
    assert pieces(load(tmp_path, pre="smollm", **vocabulary_with_digits), "\n\n12") == ["ĊĊ", "1", "2"]
    assert pieces(load(tmp_path, pre="qwen2", **vocabulary_with_digits), "\n\n12") == ["ĊĊ", "1", "2"]
    assert pieces(load(tmp_path, pre="dbrx", **vocabulary_with_digits), "\n\n12") == ["ĊĊ", "12"]


def test_a_piece_that_is_a_token_is_not_merged_where_the_name_says_so(tmp_path: Path) -> None:
    tokens = vocabulary()
    tokens[-1] = "wor"  # no merge leads to it
    fields = {"tokens": tokens, "merges": MERGES[:-1], "add_bos_token": False}
    assert pieces(load(tmp_path, pre="dbrx", **fields), "wor") == ["w", "o", "r"]
    assert pieces(load(tmp_path, pre="llama-bpe", **fields), "wor") == ["wor"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre": "gpt-2", "add_bos_token": None}, ["hello"]),
        ({"pre": "llama-bpe", "add_bos_token": None}, ["<bos>", "hello"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hello"]),
        ({"add_bos_token": True}, ["<bos>", "hello"]),
        ({"add_eos_token": True}, ["hello", "<eos>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, fields: dict[str, Any], expected: list[str]
) -> None:
    assert pieces(load(tmp_path, **fields), "hello") == expected


def test_tokens_marked_as_control_or_user_defined_stay_whole(tmp_path: Path) -> None:
    tokens = vocabulary()
    tokens[-2:] = ["<|call|>", "<think>"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 5) + [3, 4]
    tokenizer = load(tmp_path, tokens=tokens, token_type=kinds, merges=MERGES[:-2])
    assert pieces(tokenizer, "he<|call|>he<think>he") == ["he", "<|call|>", "he", "<think>", "he"]
    ids = tokenizer("<|call|><think>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (None, ["<s>", "▁hello", "▁wor", "<0x21>"]),
        (True, ["<s>", "▁hello", "▁wor", "<0x21>"]),
        (False, ["<s>", "hello", "▁wor", "<0x21>"]),
    ],
)
def test_a_space_goes_before_sentencepiece_text_unless_the_file_says_no(
    tmp_path: Path, prefix: bool | None, expected: list[str]
) -> None:
    keys = {
        **sentencepiece(),
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    tokenizer = load(tmp_path, **{key.removeprefix("tokenizer.ggml."): v for key, v in keys.items()})
    assert pieces(tokenizer, "hello wor!") == expected
    assert tokenizer.decode(tokenizer("hello wor!")["input_ids"], skip_special_tokens=True) == "hello wor!"


UNKNOWN = {
    "pre-tokenizer": ({"pre": "future-bpe"}, r"tokenizer\.ggml\.pre='future-bpe'"),
    "another spelling": ({"pre": "gemma4"}, r"tokenizer\.ggml\.pre='gemma4'"),
    "kind of vocabulary": ({"model": "rwkv"}, r"tokenizer\.ggml\.model='rwkv'"),
    "no vocabulary": ({"model": None, "tokens": None}, r"no vocabulary"),
    "no merges": ({"merges": None}, r"without tokenizer\.ggml\.merges"),
    "bos without id": ({"add_bos_token": True, "bos_token_id": None}, r"bos_token_id is not"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_without_a_known_tokenizer_a_file_runs_on_ids_or_on_a_tokenizer_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    fields, message = UNKNOWN[kind]
    keys = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    path = write_gguf(tmp_path / "unknown.gguf", tiny_llama(), keys=keys)
    good = load(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)
    for start in ("converted", "from the copy"):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            LLM(str(path), device="cpu", kv_cache_memory_bytes=1 << 20) as llm,
        ):
            ids = llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids
        assert len(ids) == 4
        assert [r for r in caplog.records if regex.search(message, r.getMessage())], start
    with LLM(str(path), tokenizer=good, device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
        output = llm.generate(["hello wor"], SamplingParams(temperature=0.0, max_tokens=4))[0]
    assert output.prompt_token_ids == good("hello wor")["input_ids"]


def test_a_file_that_names_no_pre_tokenizer_is_cut_the_default_way(tmp_path: Path) -> None:
    assert pieces(load(tmp_path, pre=None, **with_merges("! !")), "1234!!") == ["1", "2", "3", "4", "!!"]


def test_keys_of_the_tokenizer_that_are_not_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, suppress_tokens=[5], future=7, add_space_prefix=True)
    text = caplog.text
    assert "tokenizer.ggml.suppress_tokens=[5]" in text
    assert "tokenizer.ggml.future=7" in text
    assert "tokenizer.ggml.add_space_prefix=True" in text


def test_every_name_has_one_meaning() -> None:
    assert not NOT_BYTE_LEVEL & PRE_TOKENIZERS.keys()
