"""`vattn kernels --static`: the kernels' machine code from the command line, with no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.kernels.test_static import missing_tools
from vattn.commands.kernels import kernels
from vattn.errors import ConfigError


@pytest.mark.skipif(bool(missing_tools()), reason="this Triton wheel comes without NVIDIA's tools")
def test_a_table_and_a_file(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "vattn.cli", "kernels", "--static", "--cc", "90", "--quick"]
    done = subprocess.run(
        [*command, "--only", "decode/contiguous/bf16/d128", "--json", str(figures)],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "decode/contiguous/bf16/d128/decode_kernel/sm90" in done.stdout
    found = json.loads(figures.read_text())["kernels"]
    assert {k["cc"] for k in found} == {90} and all(k["registers"] > 0 for k in found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"static": False}, "--static"),
        ({"cc": "ninety"}, "'ninety' is not a list"),
        ({"only": "no such kernel"}, "'no such kernel'"),
        ({"json_file": Path("/nowhere/f.json")}, "no folder /nowhere"),
        ({"cc": "42"}, "compute capability 42"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((typer.BadParameter, ConfigError), match=says):
        kernels(**{"static": True, "cc": "90", "only": "", "json_file": None, **options})
