"""`vattn quality`, on a tiny model with a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.models.tiny import VOCAB, build
from vattn.cli import app
from vattn.errors import ConfigError
from vattn.kv.ranges import KVRanges


def vattn(*args: str) -> str:
    """What the command prints; errors are raised."""
    done = CliRunner().invoke(app, ["quality", *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are letters."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    letters = {chr(32 + i): i for i in range(VOCAB - 32)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return str(folder)


SMALL = ["--tokens", "120", "--prompts", "2", "--max-tokens", "5", "--chunk", "16"]


def test_every_way_is_reported(tiny: str, tmp_path: Path) -> None:
    figures, ranges, text = tmp_path / "f.json", tmp_path / "r.safetensors", tmp_path / "text.txt"
    text.write_text("What is stored is what is read. " * 10)
    files = ["--text", str(text), "--json", str(figures), "--save-ranges", str(ranges)]
    shown = vattn("--model", tiny, *SMALL, *files)
    assert "120 tokens" in shown
    report = json.loads(figures.read_text())
    assert report["format"] == "vattn-quality-1" and report["text"] == {"source": "text.txt", "tokens": 120}
    ways = [(run["kv_cache_dtype"], run["kv_scales"]) for run in report["runs"]]
    assert ways == [
        ("float32", None),
        ("int8", "token"),
        ("int8", "static"),
        ("float8_e4m3fn", "token"),
        ("float8_e4m3fn", "static"),
    ]
    for run in report["runs"]:
        assert run["positions"] == 120 and len(run["divergence"]) == 2
        assert 0 <= run["kl_mean"] <= run["kl_max"] and 0 < run["agreement"] <= 1
    assert KVRanges.load(ranges).k.shape == (3, 2)
    again = ["--kv-cache-dtype", "int8", "--kv-scales", "static", "--ranges", str(ranges)]
    vattn(
        "--model", tiny, *SMALL, *again, "--text", str(text), "--kv-backend", "paged", "--json", str(figures)
    )
    repeated = json.loads(figures.read_text())["runs"][1]
    assert repeated["kl_mean"] == pytest.approx(report["runs"][2]["kl_mean"], rel=0.05), "on paged the same"


def test_what_cannot_be_measured_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    for args, reason in (
        (["--kv-cache-dtype", "auto"], "measure int8 and fp8_e4m3"),
        (["--kv-scales", "channel"], "scales token and static"),
        (["--text", str(tmp_path / "none")], "--text"),
        (["--ranges", str(tmp_path / "none")], "no such file"),
        (["--json", str(tmp_path / "no" / "file")], "there is no folder"),
    ):
        with pytest.raises(ConfigError) as refused:
            vattn("--model", "no/such", *args)
        assert reason in str(refused.value)
