"""What a request may expect of the scheduler: how urgent it is, whose it is, how long it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from vattn.errors import RequestError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Service:
    """Terms of one request. Raises RequestError for values that are none.

    - `priority`: smaller is more urgent, as in vLLM; counts under `scheduling_policy="priority"`.
    - `tenant`: on whose account it runs; tenants get fair shares of tokens and memory.
    - `timeout_s`: seconds from arrival; a request that has not ended by then ends with `"timeout"`.
    """

    priority: int = 0
    tenant: str = DEFAULT_TENANT
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority must be a whole number, got {self.priority!r}")
        if not isinstance(self.tenant, str) or not self.tenant:
            raise RequestError(f"tenant must be a name, got {self.tenant!r}")
        timeout = self.timeout_s
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, Real) or math.isnan(timeout) or timeout <= 0:
            raise RequestError(f"timeout_s must be a positive number of seconds or None, got {timeout!r}")

    @staticmethod
    def each(
        count: int,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout_s: float | Sequence[float | None] | None = None,
    ) -> list[Service]:
        """The terms of `count` requests, from one value for all or a list of one each."""
        columns = [
            _each(name, value, count)
            for name, value in (("priority", priority), ("tenant", tenant), ("timeout_s", timeout_s))
        ]
        return [Service(*row) for row in zip(*columns, strict=True)]


DEFAULT_SERVICE = Service()


def _each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts came with {len(value)} values of {name}")
    return list(value)
