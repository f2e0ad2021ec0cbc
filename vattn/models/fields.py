"""Reading transformers configs, which may lack any field."""

from __future__ import annotations

from typing import Any

LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")


def get_field(config: Any, field: str) -> Any:
    """A field, or None. What differs between layers cannot be read from the whole config: None too."""
    try:
        return getattr(config, field, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None
