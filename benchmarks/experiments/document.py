"""Put the recorded findings of all experiments into docs/benchmarks.md, and draw their figures.

    python benchmarks/experiments/document.py            # text and figures
    python benchmarks/experiments/document.py --check    # exit 1 where the text is not what the records say

Numbers in those paragraphs are never typed: they come from benchmarks/results/experiments/*.json.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from vattn.lab.bench.bench_report import write
from vattn.lab.experiments import panels, record
from vattn.lab.experiments.experiment import Experiment
from vattn.lab.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks" / "results" / "experiments"
IMAGES = ROOT / "docs" / "images"


def render(experiment: Experiment, made: dict[str, Any]) -> str:
    """What stands between the marks of an experiment: figure, findings, where they come from."""
    name, where = experiment.name, made["environment"]
    first, second, third = experiment.findings(made["parts"])
    threads = "one thread" if where["threads"] == 1 else f"{where['threads']} threads"
    return "\n".join(
        [
            f"![{experiment.question}](images/experiment-{name}.png)",
            "",
            f"1. {first}",
            f"2. {second}",
            f"3. {third}",
            "",
            f"({made['model']['name']}, {made['model']['dtype']}, {where['cpu']}, {threads}, torch "
            f"{where['torch']}, commit {where['commit']}, {where['date']}; "
            f"[{name}.json](../benchmarks/results/experiments/{name}.json))",
        ]
    )


def documented(text: str) -> str:
    """The document with every block between marks rendered anew. ValueError where one is missing."""
    for experiment in EXPERIMENTS:
        made = record.read(RECORDS / f"{experiment.name}.json", experiment)
        start, end = f"<!-- findings: {experiment.name} -->", "<!-- end -->"
        pattern = re.compile(re.escape(start) + r"\n.*?" + re.escape(end), re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{DOCUMENT.name} must hold {start} … {end} once")
        block = f"{start}\n{render(experiment, made)}\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def main() -> None:
    before = DOCUMENT.read_text(encoding="utf-8")
    after = documented(before)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if before == after else f"{DOCUMENT} is not what the records say: run {sys.argv[0]}")
    DOCUMENT.write_text(after, encoding="utf-8")
    for experiment in EXPERIMENTS:
        file = RECORDS / f"{experiment.name}.json"
        made = record.read(file, experiment)
        now = list(experiment.findings(made["parts"]))
        if made["findings"] != now:  # its words were changed since
            write(file, {**made, "findings": now})
        panels.save(experiment, made["parts"], IMAGES / f"experiment-{experiment.name}.png")


if __name__ == "__main__":
    main()
