"""Chooses the device and dtype of a model."""

from __future__ import annotations

import torch

from vattn.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def choose_device(device: str | torch.device) -> torch.device:
    """The device with this name; `"auto"` is CUDA if there is a CUDA device. Raises ConfigError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:1'") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={str(device)!r} is not supported: use 'auto', 'cpu' or 'cuda'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return place


def choose_dtype(dtype: str | torch.dtype, place: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in. `stored` is the checkpoint's, or None if it doesn't say.

    `"auto"` is float32 on a CPU, where other dtypes are slow (bfloat16 by a factor of 80 without matrix
    units for it), and `stored` on CUDA. Raises ConfigError.
    """
    if dtype == "auto":
        dtype = torch.float32 if place.type == "cpu" or stored is None else stored
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r} is not supported: use 'auto', {', '.join(map(repr, DTYPES))}")
    return found
