"""Tensors over bare addresses."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from vattn.vmm.dlpack import tensor_from_address
from vattn.vmm.driver import Access
from vattn.vmm.host import HostDriver
from vattn.vmm.strides import contiguous_stride, span_bytes

PAGE = 64 << 10
CPU = torch.device("cpu")
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Owner:
    pass


@pytest.fixture
def address() -> Iterator[int]:
    """A mapped, writable page."""
    driver = HostDriver(PAGE, budget=PAGE)
    va = driver.reserve(PAGE)
    driver.map(va, PAGE, driver.create(PAGE))
    driver.set_access(va, PAGE, Access.READ_WRITE)
    yield va
    gc.collect()
    driver.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_reads_and_writes_the_memory(address: int, dtype: torch.dtype) -> None:
    tensor = tensor_from_address(address, (4, 6), (6, 1), dtype, CPU)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (dtype, (4, 6), address)
    values = torch.arange(24).reshape(4, 6).to(dtype)
    tensor.copy_(values)
    raw = tensor_from_address(address, (24 * dtype.itemsize,), (1,), torch.uint8, CPU)
    assert raw.equal(values.contiguous().view(torch.uint8).flatten())


def test_strides_are_in_elements(address: int) -> None:
    flat = tensor_from_address(address, (24,), (1,), torch.int32, CPU)
    torch.arange(24, dtype=torch.int32, out=flat)
    strided = tensor_from_address(address, (2, 3), (1, 8), torch.int32, CPU)
    assert strided.tolist() == [[0, 8, 16], [1, 9, 17]]
    broadcast = tensor_from_address(address, (2, 3), (0, 1), torch.int32, CPU)
    assert broadcast.tolist() == [[0, 1, 2]] * 2
    assert tensor_from_address(address, (), (), torch.int32, CPU).item() == 0
    assert tensor_from_address(address, (0, 5), (5, 1), torch.int32, CPU).numel() == 0


def test_a_terabyte_without_memory_can_be_viewed() -> None:
    driver = HostDriver(PAGE)
    va = driver.reserve(1 << 40)
    tensor = tensor_from_address(va, (1 << 20, 1 << 18), (1 << 18, 1), torch.float32, CPU)
    assert tensor.nbytes == 1 << 40 and tensor[-1, -1:].data_ptr() == va + (1 << 40) - 4
    driver.close()


@pytest.mark.parametrize(
    ("shape", "stride", "device"),
    [((2, 3), (1,), CPU), ((-1,), (1,), CPU), ((2,), (-1,), CPU), ((2,), (1,), torch.device("meta"))],
)
def test_impossible_views_are_refused(shape: tuple[int], stride: tuple[int], device: torch.device) -> None:
    with pytest.raises(ValueError):
        tensor_from_address(4096, shape, stride, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_the_owner_lives_as_long_as_any_view(address: int, dtype: torch.dtype) -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    tensor = tensor_from_address(address, (8,), (1,), dtype, CPU, owner)
    view = tensor.view(torch.uint8)[2:]
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None


def test_the_owner_is_dropped_on_whatever_thread_the_last_view_dies(address: int) -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    box = [tensor_from_address(address, (8,), (1,), torch.float32, CPU, owner)]
    del owner
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert gone() is None


def test_a_view_that_dies_while_an_error_is_raised_does_not_replace_the_error(address: int) -> None:
    def failing() -> None:
        raise ValueError("the error")

    def both(view: torch.Tensor, other: None) -> None:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    with pytest.raises(ValueError, match="the error"):
        both(tensor_from_address(address, (8,), (1,), torch.float32, CPU, owner), failing())  # type: ignore[func-returns-value]
    del owner
    assert gone() is None


def test_an_owner_in_a_cycle_with_its_view_is_collected(address: int) -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    tensor = tensor_from_address(address, (8,), (1,), torch.float32, CPU)
    owner.view = tensor  # type: ignore[attr-defined]
    owner.me = owner  # type: ignore[attr-defined]
    del owner, tensor
    gc.collect()
    assert gone() is None


def test_a_view_made_in_inference_mode_is_an_ordinary_tensor(address: int) -> None:
    with torch.inference_mode():
        tensor = tensor_from_address(address, (8,), (1,), torch.float32, CPU)
        assert not tensor.is_inference()
    tensor.fill_(2.0)
    weight = torch.ones(8, requires_grad=True)
    (tensor * weight).sum().backward()
    assert weight.grad is not None and weight.grad.eq(2).all()


def test_views_may_outlive_the_interpreter() -> None:
    code = """
import sys, torch
from vattn.vmm.growable import GrowableTensor
tensor = GrowableTensor((16,), torch.float32, 100)
tensor.grow(50)
torch.leaked = tensor.view()[3:]
sys.stay = [tensor, tensor.view()]
sys.stay.append(sys.stay)
class Late:
    def __del__(self, view=tensor.view()):
        view.sum()
sys.late = Late()
print("end")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_row_major_strides_and_spans() -> None:
    for shape in ((), (5,), (2, 3, 4), (0, 3), (3, 0, 2)):
        assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()
    assert span_bytes((2, 3), (10, 2), 4) == (10 + 4 + 1) * 4
    assert span_bytes((2, 0), (1, 1), 4) == 0
    assert span_bytes((), (), 8) == 8
