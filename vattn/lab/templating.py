"""Pages are Jinja2 templates in `vattn/lab/templates`: whatever a record holds is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vattn.lab.charts.palette import css_variables


def render(template: str, **values: Any) -> str:
    """A template of this package with these values. A name it does not know is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vattn.lab"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colour_variables"] = css_variables
    return environment
