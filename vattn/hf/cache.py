"""`VirtualCache`: a transformers cache whose memory grows in place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from vattn.checks import shown
from vattn.errors import ConfigError, UnsupportedModel
from vattn.hf.layers import VirtualLayer
from vattn.hf.layout import LayoutName
from vattn.hf.sliding import VirtualSlidingLayer
from vattn.hf.source import Arena
from vattn.vmm.driver import Driver

_LAYERS_UNKNOWN = 32  # to choose a page size when no config says


class VirtualCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A drop-in for `DynamicCache`. Results are the same, but it never copies past tokens or reserves memory.

        model.generate(**inputs, past_key_values=VirtualCache(model.config))

    Args:
        config: the model's config. It says which layers have sliding windows. None: every layer keeps every
            token.
        max_len: maximum number of tokens, prompt and output. Addresses are reserved for them, memory is not.
            Default: the config's `max_position_embeddings`.
        layout: `"heads"` (dense heads, a page of slack in each), `"tokens"` (a page of slack for a whole
            layer) or `"auto"`: the first on CPU, the second on CUDA. See docs/hf.md.
        page_bytes: bytes by which an address range grows, a multiple of the driver's granularity. Default:
            see docs/hf.md.
        driver: virtual memory driver to map with; the caller must close it. Default: the cache opens its own
            driver for every device that the model computes on.

    Memory is mapped page by page as tokens arrive. `crop`, `reset` and garbage collection give it back. Views
    from `update`, `keys` and `values` stay readable as long as they are held, even after these calls. Their
    content changes if the cache is cropped and written again, or reordered.

    The cache belongs to the process that made it. A forked child may drop it; any other use there raises
    `WrongProcess`.

    Raises `ConfigError` for wrong arguments, and `UnsupportedModel`, with the layer's name, for layers that
    it can't hold (linear attention and other recurrent states, indexed sparse attention).
    """

    def __init__(
        self,
        config: Any | None = None,
        max_len: int | None = None,
        *,
        layout: LayoutName = "auto",
        page_bytes: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        if config is not None and not callable(getattr(config, "get_text_config", None)):
            raise ConfigError(f"config must be a transformers config, not {shown(config)}")
        choice = None if config is None else _supported(DynamicCache(config=config).layers)
        if max_len is None:
            max_len = _max_positions(config)
        count = _LAYERS_UNKNOWN if choice is None else len(choice)
        arena = Arena(layout, page_bytes, driver, count, max_len)
        self.max_len = max_len
        if choice is None:
            Cache.__init__(self, layer_class_to_replicate=partial(VirtualLayer, arena))
        else:
            Cache.__init__(self, layers=[_virtual(layer, arena) for layer in choice])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace sequence i of every layer by the old sequence `beam_idx[i]`."""
        rows = beam_idx.tolist()  # one wait for the device, not one per layer
        for layer in self._virtual_layers():
            layer.reorder(rows)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("VirtualCache does not offload: its memory is bound to a device")

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> NoReturn:
        """Not supported."""
        raise NotImplementedError("VirtualCache does not offload, so there is nothing to prefetch")

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that all layers hold."""
        return sum(layer.nbytes for layer in self._virtual_layers())

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of physical memory mapped for these tokens."""
        return sum(layer.nbytes_mapped for layer in self._virtual_layers())

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of reserved addresses."""
        return sum(layer.nbytes_reserved for layer in self._virtual_layers())

    def check(self) -> None:
        """Raise AssertionError unless tokens, pages and driver agree."""
        for layer in self._virtual_layers():
            layer.check()

    def __repr__(self) -> str:
        return (
            f"VirtualCache({len(self.layers)} layers, {self.get_seq_length() if self.layers else 0:,} of "
            f"{self.max_len:,} tokens, {self.nbytes_mapped:,} bytes mapped)"
        )

    def _virtual_layers(self) -> Iterator[VirtualLayer]:
        return (layer for layer in self.layers if isinstance(layer, VirtualLayer))


# Layers that hold nothing, where layers share KV; older releases have none.
_DUMMY = getattr(cache_utils, "DummyLayer", None)


def _supported(layers: list[Any]) -> list[Any]:
    """The layers that transformers would use. Raises UnsupportedModel if we have no match for one."""
    for index, layer in enumerate(layers):
        kind = type(layer)
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer, _DUMMY):
            raise UnsupportedModel(
                f"layer {index} of this model needs a {kind.__name__}, which VirtualCache does not have: it "
                f"holds K and V of full and of sliding-window attention. Use transformers' DynamicCache"
            )
    return layers


def _virtual(layer: Any, arena: Arena) -> Any:
    """Our replacement for one of transformers' layers."""
    if type(layer) is DynamicLayer:
        return VirtualLayer(arena)
    if type(layer) is DynamicSlidingWindowLayer:
        return VirtualSlidingLayer(arena, layer.sliding_window)
    return layer


def _max_positions(config: Any | None) -> int:
    if config is None:
        raise ConfigError("VirtualCache needs max_len=… or a config that knows max_position_embeddings")
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ConfigError(
            f"{type(config).__name__} names no max_position_embeddings: VirtualCache(config, max_len=…)"
        )
    return positions
