"""vattn's own engine as a target, one system per choice of KV memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from vattn.config import KVCacheConfig
from vattn.engine.service import DEFAULT_SERVICE
from vattn.errors import ConfigError
from vattn.kv.factory import open_kv_driver
from vattn.lab.bench.probe import Probe
from vattn.lab.bench.sweeps import BATCHING, Sweeps
from vattn.lab.bench.target import Finished, Inside, System, Target
from vattn.llm import LLM
from vattn.models.loader import LoadedModel
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, RequestOutputKind, SamplingParams
from vattn.prompts import TokenizedPrompt
from vattn.vmm.counter import CallCounter


@dataclass
class VattnSystem(System):
    """An `LLM` with these options; the weights are shared by all systems of a comparison."""

    name: str
    loaded: LoadedModel
    options: dict[str, Any] = field(default_factory=dict)
    barrier: bool = False

    @contextmanager
    def open(self) -> Iterator[Target]:
        driver = CallCounter(open_kv_driver(next(self.loaded.model.parameters()).device))
        try:
            with LLM(self.loaded, driver=driver, **self.options) as llm:
                if driver.device.type == "cuda":
                    _staircase(llm)
                yield VattnTarget(llm, driver)
        finally:
            driver.close()


def _staircase(llm: LLM) -> None:
    """Requests that end one after another: every batch size comes by, so every graph is captured."""
    width = llm.scheduler_config.max_num_seqs
    longest = llm.max_model_len - 16
    params = [_params(min(longest, 2 + i), 1) for i in range(width)]
    llm.generate([[1] * 16] * width, params, use_tqdm=False)
    llm.reset_prefix_cache()


def _params(output_len: int, n: int) -> SamplingParams:
    """Greedy, unless several outputs are wanted: those must differ."""
    return SamplingParams(
        n=n,
        temperature=0.0 if n == 1 else 1.0,
        max_tokens=output_len,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _beams(output_len: int, width: int) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=output_len, ignore_eos=True)


@dataclass
class _Running:
    """A request on its way: its outputs' tokens so far, and when they came."""

    name: str
    beams: bool
    token_ids: list[list[int]]
    times: list[list[float]]


class VattnTarget(Target):
    """One engine for one run, driven as users drive it: streams, with their text.

    What the engine did before does not show in its counters.
    """

    def __init__(self, llm: LLM, driver: CallCounter) -> None:
        self.llm = llm
        self.driver = driver
        self.kv = llm.describe_kv()
        self._session = llm.session()
        self._session.keep()
        self._probe: Probe | None = None
        self._before: dict[str, Any] = {}
        self._running: dict[str, _Running] = {}

    def clock(self) -> float:
        return time.perf_counter()

    def start(self) -> float:
        self.driver.reset()
        self._before = self._totals()
        started = self.clock()
        self._probe = Probe(self.llm, started)
        return started

    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        params = _params(output_len, n) if not beams else _beams(output_len, n)
        prompt = TokenizedPrompt(None, prompt_token_ids)
        added = self._session.add([prompt], [params], [DEFAULT_SERVICE], stream=not beams, wait=False)
        outputs = range(1 if beams else n)
        self._running[added[0]] = _Running(request_id, beams, [[] for _ in outputs], [[] for _ in outputs])

    def advance(self, wait_s: float) -> list[Finished]:
        if not self._running:
            time.sleep(wait_s)
            return []
        outputs = self._session.wait(None if math.isinf(wait_s) else wait_s, raises=False)
        now = self.clock()
        return [done for output in outputs if (done := self._take(output, now)) is not None]

    def _take(self, output: RequestOutput, now: float) -> Finished | None:
        """Enter what is new of a request; when it ends, what came of it."""
        running = self._running[output.request_id]
        if running.beams:  # all of them are told when the search is over
            running.token_ids = [completion.token_ids for completion in output.outputs]
            running.times = [[now] * len(ids) for ids in running.token_ids]
        else:
            for completion in output.outputs:
                running.token_ids[completion.index] += completion.token_ids
                running.times[completion.index] += [now] * len(completion.token_ids)
        if not output.finished:
            return None
        del self._running[output.request_id]
        return Finished(
            running.name,
            running.token_ids[0] if running.token_ids else [],
            running.times,
            finish_reason=output.outputs[0].finish_reason if output.outputs else "error",
            error=output.error,
            first_scheduled=output.metrics.first_scheduled_time,
            cached_tokens=output.metrics.num_cached_tokens,
            preemptions=output.metrics.num_preemptions,
        )

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


def check_choices(
    backends: Sequence[str],
    block_sizes: Sequence[int],
    page_bytes: Sequence[int | None],
    layouts: Sequence[str],
    kv_dtypes: Sequence[str],
) -> None:
    """Raise ConfigError for a choice the engine does not know, one made twice, or none at all."""
    for option, choices in (
        ("--backends", backends),
        ("--block-sizes", block_sizes),
        ("--page-bytes", page_bytes),
        ("--layouts", layouts),
        ("--kv-dtypes", kv_dtypes),
    ):
        if not choices or len(set(choices)) < len(choices):
            raise ConfigError(f"{option} {','.join(map(str, choices))!r}: name each once, and at least one")
    for backend, block, page, layout, dtype in product(backends, block_sizes, page_bytes, layouts, kv_dtypes):
        KVCacheConfig(backend=backend, layout=layout, page_bytes=page, block_size=block, dtype=dtype)  # type: ignore[arg-type]


def vattn_systems(
    loaded: LoadedModel,
    backends: Sequence[str],
    common: dict[str, Any],
    *,
    block_sizes: Sequence[int] = (16,),
    page_bytes: Sequence[int | None] = (None,),
    layouts: Sequence[str] = ("auto",),
    kv_dtypes: Sequence[str] = ("auto",),
    sweeps: Sweeps | None = None,
) -> list[VattnSystem]:
    """One system per backend and choice that matters to it, named by what is swept.

    `sweeps`: values of other options of `LLM`, and of `batching`, for all backends.

        static    x layouts x dtypes                   static-per_layer-int8
        paged     x block sizes x dtypes               paged-32
        virtual   x layouts x page sizes x dtypes      virtual-per_layer-64KiB

    Raises ConfigError as `check_choices` does.
    """
    if not backends:
        return []
    check_choices(backends, block_sizes, page_bytes, layouts, kv_dtypes)
    matters: dict[str, dict[str, Sequence[Any]]] = {
        "static": {"kv_layout": layouts},
        "paged": {"block_size": block_sizes},
        "virtual": {"kv_layout": layouts, "page_bytes": page_bytes},
    }
    systems = []
    for backend in backends:
        choices = {**matters[backend], "kv_cache_dtype": kv_dtypes}
        every = {**choices, **(sweeps or {})}
        for chosen in product(*every.values()):
            options = dict(zip(every, chosen, strict=True))
            parts = [
                _text(v) if k in choices or k == BATCHING else f"{k}={_text(v)}"
                for k, v in options.items()
                if len(every[k]) > 1
            ]
            barrier = options.pop(BATCHING, "continuous") == "static"
            name = "-".join([backend, *parts])
            systems.append(VattnSystem(name, loaded, {"kv_backend": backend, **common, **options}, barrier))
    return systems


def _text(choice: Any) -> str:
    """A choice as it stands in a name; numbers that are large are page sizes."""
    if choice is None or isinstance(choice, bool):
        return {None: "default", True: "true", False: "false"}[choice]
    if isinstance(choice, int) and choice >= 1 << 10:
        unit, name = (20, "MiB") if choice % (1 << 20) == 0 else (10, "KiB")
        return f"{choice >> unit}{name}"
    return str(choice)
