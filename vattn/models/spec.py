"""The sizes of a model, read from its transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vattn.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LONGEST_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class ModelSpec:
    """The sizes the engine needs of a model. All layers are alike.

    - `num_heads` query heads attend over `num_kv_heads` KV heads of `head_dim` each.
    - `max_model_len`: most tokens of a sequence, prompt and output together.
    - `dtype`: of weights and of the KV cache.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: PreTrainedConfig, dtype: torch.dtype) -> ModelSpec:
        """The sizes in a supported config. Raises UnsupportedModel if one is missing or odd."""
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
            raise UnsupportedModel(f"{text.model_type}: the config has no {_LONGEST_FIELDS[0]}")
        return cls(
            model_type=text.model_type,
            num_layers=_size(text, "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_size(text, "head_dim", "kv_channels", default=hidden // heads),
            vocab_size=_size(text, "vocab_size"),
            max_model_len=longest,
            dtype=dtype,
        )


def text_config(config: PreTrainedConfig) -> Any:
    """The part of a config that describes the decoder."""
    return config.get_text_config(decoder=True)


def get_field(config: Any, field: str) -> Any:
    """A field, or None. What differs between layers cannot be read from the whole config: None too."""
    try:
        return getattr(config, field, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest sequence whose positions mean the same at every length; None: not said.

    LongRoPE turns to other frequencies once a sequence passes its original length. With keys already
    cached and other sequences in the batch that cannot be followed: sequences stay below.
    """
    limits = [v for f in _LONGEST_FIELDS if isinstance(v := get_field(config, f), int) and v > 0][:1]
    rope = get_field(config, "rope_parameters") or {}
    for parameters in (rope, *rope.values()):  # one set for all layers, or one per kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings") or limits[0])
    return min(limits, default=None)


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
