"""Options of the engine to vary, as they are written: `background_mapping=true,false`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from vattn.errors import ConfigError
from vattn.llm import LLM

BATCHING = "batching"
"""`continuous`: a request joins as soon as there is room. `static`: the next batch starts when the last
request of this one has ended, as engines did before continuous batching."""

_OWN = frozenset(
    {
        "kv_backend", "kv_layout", "page_bytes", "block_size", "kv_cache_dtype", "kv_cache_memory_bytes",
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "driver", "tokenizer", "device", "dtype",
        "trust_remote_code", "revision", "trace",
    }
)  # fmt: skip
"""Options that the benchmark sets itself, or that belong to the model."""

Sweeps = Mapping[str, Sequence[Any]]


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["overlap=true,false", "seed=1"]` -> values by option. Raises ConfigError."""
    sweeps: dict[str, list[Any]] = {}
    known = engine_options()
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or name not in known or name in sweeps:
            raise ConfigError(
                f"--sweep {text!r}: write an option of LLM and its values, each option once, e.g. "
                f"background_mapping=true,false; options: {', '.join(known)}"
            )
        sweeps[name] = [_value(value.strip()) for value in values.split(",")]
        if len({str(v) for v in sweeps[name]}) < len(sweeps[name]):
            raise ConfigError(f"--sweep {text!r}: name each value once")
        if name == BATCHING and not set(sweeps[name]) <= {"continuous", "static"}:
            raise ConfigError(f"--sweep {text!r}: batching is continuous or static")
    return sweeps


def engine_options() -> list[str]:
    """What may be swept."""
    parameters = inspect.signature(LLM.__init__).parameters.values()
    names = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return [BATCHING, *(name for name in names if name not in _OWN)]


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
