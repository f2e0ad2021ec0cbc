"""`vattn kernels`: what the attention kernels compile to, on a machine with no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def kernels(
    static: Annotated[
        bool, typer.Option("--static", help="Compile every kernel and measure its machine code.")
    ] = False,
    cc: Annotated[str, typer.Option(help="Compute capabilities, comma-separated.")] = "80,90,100",
    only: Annotated[str, typer.Option(help="Cases whose name contains this, e.g. decode/paged-16.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Representative cases only.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if a kernel is worse than recorded for this Triton.")
    ] = False,
) -> None:
    """Compile the Triton kernels for GPUs that need not be there, and show what they are made of.

    Registers, spills, shared memory, instructions of the main loop, the share that is integer arithmetic,
    load widths, and which copy and matrix instructions are used. Nothing runs on a GPU.
    """
    from vattn.errors import ConfigError

    if not static:
        raise typer.BadParameter("say --static: it is the only check there is", param_hint="--static")
    capabilities = [part.strip() for part in cc.split(",")]
    if not all(part.isdecimal() for part in capabilities):
        raise typer.BadParameter(f"{cc!r} is not a list like 80,90,100", param_hint="--cc")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="--json")

    from vattn.kernels import aot
    from vattn.kernels.cases import all_cases

    if not any(only in case.name for case in all_cases()):
        raise typer.BadParameter(f"no case's name contains {only!r}", param_hint="--only")
    arguments = ["--static", "--cc", ",".join(capabilities), "--only", only]
    arguments += ["--quick"] * quick + ["--check"] * check
    arguments += ["--json", str(json_file)] if json_file is not None else []
    try:
        code = aot.main(arguments)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if code:
        raise typer.Exit(code)
