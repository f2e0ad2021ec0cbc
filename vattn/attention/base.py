"""The interface of an attention implementation: plan once per step, then run for every layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from vattn.errors import ConfigError
from vattn.kv.base import KVCache

if TYPE_CHECKING:
    from vattn.attention.graphs import DecodeGraphs


class StepAttention(Protocol):
    """A step's attention: planned once, called for every layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k and v `[T, Hkv, D]` of the new tokens, then attend. q and the result are `[T, Hq, D]`."""


class StepTimer(ABC):
    """Times attention, for measurements."""

    @abstractmethod
    def timed(self, step: StepAttention) -> StepAttention:
        """Wrap `step` so that its attention is timed."""


def refuse_quantised(kv: KVCache, name: str, instead: str) -> None:
    """Raise ConfigError if the cache is quantised, for an attention `name` that can't read scales.

    `instead` names implementations that can.
    """
    if kv.shape.quantised:
        raise ConfigError(
            f"attention={name!r} reads no quantised KV (the cache holds {kv.shape.dtype}): use {instead}, or "
            "kv_cache_dtype='auto'"
        )


class AttentionBackend(ABC):
    """One way of computing attention over one kind of memory. Lives as long as the engine."""

    @abstractmethod
    def check(self, kv: KVCache, device: torch.device) -> None:
        """Raise ConfigError, with the reason, if this implementation can't read `kv` or run on `device`."""

    def decode_graphs(
        self, model: nn.Module, kv: KVCache, *, num_heads: int, max_batch: int
    ) -> DecodeGraphs | None:
        """Captured graphs for the decode steps of `model`; None if this attention can't be captured."""
        return None

    @abstractmethod
    def plan(self, inputs: Any) -> StepAttention:
        """Decide everything that depends on lengths and addresses. `inputs` is an `AttentionInputs`."""
