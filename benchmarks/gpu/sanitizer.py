"""A short engine run under `compute-sanitizer`: does any kernel touch memory that is not there?

    python -m benchmarks.gpu.sanitizer --json FILE [--dry]

Virtual memory makes the question sharp: behind a request's last page there is nothing. A small model, prompts
that end on page and block borders and just beside them, every backend, eager and from graphs. Without the
tool, or in a dry run, the engine still runs, and what it computes is compared between backends.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import survive

TOOL = "compute-sanitizer"
FOUND_ERRORS = 86
"""Exit status the tool is told to give when it has found something."""
OPTIONS = (
    "--tool=memcheck",
    # The driver's trial of read-only access, and libraries' own trials, are refused calls, not faults.
    "--report-api-errors=no",
    f"--error-exitcode={FOUND_ERRORS}",
    "--print-limit=20",
)
OUTPUT_TOKENS = 4
LENGTHS = (1, 13, 14, 15, 16, 17, 61, 64, 65, 125)
"""Of prompts. All tokens but the last are stored, so 13, 61 and 125 fill their blocks to the last place."""
PAGE_FULL = 2048 - OUTPUT_TOKENS + 1
"""A prompt whose tokens fill a page of 2 MiB of the model `small` to the last byte, interleaved."""


def run_engine(dry: bool) -> dict[str, Any]:
    """The short run itself."""
    import torch

    from benchmarks.gpu.engine import BACKENDS
    from benchmarks.gpu.models import random_model
    from vattn import LLM, SamplingParams
    from vattn.models.loader import load_model
    from vattn.vmm.driver import open_driver

    device = torch.device("cpu" if dry else "cuda")
    model = random_model("tiny" if dry else "small", device, torch.float32 if dry else torch.bfloat16)
    loaded = load_model(model, device=device)
    vocab = loaded.spec.vocab_size
    generator = torch.Generator().manual_seed(0)
    lengths = LENGTHS if dry else (*LENGTHS, PAGE_FULL)
    prompts: list[list[int]] = [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    driver = open_driver("cpu", granularity=4096) if dry else open_driver(device)
    runs: list[dict[str, Any]] = []
    tokens: list[list[list[int]]] = []
    for backend, options in BACKENDS.items():
        eager = backend not in ("virtual interleaved", "paged 16")
        with LLM(
            loaded, driver=driver, max_model_len=max(lengths) + OUTPUT_TOKENS, max_num_seqs=4,
            max_num_batched_tokens=48 if dry else 512,
            kv_cache_memory_bytes=(8 << 20) if dry else (1 << 30), enforce_eager=eager, **options,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            llm.check()
            graphs = llm.runner.graphs is not None
            runs.append({"backend": backend, "graphs": graphs, "steps": llm.metrics().steps})
        print(f"{backend}: {runs[-1]['steps']} steps, {'graphs' if graphs else 'eager'}", flush=True)
    driver.close()
    equal = [sum(a == b for a, b in zip(t, tokens[0], strict=True)) / len(prompts) for t in tokens]
    return {"runs": runs, "requests": len(prompts), "tokens_equal_share": equal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--engine", action="store_true", help="only the engine run, as the tool starts it")
    options = parser.parse_args()
    if options.engine:
        survive.store(options.json, run_engine(options.dry))
        return 0
    tool = None if options.dry else shutil.which(TOOL)
    command = [sys.executable, "-m", "benchmarks.gpu.sanitizer", "--engine", "--json", str(options.json)]
    command += ["--dry"] * options.dry
    options.json.unlink(missing_ok=True)
    if tool is not None:
        command = [tool, *OPTIONS, *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed = []
    for text in process.stdout:
        print(text, end="", flush=True)
        printed.append(text)
    code = process.wait()
    record: dict[str, Any] = survive.load(options.json)
    record["exit_code"] = code
    record["tool"] = subprocess.check_output([tool, "--version"], text=True).strip() if tool else None
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", "".join(printed))
    record["errors"] = int(summary[-1]) if summary else None
    if tool is None:
        record["not_available"] = "dry run" if options.dry else f"{TOOL} is not installed"
    survive.store(options.json, record)
    return code


if __name__ == "__main__":
    survive.leave(main())
