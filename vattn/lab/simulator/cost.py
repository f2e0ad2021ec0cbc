"""How long a step takes: a roofline of the forward pass, plus host, links and driver calls.

    device = linear + attention + all-reduces
      linear     max(weights read / bandwidth, 2 x parameters x rows / FLOPs)      (Williams et al., 2009)
      attention  decodes: KV read / bandwidth;  prompt chunks: 4 x heads x dim x layers x pairs / FLOPs
      links      2 all-reduces a layer: latency + 2 (tp - 1) / tp x rows x hidden x 2 bytes / link
    host   = per step + per request
    step   = max(device, host) with overlap, else their sum; plus driver calls that nothing hides

Every peak is multiplied by an efficiency. The efficiencies are parameters; `Efficiency` says where the
defaults come from, and `vattn.lab.simulator.calibrate` replaces all of this by a fit to measured steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from vattn.errors import ConfigError
from vattn.lab.simulator.gpus import Gpu
from vattn.lab.simulator.work import StepWork
from vattn.models.spec import ModelSpec


@dataclass(frozen=True)
class Efficiency:
    """What of the data sheet is reached, and what a step costs besides. All are assumptions to replace.

    - `linear_bandwidth`: share of peak when weights are streamed. 0.8: memory-bound kernels reach 80-90 %
      of HBM's peak in copy tests.
    - `linear_flops`: share of peak FLOPs of large bf16 matrix products. 0.65: what vendor libraries reach
      on large square products under power limits.
    - `kv_bandwidth`: share of peak when decodes stream KV. 0.7: below `linear_bandwidth`, sequences being
      of unequal length.
    - `attention_flops`: share of peak FLOPs of prompt attention. 0.4: FlashAttention-2 reaches 35 % of an
      H100 and up to 72 % of an A100, FlashAttention-3 75 % of an H100 (Shah et al., 2024, section 1).
    - `paged_decode`, `paged_prefill`: time of a paged kernel by a contiguous one's. FlashInfer measures
      1.01 and 1.10; `vattn bench kernels` measures ours.
    - `step_seconds`, `request_seconds`: host work of a step and of each request in it: a guess at a Python
      engine's; with overlap it hides behind any step that takes longer.
    - `link_latency`: seconds before an all-reduce moves bytes.
    """

    linear_bandwidth: float = 0.8
    linear_flops: float = 0.65
    kv_bandwidth: float = 0.7
    attention_flops: float = 0.4
    paged_decode: float = 1.01
    paged_prefill: float = 1.10
    step_seconds: float = 1e-3
    request_seconds: float = 10e-6
    link_latency: float = 10e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value, share = getattr(self, field.name), field.name.endswith(("bandwidth", "flops"))
            least = "in (0, 1]" if share else "at least 0"
            if not math.isfinite(value) or value < 0 or (share and not 0 < value <= 1):
                raise ConfigError(f"{field.name}={value!r} must be {least}")


@dataclass(frozen=True)
class CallSeconds:
    """Seconds of one driver call of each kind on a GPU.

    Defaults: the middle of what others measured on A100 and H100 (vAttention, section 6; GMLake); a GPU's
    own come from `vattn vmm bench`.
    """

    create: float = 60e-6
    release: float = 23e-6
    map: float = 2e-6
    set_access: float = 37e-6
    unmap: float = 30e-6


class StepCost(NamedTuple):
    """Seconds of one step."""

    duration: float
    stall: float
    """Of it: waiting for driver calls."""


class CostModel(Protocol):
    """Prices steps."""

    def step(self, work: StepWork) -> StepCost: ...

    def describe(self) -> dict[str, float | str]:
        """Its parameters, for the record."""
        ...


class Mapping(NamedTuple):
    """How driver calls meet compute."""

    hidden: bool
    """Made ahead by a thread: a step waits only for what takes longer than the step."""

    def stall(self, calls: float, step: float) -> float:
        """Seconds a step of `step` seconds waits for `calls` seconds of driver calls."""
        return max(0.0, calls - step) if self.hidden else calls


class Roofline:
    """The model above for one model on `tp` equal devices."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: Gpu,
        *,
        tp: int,
        weight_bytes: float,
        kv_token_bytes: int,
        paged: bool,
        mapping: Mapping,
        overlap: bool,
        efficiency: Efficiency,
    ) -> None:
        """`weight_bytes`: of one parameter. `kv_token_bytes`: of a token on one device."""
        self.model = model
        self.efficiency = e = efficiency
        self.mapping = mapping
        self.overlap = overlap
        self._per_param = weight_bytes / (tp * gpu.bandwidth * e.linear_bandwidth)
        self._per_flop = 1 / (tp * gpu.flops * e.linear_flops)
        self._kv = kv_token_bytes / (gpu.bandwidth * e.kv_bandwidth)
        pair_flops = 4 * model.num_heads * model.head_dim * model.num_layers
        self._pair = pair_flops / (tp * gpu.flops * e.attention_flops)
        self._decode = e.paged_decode if paged else 1.0
        self._prefill = e.paged_prefill if paged else 1.0
        self._reduces = 2 * model.num_layers if tp > 1 else 0
        self._row_link = 2 * (tp - 1) / tp * model.hidden_size * 2 / gpu.link_bandwidth

    def device(self, work: StepWork) -> float:
        """Seconds of the forward pass on the devices."""
        model = self.model
        read = model.layer_params_read(work.tokens) + (model.head_params if work.sampled else 0)
        flops = 2 * (model.active_params * work.tokens + model.head_params * work.sampled)
        linear = max(read * self._per_param, flops * self._per_flop)
        prompts = max(work.pairs * self._pair, work.prefill_kv * self._kv)
        attention = work.decode_kv * self._kv * self._decode + prompts * self._prefill
        return (
            linear + attention + self._reduces * (self.efficiency.link_latency + work.tokens * self._row_link)
        )

    def step(self, work: StepWork) -> StepCost:
        device = self.device(work)
        host = self.efficiency.step_seconds + self.efficiency.request_seconds * work.requests
        duration = max(device, host) if self.overlap else device + host
        stall = self.mapping.stall(work.calls, duration)
        return StepCost(duration + stall, stall)

    def describe(self) -> dict[str, float | str]:
        return {"kind": "roofline", **{f.name: getattr(self.efficiency, f.name) for f in fields(Efficiency)}}
