"""Static scales of a quantised KV cache: how large keys and values get, per layer and head.

A range is the largest magnitude that must be kept; the scale follows from the stored type, so one
measurement (`vattn.lab.quality.calibrate`) serves both:

    scale = range / 127 (int8)   or   range / 448 (float8 e4m3)        value = stored x scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vattn.checks import shown
from vattn.errors import ConfigError
from vattn.kernels.quantise import LARGEST

FORMAT = "vattn-kv-ranges-1"


@dataclass(frozen=True, eq=False)
class KVRanges:
    """Largest magnitudes of keys and values: float32 `[layers, kv_heads]` each.

    Raises ConfigError unless they are matrices of equal shape that hold only finite numbers of 0 or more (0
    is for a head that is always 0).
    """

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        for name, x in (("k", self.k), ("v", self.v)):
            if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
                found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else shown(x)
                raise ConfigError(f"kv_scales: {name!r} must be floats [layers, kv_heads], not {found}")
            if not bool((x.isfinite() & (x >= 0)).all()):
                raise ConfigError(f"kv_scales: {name!r} has ranges that are negative or not finite")
        if self.k.shape != self.v.shape:
            raise ConfigError(
                f"kv_scales: 'k' is {list(self.k.shape)} and 'v' is {list(self.v.shape)}: they must be equal"
            )

    @staticmethod
    def of(source: Any) -> KVRanges:
        """From ranges, a mapping with "k" and "v" (tensors or nested lists), or a file of `save`.

        Raises ConfigError for anything else.
        """
        if isinstance(source, KVRanges):
            return source
        if isinstance(source, (str, Path)):
            return KVRanges.load(source)
        if isinstance(source, Mapping) and source.keys() == {"k", "v"}:
            try:
                k, v = (torch.as_tensor(source[name], dtype=torch.float32) for name in "kv")
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise ConfigError(f"kv_scales: 'k' and 'v' must be [layers, kv_heads]: {error}") from error
            return KVRanges(k, v)
        raise ConfigError(
            f"kv_scales={shown(source)} is unknown: use 'token', the file of a calibration, KVRanges, or a "
            "mapping with 'k' and 'v'"
        )

    @staticmethod
    def load(path: str | Path) -> KVRanges:
        """Read a safetensors file with "k" and "v". Raises ConfigError."""
        if not isinstance(path, (str, Path)):
            raise ConfigError(f"kv_scales must be the name of a file, got {shown(path)}")
        if not Path(path).is_file():
            raise ConfigError(f"kv_scales={str(path)!r}: there is no such file; use 'token', or calibrate")
        try:
            with safe_open(path, framework="pt") as file:
                names, form = set(file.keys()), (file.metadata() or {}).get("format")
                if names != {"k", "v"} or form != FORMAT:
                    raise ConfigError(
                        f"kv_scales={str(path)!r} holds {sorted(names)} in format {form!r}, not 'k' and 'v' "
                        f"in format {FORMAT!r}"
                    )
                return KVRanges(file.get_tensor("k"), file.get_tensor("v"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"kv_scales={str(path)!r} is no safetensors file: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` reads."""
        tensors = {"k": self.k.float().contiguous().cpu(), "v": self.v.float().contiguous().cpu()}
        save_file(tensors, path, metadata={"format": FORMAT})

    def check(self, num_layers: int, num_kv_heads: int) -> None:
        """Raise ConfigError unless these are ranges of such a model."""
        if self.k.shape != (num_layers, num_kv_heads):
            raise ConfigError(
                f"kv_scales are of {self.k.shape[0]} layers with {self.k.shape[1]} KV heads; the model has "
                f"{num_layers} layers with {num_kv_heads}: calibrate with this model"
            )

    def scales(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """float32 `[layers, 2, kv_heads]` for values stored as `dtype`."""
        ranges = torch.stack([self.k, self.v], dim=1).to(device, torch.float32)
        return ranges / LARGEST[dtype]
