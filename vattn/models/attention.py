"""The hook into transformers: attention of every layer goes to the step's plan.

transformers calls `attention_forward` once per layer with that layer's new q, k and v; the plan,
handed down through the model's keyword arguments, stores k and v and attends over the cache. No
state is global: two engines in one process share nothing but the registered function.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from vattn.attention.base import StepAttention
from vattn.errors import VattnError

ATTENTION_NAME = "vattn"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    vattn_step: StepAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[1, Hq, T, D]` in, `[1, T, Hq, D]` out."""
    if vattn_step is None:
        raise VattnError(
            "this model serves a vattn engine: close the LLM first, or give it back its attention with "
            "model.set_attn_implementation('sdpa')"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return vattn_step.attend(layer, q, k, v, scale).unsqueeze(0), None


def register_attention() -> str:
    """Make `attn_implementation="vattn"` known to transformers. Idempotent; returns the name."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    return ATTENTION_NAME
