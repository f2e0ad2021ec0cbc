"""Calls that fail now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Flaky:
    """From here on, every `every`-th call of `owner.name`, beginning with the `first`, does nothing but fail.

    `failure`: what it raises; None: it returns None, as what is short of memory does.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        name: str,
        first: int,
        every: int,
        failure: Callable[[], Exception] | None,
    ) -> None:
        self.calls = 0
        self.failures = 0
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls < first or (self.calls - first) % every:
                return original(*args, **kwargs)
            self.failures += 1
            if failure is None:
                return None
            raise failure()

        monkeypatch.setattr(owner, name, call)


def planted() -> RuntimeError:
    """As torch has them."""
    return RuntimeError("planted: can't allocate memory")
