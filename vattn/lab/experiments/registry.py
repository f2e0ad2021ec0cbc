"""All experiments by name."""

from __future__ import annotations

from vattn.errors import ConfigError
from vattn.lab.experiments.batching import Batching
from vattn.lab.experiments.block_size import BlockSize
from vattn.lab.experiments.cow import CopyOnWrite
from vattn.lab.experiments.experiment import Experiment
from vattn.lab.experiments.mapping import Mapping
from vattn.lab.experiments.no_gain import NoGain
from vattn.lab.experiments.page_size import PageSize
from vattn.lab.experiments.paged_kernels import Kernels
from vattn.lab.experiments.preemption import Preemption
from vattn.lab.experiments.prefix_sharing import Prefix
from vattn.lab.experiments.waste import Waste

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
