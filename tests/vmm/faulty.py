"""A driver that fails on command: which call fails is counted over the kinds that can."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vattn.vmm.driver import UNKNOWN, Driver, DriverError, OutOfMemory

CALLS = ("reserve", "free", "create", "release", "map", "set_access", "unmap")


class FaultyDriver:
    """Passes calls on to `driver`, except for the `fail_at`-th (from 1), which raises and does nothing.

    `kinds`: which calls are counted and may fail. `lasting`: every counted call from that one on fails.
    A failing `create` raises `OutOfMemory`, anything else a plain `DriverError`. `fail_at` None: none fails.
    """

    def __init__(
        self,
        driver: Driver,
        fail_at: int | None = None,
        kinds: Iterable[str] = CALLS,
        lasting: bool = False,
    ) -> None:
        self.driver = driver
        self.fail_at = fail_at
        self.kinds = frozenset(kinds)
        self.lasting = lasting
        self.calls = 0  # counted so far
        self.failures: list[str] = []

    def heal(self) -> None:
        """Fail no more."""
        self.fail_at = None

    def arm(self, fail_at: int) -> None:
        """Fail at the `fail_at`-th call from now."""
        self.calls = 0
        self.fail_at = fail_at

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.driver, name)
        return self._guarded(name, attribute) if name in CALLS else attribute

    def _guarded(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if kind in self.kinds:
                self.calls += 1
                if self.fail_at is not None and (
                    self.calls == self.fail_at or (self.lasting and self.calls > self.fail_at)
                ):
                    self.failures.append(kind)
                    if kind == "create":
                        raise OutOfMemory(kind, hint="injected")
                    raise DriverError(kind, UNKNOWN, hint="injected")
            return call(*args, **kwargs)

        return guarded
