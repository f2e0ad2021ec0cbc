"""`vattn compare` over workloads that share: what was saved is shown, and tokens stay equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models.tiny import build
from vattn.cli import app

ARGS = ["--requests", "6", "--prompt-len", "4:20", "--output-len", "4:9", "--max-model-len", "160"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return str(folder)


def compare(tiny: str, folder: Path, *args: str) -> tuple[str, dict[str, Any]]:
    figures = folder / "figures.json"
    # Enough memory that nobody has to wait in `static`, which shares none of it.
    command = ["compare", "--model", tiny, *ARGS, "--kv-memory", "16MiB", "--json", str(figures), *args]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "tokens equal on all backends: yes" in result.output
    return result.output, json.loads(figures.read_text())


def test_a_common_prefix_is_computed_once_where_it_can_be_shared(tiny: str, tmp_path: Path) -> None:
    args = ["--workload", "shared-prefix", "--prefix-len", "80", "--page-bytes", "4KiB"]
    args += ["--kv-layout", "per_layer"]
    shown, report = compare(tiny, tmp_path, *args)
    assert report["workload"]["name"] == "shared-prefix" and report["prefix_caching"] is True
    b = report["backends"]
    for name in ("virtual", "paged"):
        assert b[name]["prefix_hit_tokens"] == b[name]["cached_tokens"] == 5 * 80
        assert b[name]["computed_tokens"] == b["static"]["computed_tokens"] - 5 * 80
    assert b["paged"]["peak_shared_saved_bytes"] > 0
    # A page is 32 tokens of one layer's K or V, 2 x 3 of them for all: two are shared, 16 tokens are copied.
    assert b["virtual"]["units_shared"] == 5 * 2 * 6 and b["virtual"]["tails_copied"] == 5
    assert b["virtual"]["prefix_tokens_unshared_by_page_size"] == 5 * 16
    assert b["virtual"]["bytes_copied"] == 5 * 16 * 768
    assert b["paged"]["units_shared"] == 5 * 5 and b["paged"]["bytes_copied"] == 0
    assert b["static"]["prefix_hit_tokens"] == b["static"]["peak_shared_saved_bytes"] == 0
    for label in (
        "KV saved by sharing",
        "pages or blocks shared",
        "tails copied",
        "bytes copied",
        "page size",
    ):
        assert label in shown


def test_without_caching_nothing_is_found(tiny: str, tmp_path: Path) -> None:
    args = ["--workload", "shared-prefix", "--prefix-len", "64", "--no-prefix-caching"]
    _, report = compare(tiny, tmp_path, *args)
    assert report["prefix_caching"] is False
    for figures in report["backends"].values():
        assert figures["prefix_hit_tokens"] == figures["units_shared"] == 0


def test_turns_of_a_chat_go_on_where_the_last_one_ended(tiny: str, tmp_path: Path) -> None:
    _, report = compare(tiny, tmp_path, "--workload", "chat", "--requests", "3", "--turns", "3")
    b = report["backends"]
    assert report["workload"]["turns"] == 3
    assert b["virtual"]["rows_continued"] > 0 and b["paged"]["prefix_hit_tokens"] > 0
    assert b["static"]["computed_tokens"] > b["virtual"]["computed_tokens"]


@pytest.mark.parametrize("workload", ["parallel-sampling", "beam"])
def test_outputs_of_one_prompt_are_forked(workload: str, tiny: str, tmp_path: Path) -> None:
    _, report = compare(tiny, tmp_path, "--workload", workload, "--samples", "3")
    for figures in report["backends"].values():
        assert figures["forks"] >= 6 * 2
        assert figures["output_throughput"] > 0
    assert report["backends"]["virtual"]["tails_copied"] > 0


def test_an_unknown_workload_is_refused() -> None:
    result = CliRunner().invoke(app, ["compare", "--workload", "magic"])
    assert result.exit_code != 0
    assert "magic" in f"{result.output} {result.exception}"
