"""What the doctor reads, how it reasons, and what the command shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.engines import stepped
from tests.lab.doctor.cases import measured_record, requests, tiny
from vattn import LLM, SamplingParams
from vattn.cli import app
from vattn.errors import ConfigError
from vattn.lab.bench.bench_record import as_bench
from vattn.lab.doctor.case import Case, Length
from vattn.lab.doctor.diagnose import RULES, diagnose, diagnose_bench, diagnose_record
from vattn.lab.doctor.size_rules import best, choices, waste


def test_a_case_without_records_is_not_judged() -> None:
    """A peer tells nothing about its memory."""
    diagnosis = diagnose(Case("peer", "peer"))
    assert diagnosis.verdict == "unknown" and not diagnosis.findings
    assert all(rule(Case("peer", "peer")) is None for rule in RULES)


def test_waste_is_what_a_request_leaves_unused_over_its_life() -> None:
    """16 tokens a block: a prompt of 16 that grows by 16 has 1 to 16 of its second block."""
    assert waste([Length(16, 16)], 16) == pytest.approx(1 - 24.5 / 32, abs=0.02)
    assert waste([Length(32, 0)], 16) == 0
    assert waste([Length(17, 0)], 16) == pytest.approx(15 / 32)
    assert waste([Length(17, 0, 3), Length(32, 0, 5)], 16) == pytest.approx(45 / 256)


def test_the_best_size_is_the_largest_that_wastes_little() -> None:
    case = Case("c", "paged", lengths=[Length(1000, 1000, 10)], unit_tokens=16)
    found = best(choices(case))
    assert found is not None and found.label == "64 tokens" and found.waste <= 0.05
    larger = next(size for size in choices(case) if size.label == "128 tokens")
    assert larger.waste > 0.05


def test_pages_are_weighed_in_both_layouts() -> None:
    model = {"num_layers": 2}
    case = Case("c", "virtual", model, lengths=[Length(60, 8)], token_bytes=512, unit_tokens=512)
    labels = {size.label: size.tokens for size in choices(case)}
    assert labels["64.0 KiB per_layer"] == 512 and labels["64.0 KiB interleaved"] == 128


def test_noise_and_failures_are_told() -> None:
    wide = {"median": 100.0, "low": 80.0, "high": 130.0, "n": 9, "coverage": 0.96}
    case = Case(
        "c", "paged", summary={"output_throughput": wide}, failed=2, finished=8, errors=["out of seats"]
    )
    found = {finding.rule: finding for finding in diagnose(case).findings}
    assert "50%" in found["noise"].evidence[0]
    assert found["failures"].kind == "problem" and "out of seats" in found["failures"].evidence
    narrow = {**wide, "low": 99.0, "high": 101.0}
    assert not diagnose(Case("c", "paged", summary={"output_throughput": narrow})).findings


def test_swap_takes_the_time() -> None:
    case = Case("c", "paged", swap_s=2.0, swap_bytes=1e9, busy_s=10.0)
    assert [finding.rule for finding in diagnose(case).findings] == ["swap"]


def test_a_running_engine_with_a_full_cache() -> None:
    """A snapshot in the middle of a load that does not fit."""
    with LLM(
        tiny(), kv_backend="paged", kv_cache_memory_bytes=128 << 10, max_num_seqs=16, max_model_len=256
    ) as llm:
        for i in range(12):
            params = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False)
            stepped(llm).add_request(str(i), list(range(3, 51)), params)
        for _ in range(30):
            stepped(llm).step()
        [diagnosis] = diagnose_record(json.loads(json.dumps(llm.snapshot())))
    assert diagnosis.verdict == "memory"
    assert "cache-full" in {finding.rule for finding in diagnosis.findings}


def test_a_running_engine_with_room() -> None:
    with LLM(tiny(), kv_backend="virtual", kv_cache_memory_bytes=8 << 20, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
        llm.generate([[3, 4, 5]] * 4, params, use_tqdm=False)
        [diagnosis] = diagnose_record(json.loads(json.dumps(llm.snapshot())))
    assert diagnosis.verdict == "not-memory"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("doctor") / "bench.json"
    file.write_text(json.dumps(measured_record(requests(8, "8:16", "8"), kv_kib=1024, kv_backend="paged")))
    return file


def test_the_command_says_it_in_words(record: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(record)])
    assert result.exit_code == 0
    assert "KV memory is not your problem" in result.output
    assert "because" in result.output and "try" in result.output and "threshold" in result.output


def test_the_command_says_it_in_json(record: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(record), "--json", "--run", "planted"])
    [diagnosis] = json.loads(result.output)
    assert diagnosis["name"] == "planted" and diagnosis["verdict"] == "not-memory"
    for finding in diagnosis["findings"]:
        assert set(finding) == {"rule", "kind", "sentence", "evidence", "advice", "numbers"}


def test_what_is_no_record_is_refused(tmp_path: Path, record: Path) -> None:
    file = tmp_path / "x.json"
    for text, said in (
        ("nonsense", "can't be read as JSON"),
        ("[]", "not a JSON object"),
        ('{"format": "other"}', "neither a benchmark record"),
        ('{"format": "vattn-snapshot-1"}', "damaged snapshot"),
        ('{"format": "vattn-bench-1", "runs": []}', "no runs"),
    ):
        file.write_text(text)
        result = CliRunner().invoke(app, ["doctor", str(file)])
        assert isinstance(result.exception, ConfigError) and said in str(result.exception), text
    result = CliRunner().invoke(app, ["doctor", str(record), "--run", "nobody"])
    assert isinstance(result.exception, ConfigError) and "planted" in str(result.exception)


def test_a_damaged_record_is_refused(record: Path) -> None:
    damaged = json.loads(record.read_text())
    damaged["runs"][0]["repeats"][0]["steps"]["in_use"].pop()
    with pytest.raises(ConfigError, match="differ in length"):
        diagnose_bench(as_bench(damaged))
