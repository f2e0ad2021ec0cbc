"""llama.cpp's server, when the user has `llama-server` on the PATH."""

from __future__ import annotations

import http.client
import json
import queue
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vattn.errors import ConfigError, VattnError
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.target import Finished, System, Target

if TYPE_CHECKING:
    from vattn.models.loader import LoadedModel

START_S = 300.0
"""Seconds a server may take to load its model."""
SILENCE_S = 600.0
"""A request that gives no token for this long has failed."""


class LlamaCpp(System):
    """A server of its own per run, with as many slots as requests may run at once; asked over HTTP.

    It needs the model as a GGUF file. Its context is shared out evenly: every slot gets `max_model_len`.
    """

    peer: ClassVar[bool] = True

    def __init__(self, loaded: LoadedModel, limits: Limits) -> None:
        self.name = "llama.cpp"
        found = shutil.which("llama-server")
        if found is None:
            raise ConfigError(
                "--peer llama.cpp: there is no llama-server on the PATH; build it or install it from "
                "https://github.com/ggml-org/llama.cpp"
            )
        if not loaded.name.endswith(".gguf") or not Path(loaded.name).is_file():
            raise ConfigError(f"--peer llama.cpp needs --model FILE.gguf, not {loaded.name!r}")
        self._server = found
        self.options: dict[str, Any] = {
            "model": loaded.name,
            "parallel": limits.max_num_seqs,
            "ctx-size": limits.max_num_seqs * limits.max_model_len,
            "batch-size": limits.max_num_batched_tokens,
        }

    @contextmanager
    def open(self) -> Iterator[Target]:
        port = _free_port()
        arguments = [part for key, value in self.options.items() for part in (f"--{key}", str(value))]
        command = [self._server, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_until_healthy(process, port)
            yield _HttpTarget(port, self.options)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _HttpTarget(Target):
    """A thread per request in flight reads its stream of tokens."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        self._port = port
        self._ended: queue.Queue[Finished] = queue.Queue()
        self._running = 0
        self.kv = {"backend": "llama.cpp", "slots": options["parallel"], "num_tokens": options["ctx-size"]}

    def clock(self) -> float:
        return time.perf_counter()

    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        if n != 1:
            raise ConfigError("llama.cpp's server samples one output per request: leave --peer out")
        self._running += 1
        arguments = (request_id, prompt_token_ids, output_len)
        threading.Thread(target=self._ask, args=arguments, daemon=True).start()

    def advance(self, wait_s: float) -> list[Finished]:
        if not self._running:
            time.sleep(wait_s)
            return []
        try:
            ended = self._ended.get(timeout=min(wait_s, SILENCE_S))
        except queue.Empty:
            if wait_s >= SILENCE_S:
                raise VattnError("llama-server stopped giving results") from None
            return []
        self._running -= 1
        return [ended]

    def _ask(self, request_id: str, prompt_token_ids: list[int], output_len: int) -> None:
        times: list[float] = []
        tokens: list[int] = []
        error = None
        try:
            for event in self._stream(prompt_token_ids, output_len):
                new = event.get("tokens") or []
                tokens += new
                times += [time.perf_counter()] * len(new)
            if len(tokens) != output_len:
                error = f"llama-server gave {len(tokens)} tokens instead of {output_len}"
        except (OSError, ValueError, http.client.HTTPException, VattnError) as why:
            error = f"llama-server: {why}"
        self._ended.put(Finished(request_id, tokens, [times], error=error))

    def _stream(self, prompt_token_ids: list[int], output_len: int) -> Iterator[dict[str, Any]]:
        """Events of one completion, as they come (`POST /completion` with `stream` and `return_tokens`)."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SILENCE_S)
        body = {
            "prompt": prompt_token_ids,
            "n_predict": output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens": True,
            "stream": True,
            "cache_prompt": True,
        }
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise VattnError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    """Until `GET /health` says 200. Raises VattnError if the server ends or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise VattnError(f"llama-server ended with status {process.returncode} before it was ready")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise VattnError(f"llama-server was not ready after {START_S:.0f} seconds")
