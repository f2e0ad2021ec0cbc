"""What a run gave memory out in: sizes of units and tokens, from its record."""

from __future__ import annotations

from vattn.lab.bench.bench_record import Bench, Run


def unit_tokens(bench: Bench, run: Run) -> float | None:
    """Tokens in what memory is given out in: a block, a page (of one range), or a whole row."""
    if run.backend == "static":
        longest = run.options.get("max_model_len") or bench.limits.get("max_model_len")
        return float(longest) if longest else None
    if run.backend == "paged":
        size = run.kv.get("block_size") or run.options.get("block_size")
        return float(size) if size else None
    token, layers = token_bytes(bench, run), bench.model.get("num_layers")
    page = run.kv.get("page_bytes")
    if run.backend != "virtual" or not page or not token or not layers:
        return None
    return float(page) * ranges(bench, run) / token


def token_bytes(bench: Bench, run: Run) -> float | None:
    """K and V of one token in this run's memory: quantised KV takes less than the model's own."""
    model = run.record.get("model") or bench.model
    size = model.get("token_bytes")
    if size is None:
        return None
    dtype = str(run.kv.get("kv_cache_dtype") or run.options.get("kv_cache_dtype") or "auto")
    if dtype in ("int8", "fp8_e4m3") and model.get("num_kv_heads") and str(model.get("dtype")) != dtype:
        heads, dim = int(model["num_kv_heads"]), int(model["head_dim"])
        values = -(-heads * dim // 4) * 4 + 4 * heads
        return 2.0 * int(model["num_layers"]) * (-(-values // 16) * 16)
    return float(size)


def ranges(bench: Bench, run: Run) -> int:
    """Address ranges of a row: one where tokens lie together, else one per layer for K and for V."""
    return 2 * int(bench.model["num_layers"]) if run.kv.get("layout") == "per_layer" else 1
