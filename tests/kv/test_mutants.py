"""Caches that share wrongly are noticed: by books, contents, or a write that kills the process."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kv import mutants, test_sharing
from tests.kv.test_sharing_machine import SharingMachine


def noticed(mutant: mutants.Mutant | None, scenario: Callable[[], object]) -> bool:
    """Whether a scenario in a child of this process, with a mutant, ends otherwise than well."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        torch.set_num_threads(1)  # the parent's worker threads do not exist here
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        try:
            if mutant is not None:
                mutant(pytest.MonkeyPatch())
            scenario()
        except BaseException:
            os._exit(3)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 3, -signal.SIGSEGV), status
    return status != 0


def machine(backend: str, unit: int, examples: int = 200) -> Callable[[], None]:
    """Any interleaving, as in `test_sharing_machine`, the same ones every time."""
    kind = type("Machine", (SharingMachine,), {"backend": backend, "unit": unit})
    limits = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda: run_state_machine_as_test(kind, settings=limits)


def cases() -> None:
    """Cases that random interleavings meet rarely."""
    test_sharing.test_a_tail_is_kept_until_it_is_copied()
    for backend in ("virtual-interleaved", "virtual-per_layer"):
        for whole_page in (True, False):
            test_sharing.test_of_two_entries_on_one_page_the_later_ones_counts(backend, whole_page)
        test_sharing.test_a_finished_row_is_continued_as_far_as_its_text_goes(backend)
        test_sharing.test_a_prompt_that_is_cached_whole_computes_its_last_token(backend)


BY_CASES = {
    mutants.hits_are_not_pinned,
    mutants.tail_of_the_first_entry_on_its_page,
    mutants.units_of_the_first_entries,
    mutants.continues_behind_another_text,
    mutants.all_tokens_cached,
}


@pytest.mark.parametrize("mutant", mutants.VIRTUAL, ids=lambda m: m.__name__)
def test_mutants_of_virtual(mutant: mutants.Mutant) -> None:
    assert noticed(mutant, cases if mutant in BY_CASES else machine("virtual-interleaved", 5))


@pytest.mark.parametrize("mutant", mutants.PAGED, ids=lambda m: m.__name__)
def test_mutants_of_paged(mutant: mutants.Mutant) -> None:
    assert noticed(mutant, machine("paged-16", 16))


def test_what_shares_rightly_is_not_taken_for_a_mutant() -> None:
    assert not noticed(None, cases)
    assert not noticed(None, machine("virtual-interleaved", 5, examples=5))
