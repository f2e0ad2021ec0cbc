"""Static ranges as users give them: files, mappings, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vattn.config import KVCacheConfig
from vattn.errors import ConfigError
from vattn.kv.ranges import KVRanges

K, V = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    KVRanges(K, V).save(tmp_path / "ranges.safetensors")
    back = KVRanges.of(str(tmp_path / "ranges.safetensors"))
    assert torch.equal(back.k, K) and torch.equal(back.v, V)


def test_a_mapping_may_hold_lists() -> None:
    ranges = KVRanges.of({"k": [[1.0, 2.0]], "v": V})
    assert torch.equal(ranges.k, K)


def test_one_calibration_serves_both_types() -> None:
    ranges = KVRanges(K, V)
    device = torch.device("cpu")
    assert torch.equal(ranges.scales(torch.int8, device)[0, 0] * 127, K[0])
    assert torch.equal(ranges.scales(torch.float8_e4m3fn, device)[0, 1] * 448, V[0])


def test_what_is_no_calibration_is_refused(tmp_path: Path) -> None:
    other, text = tmp_path / "other.safetensors", tmp_path / "text"
    save_file({"weights": K}, other)
    text.write_text("hello")
    for source, reason in (
        (tmp_path / "missing", "no such file"),
        (other, "not 'k' and 'v'"),
        (text, "no safetensors file"),
        ({"k": K}, "use 'token'"),
        (7, "use 'token'"),
        ({"k": [1.0], "v": [1.0]}, r"\[layers, kv_heads\]"),
        ({"k": [["a"]], "v": [["b"]]}, r"\[layers, kv_heads\]"),
        ({"k": K, "v": torch.cat([V, V])}, "must be equal"),
        ({"k": -K, "v": V}, "negative or not finite"),
        ({"k": K * float("nan"), "v": V}, "negative or not finite"),
    ):
        with pytest.raises(ConfigError, match=reason):
            KVCacheConfig(dtype="int8", scales=source)  # type: ignore[arg-type]


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4' is unknown: use one of 'auto'"):
        KVCacheConfig(dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="set kv_cache_dtype"):
        KVCacheConfig(scales=KVRanges(K, V))
