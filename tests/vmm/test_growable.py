"""A tensor that grows in place: what users see of it, and that it gives back what it took."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading

import pytest
import torch

from tests.vmm.memory_files import memory_files, memory_of
from vattn.vmm.driver import CallCounter, DriverUnavailable, OutOfMemory, open_driver
from vattn.vmm.growable import GrowableTensor
from vattn.vmm.host import HostDriver

PAGE = 64 << 10


def footprint() -> tuple[int, int]:
    """Mappings of ours and open descriptors."""
    gc.collect()  # what other tests left behind is no leak of this one
    with open("/proc/self/maps") as lines:
        ours = sum("memfd:vattn" in line for line in lines)
    return ours, len(os.listdir("/proc/self/fd"))


def reserved_kib() -> int:
    """Address space of the process in KiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))


# Growing


def test_it_starts_empty_and_grows_in_place() -> None:
    tensor = GrowableTensor((3, 8), torch.float32, 100_000)
    assert len(tensor) == 0 and tensor.view().shape == (0, 3, 8) and tensor.nbytes_mapped == 0
    address = tensor.data_ptr()
    total = 0
    for count in (1, 7, 300, 5000):
        tensor.grow(count)
        tensor.view()[total:] = total
        total += count
        assert tensor.shape == tensor.view().shape == (total, 3, 8)
        assert tensor.data_ptr() == tensor.view().data_ptr() == address
        tensor.check()
    assert tensor.view()[0].eq(0).all() and tensor.view()[1:8].eq(1).all() and tensor.view()[-1].eq(308).all()
    assert tensor.view().is_contiguous() and tensor.view().dtype == torch.float32


def test_memory_is_mapped_page_by_page() -> None:
    tensor = GrowableTensor((1000,), torch.uint8, 1_000_000)
    for rows in range(1, 200):
        tensor.grow(1)
        assert tensor.nbytes == rows * 1000
        assert 0 <= tensor.nbytes_mapped - tensor.nbytes < PAGE
    assert tensor.nbytes_reserved == -(-1_000_000_000 // PAGE) * PAGE


def test_rows_may_straddle_pages() -> None:
    tensor = GrowableTensor((PAGE // 2 + 7,), torch.uint8, 100)
    for row in range(20):
        tensor.grow(1)
        tensor.view()[row] = row
    assert tensor.view().float().mean(dim=1).tolist() == list(range(20))


def test_growth_within_mapped_pages_calls_no_driver() -> None:
    driver = CallCounter(HostDriver(PAGE))
    tensor = GrowableTensor((16,), torch.float32, 1 << 20, driver=driver)
    tensor.grow(1)
    driver.reset()
    for _ in range(PAGE // 64 - 1):
        tensor.grow(1)
    assert driver.total == 0
    tensor.grow(1)
    assert driver.counts == {**dict.fromkeys(driver.counts, 0), "create": 1, "map": 1, "set_access": 1}


def test_it_can_fill_its_reservation_to_the_last_row() -> None:
    tensor = GrowableTensor((7,), torch.float64, 12_345)
    tensor.grow(12_345)
    tensor.view().fill_(1)
    tensor.check()
    with pytest.raises(ValueError, match="cannot grow 12345 rows by 1: max_rows is 12345"):
        tensor.grow(1)
    assert len(tensor) == 12_345


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn], ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    tensor = GrowableTensor((5,), dtype, 100)
    tensor.grow(3)
    assert (tensor.dtype, tensor.view().dtype, tensor.nbytes) == (dtype, dtype, 15 * dtype.itemsize)


def test_scalars_make_a_growing_vector() -> None:
    tensor = GrowableTensor((), torch.int32, 1000)
    tensor.append(torch.arange(10, dtype=torch.int32))
    assert tensor.view().tolist() == list(range(10))


def test_append_grows_and_copies() -> None:
    tensor = GrowableTensor((2,), torch.float32, 100)
    tensor.append(torch.ones(3, 2))
    tensor.append(torch.full((1, 2), 2.0))
    assert tensor.view()[:, 0].tolist() == [1, 1, 1, 2]
    with pytest.raises(ValueError, match=r"\(1, 3\) do not fit"):
        tensor.append(torch.ones(1, 3))
    assert len(tensor) == 4


# Shrinking


def test_shrink_gives_pages_back_to_the_system() -> None:
    before = memory_files()
    driver = HostDriver(PAGE)
    tensor = GrowableTensor((PAGE,), torch.uint8, 100, driver=driver)
    tensor.grow(10)
    tensor.view().fill_(3)
    files = memory_files() - before
    assert memory_of(files) == 10 * PAGE
    tensor.shrink(7)
    assert len(tensor) == 3 and tensor.nbytes_mapped == 3 * PAGE
    assert memory_of(files) == 3 * PAGE
    assert tensor.view().eq(3).all()
    tensor.check()
    tensor.grow(1)
    assert tensor.view()[3].eq(0).all(), "new memory, not what was there before"
    tensor.shrink(4)
    assert tensor.nbytes_mapped == 0 and tensor.view().shape == (0, PAGE)
    with pytest.raises(ValueError, match="cannot shrink 0 rows by 1"):
        tensor.shrink(1)
    driver.close()


# Views


def test_a_view_follows_what_is_written_through_another() -> None:
    tensor = GrowableTensor((4,), torch.float32, 1 << 20)
    tensor.grow(2)
    early = tensor.view()
    tensor.grow(100_000)
    tensor.view()[1] = 5
    assert early[1].eq(5).all() and early.shape == (2, 4)


def test_a_view_keeps_the_memory_alive() -> None:
    before = footprint()
    tensor = GrowableTensor((4,), torch.float32, 1 << 20)
    tensor.grow(1000)
    tensor.view().fill_(7)
    part = tensor.view()[500:]
    tensor.close()
    assert part.eq(7).all()
    tensor = None  # type: ignore[assignment]
    gc.collect()
    assert part.add_(1).eq(8).all()
    del part
    gc.collect()
    assert footprint() == before


def test_views_can_be_saved_copied_and_pickled() -> None:
    tensor = GrowableTensor((4,), torch.float32, 1 << 40)
    tensor.grow(3)
    tensor.view().fill_(2)
    view = tensor.view()
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    for twin in (torch.load(file), copy.deepcopy(view), pickle.loads(pickle.dumps(view)), view.clone()):
        assert twin.equal(view) and twin.data_ptr() != view.data_ptr()


def test_views_work_with_autograd() -> None:
    tensor = GrowableTensor((4,), torch.float32, 100)
    with torch.inference_mode():
        tensor.grow(3)
        tensor.view().fill_(2)
    weight = torch.ones(4, requires_grad=True)
    (tensor.view() @ weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [6, 6, 6, 6]


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape_tail": (0, 4)}, "holds nothing"),
        ({"shape_tail": (-1, -4)}, "holds nothing"),
        ({"max_rows": 0}, "max_rows must be positive"),
        ({"max_rows": -5}, "max_rows must be positive"),
        ({"page_bytes": 0}, "page_bytes must be positive"),
        ({"page_bytes": 1000}, "system page"),
        ({"device": "xpu"}, "no virtual memory driver"),
    ],
)
def test_impossible_tensors_are_refused(arguments: dict[str, object], message: str) -> None:
    before = footprint()
    with pytest.raises(ValueError, match=message):
        GrowableTensor(**{"shape_tail": (4,), "dtype": torch.float32, "max_rows": 10, **arguments})  # type: ignore[arg-type]
    assert footprint() == before


def test_page_bytes_must_suit_a_given_driver() -> None:
    driver = HostDriver(PAGE)
    with pytest.raises(ValueError, match="granularity"):
        GrowableTensor((4,), torch.float32, 10, driver=driver, page_bytes=PAGE + 4096)
    driver.close()


@pytest.mark.parametrize("page_bytes", [4096, 3 * PAGE, 2 << 20])
def test_page_bytes_choose_the_unit(page_bytes: int) -> None:
    tensor = GrowableTensor((4,), torch.float32, 1 << 20, page_bytes=page_bytes)
    tensor.grow(1)
    assert tensor.nbytes_mapped == page_bytes
    tensor.view().fill_(1)
    tensor.check()


def test_exhaustion_is_an_error_that_changes_nothing() -> None:
    driver = HostDriver(PAGE, budget=4 * PAGE)
    tensor = GrowableTensor((PAGE,), torch.uint8, 100, driver=driver)
    tensor.grow(3)
    with pytest.raises(OutOfMemory, match=f"{2 * PAGE:,} bytes needed for 2 rows; {PAGE:,} of {4 * PAGE:,}"):
        tensor.grow(2)
    assert len(tensor) == 3 and driver.memory_info()[0] == PAGE
    tensor.check()
    tensor.grow(1)
    driver.close()


def test_negative_growth_is_refused() -> None:
    tensor = GrowableTensor((4,), torch.float32, 10)
    for call in (lambda: tensor.grow(-1), lambda: tensor.shrink(-1)):
        with pytest.raises(ValueError):
            call()


def test_a_closed_tensor_says_so() -> None:
    with GrowableTensor((4,), torch.float32, 10) as tensor:
        tensor.grow(2)
    assert tensor.closed and len(tensor) == 0
    assert (tensor.nbytes_mapped, tensor.nbytes_reserved, tensor.nbytes) == (0, 0, 0)
    tensor.close()
    for call in (
        tensor.view,
        tensor.data_ptr,
        lambda: tensor.grow(1),
        lambda: tensor.shrink(0),
        tensor.__enter__,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in repr(tensor)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_is_refused_with_the_way_to_do_it(how: object) -> None:
    tensor = GrowableTensor((4,), torch.float32, 10)
    with pytest.raises(TypeError, match=r"use \.view\(\)\.clone\(\)"):
        how(tensor)  # type: ignore[operator]


def test_cuda_without_a_gpu_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverUnavailable):
        GrowableTensor((4,), torch.float32, 10, device="cuda")


def test_repr_shows_shape_and_memory() -> None:
    tensor = GrowableTensor((4,), torch.float32, 10)
    tensor.grow(2)
    assert repr(tensor) == "GrowableTensor([2, 4], dtype=torch.float32, device=cpu, 65,536 bytes mapped)"


# Giving back


def test_many_lives_leave_no_mapping_descriptor_or_address_behind() -> None:
    def live(index: int) -> None:
        tensor = GrowableTensor((64,), torch.float32, 1 << 24)
        tensor.grow(500 + index)
        tensor.view()[-1] = 1
        if index % 3 == 0:
            tensor.cycle = tensor  # type: ignore[attr-defined]
        elif index % 3 == 1:
            tensor.close()

    live(0)
    gc.collect()
    before, addresses = footprint(), reserved_kib()
    for index in range(1000):
        live(index)
    gc.collect()
    assert footprint() == before
    assert reserved_kib() - addresses < (1 << 24) * 256 // 1024, "less than one reservation of 4 GiB"


def test_tensors_that_share_a_driver_give_back_their_part() -> None:
    driver = HostDriver(PAGE, budget=64 * PAGE)
    keep = GrowableTensor((PAGE,), torch.uint8, 32, driver=driver)
    keep.grow(2)
    for _ in range(50):
        tensor = GrowableTensor((PAGE,), torch.uint8, 32, driver=driver)
        tensor.grow(20)
        view = tensor.view()
        del tensor
        assert driver.memory_info()[0] == 42 * PAGE, "the view holds it"
        del view
        assert driver.memory_info()[0] == 62 * PAGE
    keep.check()
    driver.check()
    driver.close()
    keep.close()


def test_collection_in_the_middle_of_driver_calls_of_many_threads() -> None:
    driver = open_driver("cpu", budget=2000 * PAGE)
    errors: list[BaseException] = []
    threshold = gc.get_threshold()
    gc.set_threshold(5)  # collect all the time, wherever the threads are

    def work() -> None:
        try:
            for _ in range(100):
                tensor = GrowableTensor((PAGE,), torch.uint8, 8, driver=driver)
                tensor.cycle = tensor  # type: ignore[attr-defined]
                tensor.grow(3)
                tensor.view().fill_(1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        gc.set_threshold(*threshold)
    assert not errors and not any(thread.is_alive() for thread in threads)
    gc.collect()
    driver.defer(lambda: None)
    assert driver.memory_info() == (2000 * PAGE, 2000 * PAGE)
    driver.close()
