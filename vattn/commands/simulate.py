"""`vattn simulate`: what a model on a GPU would do with a load, without either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vattn.commands import options as opt
from vattn.commands.bench_options import ArrivalOptions, WorkloadOptions
from vattn.commands.option_groups import grouped
from vattn.units import nbytes

if TYPE_CHECKING:
    from vattn.lab.bench.arrivals import Arrivals
    from vattn.lab.bench.slo import Slo
    from vattn.lab.bench.workload import Workload
    from vattn.lab.simulator.setup import Simulation, SimulationConfig
    from vattn.lab.simulator.source import Plan


@dataclass(frozen=True)
class SimulatedOptions:
    """The simulated engine; names as in `--sweep`."""

    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of the table (llama-3-70b, …) or a config.json.")
    ] = "llama-3-8b"
    gpu: Annotated[str, typer.Option(help="h100, h200, a100-80, …")] = "h100"
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share the model; default: as few as hold it.")
    ] = None
    backend: Annotated[str, typer.Option("--backend", "--backends", help="Backends, comma-separated.")] = (
        "virtual,paged,static"
    )
    kv_layout: opt.Layout = "auto"
    page_bytes: opt.PageBytes = None
    block_size: opt.BlockSize = 16
    kv_memory: Annotated[
        str | None, typer.Option("--kv-memory", help="KV memory of each GPU; default: what is left.")
    ] = None
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (bfloat16), fp8_e4m3 or int8.")] = "auto"
    weight_dtype: Annotated[str, typer.Option(help="bfloat16, fp8, int8, int4 or float32.")] = "bfloat16"
    max_num_seqs: opt.MaxNumSeqs = 256
    max_num_batched_tokens: opt.MaxBatchedTokens = 2048
    max_model_len: opt.MaxModelLen = None
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of each GPU's memory to use.")] = 0.9
    prefix_caching: Annotated[
        str, typer.Option(help="true, false or auto: where requests have text in common.")
    ] = "auto"
    mapping: Annotated[
        str, typer.Option(help="hidden: driver calls made ahead, in a thread; exposed: in the step.")
    ] = "hidden"


@grouped
def simulate(
    simulated: SimulatedOptions,
    load: WorkloadOptions,
    arriving: ArrivalOptions,
    sweep: Annotated[
        list[str] | None, typer.Option(help="NAME=V1,V2,…: one run per value; may be repeated.")
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of the cost model, e.g. linear_flops=0.5.")
    ] = None,
    calibrate: Annotated[Path | None, typer.Option(help="A bench JSON: fit step times to its steps.")] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limits in ms of a good request, e.g. ttft:500 tpot:50.")
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="[METRIC:MS]...", help="More limits of --goodput.")
    ] = None,
    capacity: Annotated[
        bool, typer.Option("--capacity", help="Find the highest request rate that meets --goodput.")
    ] = False,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="capacity: requests that must be good.")
    ] = 0.9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Serve a load on paper: the real scheduler and KV managers, and a priced forward pass.

    Memory figures are exact. Times are those of a roofline model, or with --calibrate of a fit to measured
    steps: docs/simulator.md says how far to trust them.
    """
    from vattn.commands.simulate_options import configure, parse_assumptions, parse_sweeps
    from vattn.errors import ConfigError
    from vattn.lab.bench import bench_report as reports
    from vattn.lab.bench.from_options import choose_arrivals, choose_workload
    from vattn.lab.bench.slo import Slo
    from vattn.lab.simulator.calibrate import calibrate as fit_to
    from vattn.lab.simulator.sweep import combinations

    if more_goodput and not goodput:
        raise typer.BadParameter(f"{' '.join(more_goodput)!r} is not an option", param_hint="--goodput")
    slo = Slo.parse([*(goodput or ()), *(more_goodput or ())])
    if capacity and slo is None:
        raise ConfigError("--capacity needs --goodput: the limits of a good request, e.g. ttft:500 tpot:50")
    reports.check_writable(json_file)
    base = {f.name: getattr(simulated, f.name) for f in fields(simulated)}
    swept = {"backend": [b.strip() for b in simulated.backend.split(",") if b.strip()]}
    if not swept["backend"]:
        raise ConfigError(f"--backend {simulated.backend!r} names no backend: write e.g. virtual,paged")
    swept |= parse_sweeps(sweep or ())
    chosen = combinations(base | parse_assumptions(assume or ()), swept)
    fit = None if calibrate is None else fit_to(calibrate, next(iter(chosen.values()))["backend"])
    configs = {name: configure(c, fit).resolved() for name, c in chosen.items()}
    workload = choose_workload(
        load.workload,
        requests=load.requests,
        prompt_len=load.prompt_len or "16:512",
        output_len=load.output_len or "16:128",
        groups=load.groups,
        prefix_len=load.prefix_len,
        turns=load.turns,
        think_s=load.think,
        samples=load.samples,
        trace=load.trace,
        length_scale=load.length_scale,
        seed=load.seed,
    )
    arrivals = choose_arrivals(
        workload,
        kind=arriving.arrivals,
        rate=arriving.request_rate,
        burstiness=arriving.burstiness,
        time_scale=arriving.time_scale,
        seed=load.seed,
    )
    _run(configs, workload, arrivals, slo, arriving.max_concurrency, share if capacity else None, json_file)


def _run(
    configs: Mapping[str, SimulationConfig],
    workload: Workload,
    arrivals: Arrivals,
    slo: Slo | None,
    concurrency: int | None,
    share: float | None,
    json_file: Path | None,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vattn.lab.bench import bench_report as reports
    from vattn.lab.simulator.results import describe_run, report
    from vattn.lab.simulator.setup import simulate as run
    from vattn.lab.simulator.source import plan

    console = Console()
    done: dict[str, Simulation] = {}
    sentences: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name, config in configs.items():
            plans = plan(workload, config.model.vocab_size)
            task = progress.add_task(name, total=len(plans))
            done[name] = run(
                config,
                plans,
                arrivals,
                max_concurrency=concurrency,
                progress=lambda sent: progress.update(task, completed=sent),  # noqa: B023
            )
            if share is not None and slo is not None:
                progress.update(task, description=f"{name}: capacity")
                sentences.append(f"{name}: {_capacity(done[name], plans, slo, share)}")
            progress.remove_task(task)
    sentences = [*_basis(done), *sentences]
    console.print(
        f"{workload.describe()}\narrivals {arrivals.describe()}",
    )
    runs = [describe_run(name, s, slo, detail=False) for name, s in done.items()]
    console.print(_table(runs))
    for sentence in sentences:
        console.print(f"- {sentence}", highlight=False)
    if json_file is not None:
        record = report(done, workload.describe(), arrivals.describe(), slo, sentences)
        reports.write(json_file, record)
        console.print(f"everything simulated was written to {json_file}")


def _capacity(first: Simulation, plans: list[Plan], slo: Slo, share: float) -> str:
    from vattn.lab.bench.arrivals import Arrivals
    from vattn.lab.simulator.capacity import highest_rate
    from vattn.lab.simulator.setup import simulate as run

    at_once = run(first.config, plans, Arrivals("at-once"))
    most = len(plans) / at_once.outcome.seconds  # more would pile up, if only for long enough
    found = highest_rate(
        lambda rate: run(first.config, plans, Arrivals("poisson", rate)), slo, most=most, share=share
    )
    limits = " ".join(f"{name}:{limit:g}" for name, limit in slo.to_dict().items())
    if not found.rate:
        return f"no request rate keeps {limits} (ms) for {share:.0%} of the requests, not even a low one"
    return (
        f"up to {found.rate:.3g} requests/s (Poisson) keep {limits} (ms) for {share:.0%} of {len(plans):,} "
        f"requests: {found.rate / (first.config.tp or 1):.3g} a GPU"
        + ("; that is all it can complete" if found.rate == most else "")
    )


def _basis(done: Mapping[str, Simulation]) -> list[str]:
    """The assumptions behind the figures."""
    sentences = []
    seen: dict[tuple[str, str, int | None], None] = {}
    for simulation in done.values():
        config = simulation.config
        key = (config.model.name, config.gpu.name, config.tp)
        if key in seen:
            continue
        seen[key] = None
        weights, memory = (nbytes(n or 0) for n in (config.weight_bytes, config.kv.memory_bytes))
        sentences.append(
            f"{config.model.name} on {config.tp} x {config.gpu.name}: {weights} of weights "
            f"({config.weight_dtype}), {memory} of KV on each GPU, "
            f"{config.kv_shape(config.tp or 1).token_bytes:,} bytes a token there"
        )
    fit = next(iter(done.values())).config.fit
    sentences.append(
        "times are a roofline model's, with assumed efficiencies: compare, don't promise (docs/simulator.md)"
        if fit is None
        else fit.sentence()
    )
    return sentences


SHOWN = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("median", "p99")),
    "peak_kv_bytes",
    "kv_utilization",
    "peak_running",
)
COMPACT = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "p99_ttft_ms",
    "p99_tpot_ms",
    "kv_utilization",
)
"""What is shown of many runs: a row each."""


def _table(runs: list[dict[str, Any]]) -> Table:
    """A column per run; of many runs a row each. Memory is that of one GPU."""
    from vattn.commands.bench_tables import counter_rows, metric_rows, table_of

    counted = {
        "preemptions": lambda c: c["preemptions"],
        "driver calls": lambda c: sum(n for k, n in c["driver_calls"].items() if k != "reserve"),
        "map stall (ms)": lambda c: c["map_stall_s"] * 1e3,
    }
    few = len(runs) <= 4
    rows = [*metric_rows(runs, SHOWN if few else COMPACT), *counter_rows(runs, counted if few else {})]
    if few:
        times = [f"{run['repeats'][-1]['duration_s']:,.1f}" for run in runs]
        return table_of("simulated", runs, [*rows, ["virtual time (s)", *times]])
    table = Table(title="simulated (the JSON has more)")
    table.add_column("", overflow="fold")
    for label, *_ in rows:
        table.add_column(label, justify="right")
    for at, run in enumerate(runs):
        table.add_row(run["name"], *(row[at + 1] for row in rows))
    return table
