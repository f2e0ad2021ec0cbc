"""`vattn quality`: what 8-bit KV costs, measured against the same model with its KV as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vattn.commands import options as opt

if TYPE_CHECKING:
    from vattn.lab.quality.measure import Quality


def quality(
    model: opt.Model = "smollm2",
    text: Annotated[Path | None, typer.Option(help="Text to measure on; default: built-in passages.")] = None,
    kv_cache_dtypes: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Types to measure, comma-separated.")
    ] = "int8,fp8_e4m3",
    kv_scales: Annotated[
        str, typer.Option("--kv-scales", help="token, static, or both; comma-separated.")
    ] = "token,static",
    ranges: Annotated[
        Path | None, typer.Option("--ranges", help="Calibration to use for static scales; default: make one.")
    ] = None,
    save_ranges: Annotated[
        Path | None, typer.Option("--save-ranges", help="Write the calibration here, for kv_scales=.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text to measure on at most.")] = 1024,
    context: Annotated[int, typer.Option(min=2, help="Tokens of one piece of text at most.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 64,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of free generation.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = 64,
    kv_backend: Annotated[str, typer.Option(help="virtual, paged or static.")] = "virtual",
    kv_layout: opt.Layout = "auto",
    kv_memory: opt.KVMemory = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """KL of the logits, agreement of greedy tokens, perplexity, and where free generation parts ways.

    Every engine reads the same text in chunks through its own KV cache. Nothing is assumed about the
    kernels: they read what is stored.
    """
    console = Console()
    ways = [
        (d, s) for d in _names(kv_cache_dtypes, "--kv-cache-dtype") for s in _names(kv_scales, "--kv-scales")
    ]
    memory = opt.parse_bytes(kv_memory, "--kv-memory")

    from vattn.config import KVCacheConfig
    from vattn.errors import ConfigError
    from vattn.kv.ranges import KVRanges
    from vattn.lab.bench.environment import environment
    from vattn.lab.quality.session import run, static_ranges, texts_of
    from vattn.models.attention import register_attention
    from vattn.models.loader import load_model

    for stored, scales in ways:  # refuse before the model is loaded
        if stored == "auto" or scales not in ("token", "static"):
            raise ConfigError(
                f"--kv-cache-dtype {stored} --kv-scales {scales}: measure int8 and fp8_e4m3, with scales "
                "token and static"
            )
        KVCacheConfig(backend=kv_backend, layout=kv_layout, dtype=stored)  # type: ignore[arg-type]
    for option, path in (("--json", json_file), ("--save-ranges", save_ranges)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}")
    given = None if ranges is None else KVRanges.load(ranges)
    source = None if text is None else _read(text)
    register_attention()
    with console.status(f"loading {model}"):
        loaded = load_model(model, device=device, dtype=dtype)
    texts = texts_of(loaded, source, tokens, context)
    count = sum(map(len, texts))
    with console.status("calibrating"):
        static = static_ranges(loaded, given) if any(s == "static" for _, s in ways) else None
    if save_ranges is not None and static is not None:
        static.save(save_ranges)
    console.print(
        f"{count:,} tokens of {text or 'built-in passages'} in steps of {chunk}; {prompts} prompts continued "
        f"by {max_tokens} tokens"
    )
    columns = (TextColumn("{task.completed}/{task.total} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=(len(ways) + 1) * (count + prompts * max_tokens))
        found = run(
            loaded,
            ways,
            static,
            texts,
            num_prompts=prompts,
            max_tokens=max_tokens,
            chunk=chunk,
            progress=lambda n: progress.advance(task, n),
            kv_backend=kv_backend,
            kv_layout=kv_layout,
            kv_cache_memory_bytes=memory,
        )
    console.print(_table(found, max_tokens))
    if json_file is not None:
        report: dict[str, Any] = {
            "format": "vattn-quality-1",
            "environment": environment(),
            "model": {"name": loaded.name, "dtype": loaded.spec.dtype_name},
            "text": {"source": "built-in passages" if text is None else text.name, "tokens": count},
            "chunk": chunk,
            "prompts": prompts,
            "max_tokens": max_tokens,
            "kv_backend": kv_backend,
            "static_ranges": None if static is None else ("built-in passages" if given is None else "given"),
            "runs": [quality.to_dict() for quality in found],
        }
        json_file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        console.print(f"figures written to {json_file}")


def _names(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter(f"{text!r} names nothing", param_hint=option)
    return names


def _read(path: Path) -> str:
    from vattn.errors import ConfigError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from error
    if not text.strip():
        raise ConfigError(f"--text {path} is empty")
    return text


def _table(found: list[Quality], max_tokens: int) -> Table:
    table = Table(title="against the same model with its KV unquantised")
    for name in (
        "KV dtype",
        "scales",
        "bytes/token",
        "of bf16",
        "KL mean",
        "KL p99",
        "KL max",
        "greedy agrees",
        "perplexity",
        "change",
        "free generation differs from token",
    ):
        table.add_column(name, justify="left" if name in ("KV dtype", "scales") else "right")
    for q in found:
        split = sorted(d for d in q.divergence if d is not None)
        where = f"{split[0]} at the earliest" if split else f"never in {max_tokens}"
        table.add_row(
            q.kv_cache_dtype,
            q.kv_scales or "-",
            f"{q.token_bytes:,}",
            f"{q.bytes_vs_bf16:.1%}",
            f"{q.kl_mean:.2e}",
            f"{q.kl_p99:.2e}",
            f"{q.kl_max:.2e}",
            f"{q.agreement:.2%}",
            f"{q.perplexity:.3f}",
            f"{q.perplexity_change:+.2%} ± {q.perplexity_change_error:.2%}",
            f"{where}; {len(split)} of {len(q.divergence)} differ",
        )
    return table
