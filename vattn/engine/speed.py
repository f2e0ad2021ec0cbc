"""Measures the engine's speed while it runs: seconds per prompt token and per decode step."""

from __future__ import annotations

DECAY = 0.8  # an older measurement keeps this share of its weight with each new one
FEW_TOKENS = 16  # with fewer prompt tokens, a step's time says little about their cost


class SpeedMeter:
    """Keeps exponential averages over steps."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prompt_s: float | None = None

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Record that a step of `decodes` decodes and `prompt_tokens` prompt tokens took `seconds`."""
        if not prompt_tokens and decodes:
            self._decode_s = _average(self._decode_s, seconds)
        elif prompt_tokens >= FEW_TOKENS:
            # The step also ran decodes. Their time is not part of the prompt's cost.
            own = seconds - (self._decode_s or 0.0 if decodes else 0.0)
            self._prompt_s = _average(self._prompt_s, max(own, seconds / 10) / prompt_tokens)

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """Average seconds per prompt token; None until a prompt has been computed."""
        return self._prompt_s


def _average(old: float | None, new: float) -> float:
    return new if old is None else DECAY * old + (1 - DECAY) * new
