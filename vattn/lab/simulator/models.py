"""Sizes of models: a table of public configs, or any Hugging Face `config.json`.

Only what costs time or memory is kept. A decoder layer is attention (q, k, v, o) and an MLP with a gate
(gate, up, down), or `experts` of them of which `experts_per_token` run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vattn.errors import ConfigError

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one parameter by the name of its type; scales of quantised weights are left out."""


@dataclass(frozen=True)
class SimulatedModel:
    """A decoder's sizes, from its public config."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP, or of each expert."""
    vocab_size: int
    max_model_len: int
    tied: bool = False
    """Input embeddings and LM head are one matrix."""
    experts: int = 1
    experts_per_token: int = 1

    @property
    def attention_params(self) -> int:
        """q, k, v and o of all layers."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return self.num_layers * self.hidden_size * (2 * q + 2 * kv)

    @property
    def expert_params(self) -> int:
        """One expert (or the MLP) of all layers."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def head_params(self) -> int:
        """The LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters but norms and biases (below 0.1 %)."""
        embeddings = self.head_params * (1 if self.tied else 2)
        return self.attention_params + self.experts * self.expert_params + embeddings

    @property
    def active_params(self) -> int:
        """Parameters of the layers that one token is multiplied with; embeddings and head left out."""
        return self.attention_params + self.experts_per_token * self.expert_params

    def layer_params_read(self, tokens: int) -> float:
        """Parameters of the layers that a step of `tokens` tokens reads.

        Each token picks `experts_per_token` of `experts`; uniform, independent choices touch
        E x (1 - (1 - k / E) ^ tokens) of them.
        """
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return self.attention_params + self.experts * (1 - untouched) * self.expert_params


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
) -> SimulatedModel:
    """`heads` is query/kv/dim, `experts` is active/all."""
    q, kv, dim = map(int, heads.split("/"))
    active, total = map(int, experts.split("/"))
    return SimulatedModel(name, layers, hidden, q, kv, dim, mlp, vocab, length, tied, total, active)


MODELS: dict[str, SimulatedModel] = {
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


def find_model(name: str) -> SimulatedModel:
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
    return _from_config(path)


def _from_config(path: Path) -> SimulatedModel:
    from transformers import AutoConfig

    from vattn.models.spec import ModelSpec, get_field, text_config

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no config that transformers can read: {error}") from error
    spec, text = ModelSpec.from_config(config, torch.bfloat16), text_config(config)
    experts = next((n for f in ("num_local_experts", "num_experts") if (n := get_field(text, f))), 1)
    width = get_field(text, "moe_intermediate_size") if experts > 1 else None
    width = width or get_field(text, "intermediate_size") or 4 * spec.hidden_size
    model = SimulatedModel(
        name=path.parent.name if path.name == "config.json" else path.stem,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=width,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        tied=bool(get_field(config, "tie_word_embeddings")),
    )
    active = get_field(text, "num_experts_per_tok") or 1
    return replace(model, experts=experts, experts_per_token=active) if experts > 1 else model
