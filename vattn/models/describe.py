"""Describes a loaded model for the records of benchmarks, experiments and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vattn.models.loader import LoadedModel


def describe_model(loaded: LoadedModel, max_model_len: int) -> dict[str, Any]:
    """The sizes that determine how much memory and time a model takes."""
    spec = loaded.spec
    return {
        "name": loaded.name,
        "token_bytes": spec.kv_token_bytes,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "dtype": spec.dtype_name,
        "weight_bytes": sum(p.numel() * p.element_size() for p in loaded.model.parameters()),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "max_model_len": max_model_len,
        "device": str(next(loaded.model.parameters()).device),
    }
