"""`vattn generate`: complete prompts from the command line."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from vattn.commands import options as opt


def generate(
    prompts: Annotated[list[str], typer.Argument(help="Prompts; several are batched.")],
    model: opt.Model = "smollm2",
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user message.")] = False,
    kv_backend: Annotated[str, typer.Option(help="virtual, paged or static.")] = "virtual",
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep this probability mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 = all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Outputs for each prompt, sampled.")] = 1,
    beam_width: Annotated[
        int | None, typer.Option(min=1, help="Search with so many beams; no sampling.")
    ] = None,
    kv_layout: opt.Layout = "auto",
    page_bytes: opt.PageBytes = None,
    block_size: opt.BlockSize = 16,
    kv_cache_dtype: opt.KVDtype = "auto",
    kv_scales: opt.KVScales = "token",
    kv_memory: opt.KVMemory = None,
    max_model_len: opt.MaxModelLen = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    trace: opt.Trace = None,
) -> None:
    """Complete prompts. One prompt is streamed as it comes; several run as one batch.

    Several outputs of one prompt (--n, --beam-width) share its KV.
    """
    memory = opt.parse_bytes(kv_memory, "--kv-memory")
    page = opt.parse_bytes(page_bytes, "--page-bytes")
    console = Console(stderr=True)

    from vattn.errors import ConfigError
    from vattn.llm import LLM
    from vattn.params import BeamSearchParams, SamplingParams

    params = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    if beam_width is not None and (chat or n > 1 or temperature):
        raise ConfigError("--beam-width searches: it goes with neither --chat, --n nor --temperature")
    with console.status(f"loading {model}"):
        llm = LLM(
            model,
            kv_backend=kv_backend,  # type: ignore[arg-type]
            kv_layout=kv_layout,  # type: ignore[arg-type]
            page_bytes=page,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
            kv_scales=kv_scales,
            kv_cache_memory_bytes=memory,
            max_model_len=max_model_len,
            device=device,
            dtype=dtype,
            trace=trace,
        )
    with llm:
        if len(prompts) == 1 and not chat and n == 1 and beam_width is None:
            shown = 0
            with llm.stream(prompts[0], params) as stream:
                for moment in stream:
                    text = moment.outputs[0].text
                    typer.echo(text[shown:], nl=False)
                    shown = len(text)
            typer.echo()
            return
        if beam_width is not None:
            beams = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
            outputs = llm.beam_search(prompts, beams)
        elif chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            typer.echo(f"{prompt!r}")
            for completion in output.outputs:
                score = "" if completion.score is None else f"  ({completion.score:.3f})"
                typer.echo(f"  -> {completion.text!r}{score}")
