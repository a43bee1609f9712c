"""Bytes that a step needs of a TPU, from its compiler's report of buffers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from benchmarks.heaps import needed_nbytes

WRITTEN = """BufferAssignment:
allocation 0: size 512, thread-local:
allocation 1: size 262144, parameter 9, shape |f32[128,512]| at ShapeIndex {}, maybe-live-out:
 value: <1303 param.1 @0> (size=262144,offset=0): f32[128,512]{1,0:T(8,128)}
allocation 2: size 5898336, preallocated-temp:
 value: <2402 copy-start.199{} @0> (size=32,offset=5881856): (f32[128]{0:T(128)S(1)}, f32[128]{0:T(128)}, u32[]{:S(2)})
allocation 3: size 3625472, color 1, preallocated-temp:
"""
"""Of GPT on v5p, shortened: libtpu 0.0.42."""


def test_temporaries_beside_the_chip_alone_are_needed(tmp_path: Path) -> None:
    (tmp_path / "module_0000.jit_step.cl_1.after_optimizations-buffer-assignment.txt").write_text(WRITTEN)
    (tmp_path / "module_0000.jit_step.cl_1.after_optimizations-buffer-assignment-values.txt").write_text("")
    sizes = {"argument_size_in_bytes": 1000, "output_size_in_bytes": 900, "alias_size_in_bytes": 800}
    analysis = SimpleNamespace(**sizes, temp_size_in_bytes=10540288)
    assert needed_nbytes(tmp_path, analysis) == 1100 + 5898336
    analysis.temp_size_in_bytes = 0
    assert needed_nbytes(tmp_path, analysis) == 1100
