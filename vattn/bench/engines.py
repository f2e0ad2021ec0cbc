"""vattn's own engine as a target, one system per choice of KV memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from vattn.bench.probe import Probe
from vattn.bench.target import Finished, Inside, System, Target
from vattn.errors import ConfigError
from vattn.llm import LLM
from vattn.models.loader import LoadedModel
from vattn.outputs import RequestOutput
from vattn.params import SamplingParams
from vattn.vmm.counter import CallCounter
from vattn.vmm.driver import Driver, open_driver


@dataclass
class VattnSystem(System):
    """An `LLM` with these options; the weights are shared by all systems of a comparison."""

    name: str
    loaded: LoadedModel
    options: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def open(self) -> Iterator[Target]:
        driver = CallCounter(_driver(self.loaded, self.options.get("page_bytes")))
        try:
            with LLM(self.loaded, driver=driver, **self.options) as llm:
                if driver.device.type == "cuda":
                    _staircase(llm)
                yield VattnTarget(llm, driver)
        finally:
            driver.close()


def _driver(loaded: LoadedModel, page_bytes: int | None) -> Driver:
    """The device's driver; on a CPU its granularity is lowered where the page asks for it."""
    device = next(loaded.model.parameters()).device
    if device.type != "cpu" or page_bytes is None:
        return open_driver(device)
    return open_driver(device, granularity=min(64 << 10, page_bytes & -page_bytes))


def _staircase(llm: LLM) -> None:
    """Requests that end one after another: every batch size comes by, so every graph is captured."""
    width = llm.scheduler_config.max_num_seqs
    longest = llm.max_model_len - 16
    params = [_params(min(longest, 2 + i), 1) for i in range(width)]
    llm.generate([[1] * 16] * width, params, use_tqdm=False)


def _params(output_len: int, n: int) -> SamplingParams:
    """Greedy, unless several outputs are wanted: those must differ."""
    return SamplingParams(
        n=n,
        temperature=0.0 if n == 1 else 1.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
    )


class VattnTarget(Target):
    """One engine for one run: what it did before does not show in its counters."""

    def __init__(self, llm: LLM, driver: CallCounter) -> None:
        self.llm = llm
        self.driver = driver
        self.kv = llm.describe_kv()
        self._probe: Probe | None = None
        self._before: dict[str, Any] = {}

    def clock(self) -> float:
        return time.perf_counter()

    def start(self) -> float:
        self.driver.reset()
        self._before = self._totals()
        started = self.clock()
        self._probe = Probe(self.llm.engine, started)
        return started

    def submit(self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int) -> None:
        self.llm.engine.add_request(request_id, prompt_token_ids, _params(output_len, n))

    def advance(self, wait_s: float) -> list[Finished]:
        if not self.llm.engine.has_work:
            time.sleep(wait_s)
            return []
        begun = time.perf_counter()
        outputs = self.llm.engine.step()
        assert self._probe is not None, "a run begins with start"
        self._probe.log.took(time.perf_counter() - begun)
        return [self._finished(output) for output in outputs if output.finished]

    def inside(self) -> Inside:
        assert self._probe is not None, "a run begins with start"
        now = self._totals()
        counters = {key: _since(value, self._before[key]) for key, value in now.items()}
        counters["recomputed_tokens"] = self._probe.recomputed_tokens
        counters["map_stall_s"] = counters.pop("map_stall_seconds")
        counters["driver_calls"] = dict(self.driver.counts)
        counters["driver_seconds"] = dict(self.driver.seconds)
        counters["driver_latency_log2_ns"] = {
            kind: {str(b): n for b, n in enumerate(buckets) if n}
            for kind, buckets in self.driver.histograms.items()
        }
        return Inside(counters, self._probe.finish())

    def _finished(self, output: RequestOutput) -> Finished:
        assert self._probe is not None
        return Finished(
            output.request_id,
            output.outputs[0].token_ids,
            self._probe.times_of(output),
            finish_reason=output.outputs[0].finish_reason,
            error=output.error,
            first_scheduled=output.metrics.first_scheduled_time,
            cached_tokens=output.metrics.num_cached_tokens,
            preemptions=output.metrics.num_preemptions,
        )

    def _totals(self) -> dict[str, Any]:
        """Every counter of engine and cache that only ever rises."""
        metrics = self.llm.metrics()
        stats = asdict(metrics.kv_stats)
        del stats["driver_calls"]  # the virtual backend's own count; ours covers every backend
        return {
            "steps": metrics.steps,
            "computed_tokens": metrics.computed_tokens,
            "preemptions": metrics.preemptions,
            **stats,
        }


def _since(now: Any, before: Any) -> Any:
    return {k: _since(v, before.get(k, 0)) for k, v in now.items()} if isinstance(now, dict) else now - before


def vattn_systems(
    loaded: LoadedModel,
    backends: Sequence[str],
    common: dict[str, Any],
    *,
    block_sizes: Sequence[int] = (16,),
    page_bytes: Sequence[int | None] = (None,),
    layouts: Sequence[str] = ("auto",),
) -> list[VattnSystem]:
    """One system per backend and choice that matters to it, named by what is swept.

        static    x layouts                   static-per_layer
        paged     x block sizes               paged-32
        virtual   x layouts x page sizes      virtual-per_layer-64KiB

    Raises ConfigError for an unknown backend or one named twice.
    """
    if not backends or len(set(backends)) < len(backends):
        raise ConfigError(f"backends {','.join(backends)!r}: name each once, e.g. static,paged,virtual")
    systems = []
    for backend in backends:
        choices: list[tuple[str, dict[str, Any]]] = []
        if backend == "paged":
            choices = [(_part(block_sizes, str(size)), {"block_size": size}) for size in block_sizes]
        elif backend == "static":
            choices = [(_part(layouts, layout), {"kv_layout": layout}) for layout in layouts]
        elif backend == "virtual":
            choices = [
                (
                    _part(layouts, layout) + _part(page_bytes, _size(page)),
                    {"kv_layout": layout, "page_bytes": page},
                )
                for layout, page in product(layouts, page_bytes)
            ]
        else:
            raise ConfigError(f"kv_backend={backend!r} is unknown: use one of 'static', 'paged', 'virtual'")
        systems += [
            VattnSystem(backend + name, loaded, {"kv_backend": backend, **common, **options})
            for name, options in choices
        ]
    return systems


def _part(swept: Sequence[object], text: str) -> str:
    """What a swept choice adds to the name; nothing where there is no choice."""
    return f"-{text}" if len(swept) > 1 else ""


def _size(page: int | None) -> str:
    if page is None:
        return "default"
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if page % unit == 0:
            return f"{page // unit}{name}"
    return str(page)
