"""What stands behind the host driver's calls is real memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.vmm.memory_files import memory_files, memory_of
from vattn.vmm.driver import Access, DriverError, DriverUnavailable, OutOfMemory
from vattn.vmm.host import HostDriver
from vattn.vmm.hostinfo import host_memory, max_map_count

PAGE = 64 << 10
RW = Access.READ_WRITE


@pytest.fixture
def others() -> set[str]:
    """Memory files of other drivers; asked for before `driver`."""
    gc.collect()
    return memory_files()


@pytest.fixture
def driver(others: set[str]) -> Iterator[HostDriver]:
    driver = HostDriver(PAGE, budget=64 * PAGE)
    yield driver
    driver.check()
    driver.close()


def bytes_at(driver: HostDriver, va: int, size: int = PAGE) -> torch.Tensor:
    return driver.tensor(va, (size,), (1,), torch.uint8)


def mapped_page(driver: HostDriver, va: int, handle: int, access: Access = RW) -> torch.Tensor:
    driver.map(va, PAGE, handle)
    driver.set_access(va, PAGE, access)
    return bytes_at(driver, va)


def test_one_page_at_two_addresses_is_one_memory(driver: HostDriver, others: set[str]) -> None:
    va = driver.reserve(8 * PAGE)
    handle = driver.create(PAGE)
    here, there = mapped_page(driver, va, handle), mapped_page(driver, va + 5 * PAGE, handle, Access.READ)
    here.fill_(7)
    assert there.eq(7).all()
    here[100] = 9
    assert there[100] == 9
    assert memory_of(memory_files() - others) == PAGE


def test_neighbouring_pages_are_one_stretch_of_memory(driver: HostDriver) -> None:
    va = driver.reserve(3 * PAGE)
    for index, handle in reversed(list(enumerate(driver.create(PAGE) for _ in range(3)))):
        driver.map(va + index * PAGE, PAGE, handle)
    driver.set_access(va, 3 * PAGE, RW)
    whole = driver.tensor(va, (3 * PAGE // 4,), (1,), torch.int32)
    torch.arange(len(whole), dtype=torch.int32, out=whole)
    assert whole.sum() == sum(range(len(whole)))


def test_content_stays_with_the_page_not_the_address(driver: HostDriver) -> None:
    va = driver.reserve(2 * PAGE)
    one, two = driver.create(PAGE), driver.create(PAGE)
    mapped_page(driver, va, one).fill_(1)
    mapped_page(driver, va + PAGE, two).fill_(2)
    driver.unmap(va, 2 * PAGE)
    assert mapped_page(driver, va, two).eq(2).all()
    assert mapped_page(driver, va + PAGE, one).eq(1).all()


def test_memory_goes_back_to_the_system_with_the_last_mapping(driver: HostDriver, others: set[str]) -> None:
    va = driver.reserve(2 * PAGE)
    handle = driver.create(PAGE)
    for at in (va, va + PAGE):
        mapped_page(driver, at, handle).fill_(1)
    driver.release(handle)
    assert memory_of(memory_files() - others) == PAGE
    driver.unmap(va, PAGE)
    assert memory_of(memory_files() - others) == PAGE
    driver.unmap(va + PAGE, PAGE)
    assert memory_of(memory_files() - others) == 0


def test_a_page_never_shows_what_its_memory_held_before(driver: HostDriver) -> None:
    va = driver.reserve(PAGE)
    for _ in range(3):
        handle = driver.create(PAGE)
        page = mapped_page(driver, va, handle)
        assert page.eq(0).all()
        page.fill_(255)
        driver.unmap(va, PAGE)
        driver.release(handle)


def test_memory_is_taken_when_write_access_is_granted(driver: HostDriver, others: set[str]) -> None:
    va = driver.reserve(1 << 40)
    for index in range(32):
        driver.map(va + index * PAGE, PAGE, driver.create(PAGE))
    driver.set_access(va, 16 * PAGE, Access.READ)
    assert memory_of(memory_files() - others) == 0
    driver.set_access(va, 8 * PAGE, RW)
    assert memory_of(memory_files() - others) == 8 * PAGE


def test_released_ranges_are_used_again_lowest_first(driver: HostDriver) -> None:
    handles = [driver.create(PAGE) for _ in range(8)]
    for index in (6, 2, 4):
        driver.release(handles[index])
    offsets = [driver.shadow.allocations[driver.create(PAGE)].offset for _ in range(3)]
    assert offsets == [2 * PAGE, 4 * PAGE, 6 * PAGE]


def test_pages_in_file_order_are_one_mapping_to_the_kernel(driver: HostDriver) -> None:
    va = driver.reserve(32 * PAGE)
    for index in range(32):
        driver.map(va + index * PAGE, PAGE, driver.create(PAGE))
    driver.set_access(va, 32 * PAGE, RW)
    with open("/proc/self/maps") as lines:
        starts = [int(line.split("-")[0], 16) for line in lines]
    assert sum(va <= start < va + 32 * PAGE for start in starts) == 1


def test_huge_pages_are_asked_for_from_two_mebibytes_on() -> None:
    huge = 2 << 20
    driver = HostDriver(huge, budget=4 * huge)
    va = driver.reserve(2 * huge)
    driver.map(va, huge, driver.create(huge))
    driver.set_access(va, huge, RW)
    assert "hg" in smaps_flags(va)
    driver.close()


def smaps_flags(va: int) -> list[str]:
    found = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(f"{va:x}-"):
                found = True
            if found and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {va:#x}")


def test_a_page_of_three_granules_works(driver: HostDriver) -> None:
    va = driver.reserve(9 * PAGE)
    handle = driver.create(3 * PAGE)
    driver.map(va + 3 * PAGE, 3 * PAGE, handle)
    driver.set_access(va + 3 * PAGE, 3 * PAGE, RW)
    assert bytes_at(driver, va + 3 * PAGE, 3 * PAGE).fill_(3).eq(3).all()


def test_close_gives_addresses_and_descriptors_back() -> None:
    before = footprint()
    for _ in range(20):
        driver = HostDriver(PAGE, budget=16 * PAGE)
        va = driver.reserve(16 * PAGE)
        for index in range(0, 8, 2):
            mapped_page(driver, va + index * PAGE, driver.create(PAGE, shareable=index > 4))[0] = 1
        driver.close()
    assert footprint() == before


def test_a_leaked_driver_gives_everything_back_when_collected() -> None:
    before = footprint()
    for _ in range(20):
        driver = HostDriver(PAGE, budget=16 * PAGE)
        driver.map(driver.reserve(16 * PAGE), PAGE, driver.create(PAGE, shareable=True))
        driver.cycle = driver  # type: ignore[attr-defined]
    del driver
    gc.collect()
    assert footprint() == before


def footprint() -> tuple[int, int]:
    """Mappings of ours and open descriptors."""
    gc.collect()  # what other tests left behind is no leak of this one
    with open("/proc/self/maps") as lines:
        ours = sum("memfd:vattn" in line for line in lines)
    return ours, len(os.listdir("/proc/self/fd"))


def address_space_kib() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))


def test_alignment_costs_no_addresses(driver: HostDriver) -> None:
    before = address_space_kib()
    bases = [driver.reserve(PAGE, align=1 << 30) for _ in range(8)]
    assert address_space_kib() - before < 1 << 20, "less than one alignment of 1 GiB for all eight"
    for base in bases:
        driver.free(base, PAGE)


# Sharing with another process


def test_another_process_imports_the_memory(driver: HostDriver) -> None:
    va = driver.reserve(2 * PAGE)
    handle = driver.create(2 * PAGE, shareable=True)
    driver.map(va, 2 * PAGE, handle)
    driver.set_access(va, 2 * PAGE, RW)
    memory = bytes_at(driver, va, 2 * PAGE)
    memory.fill_(5)
    fd = driver.export_handle(handle)
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=add_one_elsewhere, args=(theirs, 2 * PAGE))
    child.start()
    socket.send_fds(ours, [b"here"], [fd])
    os.close(fd)
    child.join(60)
    assert child.exitcode == 0
    assert memory.eq(6).all()


def add_one_elsewhere(channel: socket.socket, size: int) -> None:
    _, (fd,), _, _ = socket.recv_fds(channel, 16, 1)
    driver = HostDriver(PAGE)
    handle = driver.import_handle(fd, size)
    os.close(fd)
    va = driver.reserve(size)
    driver.map(va, size, handle)
    driver.set_access(va, size, RW)
    bytes_at(driver, va, size).add_(1)
    driver.close()


def test_imported_memory_outlives_its_exporter() -> None:
    exporter, importer = HostDriver(PAGE), HostDriver(PAGE, budget=PAGE)
    handle = exporter.create(PAGE, shareable=True)
    mapped_page(exporter, exporter.reserve(PAGE), handle).fill_(4)
    fd = exporter.export_handle(handle)
    imported = importer.import_handle(fd, PAGE)
    os.close(fd)
    exporter.close()
    va = importer.reserve(PAGE)
    assert mapped_page(importer, va, imported).eq(4).all()
    assert importer.memory_info() == (PAGE, PAGE), "memory counts where it was created"
    importer.unmap(va, PAGE)
    importer.release(imported)
    assert importer.memory_info() == (PAGE, PAGE)
    importer.check()
    importer.close()


def test_only_shareable_handles_are_exported(driver: HostDriver) -> None:
    with pytest.raises(DriverError, match="shareable=True"):
        driver.export_handle(driver.create(PAGE))


def test_import_checks_the_descriptor(driver: HostDriver) -> None:
    fd = driver.export_handle(driver.create(PAGE, shareable=True))
    for wrong_fd, size in ((fd, 2 * PAGE), (fd, 0), (9999, PAGE)):
        with pytest.raises(DriverError) as caught:
            driver.import_handle(wrong_fd, size)
        assert caught.value.code == 1
    os.close(fd)


# Construction and limits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": 0}, "power of two"),
        ({"granularity": -4096}, "power of two"),
        ({"granularity": 3 * 4096}, "power of two"),
        ({"granularity": 512}, "system page"),
        ({"budget": -1}, "negative"),
        ({"budget": 1 << 60}, "more than the memory of this machine"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostDriver(**options)


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(DriverUnavailable, match=r"needs Linux .* this is darwin"):
        HostDriver()


def test_the_budget_is_the_memory_of_the_machine_by_default() -> None:
    driver = HostDriver()
    free, total = driver.memory_info()
    assert total == host_memory()[1] and 0 < free < total
    driver.close()


def test_reserving_more_than_the_address_space_is_an_error_not_a_crash(driver: HostDriver) -> None:
    with pytest.raises(OutOfMemory, match="addresses"):
        driver.reserve(1 << 60)


# Threads and finalisers


def test_threads_share_a_driver(driver: HostDriver) -> None:
    va = driver.reserve(64 * PAGE)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(50):
                handle = driver.create(PAGE)
                page = mapped_page(driver, va + (index * 4 + turn % 4) * PAGE, handle)
                assert page.eq(0).all()
                page.fill_(index)
                assert page.eq(index).all()
                driver.release(handle)
                driver.unmap(page.data_ptr(), PAGE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert driver.mappings(va, 64 * PAGE) == [] and driver.memory_info()[0] == 64 * PAGE


def test_deferred_work_runs_at_once_or_after_the_call_under_way(driver: HostDriver) -> None:
    done: list[str] = []
    driver.defer(lambda: done.append("idle"))
    assert done == ["idle"]
    original = driver._do_create

    def create_with_a_finaliser(*args: object) -> None:
        driver.defer(lambda: done.append(f"then {driver.memory_info()[0] // PAGE} free"))
        assert done == ["idle"], "not inside the call"
        original(*args)  # type: ignore[arg-type]

    driver._do_create = create_with_a_finaliser  # type: ignore[method-assign, assignment]
    driver.create(PAGE)
    assert done == ["idle", "then 63 free"]


def test_failing_deferred_work_does_not_fail_the_call_it_follows(
    driver: HostDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with driver._lock:
        driver.defer(lambda: 1 // 0)
    assert driver.create(PAGE) > 0
    assert "ZeroDivisionError" in caplog.text


# The kernel's limit of mappings


def test_running_out_of_mappings_is_an_error_that_leaves_room_to_unmap() -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=use_all_mappings)
    child.start()
    child.join(300)
    assert child.exitcode == 0


def use_all_mappings() -> None:
    limit = max_map_count()
    if limit is None or limit > 200_000:
        return  # the kernel of this machine would take too long to fill
    driver = HostDriver(4096, budget=None)
    va = driver.reserve(4096 * 2 * limit)
    handle = driver.create(4096)
    mapped = []
    try:
        for index in range(limit):  # every other page, so that nothing merges
            driver.map(va + index * 8192, 4096, handle)
            mapped.append(va + index * 8192)
            driver.set_access(mapped[-1], 4096, RW)
    except OutOfMemory as error:
        assert error.code == 2 and "vm.max_map_count" in error.hint
    else:
        raise AssertionError("the limit was never met")
    assert len(mapped) > limit // 2 - 1000
    with pytest.raises(OutOfMemory):
        driver.map(va + 8192 * limit - 8192, 4096, handle)
    driver.check()
    for at in mapped:
        driver.unmap(at, 4096)
    driver.map(va, 4096, handle)
    driver.close()
