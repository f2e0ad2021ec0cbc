"""Peers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vattn.errors import ConfigError
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.peers.generate_batch import GenerateBatch
from vattn.lab.bench.peers.llama_cpp import LlamaCpp
from vattn.lab.bench.peers.vllm import Vllm
from vattn.lab.bench.target import System

if TYPE_CHECKING:
    from vattn.models.loader import LoadedModel

PEERS = ("generate_batch", "vllm", "llama.cpp")


def check_peers(names: Sequence[str]) -> None:
    """Raise ConfigError for a name nobody has."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peer {name!r} is unknown: use one of {', '.join(PEERS)}")


def peer_systems(names: Sequence[str], model: str, loaded: LoadedModel, limits: Limits) -> list[System]:
    """The peers of these names, for the same model within the same limits.

    Raises ConfigError, saying what to install, before anything is loaded twice.
    """
    check_peers(names)
    systems: list[System] = []
    for name in names:
        if name == "generate_batch":
            systems.append(GenerateBatch(model, loaded, limits))
        elif name == "vllm":
            systems.append(Vllm(loaded, limits))
        else:
            systems.append(LlamaCpp(loaded, limits))
    return systems
