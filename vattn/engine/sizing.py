"""Measures how much device memory is left for KV.

total x gpu_memory_utilization
| in use: weights, other processes | peak of one full step | reserve | KV budget . . . . . . . . |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GRAPH_RESERVE = 0.02
"""Share of device memory reserved for captured graphs and fragmentation."""


class _NoAttention:
    """Attention that returns its queries, so that only the rest of the model is measured."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return q.contiguous()


@torch.inference_mode()
def activation_bytes(model: nn.Module, max_tokens: int, max_logit_rows: int) -> int:
    """Peak bytes on CUDA of a step with `max_tokens` tokens and `max_logit_rows` rows of logits.

    Runs such a step once on dummy tokens, which also loads kernels and workspaces. Then it gives torch's
    cached blocks back to the driver, because `cuMemCreate` can't use memory that torch has cached.
    """
    device = next(model.parameters()).device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    tokens = torch.zeros(1, max_tokens, dtype=torch.int64, device=device)
    with torch.autocast(device.type, enabled=False):
        logits = model(
            input_ids=tokens,
            position_ids=tokens,
            use_cache=False,
            logits_to_keep=torch.arange(min(max_logit_rows, max_tokens), device=device),
            vattn_step=_NoAttention(),
        ).logits
    # The sampler's float32 copy and a sorted copy of it, for a batch with top-p.
    peak = torch.cuda.max_memory_allocated(device) - before + 3 * logits.numel() * 4
    del logits
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(peak) + int(GRAPH_RESERVE * torch.cuda.get_device_properties(device).total_memory)
