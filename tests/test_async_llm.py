"""`AsyncLLM`: many tasks, one engine; what is cancelled frees its memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from tests.engine.engines import make_llm, random_prompts
from tests.models.tiny import VOCAB
from vattn import AsyncLLM, BeamSearchParams, SamplingParams
from vattn.errors import RequestError, StepError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(4, [9, 30, 4, 17, 22, 6], VOCAB)
BACKENDS = ["virtual-interleaved", "paged-overlap", "static-per_layer"]


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(main())


@pytest.mark.parametrize("backend", BACKENDS)
def test_tasks_get_what_generate_gives_token_by_token(backend: str) -> None:
    with make_llm("llama", backend, max_model_len=96) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

        async def one(engine: AsyncLLM, prompt: list[int]) -> list[int]:
            lengths = []
            async for output in engine.generate(prompt, GREEDY):
                lengths.append(len(output.outputs[0].token_ids))
            assert lengths == list(range(1, 13)) and output.finished
            return output.outputs[0].token_ids

        async def work() -> None:
            async with AsyncLLM(llm) as engine:
                assert await asyncio.gather(*(one(engine, prompt) for prompt in PROMPTS)) == expected
                await engine.check()

        run(work())
        assert llm.generate([1], GREEDY, use_tqdm=False), "an LLM that was lent stays open"


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_tasks_free_their_memory(backend: str) -> None:
    """Cancelled at random moments: queued, in the middle of a prompt, while it streams."""
    rng = random.Random(3)
    with make_llm("llama", backend, max_model_len=96, max_num_seqs=3, max_num_batched_tokens=16) as llm:
        engine = AsyncLLM(llm)
        long = replace(GREEDY, max_tokens=60)

        async def consume(prompt: list[int]) -> None:
            async for _ in engine.generate(prompt, long):
                pass

        async def work() -> None:
            for _ in range(12):
                tasks = [asyncio.create_task(consume(prompt)) for prompt in PROMPTS]
                await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.05]))
                doomed = rng.sample(tasks, rng.randint(1, len(tasks)))
                for task in doomed:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
                await engine.check()
                assert not llm.engine.requests()
                assert (await engine.memory_usage()).in_use == 0

        run(work())


def test_leaving_the_loop_early_aborts() -> None:
    with make_llm("llama", "paged-16", max_model_len=200) as llm:
        engine = AsyncLLM(llm)

        async def work() -> None:
            stream = engine.generate([1, 2, 3], replace(GREEDY, max_tokens=190))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await engine.check()
            assert not llm.engine.requests()

        run(work())


def test_beams_deltas_and_final_outputs() -> None:
    with make_llm("llama", "virtual-interleaved", max_model_len=64) as llm:
        engine = AsyncLLM(llm)
        [beams] = llm.beam_search([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
        [whole] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)

        async def work() -> None:
            search = BeamSearchParams(beam_width=2, max_tokens=4)
            outputs = [o async for o in engine.generate([1, 2, 3], search)]
            assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in beams.outputs]
            deltas = [o async for o in engine.generate([1, 2, 3], replace(GREEDY, output_kind="delta"))]
            assert [t for o in deltas for t in o.outputs[0].token_ids] == whole.outputs[0].token_ids
            final = [o async for o in engine.generate([1, 2, 3], replace(GREEDY, output_kind="final_only"))]
            assert [o.outputs[0].token_ids for o in final] == [whole.outputs[0].token_ids]

        run(work())


def test_refusals_and_failed_steps_reach_the_task_they_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm("llama", "paged-16", max_model_len=64) as llm:
        engine = AsyncLLM(llm)

        async def read(prompt: object, params: SamplingParams) -> None:
            async for _ in engine.generate(prompt, params):  # type: ignore[arg-type]
                pass

        async def work() -> None:
            with pytest.raises(RequestError, match="empty"):
                await read([], GREEDY)
            with pytest.raises(RequestError, match="SamplingParams"):
                await read([1], 3)  # type: ignore[arg-type]
            with monkeypatch.context() as patch:
                patch.setattr(llm.runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
                with pytest.raises(StepError, match="planted"):
                    await read([1, 2], GREEDY)
            await read([1, 2], GREEDY)
            await engine.check()

        run(work())


def test_sleep_resize_and_abort_from_a_task() -> None:
    with make_llm("llama", "virtual-interleaved", max_model_len=96) as llm:
        engine = AsyncLLM(llm)
        [expected] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)

        async def work() -> None:
            await engine.sleep()
            assert (await engine.memory_usage()).physical == 0
            task = asyncio.create_task(collect())
            await asyncio.sleep(0.01)
            await engine.wake_up()
            assert await task == expected.outputs[0].token_ids
            await engine.resize_kv_cache(llm.engine.kv.budget_bytes // 2)
            await engine.reset_prefix_cache()
            assert await collect() == expected.outputs[0].token_ids
            assert (await engine.metrics()).finished_requests == 3
            assert await engine.abort("nobody") is False
            assert (await engine.snapshot())["format"].startswith("vattn-snapshot")

        async def collect() -> list[int]:
            outputs = [output async for output in engine.generate(PROMPTS[0], GREEDY)]
            return outputs[-1].outputs[0].token_ids

        run(work())
