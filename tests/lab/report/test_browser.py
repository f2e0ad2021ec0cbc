"""The page in a real browser: light and dark, with scripts and without, and on paper.

Where no browser is installed only the file can be looked at (test_page.py), and that is said.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.report.browser import Browser, find_browser
from tests.lab.report.pages import page

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no browser of Chromium's family in PATH")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(find_browser() or "", tmp_path_factory.mktemp("profile")) as found:
        yield found


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and rows (RGB) of an 8-bit PNG."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    data, at, header = b"", 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + size]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        at += 12 + size
    width, height, _, colour = struct.unpack(">IIBB", header[:10])
    step = {2: 3, 6: 4}[colour]
    raw, rows, above = zlib.decompress(data), list[bytes](), bytearray(width * step)
    for y in range(height):
        start = y * (width * step + 1)
        filtered, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for i in range(len(line)):
            left, up = (line[i - step] if i >= step else 0), above[i]
            corner = above[i - step] if i >= step else 0
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda c: abs(guess - c))
            line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth)[filtered]) & 255
        rows.append(bytes(line) if step == 3 else bytes(b for i, b in enumerate(line) if i % 4 != 3))
        above = line
    return width, height, rows


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_a_complaint(browser: Browser, file: Path, scheme: str) -> None:
    browser.open(file, scheme=scheme)
    assert browser.console == []
    assert [url for url in browser.requested if not url.startswith("data:")] == [file.as_uri()]
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 19, 24)"}[scheme]
    width, _, rows = pixels(browser.screenshot("#memory .full svg.wide", scale=0.3))
    colours = {row[3 * x : 3 * x + 3] for row in rows for x in range(width)}
    assert rows[0][:3] == {"light": b"\xff\xff\xff", "dark": b"\x11\x13\x18"}[scheme]
    assert len(colours) > 5, "the chart has marks"


def test_the_button_turns_the_colours(browser: Browser, file: Path) -> None:
    browser.open(file, scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate("document.getElementById('theme').textContent") == "Dark colours"
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(back) == "rgb(17, 19, 24)"
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(back) == "rgb(255, 255, 255)" and browser.console == []


@pytest.mark.parametrize("width", [1200, 800, 400])
def test_charts_are_seen_and_nothing_sticks_out(browser: Browser, file: Path, width: int) -> None:
    browser.open(file, width=width)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(s => {"
        " const b = s.getBoundingClientRect();"
        " const marks = s.querySelectorAll('.mark');"
        " return [b.width, b.height, marks.length]; }).filter(([w]) => w)"
    )
    assert len(sizes) > 25 and all(w > 100 and h > 60 and marks for w, h, marks in sizes)
    small = browser.evaluate(
        "[...document.querySelectorAll('svg.chart text')].filter(t => {"
        " const h = t.getBoundingClientRect().height, w = t.getBoundingClientRect().width;"
        " return w && Math.min(h, w) && Math.max(h, w) < 8; }).map(t => t.textContent)"
    )
    assert small == [], "too small to be read"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].flatMap(s => { const b = s.getBoundingClientRect();"
        " return [...s.querySelectorAll('text')].filter(t => { const a = t.getBoundingClientRect();"
        " return b.width && (a.left < b.left - 1 || a.right > b.right + 1); }).map(t => t.textContent); })"
    )
    assert outside == [], "labels that are cut off"


def test_a_pointer_over_memory_reads_its_figures(browser: Browser, file: Path) -> None:
    browser.open(file)
    box = browser.evaluate(
        "(() => { const s = document.querySelector('#memory .full svg.wide'); s.scrollIntoView();"
        " const b = s.getBoundingClientRect(); return [b.x + 100, b.y + b.height / 2]; })()"
    )
    browser.move(*box)
    assert browser.evaluate("document.querySelector('#memory .tip').hidden") is False
    text = browser.evaluate("document.querySelector('#memory .tip').textContent")
    assert "in use" in text and "running" in text and "iB" in text


def test_tables_and_charts_need_no_script(browser: Browser, file: Path) -> None:
    browser.open(file, scripts=False)
    width, height, rows = pixels(browser.screenshot("#tables", scale=0.2))
    assert width > 180 and height > 200
    dark = sum(row[3 * x] < 200 for row in rows for x in range(width))
    assert dark > 500, "there is text"
    browser.open(file)


def test_it_prints(browser: Browser, file: Path) -> None:
    browser.open(file, scheme="dark")
    printed = browser.pdf()
    assert printed.startswith(b"%PDF") and len(printed) > 50_000
