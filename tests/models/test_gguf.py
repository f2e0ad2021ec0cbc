"""GGUF files: checked before they are decoded, decoded once, kept as a whole copy or not at all."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.gguf_files import CHAT_TEMPLATE, tiny_llama, write_gguf
from vattn.errors import ConfigError, ModelNotFound, UnsupportedModel
from vattn.models.gguf_cache import MARKER, cache_folder, converted_copy, is_complete
from vattn.models.gguf_file import inspect_gguf
from vattn.models.loader import load_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vattn" / "gguf"


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path.read_bytes()


@pytest.fixture
def tiny_file(tmp_path: Path, file_bytes: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(file_bytes)
    return path


class Converter:
    """Stands in for decoding: writes two files and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.lines: list[str] = []

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text(f"{gguf.name} {self.calls}")
        (folder / "model.safetensors").write_bytes(bytes(20 << 20))

    def copy(self, gguf: Path) -> Path:
        return converted_copy(gguf, self, announce=self.lines.append)[0]


# ------------------------------------------------------------------ what is in the file
def test_a_whole_file_is_summarised(tiny_file: Path) -> None:
    summary = inspect_gguf(tiny_file)
    assert summary.architecture == "llama"
    assert len(summary.tensors) == 2 * 9 + 3
    assert summary.fields["llama.block_count"] == 2
    assert summary.data_end <= tiny_file.stat().st_size


DAMAGED = {
    "empty": (lambda b: b"", "not a GGUF file: it starts with b''"),
    "another format": (lambda b: b"PK\x03\x04" + b[4:], r"not a GGUF file: it starts with b'PK"),
    "unknown version": (lambda b: b[:4] + struct.pack("<I", 77) + b[8:], "GGUF version 77"),
    "cut in the header": (lambda b: b[:1000], "ends at byte 1,000, inside its header"),
    "cut in the data": (
        lambda b: b[:-4096],
        r"its tensors end at byte [\d,]+ but the file ends at byte [\d,]+",
    ),
    "cut by a byte": (lambda b: b[:-1], "its tensors end at byte"),
    "absurd string": (lambda b: b[:24] + b"\xff" * 8 + b[32:], "inside its header"),
    "absurd counts": (lambda b: b[:8] + b"\xff" * 16 + b[24:], "inside its header|unknown value type"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_before_decoding(tiny_file: Path, cache: Path, kind: str) -> None:
    change, message = DAMAGED[kind]
    tiny_file.write_bytes(change(tiny_file.read_bytes()))
    with pytest.raises(ConfigError, match=message) as refusal:
        load_model(tiny_file, progress=lambda line: pytest.fail(line))
    assert str(tiny_file) in str(refusal.value)
    assert [entry.name for entry in cache.iterdir()] == ["seen"]


def test_a_part_of_a_split_model_is_refused(tiny_file: Path) -> None:
    key, value = b"split.count", struct.pack("<IH", 2, 3)
    data = tiny_file.read_bytes()
    keys = struct.unpack_from("<Q", data, 16)[0]
    entry = struct.pack("<Q", len(key)) + key + value
    tiny_file.write_bytes(data[:16] + struct.pack("<Q", keys + 1) + entry + data[24:])
    with pytest.raises(UnsupportedModel, match="one of 3 parts"):
        inspect_gguf(tiny_file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no file .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf")


# ------------------------------------------------------------------ decoding
def test_a_file_is_decoded_exactly(tiny_file: Path) -> None:
    loaded = load_model(tiny_file, device="cpu", prepare=False, progress=lambda line: None)
    expected = tiny_llama().state_dict()
    actual = loaded.model.state_dict()
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name
    assert (loaded.spec.num_heads, loaded.spec.num_kv_heads, loaded.spec.head_dim) == (4, 2, 16)
    assert loaded.eos_token_ids == {2}
    assert loaded.spec.dtype == torch.float32
    assert not hasattr(loaded.config, "quantization_config")


def test_quantised_blocks_are_decoded_to_float32(tmp_path: Path) -> None:
    path, model = tmp_path / "q8.gguf", tiny_llama()
    write_gguf(path, model, quantized="ffn_up")
    loaded = load_model(path, device="cpu", prepare=False, progress=lambda line: None)
    for name, weight in model.state_dict().items():
        actual = loaded.model.state_dict()[name]
        if "up_proj" in name:
            assert not torch.equal(actual, weight)
            torch.testing.assert_close(actual, weight, atol=float(weight.abs().max()) / 127, rtol=0)
        else:
            assert torch.equal(actual, weight), name


def test_the_tokenizer_comes_along(tiny_file: Path) -> None:
    tokenizer = load_model(tiny_file, device="cpu", progress=lambda line: None).tokenizer
    ids = tokenizer("hello world")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["hello", "Ġw"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == "hello world"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token_id == 2


# ------------------------------------------------------------------ the copy
def test_the_second_start_uses_the_copy(tiny_file: Path, cache: Path) -> None:
    lines: list[str] = []
    first = load_model(tiny_file, device="cpu", progress=lines.append)
    assert lines == ["Converting tiny.gguf (first time, about 30 s)…"]
    second = load_model(tiny_file, device="cpu", progress=lines.append)
    assert len(lines) == 1
    assert first.fingerprint == second.fingerprint
    assert first.path is not None and is_complete(Path(first.path))
    assert Path(first.path).parent == cache == cache_folder()


def test_the_same_bytes_elsewhere_use_the_same_copy(tiny_file: Path, tmp_path: Path) -> None:
    converter = Converter()
    other = tmp_path / "renamed.gguf"
    other.write_bytes(tiny_file.read_bytes())
    assert converter.copy(tiny_file) == converter.copy(other)
    assert converter.calls == 1


def test_a_changed_file_is_converted_again(tiny_file: Path) -> None:
    converter = Converter()
    first = converter.copy(tiny_file)
    data = bytearray(tiny_file.read_bytes())
    data[-1] ^= 1
    tiny_file.write_bytes(data)  # same name and size
    assert converter.copy(tiny_file) != first
    assert converter.calls == 2


SPOILT: dict[str, Callable[[Path], None]] = {
    "weights cut": lambda copy: os.truncate(copy / "model.safetensors", 100),
    "config changed": lambda copy: (copy / "config.json").write_text("tiny.gguf 9"),
    "file lost": lambda copy: (copy / "config.json").unlink(),
    "marker lost": lambda copy: (copy / MARKER).unlink(),
    "marker cut": lambda copy: os.truncate(copy / MARKER, 10),
    "marker of another format": lambda copy: (copy / MARKER).write_text(
        json.dumps({"format": 0, "files": {}})
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_copy_is_built_again(tiny_file: Path, cache: Path, how: str) -> None:
    converter = Converter()
    copy = converter.copy(tiny_file)
    SPOILT[how](copy)
    assert not is_complete(copy)
    assert converter.copy(tiny_file) == copy
    assert is_complete(copy)
    assert converter.calls == 2
    assert not list(cache.glob("*.tmp"))


def test_a_cut_copy_of_a_model_is_built_again(tiny_file: Path) -> None:
    first = load_model(tiny_file, device="cpu", prepare=False, progress=lambda line: None)
    assert first.path is not None
    weights = Path(first.path) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    lines: list[str] = []
    load_model(tiny_file, device="cpu", progress=lines.append)
    assert len(lines) == 1


def test_a_copy_made_by_older_code_is_not_used_and_goes(tiny_file: Path, cache: Path) -> None:
    converter = Converter()
    copy = converter.copy(tiny_file)
    digest = copy.name.split("-")[0]
    for name in (digest, f"{digest}-1"):  # the first format had no number in its name
        shutil.copytree(copy, cache / name)
    shutil.rmtree(copy)
    assert converter.copy(tiny_file) == copy
    assert converter.calls == 2
    assert {entry.name for entry in cache.iterdir() if entry.is_dir()} == {"seen", copy.name}


def test_a_failed_conversion_leaves_nothing(tiny_file: Path, cache: Path) -> None:
    def fails(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise UnsupportedModel("not this one")

    with pytest.raises(UnsupportedModel, match="not this one"):
        converted_copy(tiny_file, fails, announce=lambda line: None)
    assert [p for p in cache.iterdir() if p.is_dir() and p.name != "seen"] == []


def test_a_cache_that_cannot_be_written_is_explained(tiny_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        Converter().copy(tiny_file)


PROCESS = """
import os, sys, time
from pathlib import Path
from vattn.models.gguf_cache import converted_copy

def convert(gguf, folder):
    (folder / "config.json").write_text(str(os.getpid()))
    time.sleep(1.0)
    if sys.argv[2] == "die":
        os._exit(9)

copy, _ = converted_copy(Path(sys.argv[1]), convert, announce=lambda line: print(line, flush=True))
print("maker", (copy / "config.json").read_text())
"""


def start(gguf: Path, how: str = "live") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(gguf), how], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_two_processes_convert_once(tiny_file: Path, cache: Path) -> None:
    processes = [start(tiny_file), start(tiny_file)]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    converting = [lines for lines in outputs if any(line.startswith("Converting") for line in lines)]
    assert len(converting) == 1
    assert not list(cache.glob("*.tmp"))


def test_a_killed_process_does_no_harm(tiny_file: Path, cache: Path) -> None:
    process = start(tiny_file, "die")
    process.communicate(timeout=120)
    assert process.returncode == 9
    assert len(list(cache.glob("*.tmp"))) == 1
    converter = Converter()
    assert is_complete(converter.copy(tiny_file))
    assert converter.calls == 1 and converter.lines == ["Converting tiny.gguf (first time, about 30 s)…"]
    assert not list(cache.glob("*.tmp"))
