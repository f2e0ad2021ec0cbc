"""A request as it grows: what `LLM.stream` returns."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vattn.outputs import RequestOutput

if TYPE_CHECKING:
    from vattn.delivery import Delivery


class OutputStream(Iterator[RequestOutput]):
    """The moments of one request; made by `LLM.stream`. Also a context manager."""

    def __init__(self, delivery: Delivery, request_id: str) -> None:
        self._delivery = delivery
        self.request_id = request_id
        self._open = True

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        try:
            output = self._delivery.pump(self.request_id)
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        if self._open:
            self._open = False
            self._delivery.drop([self.request_id])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.__dict__.get("_open"):
            self._delivery.abandon(self.request_id)
