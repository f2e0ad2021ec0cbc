"""What a rule has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["problem", "advice", "note"]
"""`problem`: it costs now. `advice`: better is to be had. `note`: good to know."""


@dataclass(frozen=True)
class Finding:
    """One sentence, the figures it rests on, and what to do."""

    rule: str
    kind: Kind
    sentence: str
    evidence: tuple[str, ...]
    """With numbers, and the threshold they crossed."""
    advice: tuple[str, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        return {**record, "evidence": list(self.evidence), "advice": list(self.advice)}
