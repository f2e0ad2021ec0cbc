"""The record of an experiment, as JSON (`vattn-experiment-1`): parts, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError
from vattn.lab.bench.environment import environment
from vattn.lab.experiments.experiment import Experiment

if TYPE_CHECKING:
    from vattn.lab.experiments.setting import Setting

FORMAT = "vattn-experiment-1"


def make(experiment: Experiment, setting: Setting) -> dict[str, Any]:
    """Run it and record it."""
    from vattn.models.describe import describe_model

    where = environment()
    parts = experiment.measure(setting)
    return {
        "format": FORMAT,
        "name": experiment.name,
        "question": experiment.question,
        "smoke": setting.smoke,
        "environment": where,
        "model": describe_model(setting.loaded, setting.loaded.spec.max_model_len),
        "findings": list(experiment.findings(parts)),
        "parts": parts,
    }


def read(file: Path, experiment: Experiment) -> dict[str, Any]:
    """A record of that experiment. Raises ConfigError for anything else."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"cannot read the record {file}: {why}") from why
    found = (record.get("format"), record.get("name")) if isinstance(record, dict) else (None, None)
    if found != (FORMAT, experiment.name):
        raise ConfigError(
            f"{file} is no {FORMAT} of {experiment.name!r}: its format is {found[0]!r}, its name {found[1]!r}"
        )
    result: dict[str, Any] = record
    return result
