"""The examples and the benchmark run as their first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    """What a script of the repository prints; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_growing_tensors() -> None:
    out = run("examples/growing_tensor.py")
    assert "embeddings: 10,000 rows in 10,289,152 bytes" in out
    assert "replay buffer: 5,100 steps" in out and "log: 1,000 losses" in out


def test_a_cache_for_generate() -> None:
    out = run("examples/virtual_cache.py", "--tiny", "--tokens", "5")
    assert "the prompt: VirtualCache(2 layers, 200 of 2,048 tokens, 262,144 bytes mapped)" in out
    assert out.count("209 of 2,048 tokens") == 3
    assert "after reset: VirtualCache(2 layers, 0 of 2,048 tokens, 0 bytes mapped)" in out


def test_every_backend() -> None:
    out = run("examples/kv_backends.py", "--tiny")
    for backend in ("static", "paged", "virtual"):
        assert f"\n{backend} " in "\n" + out


@pytest.mark.smollm2
def test_a_cache_for_the_demo_model() -> None:
    out = run("examples/virtual_cache.py", "--tokens", "8")
    assert "Jupiter" in out and "Mercury" in out


def test_the_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    printed = run("benchmarks/hf_cache/run.py", "--smoke", "--out", str(out))
    report = json.loads(out.read_text())
    for result in report["models"].values():
        assert {"dynamic", "virtual", "virtual-tokens", "static"} <= result["cache_s"].keys()
        for cache in ("virtual", "virtual-tokens"):
            for memory, context in zip(result["memory"][cache], report["contexts"], strict=True):
                assert memory["used"] == result["token_bytes"] * (context + 1) <= memory["mapped"]
        for name in ("offloaded", "quantized-quanto"):  # measured, or said why not
            assert name in result["cache_s"] or f"{name} did not run: " in printed
