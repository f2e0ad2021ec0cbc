"""Runs the tests under `numeric/` where kernels can run: on the GPU, or in Triton's interpreter.

Whether kernels are compiled or interpreted is settled when triton is first imported, so one process can't do
both. With a GPU the tests run here. Without one, a child pytest with TRITON_INTERPRET=1 runs them one by one,
as they are asked for, and its reports are replayed as if they had run here:

    this process   item 1 ──id──>           item 2 ──id──> ...     waits for each item's reports
    child                     <──reports──            <──reports── (JSON lines through a pipe)

A child that dies, as it does when a kernel touches unmapped memory, fails the test it was running; the rest
goes on in a new child. Under pytest-xdist every worker process has a child of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

NUMERIC = Path(__file__).parent / "numeric"
PIPES = "VATTN_TEST_PIPES"


def runs_here() -> bool:
    """Whether kernels can run in this process."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU for the interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")


class Child:
    """A pytest process with the interpreter, running tests as they are asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reading, its_writing = os.pipe()
        its_reading, writing = os.pipe()
        environment = os.environ | {
            "TRITON_INTERPRET": "1",
            PIPES: f"{its_reading},{its_writing}",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(NUMERIC)]
        self.process = subprocess.Popen(
            command,
            cwd=config.rootpath,
            env=environment,
            pass_fds=(its_reading, its_writing),
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(its_reading)
        os.close(its_writing)
        self.wanted = open(writing, "w", buffering=1)  # noqa: SIM115
        self.reports = open(reading)  # noqa: SIM115

    def run(self, node_id: str) -> Iterator[pytest.TestReport]:
        """Run one test; its reports as they arrive. Ends early if the child dies."""
        with suppress(BrokenPipeError):  # it has died before: there is nothing to read either
            self.wanted.write(node_id + "\n")
        for line in self.reports:
            data = json.loads(line)
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            yield report
            if report.when == "teardown":
                return

    def close(self) -> str:
        """End the child and return what it printed."""
        self.reports.close()
        with suppress(BrokenPipeError):
            self.wanted.close()
        self.process.terminate()
        code = self.process.wait()
        self.output.seek(0)
        text = self.output.read()
        self.output.close()
        crash = max(text.find("Fatal Python error"), 0)
        return f"the interpreter process ended with code {code}; it printed\n{text[crash : crash + 3000]}"


CHILD = pytest.StashKey[Child]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if runs_here() or NUMERIC not in item.path.parents:
        return None
    config = item.config
    if CHILD not in config.stash:
        config.stash[CHILD] = Child(config)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    finished = False
    for report in config.stash[CHILD].run(item.nodeid):
        item.ihook.pytest_runtest_logreport(report=report)
        finished = report.when == "teardown"
    if not finished:
        text = config.stash[CHILD].close()
        del config.stash[CHILD]
        died = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.ihook.pytest_runtest_logreport(report=died)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CHILD in session.config.stash:
        session.config.stash[CHILD].close()


def pytest_configure(config: pytest.Config) -> None:
    if PIPES in os.environ:
        config.pluginmanager.register(Served(config, *map(int, os.environ.pop(PIPES).split(","))))


class Served:
    """In the child: runs the tests whose ids come through one pipe, writes each report to the other."""

    def __init__(self, config: pytest.Config, wanted: int, reports: int) -> None:
        self.config = config
        self.wanted = os.fdopen(wanted)
        self.reports = os.fdopen(reports, "w", buffering=1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self.wanted:
            item = items[line.strip()]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data: dict[str, Any] = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.write(json.dumps(data) + "\n")
