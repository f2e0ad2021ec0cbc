"""Gives the layers of a cache their addresses and memory. Each device has a driver and a page pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vattn.checks import choice, shown
from vattn.errors import ConfigError
from vattn.hf.layout import LAYOUTS, LayoutName, Plan, plan_heads, plan_tokens
from vattn.vmm.driver import Driver, open_driver
from vattn.vmm.pool import PagePool

# Pages of the CPU. Small ones waste little, but each is a mapping, of which a process has 65,530.
TOKENS_PAGE = 64 << 10
HEADS_PAGE = 16 << 10
HEADS_PAGE_MOST = 64 << 10
MAPPINGS = 32 << 10


class Source(NamedTuple):
    """The driver and page pool that the layers of a cache on one device share."""

    driver: Driver
    pool: PagePool


class Arena:
    """Opens a `Source` for a device when the first layer there knows what it will hold.

    Args:
        layout: `"heads"`, `"tokens"`, or `"auto"`: the first on CPU, the second on CUDA.
        page_bytes: unit in which a range grows; None: the driver's on CUDA; on CPU 64 KiB for `tokens` and
            16 KiB for `heads`, more (to 64 KiB) if a full cache would then need too many mappings.
        driver: used instead of one opened per device; it stays the caller's.
        layers, max_len: what a full cache holds.
    """

    def __init__(
        self, layout: LayoutName, page_bytes: int | None, driver: Driver | None, layers: int, max_len: int
    ) -> None:
        choice("layout", layout, LAYOUTS)
        for name, value in (("page_bytes", page_bytes), ("max_len", max_len)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise ConfigError(f"{name} must be a positive whole number, not {shown(value)}")
        if driver is not None and not callable(getattr(driver, "memory_info", None)):
            raise ConfigError(f"driver must be a virtual memory driver of vattn.vmm, not {shown(driver)}")
        self.layout = layout
        self.page_bytes = page_bytes
        self.driver = driver
        self.layers = layers
        self.max_len = max_len
        self._sources: dict[torch.device, Source] = {}

    def plan(self, key: torch.Tensor, value: torch.Tensor) -> Plan:
        """Plan the layout of states like these on their device."""
        if key.dim() != 4 or key.shape[:3] != value.shape[:3] or 0 in (*key.shape[:2], key.shape[3]):
            raise ConfigError(
                f"states must be [batch, heads, tokens, dim] of at least one number, and keys like values; "
                f"these are {list(key.shape)} and {list(value.shape)}"
            )
        heads = self.layout == "heads" or (self.layout == "auto" and key.device.type == "cpu")
        return plan_heads(key, value) if heads else plan_tokens(key, value)

    def source(self, plan: Plan) -> Source:
        """Driver and pool of the plan's device; opened on first use, with pages that suit the plan."""
        if plan.device not in self._sources:
            self._sources[plan.device] = self._open(plan)
        return self._sources[plan.device]

    def _open(self, plan: Plan) -> Source:
        driver, device = self.driver, plan.device
        if driver is not None and driver.device != device:
            raise ConfigError(
                f"the driver given maps memory of {driver.device}, the model computes on {device}"
            )
        page = self.page_bytes
        if page is None and device.type == "cpu":
            page = self._cpu_page(plan)
            if driver is not None:
                page = max(page, driver.granularity)
        if driver is None and device.type == "cpu" and page is not None:
            driver = open_driver(device, granularity=page & -page)  # the largest the page is a multiple of
        elif driver is None:
            driver = open_driver(device)
        page = page or driver.granularity
        return Source(driver, PagePool(driver, page, driver.memory_info()[1] // page * page))

    def _cpu_page(self, plan: Plan) -> int:
        if len(plan.ranges) == 1:
            return TOKENS_PAGE
        page = HEADS_PAGE
        while page < HEADS_PAGE_MOST and self.layers * self.max_len * plan.token_bytes > MAPPINGS * page:
            page *= 2
        return page

    def __getstate__(self) -> dict[str, Any]:
        if self.driver is not None:
            raise TypeError("a VirtualCache bound to a driver of the caller's can't be pickled")
        return {**self.__dict__, "_sources": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Arena:
        copied = Arena(self.layout, self.page_bytes, self.driver, self.layers, self.max_len)
        memo[id(self)] = copied
        return copied
