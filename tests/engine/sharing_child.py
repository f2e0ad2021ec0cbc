"""A process that shares in every way there is, on pages whose aliases are read-only.

python -m tests.engine.sharing_child LAYOUT          prints what was shared, as JSON, and ends well
python -m tests.engine.sharing_child LAYOUT write    then writes through an alias, and dies of it
"""

from __future__ import annotations

import json
import sys

import torch

from tests.engine.engines import kv_shape, loaded, make_llm, random_prompts, stepped
from vattn import LLM, BeamSearchParams, SamplingParams
from vattn.kv.memory.mapped import MappedMemory

NAME = "llama"


def aliases(llm: LLM) -> list[torch.Tensor]:
    """The first byte of every page that is mapped read-only, by its address there."""
    kv = llm.engine.kv.memory
    assert isinstance(kv, MappedMemory)
    space = kv.space
    memory = space.tensor((space.rows, space.pages_per_row, space.page_bytes), None, torch.uint8)
    return [
        memory[row, index, :1]
        for row in range(space.rows)
        for index in range(space.mapped(row))
        if not space._rows[row].writable[index]
    ]


def share(llm: LLM) -> tuple[int, list[torch.Tensor]]:
    """Hits, forks, beams, a chat, chunked prompts, preemptions and an abort, at once and one by one.

    Returns the most read-only pages there were, and those that are there at the end.
    """
    vocab, most = loaded(NAME).spec.vocab_size, 0

    def params(n: int, tokens: int) -> SamplingParams:
        return SamplingParams(n=n, temperature=1.0, seed=3, max_tokens=tokens, ignore_eos=True)

    [system, *questions] = random_prompts(4, [50, 5, 9, 14, 1], vocab)
    history = list(system)
    for wave, question in enumerate(questions):
        history += question
        engine = llm.engine
        by_hand = stepped(llm)
        by_hand.add_request(f"chat{wave}", history, params(1, 9))
        by_hand.add_request(f"parallel{wave}", system + question, params(4, 12))
        by_hand.add_request(
            f"beams{wave}", system + question[:1], BeamSearchParams(beam_width=3, max_tokens=8)
        )
        by_hand.add_request(f"abort{wave}", [*system, 5], params(2, 30))
        steps = 0
        while engine.has_work:
            steps += 1
            if steps == 6:
                engine.abort(f"abort{wave}")
            for output in by_hand.step():
                assert output.error is None
                if output.request_id == f"chat{wave}":
                    history += output.outputs[0].token_ids
            llm.check()
            most = max(most, len(aliases(llm)))
    return most, aliases(llm)


def main(layout: str, write: bool) -> None:
    torch.set_num_threads(1)
    budget = (190 if layout == "interleaved" else 420) * kv_shape(NAME).token_bytes
    with make_llm(
        NAME,
        f"virtual-{layout}",
        kv_cache_memory_bytes=budget,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        max_model_len=128,
    ) as llm:
        most, left = share(llm)
        m = llm.metrics()
        stats = m.kv_stats
        shared = {
            "aliases": most,
            "left": len(left),
            "hits": stats.prefix_hit_tokens,
            "forks": stats.forks,
            "continued": stats.rows_continued,
            "tails": stats.tails_copied,
            "preemptions": m.preemptions,
        }
        print(json.dumps(shared), flush=True)
        if write:
            left[0].fill_(1)
            print("lived", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "write" in sys.argv[2:])
