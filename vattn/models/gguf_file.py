"""Look into a GGUF file without decoding it: is it whole, and what does it hold?

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    ┌ magic "GGUF" │ version │ tensors │ keys ┐ header, 24 bytes
    ├ key │ type │ value                      ┤ × keys
    ├ name │ dims │ type │ offset             ┤ × tensors, offset counted from the data
    ├ padding to general.alignment            ┤
    └ data of each tensor, aligned            ┘ must end within the file
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vattn.errors import ConfigError, ModelNotFound, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_FLOAT32 = 0  # of ggml's tensor types
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape as numpy has it (slowest dimension first), ggml's type number, and its place.

    `offset` counts bytes from the start of all tensor data, `size` is its length in bytes.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class GgufSummary:
    """What a whole file says of itself.

    - `fields`: every key and its value; arrays are lists.
    - `tensors`: by name. Their data lie at `data_start + tensor.offset`, and end at byte `data_end`.
    """

    path: Path
    version: int
    architecture: str
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int
    data_end: int

    def read_vector(self, name: str) -> list[float]:
        """The values of a small float32 tensor. Raises ConfigError if it has another type."""
        tensor = self.tensors[name]
        if tensor.kind != _FLOAT32:
            raise ConfigError(f"{self.path}: tensor {name!r} has ggml type {tensor.kind}, not float32")
        with self.path.open("rb") as file:
            file.seek(self.data_start + tensor.offset)
            values: list[float] = np.frombuffer(file.read(tensor.size), "<f4").tolist()
        return values


class _Malformed(Exception):
    """The bytes contradict the format; the message completes "<file> is damaged: …"."""


class _Reader:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def skip(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise _Malformed(f"it ends at byte {len(self._data):,}, inside its header")
        return start

    def unpack(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self._data, self.skip(layout.size))[0]

    def text(self) -> str:
        size = self.unpack("Q")
        start = self.skip(size)
        return self._data[start : start + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A scalar, a string, or a list of either."""
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise _Malformed(f"byte {self.at:,} names the unknown value type {kind}")
        item, count = self.unpack("I"), self.unpack("Q")
        if item in _SCALARS:
            start = self.skip(count * struct.calcsize(_SCALARS[item]))
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, start))
        if item == _STRING:
            return [self.text() for _ in range(count)]
        raise _Malformed(f"byte {self.at:,} names the unknown array type {item}")


def inspect_gguf(path: Path) -> GgufSummary:
    """Read the header of `path` and check that all tensor data it promises is in the file.

    Raises ModelNotFound if there is no such file, ConfigError if it isn't a whole GGUF file, and
    UnsupportedModel for one part of a split model. Reads the header only.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _summarise(path, data)
    except _Malformed as why:
        raise ConfigError(f"{path} is damaged: {why}. Download or copy it again.") from None
    except UnsupportedModel as why:
        raise UnsupportedModel(f"{path}: {why}") from None
    except OSError as why:
        raise ModelNotFound(f"cannot read {path}: {why.strerror or why}") from None


def _summarise(path: Path, data: mmap.mmap) -> GgufSummary:
    reader = _Reader(data)
    reader.skip(len(MAGIC))
    version = reader.unpack("I")
    if version not in VERSIONS:
        raise _Malformed(f"it claims GGUF version {version}; versions {VERSIONS} are known")
    tensor_count, keys = reader.unpack("Q"), reader.unpack("Q")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text()
        fields[key] = reader.value(reader.unpack("I"))
    parts = fields.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(f"one of {parts} parts of a model; join them with `llama-gguf-split --merge`")
    tensors = dict(_tensor(reader) for _ in range(tensor_count))
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Malformed(f"general.alignment is {alignment!r}")
    data_start = -(-reader.at // alignment) * alignment
    data_end = data_start + max((tensor.offset + tensor.size for tensor in tensors.values()), default=0)
    if data_end > len(data):
        raise _Malformed(f"its tensors end at byte {data_end:,} but the file ends at byte {len(data):,}")
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise _Malformed("general.architecture is missing")
    return GgufSummary(path, version, architecture, fields, tensors, data_start, data_end)


def _tensor(reader: _Reader) -> tuple[str, GgufTensor]:
    """Read one tensor's description."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # takes a moment: imported when needed

    name, dims = reader.text(), reader.unpack("I")
    if dims > MAX_DIMS:
        raise _Malformed(f"tensor {name!r} claims {dims:,} dimensions")
    shape = tuple(reader.unpack("Q") for _ in range(dims))[::-1]
    kind, offset = reader.unpack("I"), reader.unpack("Q")
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise _Malformed(f"tensor {name!r} has the unknown type {kind}") from None
    size = -(-math.prod(shape) // block) * int(block_bytes)
    return name, GgufTensor(shape, int(kind), int(offset), size)
