"""From measurements to what is drawn: distributions, fills, and fewer points of a long series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.bench.geometry import unit_tokens

MAX_POINTS = 400
"""Of a line over time."""
MAX_ECDF = 200
Array = npt.NDArray[np.float64]


def thin(weights: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Indices to draw of a long series: of every stretch the one that weighs most, and both ends."""
    n = len(weights)
    if n <= limit:
        return list(range(n))
    edges = np.linspace(0, n, limit + 1).astype(int)
    values = np.asarray(weights, np.float64)
    kept = {int(a + np.argmax(values[a:b])) for a, b in pairwise(edges) if b > a}
    return sorted(kept | {0, n - 1})


def ecdf(values: Sequence[float], limit: int = MAX_ECDF) -> tuple[list[float], list[float]]:
    """Values and the share of all that is not above them, at no more than `limit` quantiles."""
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.size:
        return [], []
    at = np.unique(np.linspace(0, ordered.size - 1, min(limit, ordered.size)).round().astype(int))
    return [float(x) for x in ordered[at]], [float(x) for x in (at + 1) / ordered.size]


def latencies(run: Run, name: str) -> list[float]:
    """Of all repeats together, in milliseconds: `ttft`, `tpot`, `itl` or `e2el`; failures don't count."""
    found: list[float] = []
    for repeat in run.repeats:
        for request in repeat.get("requests") or ():
            if request.get("error") is not None or request.get("finished_s") is None:
                continue
            found += [ms for ms in _latency(request, name) if ms is not None]
    return found


def _latency(request: Mapping[str, Any], name: str) -> list[float | None]:
    first, last, sent = request["first_token_s"], request["finished_s"], request["arrival_s"]
    if first is None:
        return []
    if name == "ttft":
        return [(first - sent) * 1e3]
    if name == "e2el":
        return [(last - sent) * 1e3]
    if name == "itl":
        return [gap * 1e3 for gap in request.get("itl_s") or ()]
    tokens = int(request["output_len"]) // max(1, int(request.get("outputs") or 1))
    return [(last - first) * 1e3 / (tokens - 1)] if tokens > 1 else []


def bins(values: Sequence[float], count: int = 24) -> tuple[Array, bool]:
    """Edges of a histogram, and whether they rise by factors: where values span more than a decade or so."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 20:
        return np.geomspace(low, high * 1.0001, count + 1), True
    if high <= low:
        high = low + 1
    return np.linspace(low, high, count + 1), False


def tail_fills(bench: Bench, run: Run) -> list[float]:
    """For every request at its end, how full its last block or page was (static: its row), in (0, 1]."""
    unit = unit_tokens(bench, run)
    if not unit:
        return []
    found = []
    for request in run.requests:
        tokens = int(request["prompt_len"]) + int(request["output_len"]) // max(
            1, request.get("outputs") or 1
        )
        if tokens > 0 and request.get("error") is None:
            found.append(min(1.0, (tokens - (math.ceil(tokens / unit) - 1) * unit) / unit))
    return found
