"""Options that come in groups: a dataclass per group, which several commands take as one argument."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose parameters are the fields of the dataclasses that `command` takes.

    A parameter of `command` that is a dataclass is replaced by its fields, each with a default and
    `Annotated` with a `typer.Option`; any other stays as it is. Field names must differ over all groups.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    annotations: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not dataclasses.is_dataclass(kind):
            annotations[name] = kind
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[name] = kind
        fields = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            assert field.name not in annotations, f"two groups have an option {field.name}"
            annotations[field.name] = fields[field.name]
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=fields[field.name],
                )
            )

    def run(**values: Any) -> None:
        arguments = {
            name: kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        command(**arguments, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {**annotations, "return": None}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
