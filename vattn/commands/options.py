"""Options that several commands share, and how sizes and ranges are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option("--model", "-m", help="'smollm2' (the demo model), a hub id, a folder or a .gguf file.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on CPU, the checkpoint's on CUDA) or a torch dtype.")]
Layout = Annotated[
    str, typer.Option("--kv-layout", help="auto, interleaved or per_layer; of virtual and static.")
]
PageBytes = Annotated[
    str | None, typer.Option("--page-bytes", help="Physical page of virtual, e.g. 64KiB; default: by device.")
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a block of paged.")]
KVDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto (the model's), int8 or fp8_e4m3.")]
KVScales = Annotated[
    str, typer.Option("--kv-scales", help="Of 8-bit KV: token, or a file of `vattn quality --save-ranges`.")
]
KVMemory = Annotated[
    str | None, typer.Option("--kv-memory", help="Budget of KV memory, e.g. 512MiB or 4GiB.")
]
MaxModelLen = Annotated[int | None, typer.Option(min=2, help="Longest request: prompt and output.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests running at once.")]
MaxBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="Tokens in one step.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Log every decision of the scheduler here, as JSON lines (vattn replay)."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload and of unseeded sampling.")]

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def parse_bytes(text: str | None, option: str) -> int | None:
    """'64KiB' -> 65536; None stays None. Raises typer.BadParameter."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a size; write e.g. 65536, 64KiB, 512MiB, 4GiB", param_hint=option
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_range(text: str, option: str) -> tuple[int, int]:
    """'16:512' -> (16, 512); '64' -> (64, 64). Raises typer.BadParameter."""
    match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
    if not match:
        raise typer.BadParameter(
            f"{text!r} is not a length or a range; write e.g. 64 or 16:512", param_hint=option
        )
    return int(match[1]), int(match[2] or match[1])
