"""The sizes of a model, read from its transformers config. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vattn.errors import UnsupportedModel
from vattn.models.fields import LENGTH_FIELDS, get_field
from vattn.models.rope import longest_sequence

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_EXPERT_FIELDS = ("num_local_experts", "num_experts")


PARAMETER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one parameter by the name of its type; scales of quantised weights are left out."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes that decide what a model needs in memory and time. All layers are alike.

    A decoder layer is attention (q, k, v, o) and an MLP with a gate (gate, up, down), or `experts` such MLPs,
    of which each token uses `experts_per_token`. Counts of parameters leave out norms and biases (below
    0.1 %), and are estimates for a model whose layers are built otherwise.

    - `num_heads` query heads attend over `num_kv_heads` KV heads of `head_dim` each.
    - `max_model_len`: most tokens of a sequence, prompt and output together.
    - `dtype_name`: type of weights and of the KV cache, as torch names it: "bfloat16".
    - `intermediate_size`: width of the MLP, or of each expert.
    - `tied`: input embeddings and LM head are one matrix.
    - `name`: what messages call the model; by default its type.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype_name: str
    intermediate_size: int
    tied: bool = False
    experts: int = 1
    experts_per_token: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.model_type)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype. Imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers, in the model's own type."""
        size = int(PARAMETER_BYTES[self.dtype_name])
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size

    @property
    def attention_params(self) -> int:
        """q, k, v and o of all layers."""
        return self.num_layers * self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

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
        """All parameters."""
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

    @classmethod
    def from_config(cls, config: PreTrainedConfig, dtype: torch.dtype | str) -> ModelSpec:
        """Read the sizes from a supported config. Raises UnsupportedModel if one is missing or invalid."""
        text = text_config(config)
        heads = _size(text, "num_attention_heads")
        kv_heads = 1 if get_field(text, "multi_query") else _size(text, "num_key_value_heads", default=heads)
        hidden = _size(text, "hidden_size")
        longest = longest_sequence(text)
        if heads % kv_heads:
            raise UnsupportedModel(
                f"{text.model_type}: num_attention_heads={heads} is not a multiple of "
                f"num_key_value_heads={kv_heads}"
            )
        if longest is None:
            raise UnsupportedModel(f"{text.model_type}: the config has no {LENGTH_FIELDS[0]}")
        experts = next((n for f in _EXPERT_FIELDS if (n := get_field(text, f))), 1)
        width = get_field(text, "moe_intermediate_size") if experts > 1 else None
        return cls(
            model_type=text.model_type,
            num_layers=_size(text, "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_size(text, "head_dim", "kv_channels", default=hidden // heads),
            vocab_size=_size(text, "vocab_size"),
            max_model_len=longest,
            dtype_name=str(dtype).removeprefix("torch."),
            intermediate_size=width or get_field(text, "intermediate_size") or 4 * hidden,
            tied=bool(get_field(config, "tie_word_embeddings")),
            experts=experts,
            experts_per_token=get_field(text, "num_experts_per_tok") or 1 if experts > 1 else 1,
        )


def text_config(config: PreTrainedConfig) -> Any:
    """The part of a config that describes the decoder."""
    return config.get_text_config(decoder=True)


def _size(config: Any, *fields: str, default: int | None = None) -> int:
    """The first of `fields` that holds a positive whole number, or a list of equal ones."""
    for field in fields:
        value = get_field(config, field)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    if default is None:
        raise UnsupportedModel(f"{config.model_type}: the config has no size in {' or '.join(fields)}")
    return default
