"""What became of a stage, in one JSON file: status, time, figures, and the end of its log.

    python -m benchmarks.gpu.record STAGE --code 0 --began 3.2 --ended 9.7 --limit 60 \\
        --log FILE --result FILE --out DIR

`status` is one of

    ok              it ended with 0
    not available   it ended with 0 and says that what it needs is not here
    timed out       `timeout` ended it; figures it had written until then are kept
    failed          anything else
    not run         nothing of the whole run's time was left for it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TIMED_OUT, KILLED, NOT_RUN = 124, 137, -1
LOG_BYTES, FAILED_LOG_BYTES = 4_000, 40_000


def status_of(code: int, seconds: float, limit: float, result: dict[str, Any] | None) -> str:
    if code == NOT_RUN:
        return "not run"
    if code == TIMED_OUT or (code == KILLED and seconds >= limit):
        return "timed out"
    if code != 0:
        return "failed"
    return "not available" if result is not None and "not_available" in result else "ok"


def end_of(path: Path, most: int) -> str:
    """The last `most` bytes of a text file, from the start of a line."""
    if not path.exists():
        return ""
    data = path.read_bytes()
    text = data[-most:].decode(errors="replace")
    return text if len(data) <= most else "[...]\n" + text.partition("\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--began", type=float, required=True)
    parser.add_argument("--ended", type=float, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--command", default="")
    options = parser.parse_args()
    seconds = options.ended - options.began
    result, unreadable = None, None
    if options.result.exists():
        try:
            result = json.loads(options.result.read_text())
        except ValueError as error:
            unreadable = str(error)
    by_name = result if isinstance(result, dict) else None
    status = status_of(options.code, seconds, options.limit, by_name)
    record = {
        "stage": options.stage,
        "status": status,
        "dry": options.dry,
        "exit_code": options.code,
        "seconds": round(seconds, 1),
        "limit_s": options.limit,
        "command": options.command,
        "result": result,
        "unreadable_result": unreadable,
        "log_tail": end_of(options.log, LOG_BYTES if status == "ok" else FAILED_LOG_BYTES),
    }
    (options.out / f"gpu-{options.stage}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"== {options.stage}: {status} in {seconds:.0f} of {options.limit:.0f} s")


if __name__ == "__main__":
    main()
