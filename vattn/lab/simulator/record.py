"""What a simulation leaves behind: columns of steps, and its requests."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from vattn.kv.usage import MemoryUsage
from vattn.lab.simulator.work import StepWork


@dataclass
class StepColumns:
    """One entry per step. Times in seconds of the virtual clock, memory in bytes."""

    time_s: list[float] = field(default_factory=list)
    """Start of the step."""
    duration_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    virtual_reserved: list[int] = field(default_factory=list)
    physical: list[int] = field(default_factory=list)
    in_use: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    logical: list[int] = field(default_factory=list)
    shared_saved: list[int] = field(default_factory=list)
    tail_waste: list[int] = field(default_factory=list)
    external_waste: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    """In this step."""
    map_stall_s: list[float] = field(default_factory=list)
    decode_kv_tokens: list[int] = field(default_factory=list)
    prefill_kv_tokens: list[int] = field(default_factory=list)
    prefill_pairs: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.time_s)

    def add(
        self,
        start: float,
        duration: float,
        stall: float,
        work: StepWork,
        usage: MemoryUsage,
        running: int,
        waiting: int,
        preemptions: int,
    ) -> None:
        self.time_s.append(start)
        self.duration_s.append(duration)
        self.map_stall_s.append(stall)
        self.tokens.append(work.tokens)
        self.decodes.append(work.decodes)
        self.sampled.append(work.sampled)
        self.decode_kv_tokens.append(work.decode_kv)
        self.prefill_kv_tokens.append(work.prefill_kv)
        self.prefill_pairs.append(work.pairs)
        self.running.append(running)
        self.waiting.append(waiting)
        self.preemptions.append(preemptions)
        self.virtual_reserved.append(usage.virtual_reserved)
        self.physical.append(usage.physical)
        self.in_use.append(usage.in_use)
        self.parked.append(usage.parked)
        self.cached.append(usage.cached)
        self.free.append(usage.free)
        self.logical.append(usage.logical)
        self.shared_saved.append(usage.shared_saved)
        self.tail_waste.append(usage.tail_waste)
        self.external_waste.append(usage.external_waste)

    def usage(self, step: int) -> MemoryUsage:
        """The memory of one step."""
        return MemoryUsage(**{f.name: getattr(self, f.name)[step] for f in fields(MemoryUsage)})

    def to_dict(self) -> dict[str, list[float] | list[int]]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
