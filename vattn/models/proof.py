"""Tests by experiment whether a model can run in the engine.

The engine packs sequences side by side into `[1, T]`, separates them by `position_ids`, and computes each
layer's attention itself. The test does the same with the simplest attention and no cache. It compares the
result with what transformers computes for each sequence alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vattn.errors import UnsupportedModel
from vattn.models.attention import ATTENTION_NAME
from vattn.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (5, 1, 9, 3)  # tokens of the packed sequences
TOLERANCE = {torch.float32: 1e-3}  # largest difference of logits, relative to the largest logit
LOW_PRECISION_TOLERANCE = 5e-2  # of the median token: rounding may send single tokens to other experts


class NaiveAttention:
    """A `StepAttention` over packed sequences that start at position 0; records what it was asked."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.layers: list[int] = []
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._spans = list(pairwise(accumulate(lengths, initial=0)))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal softmax attention per sequence: q `[T, Hq, D]`, k and v `[T, Hkv, D]`."""
        self.layers.append(layer)
        self.shapes.add((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        outputs = []
        for start, end in self._spans:
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]).float() * scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))
        return torch.cat(outputs)


@torch.inference_mode()
def prove_packed(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raise UnsupportedModel, saying what differs, unless packed sequences give the results of separate ones.

    Takes a few forward passes over 18 tokens. The model's attention is restored afterwards.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(spec.vocab_size, (1, sum(LENGTHS)), generator=generator).to(model.device)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(model.device)
    before = model.config._attn_implementation
    naive = NaiveAttention(LENGTHS)
    try:
        with torch.autocast(model.device.type, enabled=False):
            model.set_attn_implementation("eager")
            parts = torch.split(ids, list(LENGTHS), dim=1)
            alone = [model(input_ids=part, use_cache=False).logits for part in parts]
            model.set_attn_implementation(ATTENTION_NAME)
            packed = model(input_ids=ids, position_ids=positions, use_cache=False, vattn_step=naive).logits
    except Exception as why:
        raise UnsupportedModel(f"{spec.model_type} models cannot be run on packed sequences: {why}") from why
    finally:
        model.set_attn_implementation(before)

    if naive.layers != list(range(spec.num_layers)):
        _refuse(spec, f"its {spec.num_layers} layers asked for attention as {naive.layers}, not once each")
    kv = (sum(LENGTHS), spec.num_kv_heads, spec.head_dim)
    expected = {((sum(LENGTHS), spec.num_heads, spec.head_dim), kv, kv)}
    if naive.shapes != expected:
        _refuse(spec, f"q, k and v have the shapes {naive.shapes}, not {expected} as the config says")
    expected_logits = torch.cat(alone, dim=1).float()
    error = (packed.float() - expected_logits).abs().amax(-1) / expected_logits.abs().max()
    found = float(error.max() if spec.dtype in TOLERANCE else error.median())
    limit = TOLERANCE.get(spec.dtype, LOW_PRECISION_TOLERANCE)
    if not found <= limit:  # NaN is refused too
        _refuse(spec, f"logits of packed sequences are off by {found:.1e} of the largest, not {limit:.0e}")


def _refuse(spec: ModelSpec, why: str) -> None:
    raise UnsupportedModel(f"{spec.model_type} models are not known to work, and failed the check: {why}")
