"""`virtual`: each request owns a contiguous range of addresses; the driver maps pages as it grows.

    row 0 (live)    | page 7 | page 2 | page 9 |  . . reserved, unmapped . .  |
    row 1 (live)    | page 7 | page 2 | page 3 |  . . 7 and 2 are shared: one page, two addresses
    row 2 (parked)  | page 4 | page 1 |  . . . . . . . . . . . . . . . . . .  |
    row 3 (empty)   |  . . . . . . . . . . . . . . . . . . . . . . . . . . .  |

A unit is one page in each range of a row. A row has one range, or one for each layer's K and V. If a request
begins with text from the prefix cache, it shares the full pages of that text and copies the partly filled
page behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from vattn.errors import ConfigError
from vattn.kv.backends.base import Backend, contiguous_inputs
from vattn.kv.books.books import Books
from vattn.kv.books.rows import MappedBooks
from vattn.kv.books.units import UnitLayout
from vattn.kv.inputs import Chunk, ContiguousInputs
from vattn.kv.layout import RowLayout
from vattn.kv.memory.base import Memory
from vattn.kv.memory.mapped import MappedMemory

if TYPE_CHECKING:
    from vattn.kv.cache import KVCache


class VirtualBackend(Backend):
    """`max_rows` rows in one reservation of addresses; the budget limits the pages mapped in them."""

    name = "virtual"
    unit = "page"
    reads = ContiguousInputs

    @cached_property
    def geometry(self) -> RowLayout:
        """The layout of the rows. With a prefix cache there is one extra row, to copy from cached pages."""
        setting = self.setting
        page, driver = setting.page_bytes, setting.driver
        if page % driver.granularity:
            raise ConfigError(
                f"page_bytes={page:,} is not a multiple of the {driver.name} driver's granularity of "
                f"{driver.granularity:,} bytes"
            )
        rows = setting.max_rows + (setting.fingerprint is not None)
        return RowLayout(setting.kind, setting.shape, rows, setting.max_tokens, page)

    def layout(self) -> UnitLayout:
        return self.geometry.units

    def books(self, layout: UnitLayout) -> Books:
        setting = self.setting
        return MappedBooks(
            layout,
            setting.budget_bytes // layout.bytes,
            rows=setting.max_rows,
            address_bytes=self.geometry.rows * self.geometry.row_bytes * layout.ranges,
            fingerprint=setting.fingerprint,
            entry_tokens=setting.config.block_size,
        )

    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        setting, background = self.setting, self.setting.config.background_mapping
        return MappedMemory(
            layout,
            setting.shape,
            self.geometry,
            setting.driver,
            scratch=setting.fingerprint is not None,
            background=setting.driver.device.type == "cuda" if background is None else background,
        )

    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> ContiguousInputs:
        cache.look_ahead()
        pitch = self.geometry.row_tokens
        return contiguous_inputs(cache.tensor, chunks, cache.rows(chunks), pitch, cache.scales)

    def describe(self, books: Books) -> dict[str, str | int]:
        geometry = self.geometry
        return {
            "layout": str(geometry.kind),
            "page_bytes": geometry.page_bytes,
            "pages": books.limit * geometry.ranges,
            "rows": self.setting.max_rows,
        }

    def smallest(self) -> str:
        return f"one page of {self.geometry.page_bytes:,} bytes in each of {self.geometry.ranges} ranges"
