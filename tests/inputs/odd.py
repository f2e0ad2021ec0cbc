"""Values that somebody passes one day, each where another kind was meant."""

from __future__ import annotations

import inspect
from collections import OrderedDict, UserDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vattn.errors import ArgumentError, DriverError, DriverUnavailable, VattnError

OURS = (VattnError, ArgumentError, DriverError, DriverUnavailable)


class Mute:
    """Has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Touchy:
    """Can't be compared, nor tested for truth."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "a half": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "10**400": lambda: 10**400,
    "-10**5000": lambda: -(10**5000),
    "numpy int": lambda: np.int64(3),
    "numpy float": lambda: np.float32(0.5),
    "numpy nan": lambda: np.float64("nan"),
    "numpy bool": lambda: np.True_,
    "array": lambda: np.array([1.0, 2.0]),
    "array of ints": lambda: np.array([1, 2]),
    "array of one": lambda: np.array(1),
    "array of nothing": lambda: np.zeros((0,)),
    "matrix": lambda: np.ones((2, 2)),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor of one": lambda: torch.tensor(1),
    "meta tensor": lambda: torch.zeros(2, device="meta"),
    "Fraction": lambda: Fraction(1, 3),
    "Decimal": lambda: Decimal("NaN"),
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "x",
    "nul": lambda: "\0",
    "half a character": lambda: "\ud83d",
    "bytes": lambda: b"bytes",
    "bytearray": lambda: bytearray(b"bytes"),
    "memoryview": lambda: memoryview(b"bytes"),
    "path": lambda: Path("no/such/folder/file"),
    "empty list": list,
    "list of None": lambda: [None],
    "list of nan": lambda: [float("nan")],
    "nested list": lambda: [[[1]]],
    "list of text": lambda: ["x", "y"],
    "set": lambda: {1, 2},
    "dict": lambda: {"x": 1},
    "dict of odd keys": lambda: {None: None, 1: 2},
    "OrderedDict": lambda: OrderedDict(x=1),
    "UserDict": lambda: UserDict(x=1),
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "endless range": lambda: range(10**30),
    "function": lambda: len,
    "class": lambda: int,
    "object": lambda: object(),
    "no repr": Mute,
    "touchy": Touchy,
}


def parameters(entry: Any, *leave_out: str) -> list[str]:
    """Names of what `entry` takes."""
    return [name for name in inspect.signature(entry).parameters if name not in ("self", *leave_out)]


def foreign(call: Callable[[Any], Any], leave_out: tuple[str, ...] = ()) -> list[str]:
    """The errors that are not ours, of `call` with each odd value."""
    found = []
    for name, make in ODD.items():
        if name in leave_out:
            continue
        try:
            call(make())
        except OURS:
            pass
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
    return found
