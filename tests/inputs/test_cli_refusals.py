"""Every command refuses bad input with one sentence on stderr and status 2, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vattn.cli import app, run

NOWHERE = ["--model", "./nowhere"]
HUGE = "9" * 5000

COMMANDS: dict[str, list[str]] = {
    # command: what else it needs, so that it would end (refused) without loading a model
    "generate": ["prompt", *NOWHERE],
    "compare": NOWHERE,
    "quality": NOWHERE,
    "bench throughput": NOWHERE,
    "bench latency": NOWHERE,
    "bench serve": NOWHERE,
    "bench memory": NOWHERE,
    "bench kernels": NOWHERE,
    "bench engine": ["--batches", "x"],
    "bench experiment": ["capacity", *NOWHERE],
    "bench vmm": ["--device", "nowhere"],
    "vmm test": ["--device", "nowhere"],
    "vmm bench": ["--device", "nowhere"],
    "kernels": ["--static", "--only", "nowhere"],
    "replay": ["nowhere"],
    "report": ["nowhere", "--html", "page.html"],
    "doctor": ["nowhere"],
    "simulate": ["--model", "nowhere"],
    "pagemap": ["nowhere", "--html", "page.html"],
    "top": ["--once", "--file", "folder"],
    "limit": ["engine", "1MiB", "--file", "folder"],
    "info": ["--nowhere"],
}

CASES: list[tuple[str, list[str]]] = list(COMMANDS.items())
CASES += [(command, [*needs, "--no-such-option"]) for command, needs in COMMANDS.items()]
CASES += [(command, [*needs, "\udce9"]) for command, needs in COMMANDS.items()]
CASES += [
    (command, [*COMMANDS[command], *more])
    for command, more in [
        *(
            ("generate", ["--" + name, value])
            for name, values in {
                "max-tokens": ["0", "-1", "x", HUGE, "1.5"],
                "temperature": ["nan", "inf", "-1", "hot"],
                "top-p": ["0", "2", "nan"],
                "top-k": ["-2", "x"],
                "seed": [HUGE, "x", "9" * 30],
                "n": ["0", "9" * 30],
                "beam-width": ["0", "x"],
                "kv-backend": ["", "magic"],
                "kv-layout": ["diagonal"],
                "page-bytes": ["-1", "lots", "\0", HUGE],
                "block-size": ["0", "x"],
                "kv-cache-dtype": ["int4"],
                "kv-scales": ["nowhere.safetensors", "binary"],
                "kv-memory": ["lots", "0", "1e400"],
                "max-model-len": ["1", "x"],
                "device": ["tpu", "", "cuda:99"],
                "dtype": ["int3", ""],
                "trace": ["no/such/folder/x.jsonl"],
                "model": ["", "\0", "binary", "folder", "no/such/folder/x", "x.gguf"],
            }.items()
            for value in values
        ),
        ("generate", ["--beam-width", "2", "--chat"]),
        ("compare", ["--backends", ","]),
        ("compare", ["--backends", "virtual,virtual"]),
        ("compare", ["--prompt-len", HUGE]),
        ("compare", ["--output-len", "9:3"]),
        ("compare", ["--json", "no/such/folder/x.json"]),
        ("compare", ["--requests", "0"]),
        ("compare", ["--workload", "nothing"]),
        ("quality", ["--text", "latin"]),
        ("quality", ["--text", "folder"]),
        ("quality", ["--ranges", "binary"]),
        ("quality", ["--kv-cache-dtype", ","]),
        ("bench throughput", ["--block-sizes", HUGE]),
        ("bench throughput", ["--sweep", "="]),
        ("bench throughput", ["--peer", "nothing"]),
        ("bench throughput", ["--repeats", "0"]),
        ("bench throughput", ["--trace", "binary"]),
        ("bench serve", ["--goodput", "ttft:nan"]),
        ("bench serve", ["--request-rate", "-1"]),
        ("bench serve", ["--max-concurrency", "0"]),
        ("bench kernels", ["--contexts", ","]),
        ("bench engine", ["--batches", ","]),
        ("bench engine", ["--batches", "0"]),
        ("bench engine", ["--steps", "0"]),
        ("bench engine", ["--rounds", "0"]),
        ("bench experiment", ["--figure", "no/such/folder/x.png"]),
        ("bench vmm", ["--page", "lots"]),
        ("kernels", ["--cc", "x"]),
        ("simulate", ["--backend", ""]),
        ("simulate", ["--backend", ","]),
        ("simulate", ["--gpu", "nothing"]),
        ("simulate", ["--assume", "x=y"]),
        ("simulate", ["--calibrate", "deep.json"]),
        ("pagemap", ["--every", "0"]),
        ("top", ["--interval", "0"]),
        ("limit", ["--total", "lots"]),
    ]
]
for bad in ("binary", "empty", "latin", "folder", "list.json", "number.json", "deep.json"):
    CASES += [("replay", [bad]), ("doctor", [bad])]
    CASES += [("report", [bad, "--html", "page.html"]), ("pagemap", [bad, "--html", "page.html"])]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are none of ours."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "empty").touch()
    (folder / "latin").write_bytes(b"caf\xe9 " * 50)
    (folder / "list.json").write_text("[1, 2]")
    (folder / "number.json").write_text("5")
    (folder / "deep.json").write_text("[" * 100_000)
    return folder


@pytest.mark.parametrize(
    ("command", "arguments"), CASES, ids=lambda value: value if isinstance(value, str) else ascii(value)[:80]
)
def test_bad_input_ends_in_one_sentence(
    command: str,
    arguments: list[str],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    status = run([*command.split(), *arguments])
    shown = capsys.readouterr()
    assert status == 2, shown
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    assert "Traceback" not in shown.out


def commands(group: Any, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        yield from commands(command, f"{path}{name} ") if hasattr(command, "commands") else [path + name]


def test_the_table_has_every_command() -> None:
    from typer.main import get_command

    assert set(commands(get_command(app))) == set(COMMANDS)
