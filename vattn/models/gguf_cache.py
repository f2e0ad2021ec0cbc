"""Converted copies of GGUF files, so that only the first start pays for decoding.

    $XDG_CACHE_HOME/vattn/gguf/           ~/.cache/vattn/gguf without XDG_CACHE_HOME
    ├ <sha256 of the GGUF>-<FORMAT>/      config, tokenizer, float32 safetensors, as transformers reads them
    │   └ complete.json                   written last: names and sizes of all other files
    ├ <sha256>-<FORMAT>.lock              held while converting; the system drops it with its process
    ├ <sha256>-<FORMAT>.<random>.tmp/     a copy being written, or left by a process that was killed
    └ seen/<sha256 of the path>.json      size, mtime and hash of a file, so that it's hashed once

A copy appears by one rename of a directory whose files are on disk: it is whole or absent. A copy
that was damaged later (`complete.json` disagrees) is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError, ModelNotFound, VattnError

# Of what a copy holds. Any change of how files are read raises it: copies of other formats are never used,
# and those of older ones are removed when a new one is built.
FORMAT = 4
MARKER = "complete.json"
CHECKSUM_LIMIT = 16 << 20  # files up to this many bytes are compared by hash too, not by size alone

Convert = Callable[[Path, Path], None]
"""Write everything decoded from a GGUF file (first path) into an empty folder (second path)."""


def cache_folder() -> Path:
    """Where converted copies are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vattn" / "gguf"


def converted_copy(
    gguf: Path,
    convert: Convert,
    *,
    announce: Callable[[str], None],
    check: Callable[[Path], object] = lambda gguf: None,
    folder: Path | None = None,
) -> tuple[Path, str]:
    """The folder with the converted copy of `gguf` and the file's hash; converts if there is none.

    `check` sees the file before it is converted, and raises if it should not be; a file with a copy has
    passed. `announce` receives one line before a long wait. Several processes may ask at once: one
    converts, the others wait for it. What `check` and `convert` raise passes through, and then nothing
    is left behind. Raises ConfigError if the copy cannot be written.
    """
    folder = cache_folder() if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        digest = _digest(gguf, folder / "seen")
        copy = folder / f"{digest}-{FORMAT}"
        if not is_complete(copy):
            check(gguf)
            with _lock(copy.with_suffix(".lock"), announce):
                if not is_complete(copy):
                    announce(f"Converting {gguf.name} (first time, about 30 s)…")
                    _build(gguf, copy, convert)
                    for old in (folder / digest, *(folder / f"{digest}-{n}" for n in range(FORMAT))):
                        shutil.rmtree(old, ignore_errors=True)
    except VattnError:
        raise
    except OSError as why:
        raise ConfigError(
            f"cannot keep the converted copy of {gguf.name} in {folder}: {why.strerror or why}. It takes the "
            "model's size in float32; XDG_CACHE_HOME names another place."
        ) from why
    return copy, digest


def is_complete(copy: Path) -> bool:
    """Whether `copy` holds every file its marker lists, unchanged in size (small ones: in content)."""
    try:
        marker = json.loads((copy / MARKER).read_text())
        return bool(marker["format"] == FORMAT) and marker["files"] == _list_files(copy)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(gguf: Path, copy: Path, convert: Convert) -> None:
    """Convert into a temporary folder, then put it in `copy`'s place. The caller holds the lock."""
    for leftover in copy.parent.glob(f"{copy.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", suffix=".tmp", dir=copy.parent))
    try:
        convert(gguf, work)
        marker = {"format": FORMAT, "source": gguf.name, "files": _list_files(work)}
        (work / MARKER).write_text(json.dumps(marker, indent=1))
        for path in (*work.iterdir(), work):
            _sync(path)
        if copy.exists():  # damaged: moved aside first, for rename only replaces an empty folder
            os.rename(copy, tempfile.mkdtemp(prefix=f"{copy.name}.", suffix=".tmp", dir=copy.parent))
        os.rename(work, copy)
        _sync(copy.parent)
    finally:
        for leftover in copy.parent.glob(f"{copy.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def _list_files(folder: Path) -> dict[str, list[Any]]:
    """`{name: [bytes, sha256 or None]}` of every file but the marker."""
    files = {}
    for path in folder.iterdir():
        if path.name != MARKER:
            size = path.stat().st_size
            files[path.name] = [size, _sha256(path) if size <= CHECKSUM_LIMIT else None]
    return files


def _digest(path: Path, seen: Path) -> str:
    """SHA-256 of a file; remembered as long as its size and time of change stay."""
    note = seen / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
    try:
        stat = path.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(note.read_text())
            if known["state"] == state:
                return str(known["sha256"])
        digest = _sha256(path)
    except OSError as why:
        raise ModelNotFound(f"cannot read {path}: {why.strerror or why}") from why
    with suppress(OSError):  # a cache that can be read but not written still serves
        seen.mkdir(exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps({"state": state, "sha256": digest}))
        os.replace(fresh, note)
    return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """Hold `path` among processes; on file systems without locks go on without one."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce("Another process is converting this model; waiting for it…")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
