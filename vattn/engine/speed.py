"""How fast this engine is, measured as it runs: seconds of a prompt token, of a decode step."""

from __future__ import annotations

DECAY = 0.8  # of an older measurement's weight with each new one
FEW_TOKENS = 16  # prompt tokens in a step below which its time says little about them


class SpeedMeter:
    """Exponential averages over steps."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._prompt_s: float | None = None

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of `decodes` decodes and `prompt_tokens` prompt tokens took `seconds`."""
        if not prompt_tokens and decodes:
            self._decode_s = _average(self._decode_s, seconds)
        elif prompt_tokens >= FEW_TOKENS:
            # Decodes ride along: what they take alone is not the prompt's.
            own = seconds - (self._decode_s or 0.0 if decodes else 0.0)
            self._prompt_s = _average(self._prompt_s, max(own, seconds / 10) / prompt_tokens)

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """None until a prompt was computed."""
        return self._prompt_s


def _average(old: float | None, new: float) -> float:
    return new if old is None else DECAY * old + (1 - DECAY) * new
