"""All experiments by name."""

from __future__ import annotations

from vattn.errors import ConfigError
from vattn.experiments.base import Experiment
from vattn.experiments.batching import Batching
from vattn.experiments.block_size import BlockSize
from vattn.experiments.cow import CopyOnWrite
from vattn.experiments.kernels import Kernels
from vattn.experiments.mapping import Mapping
from vattn.experiments.no_gain import NoGain
from vattn.experiments.page_size import PageSize
from vattn.experiments.preemption import Preemption
from vattn.experiments.prefix import Prefix
from vattn.experiments.waste import Waste

EXPERIMENTS: tuple[Experiment, ...] = (
    Waste(),
    BlockSize(),
    PageSize(),
    Batching(),
    CopyOnWrite(),
    Prefix(),
    Kernels(),
    Mapping(),
    NoGain(),
    Preemption(),
)
"""In the order of docs/benchmarks.md."""


def experiment(name: str) -> Experiment:
    """Raises ConfigError with the names there are."""
    for known in EXPERIMENTS:
        if known.name == name:
            return known
    raise ConfigError(
        f"there is no experiment {name!r}; there are {', '.join(known.name for known in EXPERIMENTS)}"
    )
