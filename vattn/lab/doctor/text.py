"""A diagnosis in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vattn.lab.doctor.diagnose import Diagnosis

MARKS = {"problem": "!", "advice": "+", "note": "-"}


def lines(diagnosis: Diagnosis, width: int = 100) -> Iterator[str]:
    """The verdict, then every finding with its evidence (`because`) and what to do (`try`)."""
    yield f"{diagnosis.name}"
    yield from _wrapped(diagnosis.sentence, "  ", "  ", width)
    for finding in diagnosis.findings:
        yield ""
        yield from _wrapped(
            f"{finding.sentence} [{finding.rule}]", f"  {MARKS[finding.kind]} ", "    ", width
        )
        for word, said in (("because", finding.evidence), ("try", finding.advice)):
            for text in said:
                yield from _wrapped(text, f"      {word:8}", " " * 14, width)


def _wrapped(text: str, first: str, then: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=then, break_long_words=False)
