"""All errors that users can get. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from vattn.vmm.driver import ArgumentError, DriverError, DriverUnavailable, OutOfMemory
from vattn.vmm.owner import WrongProcess

__all__ = [
    "ArgumentError",
    "CapacityError",
    "ConfigError",
    "DriverError",
    "DriverUnavailable",
    "ModelChanged",
    "ModelNotFound",
    "OutOfMemory",
    "QueueFull",
    "RequestError",
    "StepError",
    "UnsupportedModel",
    "VattnError",
    "WrongProcess",
]


class VattnError(Exception):
    """Base class of the engine's own errors. Driver errors are separate and come from `vattn.vmm`."""


class ConfigError(VattnError, ValueError):
    """An engine option is wrong or contradicts another."""


class ModelNotFound(VattnError, FileNotFoundError):
    """The model name is neither an installed package, a folder, a file nor a reachable hub id."""


class UnsupportedModel(VattnError):
    """The model needs something that the engine does not support. Raised before any weight is loaded."""


class ModelChanged(VattnError):
    """The caller's model was switched to another attention or to training while an LLM uses it."""


class RequestError(VattnError, ValueError):
    """A prompt or its sampling parameters are refused; the engine's state is untouched."""


class CapacityError(VattnError):
    """A request can never fit the KV cache or the model's context."""


class QueueFull(CapacityError):
    """Too many requests are waiting (`max_waiting`). The same request may be accepted later."""

    @classmethod
    def of(cls, tenant: str, waiting: int, new: int, limit: int) -> QueueFull:
        """`new` more requests of `tenant` would make it `waiting`, more than `limit`."""
        return cls(
            f"{waiting:,} requests of tenant {tenant!r} would have to wait, {new:,} of them new; "
            f"max_waiting={limit:,} allows no more: try again later"
        )


class StepError(VattnError, RuntimeError):
    """A step of the engine failed in the model, the sampler or the driver. `__cause__` is what they raised.

    `request_ids` names the requests in the step. Their state is the same as before the step.
    """

    def __init__(self, request_ids: Sequence[str], cause: BaseException) -> None:
        super().__init__(f"the step failed ({type(cause).__name__}: {cause}); the engine goes on, try again")
        self.request_ids = list(dict.fromkeys(request_ids))
