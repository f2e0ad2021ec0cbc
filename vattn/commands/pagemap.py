"""`vattn pagemap`: draw who holds which page, over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vattn.commands import options as opt

if TYPE_CHECKING:
    from vattn.lab.page_maps.recorder import Recording


def pagemap(
    recording: Annotated[
        Path | None,
        typer.Argument(help="A recording (--save, PageMapRecorder); default: a short run of a tiny model."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture (needs matplotlib).")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the recording, as JSON lines.")] = None,
    kv_backend: Annotated[str, typer.Option(help="Of the run: virtual, paged or static.")] = "virtual",
    kv_layout: opt.Layout = "interleaved",
    block_size: opt.BlockSize = 16,
    kv_memory: opt.KVMemory = "640KiB",
    every: Annotated[int, typer.Option(min=1, help="Sample after every so many steps.")] = 2,
    seed: opt.Seed = 0,
) -> None:
    """Draw page maps of a recording, or of a short run that shares, parks, caches and preempts."""
    from vattn.errors import ConfigError
    from vattn.lab.charts.figure import require_matplotlib
    from vattn.lab.page_maps.page_html import page_map_html
    from vattn.lab.page_maps.recorder import Recording

    if html is None and png is None and save is None:
        raise ConfigError("nothing to write: name --html FILE, --png FILE or --save FILE")
    if html is not None or png is not None:
        require_matplotlib("a drawing of page maps")
    if recording is not None:
        record = Recording.load(recording)
    else:
        memory = opt.parse_bytes(kv_memory, "--kv-memory")
        record = _run(kv_backend, kv_layout, block_size, memory, every, seed)
    if save is not None:
        record.save(save)
    if html is not None:
        html.write_text(page_map_html(record), encoding="utf-8")
    if png is not None:
        from vattn.lab.page_maps.page_png import save_page_map

        save_page_map(record, png)
    written = ", ".join(str(path) for path in (html, png, save) if path is not None)
    typer.echo(f"{record.describe()} Written: {written}")


def _run(backend: str, layout: str, block_size: int, memory: int | None, every: int, seed: int) -> Recording:
    """Run two waves of requests with a shared prefix and parallel samples, in too little memory."""
    import random

    from vattn.lab.bench.tiny import load_tiny
    from vattn.lab.page_maps.recorder import PageMapRecorder
    from vattn.llm import LLM
    from vattn.params import SamplingParams
    from vattn.vmm.host import HostDriver

    rng = random.Random(seed)
    with (
        LLM(
            load_tiny("cpu", seed=seed),
            kv_backend=backend,  # type: ignore[arg-type]
            kv_layout=layout,  # type: ignore[arg-type]
            page_bytes=8192 if backend == "virtual" else None,
            driver=HostDriver(granularity=4096),
            block_size=block_size,
            kv_cache_memory_bytes=memory,
            max_model_len=256,
            max_num_seqs=12,
            max_num_batched_tokens=128,
            seed=seed,
        ) as llm,
        PageMapRecorder(llm.engine, every=every) as recorder,
    ):
        for wave in range(2):
            topic = [rng.randrange(3, 256) for _ in range(70)]
            prompts, params = [], []
            for index in range(12):
                own = [rng.randrange(3, 256) for _ in range(rng.randrange(5, 60))]
                prompts.append(topic + own if index % 3 else own)
                count = 3 if index == 4 else 1
                params.append(
                    SamplingParams(
                        n=count,
                        temperature=1.0,
                        max_tokens=rng.randrange(8, 120),
                        ignore_eos=True,
                        detokenize=False,
                        seed=wave,
                    )
                )
            llm.generate(prompts, params, use_tqdm=False)
        return recorder.recording
