"""How much device memory is left for KV: measured, not guessed.

total x gpu_memory_utilization
| in use: weights, other processes | peak of one full step | reserve | KV budget . . . . . . . . |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GRAPH_RESERVE = 0.02
"""Share of device memory left to captured graphs and fragmentation."""


class _NoAttention:
    """Attention that returns its queries: what is measured is everything else."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return q.contiguous()


@torch.inference_mode()
def activation_bytes(model: nn.Module, max_tokens: int, max_logit_rows: int) -> int:
    """Most bytes that one step of `max_tokens` tokens and `max_logit_rows` rows of logits takes on CUDA.

    Runs it once on dummy tokens, which also loads kernels and workspaces, then gives torch's cached
    blocks back to the driver: memory that torch has cached is invisible to `cuMemCreate`.
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
    # The sampler's float32 copy and its sorted twin, for a batch with top-p.
    peak = torch.cuda.max_memory_allocated(device) - before + 3 * logits.numel() * 4
    del logits
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(peak) + int(GRAPH_RESERVE * torch.cuda.get_device_properties(device).total_memory)
