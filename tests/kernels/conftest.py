"""Runs the tests under `numeric/` where kernels can run: on the GPU, or in Triton's interpreter.

Whether kernels are compiled or interpreted is settled when triton is first imported, so one process can't do
both. With a GPU the tests run here. Without one, a child pytest with TRITON_INTERPRET=1 runs them, and
its reports are replayed as if they had run here:

    this process   item 1   item 2   item 3 ...      waits for each item's reports
    child            └─reports─┘ (JSON lines through a pipe)

A child that dies, as it does when a kernel touches unmapped memory, fails the test it was running; the rest
goes on in a new child. Under pytest-xdist, where a process gets some of the files, every file has a child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

NUMERIC = Path(__file__).parent / "numeric"
PIPE = "VATTN_TEST_REPORTS"


def runs_here() -> bool:
    """Whether kernels can run in this process."""
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU for the interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")


class Child:
    """A pytest process with the interpreter, running the given tests in order."""

    def __init__(self, config: pytest.Config, node_ids: list[str]) -> None:
        self.config = config
        self.pending = list(node_ids)
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reading, writing = os.pipe()
        environment = os.environ | {"TRITON_INTERPRET": "1", PIPE: str(writing), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *node_ids]
        self.process = subprocess.Popen(
            command,
            cwd=config.rootpath,
            env=environment,
            pass_fds=(writing,),
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(writing)
        self.reports = open(reading)  # noqa: SIM115

    def reports_of(self, node_id: str) -> Iterator[pytest.TestReport]:
        """Reports of one test as they arrive; ends early if the child dies."""
        self.pending.remove(node_id)
        for line in self.reports:
            data = json.loads(line)
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            if report.nodeid == node_id:
                yield report
                if report.when == "teardown":
                    return

    def close(self) -> str:
        """End the child and return what it printed."""
        self.reports.close()
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
    if CHILD in config.stash and item.nodeid not in config.stash[CHILD].pending:
        config.stash[CHILD].close()
        del config.stash[CHILD]
    if CHILD not in config.stash:
        shared = "PYTEST_XDIST_WORKER" in os.environ
        ours = [
            i.nodeid
            for i in item.session.items
            if NUMERIC in i.path.parents and (i.path == item.path or not shared)
        ]
        config.stash[CHILD] = Child(config, ours[ours.index(item.nodeid) :])
    child = config.stash[CHILD]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    finished = False
    for report in child.reports_of(item.nodeid):
        item.ihook.pytest_runtest_logreport(report=report)
        finished = report.when == "teardown"
    if not finished:
        del config.stash[CHILD]
        died = pytest.TestReport(item.nodeid, item.location, {}, "failed", child.close(), "call")
        item.ihook.pytest_runtest_logreport(report=died)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CHILD in session.config.stash:
        session.config.stash[CHILD].close()


def pytest_configure(config: pytest.Config) -> None:
    if PIPE in os.environ:
        config.pluginmanager.register(Reporter(config, int(os.environ[PIPE])))


class Reporter:
    """In the child: writes each report to the parent's pipe."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self.config = config
        self.pipe = os.fdopen(pipe, "w", buffering=1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data: dict[str, Any] = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.write(json.dumps(data) + "\n")
