"""Fitting recovers what was planted, never goes negative, and says how far off it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vattn.errors import ConfigError
from vattn.lab.simulator.calibrate import FEATURES, calibrate, fit_steps
from vattn.lab.simulator.work import StepWork

TOKEN_BYTES = 1000
PLANTED = {"step": 2e-3, "prompt_token": 5e-5, "decode": 3e-4, "kv_byte": 2e-10, "pair": 1e-8}


def columns(n: int = 400, noise: float = 0.0, seed: int = 0, **planted: float) -> dict[str, Any]:
    """Steps that took exactly as long as the coefficients say, give or take `noise` of it."""
    rng = np.random.default_rng(seed)
    coefficients = PLANTED | planted
    decodes = rng.integers(0, 16, n)
    prompt = np.where(rng.random(n) < 0.4, rng.integers(1, 256, n), 0)
    prompt[decodes == 0] += 1
    kv_tokens = decodes * rng.integers(10, 2000, n)
    pairs = prompt * rng.integers(1, 500, n)
    rows = np.stack([np.ones(n), prompt, decodes, kv_tokens * TOKEN_BYTES, pairs], axis=1)
    seconds = rows @ np.array([coefficients[name] for name in FEATURES])
    return {
        "tokens": (prompt + decodes).tolist(),
        "decodes": decodes.tolist(),
        "logical": (kv_tokens * TOKEN_BYTES).tolist(),
        "decode_kv_tokens": kv_tokens.tolist(),
        "prefill_pairs": pairs.tolist(),
        "duration_s": (seconds * (1 + noise * rng.standard_normal(n))).tolist(),
    }


def test_planted_coefficients_are_recovered() -> None:
    fit = fit_steps([columns()], TOKEN_BYTES)
    assert {name: getattr(fit, name) for name in FEATURES} == pytest.approx(PLANTED, rel=1e-6)
    assert fit.residual.p90 < 1e-6 and fit.residual.steps == 400


def test_noise_is_stated_and_does_not_shift_the_sum() -> None:
    fit = fit_steps([columns(3000, noise=0.2)], TOKEN_BYTES)
    assert {name: getattr(fit, name) for name in FEATURES} == pytest.approx(PLANTED, rel=0.3)
    assert 0.1 < fit.residual.median < 0.17, "the median of |normal| is 0.67 sigma"
    assert abs(fit.residual.total) < 0.02


@pytest.mark.parametrize("absent", FEATURES)
def test_what_costs_nothing_is_never_negative(absent: str) -> None:
    fit = fit_steps([columns(noise=0.1, **{absent: 0.0})], TOKEN_BYTES)
    assert all(getattr(fit, name) >= 0 for name in FEATURES)


def test_the_model_prices_a_step_with_the_coefficients() -> None:
    model = fit_steps([columns()], TOKEN_BYTES).model(2 * TOKEN_BYTES)
    work = StepWork(
        tokens=110, decodes=10, sampled=11, decode_kv=5000, prefill_kv=300, pairs=7000, requests=11, calls=9.0
    )
    expected = 2e-3 + 100 * 5e-5 + 10 * 3e-4 + 5000 * 2 * TOKEN_BYTES * 2e-10 + 7000 * 1e-8
    assert model.step(work).duration == pytest.approx(expected)


def bench_json(tmp_path: Path, steps: dict[str, Any] | None) -> Path:
    file = tmp_path / "bench.json"
    run = {"name": "virtual", "repeats": [{"steps": steps} if steps else {}]}
    file.write_text(json.dumps({"model": {"token_bytes": TOKEN_BYTES}, "runs": [run]}))
    return file


def test_a_bench_json_without_the_columns_of_work_will_do(tmp_path: Path) -> None:
    steps = columns(pair=0.0)
    del steps["decode_kv_tokens"], steps["prefill_pairs"]
    fit = calibrate(bench_json(tmp_path, steps), "virtual")
    assert fit.kv_byte == pytest.approx(PLANTED["kv_byte"], rel=1e-6)
    assert fit.pair == 0


def test_what_is_no_bench_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json is no bench JSON"):
        calibrate(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="'virtual' has no steps"):
        calibrate(bench_json(tmp_path, None))
    with pytest.raises(ConfigError, match="9 steps are too few to fit 5 coefficients"):
        calibrate(bench_json(tmp_path, columns(9)))
