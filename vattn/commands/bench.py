"""`vattn bench`: the same load on every KV backend, and on other engines, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
from vattn.commands.bench_run import (
    arrivals_of,
    at_once,
    choices_of,
    compare_systems,
    conclude,
    load_model_for,
    numbers,
    repeats_of,
    systems_of,
    workload_of,
)
from vattn.commands.experiment import experiment
from vattn.commands.option_groups import grouped
from vattn.commands.vmm import bench as vmm_bench

app = typer.Typer(help="Measure and compare KV backends, and other engines.", no_args_is_help=True)
app.command("vmm")(vmm_bench)
app.command()(experiment)


@app.command()
@grouped
def throughput(
    model: ModelOptions, systems: SystemOptions, load: WorkloadOptions, options: RunOptions
) -> None:
    """Everything at once: how many tokens a second, within the same KV memory."""
    workload = workload_of(load, options)
    compare_systems("throughput", model, systems, options, workload, at_once())


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
    from vattn.lab.bench.lengths import Lengths
    from vattn.lab.bench.workload import RandomWorkload

    tokens = output_len if output_len is not None else 8 if options.smoke else 128
    lengths = Lengths("fixed", input_len, input_len), Lengths("fixed", tokens, tokens)
    compare_systems("latency", model, systems, options, RandomWorkload(batch_size, *lengths, seed), at_once())


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
    from vattn.lab.bench.slo import Slo

    if more_goodput and not goodput:
        raise typer.BadParameter(f"{' '.join(more_goodput)!r} is not an option", param_hint="--goodput")
    slo = Slo.parse([*(goodput or ()), *(more_goodput or ())])
    workload = workload_of(load, options)
    arrivals = arrivals_of(workload, load, arriving)
    compare_systems("serve", model, systems, options, workload, arrivals, slo, arriving.max_concurrency)


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
    workload = workload_of(load, options)
    arrivals = arrivals_of(workload, load, arriving)
    compare_systems("memory", model, systems, options, workload, arrivals, None, arriving.max_concurrency)


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
    from vattn.commands.bench_tables import kernel_table
    from vattn.errors import ConfigError
    from vattn.lab.bench import bench_report as reports
    from vattn.lab.bench.interleaved_run import Limits
    from vattn.lab.bench.kernel_bench import bench_kernels
    from vattn.models.describe import describe_model

    reports.check_writable(options.json_file)
    reports.check_drawable(options.html_file)
    if systems.peer:
        raise ConfigError("--peer: kernels compares attention inside vattn; peers have none to lend")
    lengths = numbers(contexts or ("64,128" if options.smoke else "128,512,1024"), "--contexts")
    choices = choices_of(systems)
    console = Console()
    loaded, _ = load_model_for(model, options, console)
    longest = max(lengths) + 1
    budget = choices.kv_memory or 2 * batch * longest * loaded.spec.kv_token_bytes + (64 << 20)
    limits = Limits(max(batch, 1), max(512, batch), systems.max_model_len or longest, budget)
    compared = systems_of(loaded, choices, limits)
    repeats = repeats_of(options, 15)
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
    report["model"] = describe_model(loaded, limits.max_model_len)
    console.print(kernel_table(report))
    conclude(console, report, options)


@app.command()
def engine(
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes, comma-separated; default 1,16,64,128,256,512,1024.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps timed in each round.")] = 32,
    rounds: Annotated[int | None, typer.Option(help="Rounds in which all take turns; default 5.")] = None,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Seconds only, to see that it runs: batches of 1 and 8, two rounds."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
) -> None:
    """The engine without a model: host microseconds per request and decode step, by batch size.

    Scheduling, KV bookkeeping and entering tokens are timed, on a driver without memory; the model, sampling
    and text are not.
    """
    from vattn.commands.bench_tables import engine_table
    from vattn.lab.bench import bench_report as reports
    from vattn.lab.bench.engine_bench import BATCHES, bench_engine

    reports.check_writable(json_file)
    sizes = numbers(batches, "--batches") if batches else [1, 8] if smoke else BATCHES
    console = Console()
    with console.status("") as status:
        report = bench_engine(
            batches=sizes,
            steps=steps,
            rounds=rounds if rounds is not None else 2 if smoke else 5,
            progress=status.update,
        )
    console.print(engine_table(report))
    if json_file is not None:
        reports.write(json_file, report)
        console.print(f"everything measured was written to {json_file}")
