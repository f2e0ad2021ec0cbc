"""`vattn top`, `vattn limit` and `vattn pagemap`, as run from a shell."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vattn.cli import app
from vattn.errors import ConfigError
from vattn.lab.page_maps.recorder import Recording
from vattn.scale.coordinator import Coordinator
from vattn.scale.ledger import CoordinatorError

runner = CliRunner()
MIB = 1 << 20


def run(*words: object) -> str:
    result = runner.invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# ---------------------------------------------------------------------- top, limit
@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two engines of this process: one that runs, one that has not stepped yet."""
    path = tmp_path / "engines.json"
    coordinator = Coordinator(path)
    for name in ("alpha", "beta"):
        coordinator.join(name=name, device="cpu", asked=64 * MIB, floor=MIB)
    with coordinator.change() as ledger:
        alpha = ledger.engines[0]
        alpha.in_use = 16 * MIB
        alpha.status = {
            "backend": "virtual",
            "running": 3,
            "waiting": 11,
            "memory": {
                "in_use": 16 * MIB, "parked": 8 * MIB, "cached": 8 * MIB, "free": 0, "physical": 32 * MIB,
            },
            "swap_used_bytes": 2 * MIB,
            "preemptions": 1234,
            "rates": {"output_tokens_per_s": 567.8, "prefix_hit_rate": 0.875, "map_stall_share": 0.0123},
        }  # fmt: skip
    return path


def test_top_once_shows_every_engine(path: Path) -> None:
    out = run("top", "--file", path, "--once")
    alpha, beta = (next(line for line in out.splitlines() if name in line) for name in ("alpha", "beta"))
    for word in (f"({os.getpid()})", "running", "16.0 MiB / 64.0 MiB", "3 / 11", "568", "87.5%", "1.2%"):
        assert word in alpha
    assert "1,234" in alpha and "2.0 MiB" in alpha
    assert alpha.count("█") == 8 and alpha.count("▓") == alpha.count("▒") == 4 and alpha.count("·") == 14
    assert "starting" in beta and "0 B / 64.0 MiB" in beta


def test_top_json_is_the_file_and_the_targets(path: Path) -> None:
    run("limit", "--total", "32MiB", "--file", path)
    record = json.loads(run("top", "--file", path, "--json"))
    assert record["totals"] == {"cpu": 32 * MIB}
    assert [(e["name"], e["target"]) for e in record["engines"]] == [("alpha", 16 * MIB), ("beta", 16 * MIB)]
    assert "32.00 MiB" not in run("top", "--file", path, "--once")
    assert "128.0 MiB of 32.0 MiB given out" in run("top", "--file", path, "--once")


def test_top_of_no_engines(tmp_path: Path) -> None:
    assert "no engine is running" in run("top", "--file", tmp_path / "none.json", "--once")


def test_limit_sets_and_lifts(path: Path) -> None:
    assert run("limit", "alpha", "5MiB", "--file", path) == f"alpha: {5 * MIB:,} bytes at most\n"
    assert "limit 5.0 MiB" in run("top", "--file", path, "--once")
    assert Coordinator(path).read().engines[0].limit == 5 * MIB
    assert run("limit", "alpha", "none", "--file", path) == "alpha: no limit\n"
    assert Coordinator(path).read().engines[0].limit is None
    both = run("limit", "beta", "2MiB", "--total", "40MiB", "--file", path)
    assert both == f"cpu: {40 * MIB:,} bytes for all engines\nbeta: {2 * MIB:,} bytes at most\n"
    run("limit", "--total", "none", "--file", path)
    assert Coordinator(path).read().totals == {}


def test_limits_that_make_no_sense_are_refused(path: Path) -> None:
    for words, error in (
        (("gamma", "5MiB"), "no engine is called 'gamma'"),
        (("alpha", "1KiB"), "needs 1,048,576 bytes"),
        (("--total", "1MiB"), "2 engines need"),
    ):
        with pytest.raises(CoordinatorError, match=error):
            run("limit", *words, "--file", path)
    before = path.read_text()
    for words in ((), ("alpha",), ("alpha", "much")):
        assert runner.invoke(app, ["limit", *words, "--file", str(path)]).exit_code == 2
    assert path.read_text() == before


# ---------------------------------------------------------------------- page maps
class Page(HTMLParser):
    """What a reader (and a browser) finds in a page: balanced tags, ids, table cells, embedded data."""

    VOID = frozenset({"meta", "input", "link", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.classes: set[str] = set()
        self.outside: list[str] = []
        self.rows = 0
        self.data = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.rows += tag == "tr"
        self.ids += [known["id"] or ""] if "id" in known else []
        self.classes.update((known.get("class") or "").split())
        targets = [v for k, v in attrs if k in ("src", "href") and v is not None]
        self.outside += [target for target in targets if not target.startswith(("#", "data:"))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data = data


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run of each backend, recorded."""
    folder = tmp_path_factory.mktemp("maps")
    paths = {backend: folder / f"{backend}.jsonl" for backend in ("virtual", "paged", "static")}
    for backend, path in paths.items():
        run("pagemap", "--kv-backend", backend, "--save", path, "--every", 8)
    return paths


def test_the_built_in_run_shows_every_state_it_can(recorded: dict[str, Path]) -> None:
    seen = {}
    for backend, path in recorded.items():
        recording = Recording.load(path)
        assert recording.header["backend"] == backend and len(recording.frames) > 20
        seen[backend] = {s for f in recording.frames for s, nbytes in f["bytes"].items() if nbytes}
    assert seen["virtual"] >= {"private", "shared", "cached", "parked"}
    assert seen["paged"] == {"private", "shared", "cached", "free"}
    assert seen["static"] == {"private", "free"}


@pytest.mark.parametrize("backend", ["virtual", "paged", "static"])
def test_the_html_page_stands_alone_and_has_every_moment(
    recorded: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    recording = Recording.load(recorded[backend])
    run("pagemap", recorded[backend], "--html", tmp_path / "map.html")
    page = Page((tmp_path / "map.html").read_text())
    assert page.outside == [], "nothing is fetched"
    assert len(set(page.ids)) == len(page.ids)
    assert {"map", "slider", "play", "data", "now", "moment", "tip"} <= set(page.ids)
    assert page.rows == 1 + len(recording.frames)
    data: dict[str, Any] = json.loads(page.data)
    assert len(data["frames"]) == len(recording.frames)
    for shown, frame in zip(data["frames"], recording.frames, strict=True):
        drawn = [unit for line in shown["lines"] for unit, _, _ in line["cells"] if unit >= 0]
        known = {unit for units in frame["units"].values() for unit in units}
        assert set(drawn) == known, "every unit is drawn"
        assert set(map(int, shown["owners"])) == {*frame["units"]["private"], *frame["units"]["shared"]}


def test_names_of_requests_cannot_break_out_of_the_page(recorded: dict[str, Path], tmp_path: Path) -> None:
    recording = Recording.load(recorded["virtual"])
    evil = "</script><img src=x>"
    for frame in recording.frames:
        for row in frame["rows"]:
            row["owner"] = row["owner"] and evil
    recording.save(tmp_path / "evil.jsonl")
    run("pagemap", tmp_path / "evil.jsonl", "--html", tmp_path / "map.html")
    page = Page((tmp_path / "map.html").read_text())
    assert page.outside == []
    assert any(evil in line["label"] for frame in json.loads(page.data)["frames"] for line in frame["lines"])


def test_the_picture_is_one(recorded: dict[str, Path], tmp_path: Path) -> None:
    for backend, path in recorded.items():
        run("pagemap", path, "--png", tmp_path / f"{backend}.png")
        with Image.open(tmp_path / f"{backend}.png") as image:
            assert image.width > 1000 and image.height > 400
            colours = image.convert("RGB").getcolors(1 << 24)
            assert colours is not None
            counts = {colour: count for count, colour in colours}
            assert counts.get((0x2F, 0x6F, 0xD0), 0) > 1000, "private memory is blue"


def test_recordings_that_are_none_are_refused(recorded: dict[str, Path], tmp_path: Path) -> None:
    lines = recorded["paged"].read_text().splitlines()
    for text in ("", "nonsense", '{"format": "other"}', lines[0], "\n".join([lines[0], "{}"])):
        bad = tmp_path / "bad.jsonl"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.jsonl"):
            run("pagemap", bad, "--html", tmp_path / "map.html")
    with pytest.raises(ConfigError, match="nothing to write"):
        run("pagemap")
