"""A real browser, driven through Chrome's DevTools protocol over two pipes: nothing to install beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge",
)  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    """Path of an installed browser of Chromium's family."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one browser. Errors and warnings of its console are kept in `console`."""

    def __init__(self, executable: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def pipes() -> None:  # the protocol's pipes are descriptors 3 (to the browser) and 4 (from it)
            high_in, high_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(3, 4, theirs_in, theirs_out), preexec_fn=pipes,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._write, self._rest, self._last = ours_in, ours_out, b"", 0
        self._events: list[dict[str, Any]] = []
        self.console: list[str] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session: str | None = None
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self.requested: list[str] = []

    def open(self, file: Path, *, scheme: str = "light", width: int = 1200, scripts: bool = True) -> None:
        """Load a file and wait until it is there."""
        self.console.clear()
        self.requested.clear()
        self._events.clear()
        self._send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self._send("Page.navigate", url=file.absolute().as_uri())
        self._wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression. (The page's own scripts may be off.)"""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Put the pointer there."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, selector: str = "html", scale: float = 1.0) -> bytes:
        """PNG of an element, however long."""
        box = self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": scale}
        shot = self._send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._send("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, event: str) -> None:
        while not any(e["method"] == event for e in self._events):
            self._receive()

    def _receive(self, timeout_s: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method is None:
            return
        self._events.append(message)
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and hasattr(self, "requested"):
            self.requested.append(params["request"]["url"])
