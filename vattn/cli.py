"""The command line: `vattn COMMAND`. Heavy imports happen inside commands, so `--help` is quick."""

from __future__ import annotations

import sys

import typer

from vattn.commands.bench import app as bench
from vattn.commands.compare import compare
from vattn.commands.doctor import doctor
from vattn.commands.generate import generate
from vattn.commands.info import info
from vattn.commands.kernels import kernels
from vattn.commands.pagemap import pagemap
from vattn.commands.quality import quality
from vattn.commands.replay import replay
from vattn.commands.report import report
from vattn.commands.simulate import simulate
from vattn.commands.top import limit, top
from vattn.commands.vmm import app as vmm

app = typer.Typer(
    help="LLM inference with switchable KV-cache backends: virtual, paged, static.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(compare)
app.add_typer(bench, name="bench")
app.command()(info)
app.add_typer(vmm, name="vmm")
app.command()(kernels)
app.command()(quality)
app.command()(replay)
app.command()(report)
app.command()(doctor)
app.command()(simulate)
app.command()(pagemap)
app.command()(top)
app.command()(limit)


def main() -> None:
    """Run a command. Errors of ours end with one line on stderr and status 1; Ctrl-C with 130."""
    from vattn.errors import DriverError, DriverUnavailable, VattnError

    try:
        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (VattnError, DriverError, DriverUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
