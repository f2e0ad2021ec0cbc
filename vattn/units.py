"""Formats numbers with units for people to read."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Three or four significant digits: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:,.2f}" if size >= 1 else f"{value:.3g}"


def axis(value: float) -> str:
    """A round number for an axis label, without trailing zeros."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def nbytes(value: float) -> str:
    """Binary units: 512 B, 64.0 KiB, 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB" if abs(value) < 1024 else f"{value / 1024:,.2f} TiB"


def seconds(value: float) -> str:
    """0 s, 250 µs, 12 ms, 3.5 s."""
    if value == 0 or abs(value) >= 1:
        return f"{number(value)} s"
    return f"{number(value * 1e3)} ms" if abs(value) >= 1e-3 else f"{number(value * 1e6)} µs"


def millis(value: float) -> str:
    """Format a time given in milliseconds."""
    return seconds(value / 1e3) if value >= 1000 or value < 1 else f"{number(value)} ms"


def nanos(value: float) -> str:
    """Format a time given in nanoseconds."""
    return f"{number(value)} ns" if value < 1000 else seconds(value / 1e9)


def percent(value: float) -> str:
    """Format a share as a percentage: 12.3%, 100%."""
    shown = round(float(value) * 100, 1)
    return f"{shown:.0f}%" if shown >= 100 or shown.is_integer() else f"{shown:.1f}%"
