"""A whole measurement: texts, prompts, one engine per way of storing KV, all on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from vattn.errors import ConfigError
from vattn.kv.ranges import KVRanges
from vattn.lab.quality.calibrate import calibrate, pieces_of
from vattn.lab.quality.measure import Quality, measure
from vattn.lab.quality.passages import MEASURE
from vattn.llm import LLM
from vattn.models.loader import LoadedModel

PROMPT_TOKENS = 24
SPARE_BYTES = 64 << 20
"""KV memory beyond what the tokens need: last pages of every range, little used."""


def texts_of(loaded: LoadedModel, text: str | None, tokens: int, context: int) -> list[list[int]]:
    """Token ids of a text, or of the built-in passages: pieces of at most `context`, `tokens` in all."""
    texts: list[list[int]] = []
    left = tokens
    for source in MEASURE if text is None else (text,):
        for piece in pieces_of(loaded, source, context):
            if len(piece[:left]) > 1:
                texts.append(piece[:left])
                left -= len(texts[-1])
    if not texts:
        raise ConfigError("the text has fewer than two tokens: there is nothing to predict")
    return texts


def prompts_of(texts: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` short prompts from all over the texts."""
    flat = [ids[i : i + PROMPT_TOKENS] for ids in texts for i in range(0, len(ids), PROMPT_TOKENS)]
    return [flat[i * len(flat) // count] for i in range(min(count, len(flat)))]


def static_ranges(loaded: LoadedModel, given: KVRanges | None) -> KVRanges:
    """The calibration that was given, or one made on the built-in passages. Raises ConfigError."""
    if given is None:
        return calibrate(loaded)
    given.check(loaded.spec.num_layers, loaded.spec.num_kv_heads)
    return given


def run(
    loaded: LoadedModel,
    ways: Sequence[tuple[str, str]],
    static: KVRanges | None,
    texts: Sequence[list[int]],
    *,
    num_prompts: int,
    max_tokens: int,
    chunk: int,
    progress: Callable[[int], None] = lambda tokens: None,
    kv_cache_memory_bytes: int | None = None,
    **options: Any,
) -> list[Quality]:
    """Measure each way (kv_cache_dtype, "token" or "static"); the unquantised model's figures come first.

    `static`: the ranges of those with static scales. `options` are of every `LLM`. KV memory is what the
    tokens need unless given, since all engines stand at the same time.
    """
    spec, prompts = loaded.spec, prompts_of(texts, num_prompts)
    longest = max(*map(len, texts), PROMPT_TOKENS + max_tokens) + 1
    wanted = longest + len(prompts) * (PROMPT_TOKENS + max_tokens)
    memory = kv_cache_memory_bytes or wanted * spec.kv_token_bytes + SPARE_BYTES
    with ExitStack() as stack:

        def engine(**kv: Any) -> LLM:
            sizes: dict[str, Any] = {
                "max_model_len": min(longest, spec.max_model_len),
                "kv_cache_memory_bytes": memory,
            }
            return stack.enter_context(LLM(loaded, max_num_seqs=8, **{**sizes, **options, **kv}))

        reference = engine()
        engines = [
            engine(kv_cache_dtype=stored, kv_scales="token" if scales == "token" else static)
            for stored, scales in ways
        ]
        return measure(
            reference, engines, texts, prompts, max_tokens=max_tokens, chunk=chunk, progress=progress
        )
