"""Models by name: a table of public configs, or any Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vattn.errors import ConfigError
from vattn.models.spec import ModelSpec


def _model(
    name: str,
    layers: int,
    hidden: int,
    heads: str,
    mlp: int,
    vocab: int,
    length: int,
    *,
    tied: bool = False,
    experts: str = "1/1",
) -> ModelSpec:
    """`heads` is query/kv/dim, `experts` is active/all."""
    q, kv, dim = map(int, heads.split("/"))
    active, total = map(int, experts.split("/"))
    kind = name.split("-")[0]
    return ModelSpec(
        kind, layers, hidden, q, kv, dim, vocab, length, "bfloat16", mlp, tied, total, active, name
    )


MODELS: dict[str, ModelSpec] = {
    m.name: m
    for m in (
        _model("smollm2-135m", 30, 576, "9/3/64", 1536, 49152, 8192, tied=True),
        _model("smollm2-360m", 32, 960, "15/5/64", 2560, 49152, 8192, tied=True),
        _model("smollm2-1.7b", 24, 2048, "32/32/64", 8192, 49152, 8192, tied=True),
        _model("llama-3-8b", 32, 4096, "32/8/128", 14336, 128256, 8192),
        _model("llama-3-70b", 80, 8192, "64/8/128", 28672, 128256, 8192),
        _model("llama-3.1-8b", 32, 4096, "32/8/128", 14336, 128256, 131072),
        _model("llama-3.1-70b", 80, 8192, "64/8/128", 28672, 128256, 131072),
        _model("llama-3.1-405b", 126, 16384, "128/8/128", 53248, 128256, 131072),
        _model("llama-3.2-1b", 16, 2048, "32/8/64", 8192, 128256, 131072, tied=True),
        _model("llama-3.2-3b", 28, 3072, "24/8/128", 8192, 128256, 131072, tied=True),
        _model("mistral-7b", 32, 4096, "32/8/128", 14336, 32768, 32768),
        _model("mistral-small-24b", 40, 5120, "32/8/128", 32768, 131072, 32768),
        _model("mixtral-8x7b", 32, 4096, "32/8/128", 14336, 32000, 32768, experts="2/8"),
        _model("qwen2.5-7b", 28, 3584, "28/4/128", 18944, 152064, 32768),
        _model("qwen2.5-72b", 80, 8192, "64/8/128", 29568, 152064, 32768),
        _model("qwen3-0.6b", 28, 1024, "16/8/128", 3072, 151936, 40960, tied=True),
        _model("qwen3-4b", 36, 2560, "32/8/128", 9728, 151936, 40960, tied=True),
        _model("qwen3-8b", 36, 4096, "32/8/128", 12288, 151936, 40960),
        _model("qwen3-14b", 40, 5120, "40/8/128", 17408, 151936, 40960),
        _model("qwen3-32b", 64, 5120, "64/8/128", 25600, 151936, 40960),
        _model("qwen3-30b-a3b", 48, 2048, "32/4/128", 768, 151936, 40960, experts="8/128"),
        _model("qwen3-235b-a22b", 94, 4096, "64/4/128", 1536, 151936, 40960, experts="8/128"),
        _model("phi-4", 40, 5120, "40/10/128", 17920, 100352, 16384),
    )
}
ALIASES = {"smollm2": "smollm2-135m"}

_EXPLICIT = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_HEAD_DIM_IS_A_SHARE = ("llama", "mistral", "mixtral", "qwen2")
"""Types whose `head_dim`, where a config leaves it out, is hidden_size / heads."""


def find_model(name: str) -> ModelSpec:
    """A model of the table, or the one a `config.json` (file or its folder) describes.

    Raises ConfigError, which lists the table, or UnsupportedModel when the engine could not run it.
    """
    known = MODELS.get(ALIASES.get(name.lower(), name.lower()))
    if known is not None:
        return known
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"model {name!r} is not in the table and no config.json: use the path of one, or one of "
            f"{', '.join(MODELS)}"
        )
    spec = ModelSpec.from_config(_read_config(path), "bfloat16")
    return replace(spec, name=path.parent.name if path.name == "config.json" else path.stem)


def _says_all(fields: dict[str, Any]) -> bool:
    explicit = all(fields.get(field) is not None for field in _EXPLICIT)
    width = fields.get("head_dim") or fields.get("model_type") in _HEAD_DIM_IS_A_SHARE
    return explicit and bool(width) and "longrope" not in str(fields)


def _read_config(path: Path) -> Any:
    """A config that says every size itself is read as it stands: transformers takes seconds to import.

    It is asked where a size is left out or has another name, because it knows the defaults of each type.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a {type(fields).__name__}")
        if _says_all(fields):
            plain = SimpleNamespace(**fields)
            plain.get_text_config = lambda decoder: plain
            return plain
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no config that can be read: {error}") from error
