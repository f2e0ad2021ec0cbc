"""Attention alone, by context length: contiguous rows against block tables, over the same numbers.

A batch of requests holds `context` tokens each; the last `queries` of them are stored and attended to, layer
after layer, as a step of the engine does it. Beside the time in attention stands the time it takes to plan
the step (positions, lengths, tables), which is paid once per step, not per layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch

from vattn.errors import ConfigError
from vattn.kv.base import Chunk
from vattn.lab.bench.bench_report import FORMAT
from vattn.lab.bench.conclusions import ratio
from vattn.lab.bench.engines import VattnSystem, VattnTarget
from vattn.lab.bench.environment import environment
from vattn.lab.bench.intervals import interval
from vattn.llm import LLM
from vattn.models.loader import LoadedModel

OnContext = Callable[[int], None]


def bench_kernels(
    loaded: LoadedModel,
    systems: Sequence[VattnSystem],
    contexts: Sequence[int],
    *,
    batch: int = 4,
    queries: int = 1,
    repeats: int = 15,
    progress: OnContext | None = None,
) -> dict[str, Any]:
    """A report of kind `kernels`: per system and context, microseconds over all layers.

    Systems take turns in every repeat. Raises ConfigError for impossible sizes.
    """
    if min(batch, queries, repeats) < 1 or not contexts or min(contexts) < queries:
        raise ConfigError(
            f"contexts must be at least --queries and everything at least 1, got contexts "
            f"{','.join(map(str, contexts))}, queries {queries}, batch {batch}, repeats {repeats}"
        )
    runs: dict[str, dict[str, Any]] = {
        s.name: {"name": s.name, "options": s.options, "kv": {}, "points": []} for s in systems
    }
    samples: dict[tuple[str, int], list[float]] = {}
    for context in contexts:
        if progress is not None:
            progress(context)
        gc.collect()
        with ExitStack() as stack:
            benches = []
            for system in systems:
                target = stack.enter_context(system.open())
                assert isinstance(target, VattnTarget)
                runs[system.name]["kv"] = target.kv
                benches.append((system.name, _Step(target.llm, context, batch, queries)))
            plans: dict[str, list[float]] = {name: [] for name, _ in benches}
            for repeat in range(-2, repeats):  # two unmeasured: caches fill, kernels compile
                turn = repeat % len(benches)
                for name, bench in [*benches[turn:], *benches[:turn]]:
                    plan_s, attend_s = bench.run()
                    if repeat >= 0:
                        plans[name].append(plan_s)
                        samples.setdefault((name, context), []).append(attend_s)
        for name, _ in benches:
            attend = interval([s * 1e6 for s in samples[name, context]])
            point = {"context": context, "batch": batch, "queries": queries}
            point_us = {"attend_us": attend.to_dict()}
            plan_us = {"plan_us": interval([s * 1e6 for s in plans[name]]).to_dict()}
            runs[name]["points"].append({**point, **point_us, **plan_us})
    return {
        "format": FORMAT,
        "kind": "kernels",
        "environment": environment(),
        "layers": loaded.spec.num_layers,
        "repeats": repeats,
        "runs": list(runs.values()),
        "conclusions": _conclude([s.name for s in systems], contexts, samples),
    }


class _Step:
    """A step of one engine, planned and run again and again over the same tokens."""

    def __init__(self, llm: LLM, context: int, batch: int, queries: int) -> None:
        spec = llm.loaded.spec
        self._kv, self._attention = llm.engine.kv, llm.runner.attention
        self._layers, self._scale = spec.num_layers, spec.head_dim**-0.5
        self._device = next(llm.loaded.model.parameters()).device
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self._device, spec.dtype)

        ids = [str(b) for b in range(batch)]
        for number, request_id in enumerate(ids):
            # Different tokens each: nothing is shared.
            if self._kv.attach(request_id, [number] * context) is None:
                raise ConfigError(
                    f"{batch} requests of {context:,} tokens do not fit the KV memory: raise --kv-memory, or "
                    "lower --batch or --contexts"
                )
        self._fill(ids, context, random(context, spec.num_kv_heads, spec.head_dim))
        self._chunks = [Chunk(request_id, context - queries, queries) for request_id in ids]
        tokens = batch * queries
        self._q = random(tokens, spec.num_heads, spec.head_dim)
        self._k = random(tokens, spec.num_kv_heads, spec.head_dim)

    def _fill(self, ids: Sequence[str], context: int, values: torch.Tensor) -> None:
        """Write K and V of every token by storing them as a prompt, without attending over it."""
        for request_id in ids:
            inputs = self._kv.begin_step([Chunk(request_id, 0, context)])
            places = inputs.slot_mapping.to(self._device)
            for layer in inputs.kv:
                layer.flatten(1, 2)[:, places] = values.to(layer.dtype)
            if inputs.scales is not None and inputs.scales.dim() == 5:
                inputs.scales.flatten(2, 3)[:, :, places] = 1.0
            self._kv.submitted(None)

    @torch.inference_mode()
    def run(self) -> tuple[float, float]:
        """Seconds to plan the step, and seconds in attention over all layers."""
        started = perf_counter()
        step = self._attention.plan(self._kv.begin_step(self._chunks))
        self._wait()
        planned = perf_counter()
        for layer in range(self._layers):
            step.attend(layer, self._q, self._k, self._k, self._scale)
        self._wait()
        ended = perf_counter()
        self._kv.submitted(None)
        return planned - started, ended - planned

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _conclude(
    names: Sequence[str], contexts: Sequence[int], samples: dict[tuple[str, int], list[float]]
) -> list[str]:
    """Each system against the first, at every context."""
    sentences = []
    for other in names[1:]:
        for context in contexts:
            first = [{"us": s} for s in samples[names[0], context]]
            second = [{"us": s} for s in samples[other, context]]
            found = ratio(second, first, "us")
            if found is None:
                continue
            span = f"({found.low:.3g} to {found.high:.3g} at {found.coverage:.0%})"
            if not found.enough:
                sentences.append(f"{found.n} repeats cannot tell {other} from {names[0]}.")
                break
            verdict = (
                f"takes {found.median:.3g} times as long as {names[0]} {span}"
                if found.excludes(1)
                else f"can't be told from {names[0]}: the noise is too large {span}"
            )
            sentences.append(f"at {context:,} tokens attention of {other} {verdict}.")
    return sentences
