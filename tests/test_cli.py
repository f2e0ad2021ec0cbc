"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models.tiny import build

VATTN = [sys.executable, "-m", "vattn.cli"]


def vattn(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*VATTN, *args], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return str(folder)


def test_help_names_every_command() -> None:
    text = vattn("--help").stdout
    for command in ("generate", "compare", "info"):
        assert command in text


def test_info_says_what_is_there_and_why_not() -> None:
    text = vattn("info").stdout
    assert "host driver" in text and "granularity" in text
    assert "CUDA driver" in text


def test_compare_reports_equal_tokens_and_every_figure(tiny: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    args = ["--model", tiny, "--requests", "6", "--prompt-len", "4:40", "--output-len", "4:12"]
    shown = vattn("compare", *args, "--max-model-len", "128", "--json", str(figures)).stdout
    assert "tokens equal on all backends: yes" in shown
    report = json.loads(figures.read_text())
    assert report["tokens_equal"] is True
    assert list(report["backends"]) == ["virtual", "paged", "static"]
    keys = {
        "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "peak_kv_bytes",
        "kv_utilization", "peak_running", "preemptions", "driver_calls", "map_stall_ms",
    }  # fmt: skip
    for figure in report["backends"].values():
        assert keys <= set(figure)
        assert figure["output_throughput"] > 0 and 0 < figure["kv_utilization"] <= 1
    virtual, static = report["backends"]["virtual"], report["backends"]["static"]
    assert virtual["driver_calls"]["map"] > 0 and virtual["map_stall_ms"] > 0
    assert static["driver_calls"] == {}
    assert static["peak_running"] == 4, "by default the budget is four static requests"
    assert static["kv_utilization"] < 0.5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["compare", "--backends", "magic"], "kv_backend='magic'"),
        (["compare", "--backends", ""], "--backends"),
        (["compare", "--kv-memory", "lots"], "not a size"),
        (["compare", "--prompt-len", "9:3"], "prompt_len"),
        (["generate", "x", "--model", "./nowhere"], "nowhere"),
        (["generate", "x", "--temperature", "nan"], "temperature"),
        (["generate", "x", "--beam-width", "2", "--chat"], "--beam-width"),
    ],
)
def test_mistakes_end_in_one_line(args: list[str], says: str) -> None:
    done = subprocess.run([*VATTN, *args], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (1, 2)
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_several_outputs_of_one_prompt() -> None:
    """From the demo model, which has a tokenizer: two samples, and two beams with their scores."""
    base = [*VATTN, "generate", "The capital of France is", "--max-tokens", "3"]
    for more, scored in ((["--n", "2", "--temperature", "1", "--seed", "1"], 0), (["--beam-width", "2"], 2)):
        done = subprocess.run([*base, *more], capture_output=True, text=True, check=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("  -> ")]
        assert len(lines) == 2 and sum(line.endswith(")") for line in lines) == scored


def test_ctrl_c_ends_quietly(tiny: str) -> None:
    args = [
        "compare",
        "--model",
        tiny,
        "--requests",
        "2000",
        "--prompt-len",
        "100",
        "--output-len",
        "100",
        "--max-model-len",
        "256",
    ]
    process = subprocess.Popen([*VATTN, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "requests" in process.stdout.readline(), "the workload is announced: it runs"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
