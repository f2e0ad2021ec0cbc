"""What the commands of `vattn bench` share: from options to a plan, a run, tables and a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
from vattn.units import nbytes

if TYPE_CHECKING:
    from vattn.lab.bench.arrivals import Arrivals
    from vattn.lab.bench.engines import VattnSystem
    from vattn.lab.bench.interleaved_run import Limits
    from vattn.lab.bench.slo import Slo
    from vattn.lab.bench.workload import Workload
    from vattn.models.loader import LoadedModel


def compare_systems(
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

    from vattn.commands.bench_tables import in_words, tables
    from vattn.lab.bench import bench_report as reports
    from vattn.lab.bench.from_options import choose_limits
    from vattn.lab.bench.interleaved_run import HEADLINES, Plan, run
    from vattn.lab.bench.peers.factory import peer_systems
    from vattn.lab.bench.target import System
    from vattn.models.describe import describe_model

    reports.check_writable(options.json_file)
    reports.check_drawable(options.html_file)
    choices = choices_of(systems)
    console = Console()
    loaded, name = load_model_for(model, options, console)
    limits = choose_limits(
        loaded,
        workload,
        kv_memory_bytes=choices.kv_memory,
        max_model_len=systems.max_model_len,
        max_num_seqs=systems.max_num_seqs,
        max_num_batched_tokens=systems.max_num_batched_tokens,
    )
    plan = Plan(kind, workload, arrivals, limits, repeats_of(options, 5), max_concurrency, slo)
    compared: list[System] = [*systems_of(loaded, choices, limits)]
    compared += peer_systems(systems.peer or (), name, loaded, limits)
    console.print(
        f"{loaded.name}, KV budget {nbytes(limits.kv_memory_bytes)}, longest request "
        f"{limits.max_model_len:,} tokens\nworkload {in_words(workload.describe())}\n"
        f"arrivals {in_words(arrivals.describe())}",
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def told(system: str, repeat: int, done: int, total: int) -> None:
            turn = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {plan.repeats}"
            progress.update(task, description=f"{turn}: {system}", completed=done, total=total)

        measured = run(plan, compared, loaded.spec.vocab_size, told)
    measured["model"] = describe_model(loaded, limits.max_model_len)
    report = reports.finish(measured, HEADLINES[kind])
    console.print(*tables(report))
    conclude(console, report, options)
    if any(repeat["metrics"]["failed"] for found in report["runs"] for repeat in found["repeats"]):
        console.print("[red]some requests failed; their errors are in the JSON[/]")
        raise typer.Exit(1)


def conclude(console: Console, report: dict[str, Any], options: RunOptions) -> None:
    from vattn.lab.bench import bench_report as reports

    for sentence in report["conclusions"]:
        console.print(f"- {sentence}", highlight=False)
    if options.json_file is not None:
        reports.write(options.json_file, report)
        console.print(f"everything measured was written to {options.json_file}")
    if options.html_file is not None:
        from vattn.lab.bench.bench_record import as_bench
        from vattn.lab.report.page import report_html

        options.html_file.write_text(report_html(as_bench(report)), encoding="utf-8")
        console.print(f"and drawn in {options.html_file}")


def load_model_for(model: ModelOptions, options: RunOptions, console: Console) -> tuple[LoadedModel, str]:
    """The model, and the name it was asked for by."""
    from vattn.lab.bench.tiny import TINY, load_for_bench

    name = model.model or (TINY if options.smoke else "smollm2")
    with console.status(f"loading {name}"):
        return load_for_bench(name, model.device, model.dtype), name


class Choices(NamedTuple):
    """What is compared, read from the options before anything is loaded."""

    backends: list[str]
    block_sizes: list[int]
    page_bytes: list[int | None]
    layouts: list[str]
    kv_dtypes: list[str]
    kv_memory: int | None
    sweeps: dict[str, list[Any]]


def choices_of(systems: SystemOptions) -> Choices:
    """Raises BadParameter or ConfigError for anything that could not be run."""
    from vattn.errors import ConfigError
    from vattn.lab.bench.engines import check_choices
    from vattn.lab.bench.peers.factory import check_peers
    from vattn.lab.bench.sweeps import parse_sweeps

    backends = [] if systems.backends == "none" else _parts(systems.backends)
    if systems.backends == "none" and not systems.peer:
        raise ConfigError("--backends none leaves nothing to run: name a --peer")
    choices = Choices(
        backends,
        numbers(systems.block_sizes, "--block-sizes"),
        [opt.parse_bytes(page, "--page-bytes") for page in _parts(systems.page_bytes or "")] or [None],
        _parts(systems.layouts),
        _parts(systems.kv_dtypes),
        opt.parse_bytes(systems.kv_memory, "--kv-memory"),
        parse_sweeps(systems.sweep or ()),
    )
    check_peers(systems.peer or ())
    if systems.backends != "none":
        check_choices(*choices[:5])
    return choices


def systems_of(loaded: LoadedModel, choices: Choices, limits: Limits) -> list[VattnSystem]:
    from vattn.lab.bench.engines import vattn_systems

    common = {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_memory_bytes": limits.kv_memory_bytes,
    }
    return vattn_systems(
        loaded,
        choices.backends,
        common,
        block_sizes=choices.block_sizes,
        page_bytes=choices.page_bytes,
        layouts=choices.layouts,
        kv_dtypes=choices.kv_dtypes,
        sweeps=choices.sweeps,
    )


def workload_of(load: WorkloadOptions, options: RunOptions) -> Workload:
    from vattn.lab.bench.from_options import choose_workload

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


def arrivals_of(workload: Workload, load: WorkloadOptions, arriving: ArrivalOptions) -> Arrivals:
    from vattn.lab.bench.from_options import choose_arrivals

    return choose_arrivals(
        workload,
        kind=arriving.arrivals,
        rate=arriving.request_rate,
        burstiness=arriving.burstiness,
        time_scale=arriving.time_scale,
        seed=load.seed,
    )


def repeats_of(options: RunOptions, usual: int) -> int:
    if options.repeats is not None:
        return options.repeats
    return 2 if options.smoke else usual


def at_once() -> Arrivals:
    from vattn.lab.bench.arrivals import Arrivals

    return Arrivals("at-once")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, option: str) -> list[int]:
    parts = _parts(text)
    if not parts or not all(part.isdecimal() and len(part) <= 18 and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list like 8,16,32", param_hint=option)
    return [int(part) for part in parts]
