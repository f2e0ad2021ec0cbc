"""Rotary frequencies as a GGUF file gives them, in transformers' terms.

    frequency of pair i  =  base^(-2i/d)  ×  what `rope.scaling.*` does  ÷  `rope_freqs.weight`[i]

| in the file                                           | rope_type                                        |
|-------------------------------------------------------|--------------------------------------------------|
| nothing, scaling type `none`, factor 1                | default                                          |
| `rope.scaling.type` linear                            | linear                                           |
| `rope.scaling.type` yarn                              | yarn, its attention factor × `attn_factor`       |
| `rope_freqs.weight` as Llama 3.1 computes it          | llama3                                           |
| any other `rope_freqs.weight`                         | longrope with these divisors, short and long     |
| `rope_factors_short.weight`, `rope_factors_long.weight` | longrope                                       |

Combinations (divisors and a scaling) are refused. `Rope.check` compares what a model makes of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from vattn.errors import UnsupportedModel
from vattn.models.gguf_file import GgufSummary

DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = frozenset({DIVISORS, SHORT, LONG})
KEYS = frozenset(
    f"rope.{name}"
    for name in """
    dimension_count freq_base scale_linear scaling.type scaling.factor scaling.original_context_length
    scaling.attn_factor scaling.finetuned scaling.yarn_beta_fast scaling.yarn_beta_slow
    """.split()  # noqa: SIM905
)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Rope:
    """What a file says of rotary positions. `head_dim`: of the model; `context`: its longest sequence."""

    def __init__(self, summary: GgufSummary, head_dim: int, context: int) -> None:
        def key(name: str, default: Any = None) -> Any:
            return summary.fields.get(f"{summary.architecture}.rope.{name}", default)

        self.said = any(key(name) is not None for name in ("freq_base", "dimension_count", "scaling.type"))
        self.base = float(key("freq_base", 10000.0))
        self.dim = int(key("dimension_count") or head_dim)
        self.partial = self.dim / head_dim
        self.factor = float(key("scaling.factor", key("scale_linear", 0.0)) or 1.0)
        self.kind = str(key("scaling.type", "linear" if self.factor != 1.0 else "none"))
        self.attention = float(key("scaling.attn_factor", 1.0) or 1.0)
        self.original = int(key("scaling.original_context_length", 0) or context)
        self.betas = float(key("scaling.yarn_beta_fast", 32.0)), float(key("scaling.yarn_beta_slow", 1.0))
        self.divisors = self._read(summary, DIVISORS)
        self.short, self.long = self._read(summary, SHORT), self._read(summary, LONG)
        self.context = context
        where = f"{summary.architecture}.rope.scaling"
        if self.kind not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedModel(f"{where}.type={self.kind!r} is not a scaling that vattn knows")
        if (self.short is None) != (self.long is None) or (self.kind == "longrope" and self.short is None):
            raise UnsupportedModel(f"{where}.type={self.kind!r} needs both {SHORT} and {LONG}")
        scaled = self.kind in ("linear", "yarn") and self.factor != 1.0
        if sum((scaled, self.divisors is not None, self.short is not None)) > 1:
            raise UnsupportedModel(f"{where}.type={self.kind!r} together with {DIVISORS} or {SHORT}")
        if self.attention != 1.0 and not (self.kind == "yarn" or self.short is not None):
            raise UnsupportedModel(f"{where}.attn_factor={self.attention} with {where}.type={self.kind!r}")

    def _read(self, summary: GgufSummary, name: str) -> list[float] | None:
        """The divisors in a tensor; None if there is no such tensor."""
        if name not in summary.tensors:
            return None
        divisors = summary.read_vector(name)
        if len(divisors) != self.dim // 2 or not all(value > 0 for value in divisors):
            raise UnsupportedModel(f"{name} must hold {self.dim // 2} divisors above 0, not {len(divisors)}")
        return divisors

    def parameters(self) -> dict[str, Any]:
        """transformers' `rope_parameters`."""
        common = {"rope_theta": self.base}
        if self.partial != 1.0:
            common["partial_rotary_factor"] = self.partial
        if self.divisors is not None and (llama3 := self._as_llama3()):
            return {**common, **llama3}
        if self.divisors is not None:
            return {**common, **self._longrope(self.divisors, self.divisors, self.context)}
        if self.short is not None and self.long is not None:
            return {**common, **self._longrope(self.short, self.long, self.original)}
        if self.kind == "linear" and self.factor != 1.0:
            return {**common, "rope_type": "linear", "factor": self.factor}
        if self.kind == "yarn" and self.factor != 1.0:
            return {
                **common,
                "rope_type": "yarn",
                "factor": self.factor,
                "original_max_position_embeddings": self.original,
                "attention_factor": self._yarn_attention(),
                "beta_fast": self.betas[0],
                "beta_slow": self.betas[1],
            }
        return {**common, "rope_type": "default"}

    def _longrope(self, short: list[float], long: list[float], original: int) -> dict[str, Any]:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": self.context / original,
            "attention_factor": self.attention,
            "original_max_position_embeddings": original,
        }

    def _as_llama3(self) -> dict[str, Any] | None:
        """Llama 3.1's parameters if they give the file's divisors, else None."""
        assert self.divisors is not None
        factor = round(max(self.divisors), 3)
        low = _LLAMA3["original_max_position_embeddings"] / _LLAMA3["low_freq_factor"]
        high = _LLAMA3["original_max_position_embeddings"] / _LLAMA3["high_freq_factor"]
        for frequency, divisor in zip(self._plain(), self.divisors, strict=True):
            length = 2 * math.pi / frequency
            if length < high:
                expected = 1.0
            elif length > low:
                expected = factor
            else:
                smooth = (low / length - 1) / (_LLAMA3["high_freq_factor"] - 1)
                expected = 1 / ((1 - smooth) / factor + smooth)
            if not math.isclose(divisor, expected, rel_tol=1e-5):
                return None
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _plain(self) -> list[float]:
        return [self.base ** (-i / self.dim) for i in range(0, self.dim, 2)]

    def _yarn_attention(self) -> float:
        return self.attention * (1.0 + 0.1 * math.log(self.factor))

    def frequencies(self) -> tuple[list[float], float]:
        """Angle per position of each pair, and the factor of cos and sin, worked out as llama.cpp does."""
        plain = self._plain()
        divisors = self.divisors or self.short
        if divisors is not None:
            return [f / d for f, d in zip(plain, divisors, strict=True)], self.attention
        if self.kind == "linear":
            return [f / self.factor for f in plain], 1.0
        if self.kind != "yarn" or self.factor == 1.0:
            return plain, 1.0

        def turns_at(beta: float) -> float:
            return self.dim * math.log(self.original / (beta * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(0, math.floor(turns_at(self.betas[0])))
        high = min(self.dim - 1, math.ceil(turns_at(self.betas[1])))
        mixed = []
        for pair, frequency in enumerate(plain):
            ramp = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
            mixed.append(frequency / self.factor * (1 - ramp) + frequency * ramp)
        return mixed, self._yarn_attention()

    def check(self, model: nn.Module, config: Any) -> None:
        """Compare with the rotary embedding that the model class makes of `config`.

        Raises UnsupportedModel if the class does something else with the parameters it was given.
        """
        embeddings = {type(module) for module in model.modules() if hasattr(module, "inv_freq")}
        if not embeddings and not self.said and self.divisors is None:
            return  # learned positions, and a file that says nothing of rotary ones
        if len(embeddings) != 1:
            raise UnsupportedModel(f"{type(model).__name__} has no rotary embedding that could be checked")
        with torch.device("cpu"):
            made: Any = embeddings.pop()(config)
        frequencies, attention = self.frequencies()
        expected = torch.tensor(frequencies)
        if (
            made.inv_freq.shape != expected.shape
            or not torch.allclose(made.inv_freq, expected, rtol=1e-4, atol=0)
            or not math.isclose(getattr(made, "attention_scaling", 1.0), attention, rel_tol=1e-5)
        ):
            raise UnsupportedModel(
                f"{type(model).__name__} does not rotate as the file says (rope.*, {DIVISORS}): "
                f"rope_parameters={config.rope_parameters}"
            )
