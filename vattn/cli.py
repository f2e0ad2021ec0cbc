"""The command line: `vattn COMMAND`. Commands import heavy modules themselves, so `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

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


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. An error is printed as one line on stderr.

    0: success. 1: the command ran, but its result is bad (tokens differ, a rule fails), or a driver failed.
    2: the command can't do what was asked. 130: Ctrl-C.
    """
    from vattn.errors import DriverError, DriverUnavailable, VattnError

    try:
        for position, argument in enumerate(arguments, 1):
            if not argument.isascii():
                _require_text(position, argument)
        return int(app(list(arguments), prog_name="vattn", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except typer.Abort:
        _complain("aborted")
        return 1
    except (DriverError, DriverUnavailable) as error:
        _complain(f"error: {error}")
        return 1
    except (VattnError, OSError) as error:
        _complain(f"error: {error}")
        return 2
    except RecursionError:
        _complain("error: a file given is nested too deeply to be read")
        return 2
    except _UsageError as error:
        help_of = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
            typer.echo(error.format_message(), err=True)
        else:
            _complain(f"error: {error.format_message().rstrip('. ')}{help_of}")
        return 2


_UsageError: Any = typer.BadParameter.__base__
"""typer has its own copy of click's errors, with no public name for this one."""


def _require_text(position: int, argument: str) -> None:
    """Refuse an argument that is not UTF-8, because it can be neither tokenised nor printed."""
    from vattn.checks import text
    from vattn.errors import ConfigError

    text(f"argument {position}", argument, error=ConfigError)


def _complain(message: str) -> None:
    print(" ".join(message.split()), file=sys.stderr)


def main() -> None:
    """Run the command of `sys.argv` and exit with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
