"""Reading machine code: what a cubin contains, found with the tools that come with Triton's wheel.

    nvdisasm    instructions and labels         a loop is a branch to a label further up
    cuobjdump   registers and stack             the main loop is the first that feeds tensor cores
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

MMA_KINDS = {"wgmma": r"[HIQ]GMMA", "tcgen05": r"UTC\w*MMA", "mma": r"[HIQ]MMA"}
"""Tensor core instructions by generation: sm_90, sm_100, and what every generation has."""

INTEGER = re.compile(
    r"U?(IMAD|IADD|LEA|LOP|SHF|ISETP|SEL|PRMT|MOV|IMNMX|VIMNMX|VIADD|SGXT|BMSK|IABS)|IMUL|R2UR|S2"
)
LOAD = re.compile(r"(LDGSTS|LDG|LD)\b")


class ToolMissing(RuntimeError):
    """nvdisasm or cuobjdump isn't there."""


@dataclass(frozen=True)
class Instruction:
    opcode: str
    text: str


@dataclass(frozen=True)
class Code:
    """A kernel's machine code. stack: bytes of local memory per thread, 0 unless something spills."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        return count(self.instructions, pattern)

    def loops(self) -> list[Sequence[Instruction]]:
        """Innermost loops, in order of address."""
        spans = []
        for end, instruction in enumerate(self.instructions):
            target = re.match(r"BRA.*`\((\.L_\w+)\)", instruction.text)
            start = self.labels.get(target.group(1), end) if target else end
            if start < end:  # a branch to itself is the trap at a function's end
                spans.append((start, end))
        inner = [s for s in spans if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
        return [self.instructions[start : end + 1] for start, end in sorted(inner)]

    def main_loop(self) -> Sequence[Instruction]:
        """The first innermost loop with tensor core work; empty if there is none."""
        mma = "|".join(MMA_KINDS.values())
        return next((loop for loop in self.loops() if count(loop, mma)), [])


def count(instructions: Sequence[Instruction], pattern: str) -> int:
    """Instructions whose opcode begins with the pattern."""
    return sum(bool(re.match(pattern, i.opcode)) for i in instructions)


def integer_count(instructions: Sequence[Instruction]) -> int:
    """Address and control arithmetic, predicates and moves."""
    return sum(bool(INTEGER.match(i.opcode)) for i in instructions)


def load_widths(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Loads from global memory by bytes per thread."""
    widths: Counter[int] = Counter()
    for i in instructions:
        if LOAD.match(i.opcode):
            width = re.search(r"\.(128|64|U?S?16|U?S?8)\b", i.opcode)
            bits = int(re.sub(r"\D", "", width.group(1))) if width else 32
            widths[bits // 8] += 1
    return dict(widths)


def mma_kind(instructions: Sequence[Instruction]) -> str:
    return next((kind for kind, pattern in MMA_KINDS.items() if count(instructions, pattern)), "none")


def tool(name: str) -> str:
    """Path of a tool of Triton's wheel; raises ToolMissing."""
    try:
        return str(getattr(triton.knobs.nvidia, name).path)
    except RuntimeError as error:
        raise ToolMissing(f"{name} is not in this Triton wheel: install the wheel from PyPI") from error


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of an nvdisasm listing, and the index each label stands before."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_[\w]+):", line):
            labels[label.group(1)] = len(instructions)
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);", line):
            instructions.append(Instruction(code.group(1), code.group(1) + code.group(2)))
    return instructions, labels


def disassemble(cubin: bytes) -> Code:
    """Raises ToolMissing, or RuntimeError if a tool can't read the cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _run(tool("nvdisasm"), "-c", str(path))
        usage = _run(tool("cuobjdump"), "-res-usage", str(path))
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage)
    if not found:
        raise RuntimeError(f"cuobjdump reports no register use:\n{usage}")
    return Code(*parse(listing), registers=int(found.group(1)), stack=int(found.group(2)))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr
