"""Tensors over bare addresses, through a hand-made DLPack capsule.

`torch.from_dlpack` is the only entry that never asks a driver about the pointer, so a tensor may span a
reservation in which little or nothing is mapped. (`__cuda_array_interface__` looks up the pointer, and
`torch.frombuffer` takes only CPU memory.)

Ownership: `owner` is an attribute of the storage's Python object, which torch keeps as long as the storage,
so it goes with the last tensor, on any thread. The capsule has no deleter: one written in Python could run
while an exception is on its way (a view dies in the expression that raises) and would replace it.

Source: DLPack 1.0, `dlpack.h`, `DLManagedTensor`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

_KIND = {"cpu": 1, "cuda": 2}  # DLDeviceType
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLDataTypeCode
_TYPES = {
    torch.float16: (_FLOAT, 16),
    torch.float32: (_FLOAT, 32),
    torch.float64: (_FLOAT, 64),
    torch.bfloat16: (_BFLOAT, 16),
    torch.int8: (_INT, 8),
    torch.int16: (_INT, 16),
    torch.int32: (_INT, 32),
    torch.int64: (_INT, 64),
    torch.uint8: (_UINT, 8),
    torch.bool: (_BOOL, 8),
    torch.complex64: (_COMPLEX, 64),
    torch.complex128: (_COMPLEX, 128),
}
# Newer dtypes (fp8, wide unsigned) go through a dtype of the same size.
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("index", ctypes.c_int))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# torch copies what it needs when it makes the tensor. Later it reads `deleter` alone, which is 0 in all of
# these: they may be used again, but never freed, as tensors may outlive the interpreter.
_spare: list[_Managed] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_spare))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def tensor_from_address(
    address: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    owner: object = None,
) -> torch.Tensor:
    """View `address` on `device` as a tensor, without touching it or asking a driver about it.

    `stride` is in elements and must not be negative. `owner` stays alive until the last view is gone.
    """
    if len(shape) != len(stride):
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} differ in length")
    if any(size < 0 for size in shape) or any(step < 0 for step in stride):
        raise ValueError(f"shape {tuple(shape)} and stride {tuple(stride)} must not be negative")
    if device.type not in _KIND:
        raise ValueError(f"no DLPack view on device {device}: use cpu or cuda")
    wire = dtype if dtype in _TYPES else _BY_SIZE[dtype.itemsize]
    code, bits = _TYPES[wire]
    dims = len(shape)
    shape_array = (ctypes.c_int64 * dims)(*shape)
    stride_array = (ctypes.c_int64 * dims)(*stride)
    try:
        managed = _spare.pop()
    except IndexError:
        managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(_KIND[device.type], device.index or 0)
    managed.tensor.ndim = dims
    managed.tensor.dtype = _DataType(code, bits, 1)
    managed.tensor.shape = shape_array
    managed.tensor.strides = stride_array
    try:
        # Not an inference tensor: that could never be written to outside inference mode.
        with torch.inference_mode(False):
            tensor = from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
            tensor.untyped_storage().owner = owner  # type: ignore[attr-defined]
            return tensor if wire is dtype else tensor.view(dtype)
    finally:
        _spare.append(managed)
