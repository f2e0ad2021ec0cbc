"""`vattn compare`: the same requests through every backend, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vattn.commands import options as opt
from vattn.units import nbytes

SHOWN = (
    ("prompt tokens from the prefix cache", "prefix_hit_tokens"),
    ("found again after preemption", "resumed_hit_tokens"),
    ("forks", "forks"),
    ("rows continued as they lay", "rows_continued"),
    ("pages or blocks shared", "units_shared"),
    ("tails copied", "tails_copied"),
    ("tokens not shared: page size", "prefix_tokens_unshared_by_page_size"),
    ("prefix entries evicted", "prefix_evictions"),
)
"""Counters of sharing, shown where they are not 0."""


def compare(
    model: opt.Model = "smollm2",
    workload: Annotated[
        str, typer.Option(help="random, shared-prefix, chat, parallel-sampling or beam.")
    ] = "random",
    requests: Annotated[
        int, typer.Option("--requests", "-n", help="Number of requests; of sessions in chat.")
    ] = 16,
    prompt_len: Annotated[str, typer.Option(help="Prompt tokens, low:high, log-uniform.")] = "16:512",
    output_len: Annotated[str, typer.Option(help="Output tokens, low:high, uniform.")] = "16:128",
    groups: Annotated[int, typer.Option(help="shared-prefix: groups that share one.")] = 1,
    prefix_len: Annotated[
        int | None, typer.Option(help="shared-prefix, chat: tokens in common. Default 256, in chat 0.")
    ] = None,
    turns: Annotated[int, typer.Option(help="chat: turns of a session.")] = 3,
    samples: Annotated[
        int, typer.Option(help="parallel-sampling, beam: outputs of each prompt; the beam width.")
    ] = 4,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Of virtual and paged.")
    ] = True,
    backends: Annotated[str, typer.Option(help="Backends, comma-separated.")] = "virtual,paged,static",
    kv_memory: opt.KVMemory = None,
    max_model_len: opt.MaxModelLen = 2048,
    max_num_seqs: opt.MaxNumSeqs = 64,
    max_num_batched_tokens: opt.MaxBatchedTokens = 512,
    kv_layout: opt.Layout = "auto",
    page_bytes: opt.PageBytes = None,
    block_size: opt.BlockSize = 16,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    seed: opt.Seed = 0,
    trace: opt.Trace = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Run the same requests on each KV backend at the same memory budget, and show what differed.

    Unless --kv-memory is given, the budget is what static needs to run four requests of the maximum
    length. --trace FILE.jsonl writes one log per backend: FILE-virtual.jsonl and so on.
    """
    console = Console()
    names = [name.strip() for name in backends.split(",") if name.strip()]
    budget = opt.parse_bytes(kv_memory, "--kv-memory")
    page = opt.parse_bytes(page_bytes, "--page-bytes")

    from vattn.config import KVCacheConfig
    from vattn.errors import ConfigError
    from vattn.lab.bench.compare import run_backend, tokens_equal
    from vattn.lab.bench.environment import environment
    from vattn.lab.bench.from_options import choose_workload
    from vattn.llm import LLM
    from vattn.models.attention import register_attention
    from vattn.models.loader import load_model

    for option, text in (("prompt_len", prompt_len), ("output_len", output_len)):
        low, high = opt.parse_range(text, f"--{option.replace('_', '-')}")
        if not 1 <= low <= high:
            raise ConfigError(f"{option} needs 1 <= low <= high, got {text}")
    for name in names:  # refuse before the model is loaded
        KVCacheConfig(backend=name, layout=kv_layout, page_bytes=page, block_size=block_size)  # type: ignore[arg-type]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--backends {backends!r}: name each backend once, e.g. virtual,paged,static")
    if trace is not None and not trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace {trace}: there is no folder {trace.absolute().parent}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    asked = choose_workload(
        "beam-search" if workload == "beam" else workload,
        requests=requests,
        prompt_len=prompt_len,
        output_len=output_len,
        groups=groups,
        prefix_len=prefix_len,
        turns=turns,
        samples=samples,
        seed=seed,
    )
    register_attention()
    with console.status(f"loading {model}"):
        loaded = load_model(model, device=device, dtype=dtype)
    spec = loaded.spec
    length = min(max_model_len or spec.max_model_len, spec.max_model_len)
    if asked.max_len > length:
        raise ConfigError(
            f"requests may have {asked.max_len} tokens, the longest allowed is {length}: "
            "lower --prompt-len or --output-len, or raise --max-model-len"
        )
    if budget is None:
        budget = 4 * length * spec.kv_token_bytes
    work = asked.generate(spec.vocab_size)
    outputs = sum(w.output_len * w.n for w in work)
    console.print(
        f"{len(work)} requests ({asked.name}), {sum(len(w.prompt_token_ids) for w in work):,} prompt and "
        f"{outputs:,} output tokens; KV budget {nbytes(budget)}, "
        f"{spec.kv_token_bytes:,} bytes a token; longest request {length:,} tokens"
    )

    results = []
    columns = (TextColumn("{task.description:8}"), TextColumn("{task.completed}/{task.total} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        for name in names:
            task = progress.add_task(name, total=outputs)
            with LLM(
                loaded,
                kv_backend=name,  # type: ignore[arg-type]
                kv_layout=kv_layout,  # type: ignore[arg-type]
                page_bytes=page,
                block_size=block_size,
                enable_prefix_caching=prefix_caching and name != "static",
                max_model_len=length,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_memory_bytes=budget,
                seed=seed,
                trace=None if trace is None else trace.with_stem(f"{trace.stem}-{name}"),
            ) as llm:
                results.append(
                    run_backend(name, llm, work, lambda done, total: progress.update(task, completed=done))  # noqa: B023
                )
            progress.remove_task(task)

    equal = tokens_equal(results)
    figures = {result.name: result.to_dict() for result in results}
    console.print(_table(figures))
    if len(results) > 1:
        console.print("tokens equal on all backends: " + ("[green]yes[/]" if equal else "[red]NO[/]"))
    if json_file is not None:
        report = {
            "tokens_equal": equal,
            "backends": figures,
            "workload": asked.describe(),
            "prefix_caching": prefix_caching,
            "model": model,
            "kv_memory_bytes": budget,
            "max_model_len": length,
            "device": str(device),
            "environment": environment(),
        }
        json_file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        console.print(f"figures written to {json_file}")
    if not equal:
        raise typer.Exit(1)


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="one model, one scheduler, the same requests: only memory differs")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")

    def row(label: str, show: Any) -> None:
        table.add_row(label, *[show(f) for f in figures.values()])

    row("output tokens/s", lambda f: f"{f['output_throughput']:.1f}")

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    for name in ("ttft", "tpot"):
        row(
            f"{name.upper()} p50 / p99 (ms)",
            lambda f, name=name: f"{ms(f[f'median_{name}_ms'])} / {ms(f[f'p99_{name}_ms'])}",
        )
    row("peak physical KV held", lambda f: nbytes(f["peak_kv_bytes"]))
    row("KV utilization", lambda f: f"{f['kv_utilization']:.1%}")
    row("KV saved by sharing, peak", lambda f: nbytes(f["peak_shared_saved_bytes"]))
    for label, name in SHOWN:
        if any(f[name] for f in figures.values()):
            row(label, lambda f, name=name: f"{f[name]:,}")
    if any(f["bytes_copied"] for f in figures.values()):
        row("bytes copied for sharing", lambda f: nbytes(f["bytes_copied"]))
    row("computed tokens", lambda f: f"{f['computed_tokens']:,}")
    row("peak running requests", lambda f: str(f["peak_running"]))
    row("preemptions", lambda f: str(f["preemptions"]))
    row("rows adopted", lambda f: str(f["rows_adopted"]))
    for kind in ("reserve", "create", "map", "set_access", "unmap"):
        row(f"driver calls: {kind}", lambda f, kind=kind: f"{f['driver_calls'].get(kind, 0):,}")
    row("map stall (ms)", lambda f: f"{f['map_stall_ms']:.1f}")
    return table
