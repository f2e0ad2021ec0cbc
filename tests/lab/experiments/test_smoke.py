"""Every experiment, small: it runs, concludes in three sentences and draws, and can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.lab.experiments.registry import EXPERIMENTS, experiment


@pytest.mark.parametrize("name", [known.name for known in EXPERIMENTS])
def test_an_experiment_runs_and_is_read_again(name: str, tmp_path: Path) -> None:
    file, figure, again = tmp_path / "record.json", tmp_path / "first.png", tmp_path / "again.png"
    command = ["bench", "experiment", name]
    result = CliRunner().invoke(app, [*command, "--smoke", "--json", str(file), "--figure", str(figure)])
    assert result.exit_code == 0, (result.output, result.exception)
    record = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (record["format"], record["name"], record["smoke"]) == ("vattn-experiment-1", name, True)
    assert record["model"]["name"] and record["environment"]["torch"]
    assert record["findings"] == list(experiment(name).findings(record["parts"]))
    assert len(record["findings"]) == 3
    for sentence in record["findings"]:
        assert sentence[0] == sentence[0].upper() and sentence.endswith(".")
        assert sentence in " ".join(result.output.split()), "it may be wrapped"
    assert figure.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, [*command, "--from", str(file), "--figure", str(again)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert again.read_bytes() == figure.read_bytes(), "a record is all that a figure needs"
