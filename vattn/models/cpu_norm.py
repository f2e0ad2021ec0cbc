"""RMSNorm in one call instead of six, for float32 inference on CPU.

Six small operations per norm are 5 % of a pass of SmolLM2-135M over 8 rows; fused they take a third of
that. Models write their norms in many ways, so a module is replaced only if the fused one gives the
same numbers on a sample.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


class FusedRMSNorm(nn.Module):
    """`x / rms(x) * scale` over the last dimension."""

    def __init__(self, weight: nn.Parameter, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight  # as in the module it replaces; `scale` is that, or that plus one
        self._scale, self._shape, self._eps = scale, tuple(scale.shape), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self._scale, self._eps)

    def extra_repr(self) -> str:
        return f"{self._shape[0]}, eps={self._eps}"


def fuse_norms(model: nn.Module) -> int:
    """Replace the RMSNorm modules of a float32 model on CPU, in place. Returns how many were replaced.

    Their weights stay parameters under their names, but must not be changed any more.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            fused = _fused(norm)
            if fused is not None:
                setattr(parent, name, fused)
                replaced += 1
    return replaced


@torch.no_grad()
def _fused(norm: nn.Module) -> FusedRMSNorm | None:
    """The fused module that computes what `norm` does; None if it's another kind, or does more."""
    weight = getattr(norm, "weight", None)
    eps = next((value for field in _EPSILONS if isinstance(value := getattr(norm, field, None), float)), None)
    if "RMSNorm" not in type(norm).__name__ or isinstance(norm, FusedRMSNorm) or eps is None:
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.dtype != torch.float32:
        return None
    alone = len(inspect.signature(type(norm).forward).parameters) == 2  # self and x: no gate, no residual
    if weight.device.type != "cpu" or norm._forward_hooks or norm._forward_pre_hooks or not alone:
        return None
    sample = torch.randn(2, 3, len(weight), generator=torch.Generator().manual_seed(0))
    expected = norm(sample)
    for scale in (weight.detach(), 1 + weight.detach()):  # Gemma's norms store the distance from one
        fused = FusedRMSNorm(weight, scale, eps)
        if torch.allclose(fused(sample), expected, rtol=1e-5, atol=1e-6):
            return fused
    return None
