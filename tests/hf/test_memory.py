"""Memory comes page by page, at an address that stays, and goes back; nothing is left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.hf.models import generate, prompts
from tests.vmm.faulty import FaultyDriver
from tests.vmm.memory_files import memory_files, memory_of
from vattn import VirtualCache
from vattn.errors import CapacityError, DriverError, OutOfMemory
from vattn.vmm.host import HostDriver

LAYERS, HEADS, DIM = 3, 2, 64
TOKEN = 2 * HEADS * DIM * 4  # bytes of one token in one layer and sequence
LAYOUTS = ("heads", "tokens")


def config(**fields: Any) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_size=HEADS * DIM,
        max_position_embeddings=4096,
        **fields,
    )


def append(cache: VirtualCache, tokens: int, batch: int = 1) -> torch.Tensor:
    """Append the same random states everywhere; returns them."""
    states = torch.randn(batch, HEADS, tokens, DIM)
    for layer in range(LAYERS):
        cache.update(states, states, layer)
    return states


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 4])
def test_memory_stays_within_one_page_per_layer_of_the_tokens(layout: Any, batch: int) -> None:
    cache = VirtualCache(config(), layout=layout)
    for tokens in (1, 1, 30, 1, 700, 1, 1):
        append(cache, tokens, batch)
        assert cache.nbytes == cache.get_seq_length() * batch * TOKEN * LAYERS
        for layer in cache.layers:
            assert layer.nbytes <= layer.nbytes_mapped < layer.nbytes + layer.page_bytes
    assert cache.nbytes_reserved >= 4096 * batch * TOKEN * LAYERS
    cache.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_what_a_layer_grows_by(layout: Any) -> None:
    cache = VirtualCache(config(), layout=layout, page_bytes=4096)
    append(cache, 1)
    ranges = 1 if layout == "tokens" else 2 * HEADS
    assert [layer.page_bytes for layer in cache.layers] == [4096 * ranges] * LAYERS
    assert cache.nbytes_mapped == 4096 * ranges * LAYERS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_system_agrees(layout: Any) -> None:
    before = memory_files()
    cache = VirtualCache(config(), layout=layout)
    for tokens in (1, 100, 900, 1, 1):
        append(cache, tokens, batch=2)
        assert memory_of(memory_files() - before) == cache.nbytes_mapped
    files = memory_files() - before
    cache.crop(-500)
    assert memory_of(files) == cache.nbytes_mapped
    cache.reset()
    assert memory_of(files) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_address_stays(layout: Any) -> None:
    cache = VirtualCache(config(), layout=layout)
    append(cache, 3)
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    assert len({address for pair in addresses for address in pair}) == 2 * LAYERS
    append(cache, 2000)
    cache.crop(-1000)
    cache.reorder_cache(torch.tensor([0]))
    append(cache, 1)
    cache.reset()
    append(cache, 1)
    assert addresses == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]


def test_update_returns_views_of_what_is_there() -> None:
    cache = VirtualCache(config())
    first = append(cache, 5)
    states = torch.randn(1, HEADS, 1, DIM)
    keys, values = cache.update(states, -states, 0)
    assert torch.equal(keys, torch.cat([first, states], 2))
    assert torch.equal(values, torch.cat([first, -states], 2))
    assert keys.data_ptr() == cache.layers[0].keys.data_ptr()
    assert values.data_ptr() == cache.layers[0].values.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_crop_gives_pages_back(layout: Any) -> None:
    cache = VirtualCache(config(), layout=layout)
    states = append(cache, 2000)
    cache.crop(-1990)
    for layer in cache.layers:
        assert torch.equal(layer.keys, states[:, :, :10])
        assert layer.nbytes_mapped < layer.nbytes + layer.page_bytes
    cache.crop(0)
    assert cache.get_seq_length() == 10
    cache.crop(4)  # a positive number is what to keep
    assert cache.get_seq_length() == 4
    cache.crop(100)
    assert cache.get_seq_length() == 4
    cache.crop(-100)
    assert cache.get_seq_length() == cache.nbytes_mapped == 0
    cache.check()


def test_reset_gives_all_memory_back_and_keeps_the_addresses() -> None:
    driver = HostDriver()
    cache = VirtualCache(config(), driver=driver)
    append(cache, 2000)
    reserved = cache.nbytes_reserved
    cache.reset()
    free, total = driver.memory_info()
    assert cache.get_seq_length() == cache.nbytes_mapped == 0
    assert cache.nbytes_reserved == reserved
    assert driver.shadow.used == 0 and free <= total
    assert not cache.is_initialized
    append(cache, 3, batch=2)  # another batch may follow
    assert cache.layers[0].keys.shape == (2, HEADS, 3, DIM)


def test_an_old_view_never_points_at_nothing() -> None:
    cache = VirtualCache(config())
    states = append(cache, 2000)
    view = cache.layers[1].keys[0, 1]  # of a view: storage is what counts
    cache.crop(-1999)
    assert torch.equal(view, states[0, 1])
    assert cache.layers[1].nbytes_mapped > cache.layers[0].nbytes_mapped  # held back for the view
    cache.reset()
    assert torch.equal(view, states[0, 1])
    assert cache.nbytes_mapped == 0  # the view's memory is its own now
    append(cache, 5)
    assert torch.equal(view, states[0, 1])
    del cache
    gc.collect()
    assert torch.equal(view, states[0, 1])


def test_memory_held_back_for_a_view_goes_with_the_next_crop() -> None:
    cache = VirtualCache(config())
    append(cache, 2000)
    view = cache.layers[0].keys
    cache.crop(-1990)
    held = cache.layers[0].nbytes_mapped
    del view
    cache.crop(-1)
    assert cache.layers[0].nbytes_mapped < held
    cache.check()


def test_everything_goes_with_the_cache() -> None:
    driver = HostDriver()
    cache = VirtualCache(config(), driver=driver)
    append(cache, 2000)
    assert driver.shadow.used and driver.shadow.reservations
    del cache
    assert driver.shadow.used == 0 and not driver.shadow.reservations  # at once, no collector needed


def test_a_cache_of_its_own_driver_closes_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    caches = [VirtualCache(config()) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before  # opened when the model first computes
    for cache in caches:
        append(cache, 1)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    del cache, caches
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("let_go", ["crop", "reset", "collect", "window", "batch"])
def test_the_device_is_waited_for_before_pages_are_taken(let_go: str) -> None:
    driver = Recorder(HostDriver())
    cache = VirtualCache(_sliding(8) if let_go == "window" else config(), driver=driver)
    cache.activate_past_recording()
    append(cache, 2000)
    driver.calls.clear()
    match let_go:
        case "crop" | "window":
            cache.crop(-1900)
        case "reset":
            cache.reset()
        case "batch":
            cache.batch_repeat_interleave(2)
        case "collect":
            del cache
    calls = [call for call in driver.calls if call in ("synchronize", "unmap")]
    assert "unmap" in calls and calls[0] == "synchronize"


class Recorder:
    """A driver that writes down what is asked of it."""

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.driver, name)


class TestSlidingWindow:
    WINDOW = 200

    def cache(self, layout: Any = "heads") -> VirtualCache:
        return VirtualCache(_sliding(self.WINDOW), layout=layout)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_memory_is_that_of_the_window_however_long_the_text(self, layout: Any) -> None:
        cache = self.cache(layout)
        append(cache, 1)
        small = cache.nbytes_mapped
        for _ in range(30):
            append(cache, 60)
        window = self.WINDOW * TOKEN
        for layer in cache.layers:
            assert layer.nbytes == window - TOKEN  # the newest token pushes one out
            assert layer.nbytes_mapped < window + layer.page_bytes
        assert small <= cache.nbytes_mapped
        cache.check()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_no_driver_call_once_the_window_is_full(self, layout: Any) -> None:
        driver = FaultyDriver(HostDriver(granularity=4096))
        cache = VirtualCache(_sliding(self.WINDOW), layout=layout, driver=driver)
        append(cache, 3 * self.WINDOW)
        driver.arm(10**9)
        for _ in range(2 * self.WINDOW):
            append(cache, 1)
        assert driver.calls == 0

    def test_the_window_is_one_piece_wherever_it_ends(self) -> None:
        cache = self.cache()
        states = append(cache, 1)
        for _ in range(5 * self.WINDOW):
            states = torch.cat([states, append(cache, 1)], 2)[:, :, -self.WINDOW :]
            keys = cache.layers[0].keys
            assert torch.equal(keys, states[:, :, -keys.shape[2] :])
            assert keys.stride() == (*keys.stride()[:2], DIM, 1)  # dense, without a seam

    def test_recording_the_past_costs_what_is_recorded(self) -> None:
        cache = self.cache()
        cache.activate_past_recording()
        append(cache, 5 * self.WINDOW)
        assert cache.layers[0].nbytes == 5 * self.WINDOW * TOKEN
        cache.crop(-3)
        assert cache.get_seq_length() == 5 * self.WINDOW - 3
        assert cache.layers[0].nbytes == (self.WINDOW - 1) * TOKEN
        assert cache.layers[0].nbytes_mapped < self.WINDOW * TOKEN + cache.layers[0].page_bytes
        cache.check()

    def test_reset_and_views(self) -> None:
        cache = self.cache()
        for _ in range(5):
            append(cache, 90)
        view = cache.layers[0].values
        copy = view.clone()
        cache.reset()
        append(cache, 400)
        assert torch.equal(view, copy)
        assert cache.layers[1].nbytes_mapped


class TestFailure:
    @pytest.mark.parametrize("kind", ["create", "map", "set_access"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_layer_that_could_not_grow_is_as_before(self, kind: str, layout: Any) -> None:
        driver = FaultyDriver(HostDriver(granularity=4096), kinds=[kind])
        cache = VirtualCache(config(), layout=layout, driver=driver, page_bytes=4096)
        states, more = torch.randn(1, HEADS, 100, DIM), torch.randn(1, HEADS, 500, DIM)
        cache.update(states, states, 0)
        used, calls = driver.shadow.used, {"set_access": 1}.get(kind, 3)
        for fail_at in range(1, calls + 1):
            driver.arm(fail_at)
            with pytest.raises(DriverError):
                cache.update(more, more, 0)
            assert cache.get_seq_length() == 100 and driver.shadow.used == used
            assert torch.equal(cache.layers[0].keys, states)
            cache.check()
        driver.heal()
        cache.update(more, more, 0)
        assert torch.equal(cache.layers[0].keys, torch.cat([states, more], 2))

    def test_where_a_later_layer_had_no_memory_the_cache_is_cropped_to_what_it_was(self) -> None:
        driver = HostDriver(granularity=4096, budget=5 * 2 * HEADS * 4096)
        cache = VirtualCache(config(), driver=driver, page_bytes=4096)
        states = append(cache, 16)
        with pytest.raises(OutOfMemory, match=r"needs 16,384 bytes more; 0 of 81,920 are free"):
            append(cache, 1)
        assert [layer.get_seq_length() for layer in cache.layers] == [17, 17, 16]
        cache.crop(16)
        assert all(torch.equal(layer.keys, states) for layer in cache.layers)
        assert driver.shadow.used == cache.nbytes_mapped == cache.nbytes
        cache.check()

    def test_max_len_is_the_most(self) -> None:
        for max_len, asked in ((10, 11), (None, 4097)):
            cache = VirtualCache(config(), max_len=max_len)
            append(cache, asked - 1)
            with pytest.raises(CapacityError, match=rf"hold {asked:,} tokens; its max_len is {asked - 1:,}"):
                append(cache, 1)
            assert cache.get_seq_length() == asked - 1

    def test_addresses_that_cannot_be_had(self) -> None:
        driver = FaultyDriver(HostDriver(), fail_at=1, kinds=["reserve"])
        cache = VirtualCache(config(), driver=driver)
        with pytest.raises(DriverError) as failure:
            append(cache, 1)
        assert "max_len" in failure.value.__notes__[0]
        append(cache, 1)
        assert cache.get_seq_length() == 1

    def test_mappings_that_cannot_be_had(self) -> None:
        driver = FaultyDriver(HostDriver(), kinds=["map"])
        cache = VirtualCache(config(), driver=driver)
        append(cache, 1)
        driver.arm(1)
        with pytest.raises(DriverError) as failure:
            append(cache, 1000)
        assert "page_bytes" in failure.value.__notes__[0]

    def test_a_window_that_cannot_turn_is_tried_again(self) -> None:
        driver = FaultyDriver(HostDriver(granularity=4096), kinds=["map"])
        cache = VirtualCache(_sliding(64), driver=driver)
        states = append(cache, 60)
        driver.arm(3)
        with pytest.raises(DriverError):
            append(cache, 10)
        assert torch.equal(cache.layers[0].keys, states)
        driver.heal()
        states = torch.cat([states, append(cache, 10)], 2)
        assert torch.equal(cache.layers[0].keys, states[:, :, -63:])
        cache.check()


def test_hundreds_of_generations_leave_nothing_behind() -> None:
    tiny = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=64,
    )
    target, inputs = AutoModelForCausalLM.from_config(tiny).eval(), prompts(1, 4)
    inputs = {key: value % 32 for key, value in inputs.items()}
    kept = VirtualCache(tiny)

    def go(times: int) -> tuple[int, int, int]:
        for index in range(times):
            cache = VirtualCache(tiny) if index % 2 else kept
            generate(target, inputs, cache, do_sample=False, max_new_tokens=2)
            cache.reset()
        return _footprint()

    go(50)  # caches of torch and of the allocator
    descriptors, mappings, size = go(50)
    after = go(300)
    assert after[0] == descriptors
    assert after[1] <= mappings + 4
    assert after[2] <= size + (1 << 18)


def _sliding(window: int) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        sliding_window=window,
        layer_types=["sliding_attention"] * LAYERS,
    )


def _footprint() -> tuple[int, int, int]:
    """(open descriptors, mappings, bytes of address space) of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("\n")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return len(os.listdir("/proc/self/fd")), mappings, pages * os.sysconf("SC_PAGE_SIZE")
