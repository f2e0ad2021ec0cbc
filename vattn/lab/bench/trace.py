"""Recorded traffic: three file formats, one workload.

    own        {"arrival": 0.5, "prompt_len": 700, "output_len": 90, "session": "a"}         JSON lines
    Mooncake   {"timestamp": 500, "input_length": 700, "output_length": 90, "hash_ids": [0, 7]}
    BurstGPT   Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type          CSV

- own: `arrival` in seconds; `session` may be missing. `prompt_len` of a later turn counts the turns before
  it, answers included.
- Mooncake (github.com/kvcache-ai/Mooncake): `timestamp` in milliseconds; `hash_ids` name the prompt's
  blocks of 512 tokens, so requests whose lists begin alike share that prefix.
- BurstGPT (github.com/HPMLL/BurstGPT): seconds; answers of 0 tokens are failures and left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from vattn.errors import ConfigError
from vattn.lab.bench.workload import Workload, WorkloadRequest, check_seed, random_tokens

MOONCAKE_BLOCK = 512
"""Tokens named by one hash id."""

TraceFormat = Literal["own", "mooncake", "burstgpt"]


class TraceRow(NamedTuple):
    """One request of a trace. Lengths in tokens, `arrival_s` in seconds."""

    arrival_s: float
    prompt_len: int
    output_len: int
    session: str | None = None
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceWorkload(Workload):
    """The first `limit` requests of a trace file, earliest first; times count from the first of them.

    `length_scale` shrinks (or stretches) every length, Mooncake's blocks with them, so that traffic of
    large models can be replayed on small ones. Tokens are random; `seed` picks them.
    """

    name: ClassVar[str] = "trace"

    file: Path
    rows: tuple[TraceRow, ...]
    format: TraceFormat
    length_scale: float = 1.0
    seed: int = 0

    @staticmethod
    def read(
        file: Path, *, limit: int | None = None, length_scale: float = 1.0, seed: int = 0
    ) -> TraceWorkload:
        """Raises ConfigError, naming the line, for a file that can't be read."""
        if not 0 < length_scale < math.inf:
            raise ConfigError(f"the length scale must be above 0, got {length_scale}")
        if limit is not None and limit < 1:
            raise ConfigError(f"a trace needs at least one request, got a limit of {limit}")
        check_seed(seed)
        format, rows = read_trace(file)
        rows = sorted(rows, key=lambda row: row.arrival_s)[:limit]
        if not rows:
            raise ConfigError(f"{file} has no requests")
        rows = [_moved(row, arrival_s=row.arrival_s - rows[0].arrival_s, scale=length_scale) for row in rows]
        _check_sessions(file, rows)
        return TraceWorkload(file, tuple(rows), format, length_scale, seed)

    @property
    def max_len(self) -> int:
        return max(row.prompt_len + row.output_len for row in self.rows)

    def generate(self, vocab_size: int) -> list[WorkloadRequest]:
        rng = np.random.default_rng(self.seed)
        spoken: dict[str, int] = {}
        """Tokens said so far in each session."""
        requests = []
        for row in self.rows:
            own = row.prompt_len - (spoken.get(row.session, 0) if row.session is not None else 0)
            tokens = self._blocks(row, vocab_size) if row.hash_ids else random_tokens(rng, own, vocab_size)
            if row.session is not None:
                spoken[row.session] = row.prompt_len + row.output_len
            requests.append(
                WorkloadRequest(tokens, row.output_len, session=row.session, arrival_s=row.arrival_s)
            )
        return requests

    def _blocks(self, row: TraceRow, vocab_size: int) -> list[int]:
        """The prompt of a Mooncake row: a block's tokens follow from its id, its place and the seed."""
        block = MOONCAKE_BLOCK * self.length_scale
        tokens: list[int] = []
        for place, name in enumerate(row.hash_ids, 1):
            rng = np.random.default_rng([self.seed, name])
            tokens += random_tokens(rng, round(place * block) - len(tokens), vocab_size)
            if len(tokens) >= row.prompt_len:
                break
        return tokens[: row.prompt_len]

    def parameters(self) -> dict[str, Any]:
        return {
            "file": self.file.name,
            "format": self.format,
            "requests": len(self.rows),
            "length_scale": self.length_scale,
            "seed": self.seed,
        }


def _moved(row: TraceRow, *, arrival_s: float, scale: float) -> TraceRow:
    """The row at another time, with lengths scaled; at least one token each."""
    return row._replace(
        arrival_s=arrival_s,
        prompt_len=max(1, round(row.prompt_len * scale)),
        output_len=max(1, round(row.output_len * scale)),
    )


def read_trace(file: Path) -> tuple[TraceFormat, list[TraceRow]]:
    """The format, known by its keys, and all rows in order of the file. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"cannot read the trace {file}: {why}") from why
    first = next((line for line in text.splitlines() if line.strip()), "")
    if not first.lstrip().startswith("{"):
        return "burstgpt", list(_rows(file, csv.DictReader(text.splitlines()), 2, _burstgpt))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    objects = []
    for number, line in lines:
        try:
            objects.append(json.loads(line))
        except ValueError as why:
            raise ConfigError(f"{file}, line {number}: not JSON: {why}") from why
    mooncake = isinstance(objects[0], dict) and "input_length" in objects[0]
    return ("mooncake" if mooncake else "own"), list(_rows(file, objects, 1, _mooncake if mooncake else _own))


def _rows(
    file: Path, records: Any, first_line: int, parse: Callable[[dict[str, Any]], TraceRow | None]
) -> Iterator[TraceRow]:
    for number, record in enumerate(records, first_line):
        try:
            row = parse(record)
            if row is None:
                continue
            if row.prompt_len < 1 or row.output_len < 1:
                raise ValueError(f"lengths must be at least 1, got {row.prompt_len} and {row.output_len}")
            if not math.isfinite(row.arrival_s):
                raise ValueError(f"the arrival {row.arrival_s} is no time")
        except KeyError as why:
            raise ConfigError(
                f"{file}, line {number}: there is no {why}; formats: docs/benchmarks.md"
            ) from why
        except (TypeError, ValueError, AttributeError) as why:
            raise ConfigError(f"{file}, line {number}: {why}") from why
        yield row


def _own(record: dict[str, Any]) -> TraceRow:
    session = record.get("session")
    return TraceRow(
        float(record["arrival"]),
        int(record["prompt_len"]),
        int(record["output_len"]),
        None if session is None else str(session),
    )


def _mooncake(record: dict[str, Any]) -> TraceRow:
    prompt_len = int(record["input_length"])
    hash_ids = tuple(int(block) for block in record.get("hash_ids") or ())
    if hash_ids and len(hash_ids) * MOONCAKE_BLOCK < prompt_len:
        raise ValueError(f"{len(hash_ids)} blocks of {MOONCAKE_BLOCK} do not cover {prompt_len} tokens")
    return TraceRow(
        float(record["timestamp"]) / 1e3, prompt_len, int(record["output_length"]), None, hash_ids
    )


def _burstgpt(record: dict[str, Any]) -> TraceRow | None:
    """A session's rows say nothing about what their prompts share, so they stay single requests."""
    output_len = int(float(record["Response tokens"]))
    prompt_len = int(float(record["Request tokens"]))
    if output_len == 0 or prompt_len == 0:
        return None
    return TraceRow(float(record["Timestamp"]), prompt_len, output_len)


def _check_sessions(file: Path, rows: list[TraceRow]) -> None:
    """Each turn must be longer than what was said before it."""
    spoken: dict[str, int] = {}
    for row in rows:
        if row.session is None:
            continue
        before = spoken.get(row.session, 0)
        if row.prompt_len <= before:
            raise ConfigError(
                f"{file}: a turn of session {row.session!r} has a prompt of {row.prompt_len} tokens, but the "
                f"turns before it, answers included, have {before}"
            )
        spoken[row.session] = row.prompt_len + row.output_len
