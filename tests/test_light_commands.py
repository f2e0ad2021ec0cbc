"""Commands that run no model import neither torch nor transformers: those take seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.engines import make_llm, random_prompts
from tests.models.tiny import TINY, VOCAB
from vattn import SamplingParams
from vattn.cli import app

HEAVY = {"torch", "transformers", "triton", "accelerate", "safetensors", "gguf"}

RUN = """
import atexit, json, sys
from vattn.cli import main
out, *arguments = sys.argv[1:]
sys.argv = ["vattn", *arguments]
atexit.register(lambda: json.dump(sorted(sys.modules), open(out, "w")))
main()
"""

EVERY_HELP = """
import json, sys
import typer.main
from typer.testing import CliRunner
from vattn.cli import app

def paths(command, path=()):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from paths(below, (*path, name))

found = {}
for path in paths(typer.main.get_command(app)):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output, (path, done.output)
    found[" ".join(path)] = sorted(set(json.loads(sys.argv[1])) & set(sys.modules))
print(json.dumps(found))
"""


def heavy_modules(tmp_path: Path, *arguments: str | Path) -> set[str]:
    """Those a command had imported when its process ended."""
    out = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN, out, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return HEAVY & set(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bench JSON with steps and requests."""
    path = tmp_path_factory.mktemp("record") / "bench.json"
    asked = ["simulate", "-n", "8", "--request-rate", "20", "--backend", "paged", "--json", str(path)]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0
    return path


def test_help_of_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HELP, json.dumps(sorted(HEAVY))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {"", "generate", "bench serve", "vmm test"} <= found.keys()
    assert not any(found.values()), found


def test_import_vattn() -> None:
    code = "import sys, vattn; assert 'LLM' in dir(vattn) and vattn.__all__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_report(record: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert heavy_modules(tmp_path, "report", record, "--html", page) == set()
    assert page.stat().st_size > 10_000


def test_doctor(record: Path, tmp_path: Path) -> None:
    assert heavy_modules(tmp_path, "doctor", record) == set()


def test_an_experiment_read_back(tmp_path: Path) -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "experiments"
    assert heavy_modules(tmp_path, "bench", "experiment", "list") == set()
    asked = ("bench", "experiment", "waste", "--from", results / "waste.json")
    assert heavy_modules(tmp_path, *asked, "--figure", tmp_path / "waste.png") == set()


def test_simulate_on_a_config(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True, **config}))
    assert heavy_modules(tmp_path, "simulate", "-m", tmp_path, "-n", "4", "--prompt-len", "8") == set()


def test_replay(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with make_llm("llama", "paged-16", trace=log) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        llm.generate(random_prompts(0, [5, 9], VOCAB), params, use_tqdm=False)
    assert heavy_modules(tmp_path, "replay", log) == set()
