"""The terms on which a request is scheduled: its priority, its tenant and its timeout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from vattn.checks import each, shown, text, whole
from vattn.errors import RequestError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Service:
    """The terms of one request. Raises RequestError for invalid values.

    - `priority`: smaller is more urgent, as in vLLM. Used only with `scheduling_policy="priority"`.
    - `tenant`: the tenant that the request belongs to. Tenants get fair shares of tokens and memory.
    - `timeout_s`: seconds from arrival. A request that has not ended by then ends with `"timeout"`.
    """

    priority: int = 0
    tenant: str = DEFAULT_TENANT
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, Integral):
            raise RequestError(f"priority must be a whole number, got {shown(self.priority)}")
        object.__setattr__(self, "priority", whole("priority", self.priority, -(2**63), 2**63 - 1))
        if not isinstance(self.tenant, str) or not self.tenant:
            raise RequestError(f"tenant must be a name, got {shown(self.tenant)}")
        text("tenant", self.tenant)
        if self.timeout_s is None:
            return
        try:
            seconds = float(self.timeout_s) if isinstance(self.timeout_s, Real) else 0.0
        except OverflowError:
            seconds = math.nan
        if isinstance(self.timeout_s, bool) or not seconds > 0:
            raise RequestError(
                "timeout_s must be a positive number of seconds that a float can hold, or None, "
                f"got {shown(self.timeout_s)}"
            )
        object.__setattr__(self, "timeout_s", seconds)

    @staticmethod
    def each(
        count: int,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout_s: float | Sequence[float | None] | None = None,
    ) -> list[Service]:
        """Make the terms of `count` requests. Each argument is one value for all, or a list of one each."""
        columns = [
            each(name, value, count)
            for name, value in (("priority", priority), ("tenant", tenant), ("timeout_s", timeout_s))
        ]
        return [Service(*row) for row in zip(*columns, strict=True)]


DEFAULT_SERVICE = Service()
