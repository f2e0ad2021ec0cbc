"""Faster layers for float32 inference on CPU, above all linear ones.

Two changes, exact up to the order of additions:

- Weights lie in oneDNN's blocked layout instead of row by row, so that no call has to gather them. It
  pays from 4 rows on, and few rows are the rule: one per running request.
- Projections of one input become one product. The first to be called computes all of them, the others
  hand out their slice:

      q_proj(x) ─┐ computes  x · [Wq; Wk; Wv]ᵀ = [ q │ k │ v ],  returns q
      k_proj(x) ─┤ the same x: returns k
      v_proj(x) ─┘ the same x: returns v and lets go of the result

Milliseconds for a pass of SmolLM2-135M without attention, all rows through the head (one thread, AVX-512,
CPU time, best of 25 interleaved passes, RMSNorms fused too), as loaded → prepared:

    rows        1          4           8          16          32         256 (32 of them through the head)
            46 → 46    75 → 58    104 → 66    101 → 80    133 → 112    448 → 431
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from vattn.models.cpu_norm import fuse_norms

MIN_PACKED_ROWS = 4  # below, a plain matrix-vector product is the faster one
PACK_ROWS = 32  # the blocked layout is chosen for this many rows; the same from 8 to 256

# Modules of one input, by the names transformers gives them.
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def prepare_for_cpu(model: nn.Module) -> int:
    """Replace the linear layers (and RMSNorms) of a float32 model on CPU, in place; returns how many linear.

    For inference only: weights have no gradient, and the model must stay on the CPU. `state_dict` no
    longer has entries for the layers; their `weight` can be read (it is unpacked each time) but not
    changed. Their old weights are freed, unless that would save nothing: a weight tied to the embedding
    table, or mapped from a file (it occupies page cache only), stays and serves products of few rows.

    Changes nothing, and returns 0, where oneDNN is missing. Layers that are not plain `nn.Linear` or
    `Conv1D`, not float32 or not on the CPU are left alone.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    fuse_norms(model)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    mapped = _FileMappings()

    def stays(layer: nn.Linear) -> bool:
        return uses[id(layer.weight)] > 1 or layer.weight in mapped

    replaced = 0
    for parent in list(model.modules()):
        for names in SHARED_INPUT:
            layers = [layer for name in names if _can_replace(layer := getattr(parent, name, None))]
            if len(layers) == len(names) and len({_weight_and_bias(m)[0].shape[1] for m in layers}) == 1:
                shared = _SharedInput(layers)
                for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
                    setattr(parent, name, SliceLinear(shared, index, layer, keep=stays(layer)))
                replaced += len(names)
        for name, layer in list(parent.named_children()):
            if _can_replace(layer):
                setattr(parent, name, PackedLinear(layer, keep=stays(layer)))
                replaced += 1
    return replaced


class PackedLinear(nn.Module):
    """A linear layer with its weight in blocked layout: `[..., in] -> [..., out]`.

    `keep`: hold on to the plain weight too, and use it for inputs of less than MIN_PACKED_ROWS rows.
    """

    def __init__(self, layer: nn.Linear, *, keep: bool) -> None:
        super().__init__()
        weight, self._bias = _weight_and_bias(layer)
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight)
        self._plain = weight if keep else None
        self._few = MIN_PACKED_ROWS * self.in_features if keep else 0

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < self._few:
            assert self._plain is not None
            return F.linear(x, self._plain, self._bias)
        return _multiply(x, self._packed, self._bias)

    @property
    def weight(self) -> Tensor:
        """`[out, in]`; a copy, unless the plain weight was kept."""
        return self._packed.to_dense() if self._plain is None else self._plain

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class SliceLinear(nn.Module):
    """One of several linear layers that are called with the same tensor; see `_SharedInput`."""

    def __init__(self, shared: _SharedInput, index: int, layer: nn.Linear, *, keep: bool) -> None:
        super().__init__()
        weight, self._bias = _weight_and_bias(layer)
        self.out_features, self.in_features = weight.shape
        self._shared, self._index = shared, index
        self._plain = weight if keep else None
        self._few = MIN_PACKED_ROWS * self.in_features if keep else 0

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() < self._few:
            assert self._plain is not None
            return F.linear(x, self._plain, self._bias)
        return self._shared.take(self._index, x)

    @property
    def weight(self) -> Tensor:
        """`[out, in]`; a copy, unless the plain weight was kept."""
        return self._shared.weight(self._index) if self._plain is None else self._plain

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, slice={self._index}"


class _SharedInput:
    """The product of one input with several weights, computed once and handed out slice by slice.

    Slices belong to a tensor object, not to its values: an input changed in place between two calls
    would be answered from before. Threads may call at once; at worst one computes anew.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights, biases = zip(*map(_weight_and_bias, layers), strict=True)
        self._sizes = [len(weight) for weight in weights]
        self._packed = _pack(torch.cat(weights))
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            filled = (w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True))
            self._bias = torch.cat(list(filled))
        # The input and its slices still to be taken; one attribute, so that threads see both or neither.
        self._open: tuple[Tensor, dict[int, Tensor]] | None = None

    def take(self, index: int, x: Tensor) -> Tensor:
        """Slice `index` of the product with `x`: `[..., out of that layer]`, strided."""
        held = self._open
        if held is None or held[0] is not x or index not in held[1]:
            product = _multiply(x, self._packed, self._bias)
            held = self._open = (x, dict(enumerate(product.split_with_sizes(self._sizes, dim=-1))))
        part = held[1].pop(index)
        if not held[1]:
            self._open = None
        return part

    def weight(self, index: int) -> Tensor:
        return torch.split(self._packed.to_dense(), self._sizes)[index]


class _FileMappings:
    """The address ranges where this process maps files; `tensor in mappings`."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        maps = Path("/proc/self/maps")
        for line in maps.read_text().splitlines() if maps.exists() else []:
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" and path and path[0].startswith("/") and not path[0].startswith("/memfd:"):
                start, end = (int(address, 16) for address in addresses.split("-"))
                self._starts.append(start)
                self._ends.append(end)

    def __contains__(self, tensor: Tensor) -> bool:
        at = bisect_right(self._starts, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() + tensor.nbytes <= self._ends[at]


def _can_replace(layer: object) -> TypeGuard[nn.Linear]:
    """Whether it multiplies, and nothing else: a subclass or a hook may do more."""
    if not isinstance(layer, (nn.Linear, Conv1D)) or type(layer) not in (nn.Linear, Conv1D):
        return False
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu" and not hooked


def _weight_and_bias(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """`[out, in]` and `[out]` of a layer; Conv1D has its weight the other way round."""
    weight = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    return (weight.t() if type(layer) is Conv1D else weight), bias


def _pack(weight: Tensor) -> Tensor:
    """`[out, in]` in oneDNN's blocked layout; an opaque tensor."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, contiguous."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
