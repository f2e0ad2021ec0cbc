"""The options of `vattn bench`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vattn.commands import options as opt


@dataclass(frozen=True)
class ModelOptions:
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="'smollm2' (default), 'tiny' (random weights, nothing to download; default with --smoke), a "
            "hub id, a folder or a .gguf file.",
        ),
    ] = None
    device: opt.Device = "auto"
    dtype: opt.Dtype = "auto"


@dataclass(frozen=True)
class SystemOptions:
    """What is compared, and the limits that hold for all."""

    backends: Annotated[str, typer.Option(help="Backends, comma-separated, or 'none' for peers alone.")] = (
        "static,paged,virtual"
    )
    block_sizes: Annotated[str, typer.Option(help="Tokens in a block of paged; several: a sweep.")] = "16"
    page_bytes: Annotated[
        str | None, typer.Option(help="Pages of virtual, e.g. 64KiB,256KiB; default: by device.")
    ] = None
    layouts: Annotated[
        str, typer.Option(help="Layouts of virtual and static: auto, interleaved, per_layer.")
    ] = "auto"
    kv_dtypes: Annotated[
        str, typer.Option(help="KV in memory: auto (the model's), int8, fp8_e4m3; several: a sweep.")
    ] = "auto"
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other option of LLM and its values, e.g. background_mapping=true,false; also "
            "batching=continuous,static. May be repeated."
        ),
    ] = None
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Also run generate_batch (transformers), vllm or llama.cpp; may be repeated."),
    ] = None
    kv_memory: opt.KVMemory = None
    max_model_len: opt.MaxModelLen = None
    max_num_seqs: opt.MaxNumSeqs = 64
    max_num_batched_tokens: opt.MaxBatchedTokens = 512


@dataclass(frozen=True)
class WorkloadOptions:
    workload: Annotated[
        str,
        typer.Option(help="random, shared-prefix, chat, parallel-sampling or beam-search; see also --trace."),
    ] = "random"
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", help="Requests (chat: sessions); default 32.")
    ] = None
    prompt_len: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens: 64, 16:512 (log-uniform), uniform:16:512 or bimodal:32:1024:0.2; behind "
            "the prefix, or added by each turn, where there is one. Default 16:512."
        ),
    ] = None
    output_len: Annotated[
        str | None,
        typer.Option(help="Output tokens, written the same way; 16:128 is uniform. Default 16:128."),
    ] = None
    groups: Annotated[int, typer.Option(help="shared-prefix: groups that share one.")] = 4
    prefix_len: Annotated[
        int | None, typer.Option(help="shared-prefix, chat: tokens in common. Default 256, in chat 0.")
    ] = None
    turns: Annotated[int, typer.Option(help="chat: turns of a session.")] = 3
    think: Annotated[float, typer.Option(help="chat: mean seconds between an answer and the next turn.")] = (
        0.0
    )
    samples: Annotated[
        int, typer.Option("--samples", help="parallel-sampling, beam-search: outputs per prompt (n).")
    ] = 4
    trace: Annotated[
        Path | None, typer.Option(help="Replay a trace: own JSON lines, Mooncake or BurstGPT.")
    ] = None
    length_scale: Annotated[float, typer.Option(help="trace: multiply every length.")] = 1.0
    seed: opt.Seed = 0


@dataclass(frozen=True)
class ArrivalOptions:
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second; inf: all at once. Default: the trace's times, or inf."),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(help="poisson, gamma, constant, at-once or trace; default: poisson at --request-rate."),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of gamma arrivals: below 1 in bursts, 1 Poisson, above evener."),
    ] = None
    time_scale: Annotated[float, typer.Option(help="trace: multiply the times between arrivals.")] = 1.0
    max_concurrency: Annotated[int | None, typer.Option(help="Requests in flight at once.")] = None


@dataclass(frozen=True)
class RunOptions:
    repeats: Annotated[
        int | None,
        typer.Option(help="Measured runs of every system, interleaved. Default 5; 3 conclude nothing."),
    ] = None
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Seconds only, to see that it runs: a tiny random model, two repeats."),
    ] = False
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Draw everything measured as one HTML page.")
    ] = None
