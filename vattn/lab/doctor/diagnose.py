"""All rules over a case, and the verdict: is KV memory the problem?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vattn.errors import ConfigError
from vattn.lab.bench.bench_record import Bench, as_bench
from vattn.lab.doctor import memory_rules, prefill_rules, prefix_rules, size_rules, speed_rules, trust_rules
from vattn.lab.doctor.case import Case
from vattn.lab.doctor.finding import Finding
from vattn.lab.doctor.from_bench import bench_case
from vattn.lab.doctor.from_snapshot import FORMAT as SNAPSHOT
from vattn.lab.doctor.from_snapshot import snapshot_case
from vattn.units import percent

Rule = Callable[[Case], Finding | None]
RULES: tuple[Rule, ...] = (
    trust_rules.failures,
    memory_rules.cache_full,
    memory_rules.preemption,
    memory_rules.reserved,
    size_rules.unit_size,
    prefix_rules.missed_prefixes,
    memory_rules.swapping,
    speed_rules.seats,
    speed_rules.token_budget,
    speed_rules.kv_bandwidth,
    prefill_rules.long_prefill,
    prefill_rules.prefill_in_the_way,
    speed_rules.mapping,
    speed_rules.barrier,
    speed_rules.fixed_cost,
    memory_rules.idle,
    trust_rules.noise,
)
ORDER = {"problem": 0, "advice": 1, "note": 2}

Verdict = Literal["memory", "tight", "not-memory", "unknown"]


@dataclass(frozen=True)
class Diagnosis:
    """Of one case. Findings: problems first."""

    name: str
    verdict: Verdict
    sentence: str
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def diagnose(case: Case) -> Diagnosis:
    """Every rule that has something to say."""
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    found.sort(key=lambda finding: ORDER[finding.kind])
    verdict, sentence = _verdict(case, {finding.rule for finding in found})
    return Diagnosis(case.name, verdict, sentence, tuple(found))


def _verdict(case: Case, rules: set[str]) -> tuple[Verdict, str]:
    if case.steps is None or not case.budget:
        return "unknown", "Nobody looked inside: nothing can be said about KV memory."
    waits = case.waits()
    seen = (
        f"requests needed up to {percent(case.full)} of the budget, waited "
        f"{percent(waits.memory)} of the time for memory and were preempted {case.preemptions:,.0f} times"
    )
    if rules & {"cache-full", "preemption"}:
        return "memory", f"KV memory is the bottleneck: {seen}."
    if waits.memory >= 0.02 or case.preemptions >= 1:
        return "tight", f"KV memory is tight, but costs little: {seen}."
    return "not-memory", f"KV memory is not your problem: {seen}."


def diagnose_record(record: Mapping[str, Any], source: str = "the record") -> list[Diagnosis]:
    """Of a bench JSON one diagnosis per run, of a snapshot one. Raises ConfigError for anything else."""
    if record.get("format") == SNAPSHOT:
        return [diagnose(snapshot_case(record))]
    if isinstance(record.get("runs"), list):
        return diagnose_bench(as_bench(record, source))
    raise ConfigError(
        f"{source} is neither a benchmark record (vattn bench … --json FILE) nor a snapshot "
        f"(LLM.snapshot()): its format is {record.get('format')!r}"
    )


def diagnose_bench(bench: Bench) -> list[Diagnosis]:
    """One per run that was repeated; a kernel benchmark has none."""
    return [diagnose(bench_case(bench, run)) for run in bench.runs if run.repeats]
