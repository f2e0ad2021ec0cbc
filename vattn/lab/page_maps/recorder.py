"""Page maps over time: sampled as an engine steps, kept as JSON lines (`vattn-pagemap-1`).

{"format": "vattn-pagemap-1", "backend": "virtual", "unit": "page", "unit_bytes": …, …}
{"step": 0, "time_s": 0.0, "running": 2, "waiting": 0, "bytes": {…}, "units": {…}, "rows": […], …}
{"step": 8, …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vattn.engine.listener import StepListener
from vattn.errors import ConfigError
from vattn.kv.page_map import PageMap, PageState
from vattn.units import nbytes

if TYPE_CHECKING:
    from vattn.engine.engine import Engine

FORMAT = "vattn-pagemap-1"
SAME = ("backend", "unit", "unit_bytes", "unit_tokens", "row_units")
"""Fields of a page map that stay."""
MOMENT = ("budget_bytes", "bytes", "units", "in_prefix_cache", "rows")
"""Fields that change."""


@dataclass
class Recording:
    """What stays, and one dict per moment; fields as in `PageMap.to_dict`."""

    header: dict[str, Any]
    frames: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(page_map: PageMap) -> Recording:
        """A single moment."""
        record = page_map.to_dict()
        recording = Recording({"format": FORMAT, **{name: record[name] for name in SAME}})
        recording.add(page_map, step=0, time_s=0.0)
        return recording

    def add(self, page_map: PageMap, *, step: int, time_s: float, **more: int) -> None:
        """Append a moment of the same cache."""
        record = page_map.to_dict()
        self.frames.append(
            {"step": step, "time_s": round(time_s, 6), **more, **{name: record[name] for name in MOMENT}}
        )

    def fullest(self) -> int:
        """Index of the moment at which live requests needed most, and of these the one with most tokens."""

        def needed(index: int) -> tuple[int, int]:
            frame = self.frames[index]
            tokens = sum(row["tokens"] for row in frame["rows"])
            return frame["bytes"]["private"] + frame["bytes"]["shared"], tokens

        return max(range(len(self.frames)), key=needed)

    def describe(self) -> str:
        """What was recorded, in a sentence."""
        header, count = self.header, len(self.frames)
        size = f"{nbytes(header['unit_bytes'])}, {header['unit_tokens']:g} tokens"
        moments = "1 moment" if count == 1 else f"{count} moments"
        steps = self.frames[-1]["step"]
        return f"{header['backend']}: every {header['unit']} is {size}. {moments}, {steps} steps."

    def save(self, path: str | Path) -> None:
        """Write JSON lines."""
        with Path(path).open("w", encoding="utf-8") as file:
            for record in (self.header, *self.frames):
                file.write(json.dumps(record, separators=(",", ":")) + "\n")

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read what `save` wrote. Raises ConfigError."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no recording of page maps: {error}") from error
        if not records or not isinstance(records[0], dict) or records[0].get("format") != FORMAT:
            raise ConfigError(f"{path} is no recording of page maps: its first line has no format {FORMAT!r}")
        header, *frames = records
        if not frames:
            raise ConfigError(f"{path} is a recording without a single moment")
        missing = [name for name in SAME if name not in header]
        for index, frame in enumerate(frames, 2):
            absent = [n for n in ("step", "time_s", *MOMENT) if not isinstance(frame, dict) or n not in frame]
            if absent or missing or set(frame["bytes"]) != set(PageState):
                raise ConfigError(f"{path}, line {index}: not a moment of a page map ({absent or missing})")
        return Recording(header, frames)


class PageMapRecorder(StepListener):
    """Samples an engine's page map after every `every`-th step, from creation to `close`.

    No more than `max_frames` are kept: then every second one goes, and half as many are taken. Drawing a map
    takes time that grows with the number of pages: this is for looking, not for measuring.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        every: int = 1,
        max_frames: int = 400,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1 or max_frames < 2:
            raise ConfigError(f"every={every} must be 1 at least, max_frames={max_frames} 2 at least")
        self._engine = engine
        self._every = every
        self._max_frames = max_frames
        self._clock = clock
        self._start = clock()
        self._steps = 0
        self.recording = Recording.of(engine.kv.page_map())
        self.recording.frames.clear()
        self.sample()
        engine.listeners.append(self)

    def sample(self) -> None:
        """Record this moment."""
        scheduler = self._engine.scheduler
        self.recording.add(
            self._engine.kv.page_map(),
            step=self._steps,
            time_s=self._clock() - self._start,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )
        if len(self.recording.frames) > self._max_frames:
            del self.recording.frames[1::2]
            self._every *= 2

    def step_ended(self, failed: bool) -> None:
        if failed:
            return
        self._steps += 1
        if self._steps % self._every == 0:
            self.sample()

    def close(self) -> None:
        """Record how it ends, and stop. Idempotent."""
        if self in self._engine.listeners:
            self._engine.listeners.remove(self)
            if self._steps > self.recording.frames[-1]["step"]:
                self.sample()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
