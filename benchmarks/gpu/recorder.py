"""A pytest plugin that keeps what a test session found, as it goes, and stops it when its time is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import survive
from benchmarks.gpu.timing import Deadline

STORE_EVERY = 20
"""Reports between two writes."""


class Recorder:
    """Counts outcomes and keeps the failures' tracebacks; works under pytest-xdist too."""

    def __init__(self, path: Path, deadline: Deadline) -> None:
        self.path, self.deadline = path, deadline
        self.session: pytest.Session | None = None
        self.seen = 0
        self.record: dict[str, Any] = {
            "collected": 0, "passed": 0, "skipped": 0, "failed": 0, "not_run": 0,
            "failures": {}, "skips": {}, "stopped": None,
        }  # fmt: skip

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.record["collected"] = max(self.record["collected"], len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.record["collected"] = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and report.when in ("setup", "call"):
            self.record["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.record["skips"][reason] = self.record["skips"].get(reason, 0) + 1
        elif report.failed:
            if report.nodeid not in self.record["failures"]:
                self.record["failed"] += 1
            self.record["failures"][report.nodeid] = report.longreprtext[-1500:]
        elif report.when == "call":
            self.record["passed"] += 1
        self.seen += 1
        if self.seen % STORE_EVERY == 0:
            self.store()
        if self.deadline.left < 0 and self.session is not None and self.record["stopped"] is None:
            self.record["stopped"] = f"the time was spent after {self.deadline.seconds:.0f} s"
            # pytest-xdist has a loop of its own.
            for loop in (self.session, self.session.config.pluginmanager.get_plugin("dsession")):
                if loop is not None:
                    loop.shouldstop = self.record["stopped"]

    def store(self) -> None:
        counted = sum(self.record[outcome] for outcome in ("passed", "skipped", "failed"))
        self.record["not_run"] = max(0, self.record["collected"] - counted)
        survive.store(self.path, self.record)
