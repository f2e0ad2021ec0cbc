"""What the kernels become on the memory of a real 8-bit cache: compiled for a GPU, none needed."""

from __future__ import annotations

import pytest
import torch

from vattn.kernels import contiguous
from vattn.kernels.aot import measure
from vattn.kernels.launch import KVScales
from vattn.kernels.offline import compile_only
from vattn.kernels.sass import ToolMissing, disassemble, tool
from vattn.kv.layout import SCALE_BYTES, KVLayout, KVShape, RowLayout
from vattn.kv.memory.views import kv_views


def missing_tool() -> str:
    """Why machine code can't be read here: some Triton wheels come without the tools."""
    try:
        for name in ("nvdisasm", "cuobjdump", "ptxas"):
            tool(name)
    except ToolMissing as missing:
        return str(missing)
    return ""


@pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())
@pytest.mark.parametrize("kind", list(KVLayout))
def test_scales_beside_values_leave_loads_16_bytes_wide(kind: KVLayout) -> None:
    shape = KVShape(32, 8, 128, torch.int8, SCALE_BYTES)
    layout = RowLayout(kind, shape, rows=2, max_tokens=64, page_bytes=4096)
    size = 1 + sum((n - 1) * s for n, s in zip(layout.memory_shape, layout.memory_strides, strict=True))
    memory = torch.empty(size, dtype=torch.int8).as_strided(layout.memory_shape, layout.memory_strides)
    _, kv, scales = kv_views(memory, shape)
    assert scales is not None
    q = torch.empty(4, 32, 128, dtype=torch.bfloat16)
    lengths = torch.zeros(4, dtype=torch.int32)
    with compile_only(90) as driver:
        contiguous.decode(q, *kv[1], slots=lengths, seq_lens=lengths, scales=KVScales(*scales[1]))
    [compiled] = driver.launches
    row = measure("decode", 90, compiled, disassemble(compiled.cubin))
    assert row.narrow_loads == 0 and row.spills == 0
    assert row.loads.keys() == {"4", "16"}, "values by 16 bytes, scales one by one"
