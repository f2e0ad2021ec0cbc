"""`vattn bench`: the same load on every KV backend, and on other engines, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vattn.commands import options as opt
from vattn.commands.bench_options import (
    ArrivalOptions,
    ModelOptions,
    RunOptions,
    SystemOptions,
    WorkloadOptions,
)
from vattn.commands.option_groups import grouped
from vattn.commands.vmm import bench as vmm_bench

if TYPE_CHECKING:
    from vattn.bench.arrivals import Arrivals
    from vattn.bench.engines import VattnSystem
    from vattn.bench.run import Limits
    from vattn.bench.slo import Slo
    from vattn.bench.workload import Workload
    from vattn.models.loader import LoadedModel

app = typer.Typer(help="Measure and compare KV backends, and other engines.", no_args_is_help=True)
app.command("vmm")(vmm_bench)


@app.command()
@grouped
def throughput(
    model: ModelOptions, systems: SystemOptions, load: WorkloadOptions, options: RunOptions
) -> None:
    """Everything at once: how many tokens a second, within the same KV memory."""
    workload = _workload(load, options)
    _run("throughput", model, systems, options, workload, _at_once())


@app.command()
@grouped
def latency(
    model: ModelOptions,
    systems: SystemOptions,
    options: RunOptions,
    batch_size: Annotated[int, typer.Option(help="Requests in the one batch.")] = 8,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 32,
    output_len: Annotated[int | None, typer.Option(help="Output tokens of each; default 128.")] = None,
    seed: opt.Seed = 0,
) -> None:
    """One batch of equal requests, again and again: how long it takes from end to end."""
    from vattn.bench.lengths import Lengths
    from vattn.bench.workload import RandomWorkload

    tokens = output_len if output_len is not None else 8 if options.smoke else 128
    lengths = Lengths("fixed", input_len, input_len), Lengths("fixed", tokens, tokens)
    _run("latency", model, systems, options, RandomWorkload(batch_size, *lengths, seed), _at_once())


@app.command()
@grouped
def serve(
    model: ModelOptions,
    systems: SystemOptions,
    load: WorkloadOptions,
    arriving: ArrivalOptions,
    options: RunOptions,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits in ms that a good request keeps, e.g. --goodput ttft:200 tpot:50 e2el:5000."
        ),
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="[METRIC:MS]...", help="More limits of --goodput.")
    ] = None,
) -> None:
    """Requests that arrive over time: TTFT, TPOT, ITL, E2EL and goodput, as vLLM defines them."""
    from vattn.bench.slo import Slo

    if more_goodput and not goodput:
        raise typer.BadParameter(f"{' '.join(more_goodput)!r} is not an option", param_hint="--goodput")
    slo = Slo.parse([*(goodput or ()), *(more_goodput or ())])
    workload = _workload(load, options)
    arrivals = _arrivals(workload, load, arriving)
    _run("serve", model, systems, options, workload, arrivals, slo, arriving.max_concurrency)


@app.command()
@grouped
def memory(
    model: ModelOptions,
    systems: SystemOptions,
    load: WorkloadOptions,
    arriving: ArrivalOptions,
    options: RunOptions,
) -> None:
    """Where KV memory goes, step by step: used, wasted, shared, parked, cached."""
    workload = _workload(load, options)
    arrivals = _arrivals(workload, load, arriving)
    _run("memory", model, systems, options, workload, arrivals, None, arriving.max_concurrency)


@app.command()
@grouped
def kernels(
    model: ModelOptions,
    systems: SystemOptions,
    options: RunOptions,
    contexts: Annotated[
        str | None, typer.Option(help="Context lengths, comma-separated; default 128,512,1024.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests in the batch.")] = 4,
    queries: Annotated[
        int, typer.Option(help="New tokens of each: 1 is a decode, more a chunk of a prompt.")
    ] = 1,
) -> None:
    """Attention alone, by context length: contiguous rows against block tables."""
    from vattn.bench import report as reports
    from vattn.bench.kernels import bench_kernels
    from vattn.bench.run import Limits
    from vattn.commands.bench_tables import kernel_table
    from vattn.errors import ConfigError
    from vattn.kv.layout import KVShape

    reports.check_writable(options.json_file)
    if systems.peer:
        raise ConfigError("--peer: kernels compares attention inside vattn; peers have none to lend")
    lengths = _numbers(contexts or ("64,128" if options.smoke else "128,512,1024"), "--contexts")
    console = Console()
    loaded, _ = _load(model, options, console)
    spec = loaded.spec
    token = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype).token_bytes
    longest = max(lengths) + 1
    budget = opt.parse_bytes(systems.kv_memory, "--kv-memory") or 2 * batch * longest * token + (64 << 20)
    limits = Limits(max(batch, 1), max(512, batch), systems.max_model_len or longest, budget)
    compared = _vattn_systems(loaded, systems, limits)
    repeats = options.repeats or (2 if options.smoke else 15)
    with console.status("") as status:
        report = bench_kernels(
            loaded,
            compared,
            lengths,
            batch=batch,
            queries=queries,
            repeats=repeats,
            progress=lambda context: status.update(f"{context} tokens"),
        )
    report["model"] = reports.describe_model(loaded, limits.max_model_len)
    console.print(kernel_table(report))
    _conclude(console, report, options)


# ---------------------------------------------------------------------- shared by the commands
def _run(
    kind: str,
    model: ModelOptions,
    systems: SystemOptions,
    options: RunOptions,
    workload: Workload,
    arrivals: Arrivals,
    slo: Slo | None = None,
    max_concurrency: int | None = None,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vattn.bench import report as reports
    from vattn.bench.choose import choose_limits
    from vattn.bench.peers.factory import peer_systems
    from vattn.bench.run import HEADLINES, Plan, run
    from vattn.bench.target import System
    from vattn.commands.bench_tables import tables

    reports.check_writable(options.json_file)
    console = Console()
    loaded, name = _load(model, options, console)
    limits = choose_limits(
        loaded,
        workload,
        kv_memory_bytes=opt.parse_bytes(systems.kv_memory, "--kv-memory"),
        max_model_len=systems.max_model_len,
        max_num_seqs=systems.max_num_seqs,
        max_num_batched_tokens=systems.max_num_batched_tokens,
    )
    plan = Plan(
        kind, workload, arrivals, limits, options.repeats or (2 if options.smoke else 5), max_concurrency, slo
    )
    compared: list[System] = [*_vattn_systems(loaded, systems, limits)]
    compared += peer_systems(systems.peer or (), name, loaded, limits)
    console.print(
        f"{loaded.name}: {workload.describe()}\narrivals {arrivals.describe()}; KV budget "
        f"{opt.format_bytes(limits.kv_memory_bytes)}; longest request {limits.max_model_len:,} tokens"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def told(system: str, repeat: int, done: int, total: int) -> None:
            turn = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {plan.repeats}"
            progress.update(task, description=f"{turn}: {system}", completed=done, total=total)

        measured = run(plan, compared, loaded.spec.vocab_size, told)
    measured["model"] = reports.describe_model(loaded, limits.max_model_len)
    report = reports.finish(measured, HEADLINES[kind])
    console.print(*tables(report))
    _conclude(console, report, options)
    if any(repeat["metrics"]["failed"] for found in report["runs"] for repeat in found["repeats"]):
        console.print("[red]some requests failed; their errors are in the JSON[/]")
        raise typer.Exit(1)


def _conclude(console: Console, report: dict[str, Any], options: RunOptions) -> None:
    from vattn.bench import report as reports

    for sentence in report["conclusions"]:
        console.print(f"- {sentence}", highlight=False)
    if options.json_file is not None:
        reports.write(options.json_file, report)
        console.print(f"everything measured was written to {options.json_file}")


def _load(model: ModelOptions, options: RunOptions, console: Console) -> tuple[LoadedModel, str]:
    """The model, and the name it was asked for by."""
    from vattn.bench.tiny import TINY, load_for_bench

    name = model.model or (TINY if options.smoke else "smollm2")
    with console.status(f"loading {name}"):
        return load_for_bench(name, model.device, model.dtype), name


def _vattn_systems(loaded: LoadedModel, systems: SystemOptions, limits: Limits) -> list[VattnSystem]:
    from vattn.bench.engines import vattn_systems
    from vattn.errors import ConfigError

    if systems.backends == "none":
        if not systems.peer:
            raise ConfigError("--backends none leaves nothing to run: name a --peer")
        return []
    pages = [opt.parse_bytes(page, "--page-bytes") for page in _parts(systems.page_bytes or "")] or [None]
    common = {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_memory_bytes": limits.kv_memory_bytes,
    }
    return vattn_systems(
        loaded,
        _parts(systems.backends),
        common,
        block_sizes=_numbers(systems.block_sizes, "--block-sizes"),
        page_bytes=pages,
        layouts=_parts(systems.layouts),
    )


def _workload(load: WorkloadOptions, options: RunOptions) -> Workload:
    from vattn.bench.choose import choose_workload

    smoke = options.smoke
    return choose_workload(
        load.workload,
        requests=load.requests if load.requests is not None or not smoke or load.trace else 6,
        prompt_len=load.prompt_len or ("4:24" if smoke else "16:512"),
        output_len=load.output_len or ("2:8" if smoke else "16:128"),
        groups=load.groups,
        prefix_len=load.prefix_len,
        turns=load.turns,
        think_s=load.think,
        samples=load.samples,
        trace=load.trace,
        length_scale=load.length_scale,
        seed=load.seed,
    )


def _arrivals(workload: Workload, load: WorkloadOptions, arriving: ArrivalOptions) -> Arrivals:
    from vattn.bench.choose import choose_arrivals

    return choose_arrivals(
        workload,
        kind=arriving.arrivals,
        rate=arriving.request_rate,
        burstiness=arriving.burstiness,
        time_scale=arriving.time_scale,
        seed=load.seed,
    )


def _at_once() -> Arrivals:
    from vattn.bench.arrivals import Arrivals

    return Arrivals("at-once")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str, option: str) -> list[int]:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list like 8,16,32", param_hint=option)
    return [int(part) for part in parts]
