"""Trip counts of loops, where the compiler does not write them: from their counters."""

from __future__ import annotations

import pytest

from autopar.checks import hlo

TEXT = """HloModule step

%cond (carried: (s32[], f32[16], s32[])) -> pred[] {
  %carried = (s32[]{:T(128)}, f32[16]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %end = s32[]{:T(128)} constant(12)
  %counter = s32[]{:T(128)} get-tuple-element(%carried), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %end), direction=LT, metadata={op_name="while/cond/lt"}
}

%body (carried.1: (s32[], f32[16], s32[])) -> (s32[], f32[16], s32[]) {
  %carried.1 = (s32[]{:T(128)}, f32[16]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%carried.1), index=0
  %x.1 = f32[16]{0:T(128)} get-tuple-element(%carried.1), index=1
  %bound.1 = s32[]{:T(128)} get-tuple-element(%carried.1), index=2
  %step = s32[]{:T(128)} constant(1)
  %sum = f32[16]{0:T(128)} all-reduce(%x.1), replica_groups={{0,1}}, to_apply=%add
  %raised = s32[]{:T(128)} add(%counter.1, %step), metadata={op_name="while/body/add"}
  ROOT %next = (s32[]{:T(128)}, f32[16]{0:T(128)}, /*index=2*/s32[]{:T(128)}) tuple(%raised, %sum, %bound.1)
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16]{0:T(128)} parameter(0)
  %bound = s32[]{:T(128)} constant(7)
  %begin = s32[]{:T(128)} constant(0)
  %copied = s32[]{:T(128)} copy(%begin)
  %first = (s32[]{:T(128)}, f32[16]{0:T(128)}, /*index=2*/s32[]{:T(128)}) tuple(%copied, %x, %bound)
  %while.1 = (s32[]{:T(128)}, f32[16]{0:T(128)}, s32[]{:T(128)}) while(%first), condition=%cond, body=%body
  ROOT %result = f32[16]{0:T(128)} get-tuple-element(%while.1), index=1
}
"""

CARRIED = ("%end = s32[]{:T(128)} constant(12)", "%end = s32[]{:T(128)} get-tuple-element(%carried), index=2")


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        (("", ""), 12),
        (CARRIED, 7),
        (("%begin = s32[]{:T(128)} constant(0)", "%begin = s32[]{:T(128)} constant(4)"), 8),
        (("%step = s32[]{:T(128)} constant(1)", "%step = s32[]{:T(128)} constant(5)"), 3),
        (("constant(12)", "constant(-3)"), 0),
    ],
)
def test_a_counter_says_how_often_a_loop_runs(change: tuple[str, str], trips: int):
    (sent,) = hlo.collectives(TEXT.replace(*change), ("x",), (2,))
    assert sent.count == trips


@pytest.mark.parametrize(
    "change",
    [
        ("direction=LT", "direction=NE"),
        ("%begin = s32[]{:T(128)} constant(0)", "%begin = s32[]{:T(128)} parameter(1)"),
        ("%step = s32[]{:T(128)} constant(1)", "%step = s32[]{:T(128)} parameter(1)"),
        ("add(%counter.1, %step)", "multiply(%counter.1, %step)"),
        ("%end = s32[]{:T(128)} constant(12)", "%end = s32[]{:T(128)} parameter(1)"),
        ("compare(%counter, %end)", "compare(%end, %counter)"),
    ],
)
def test_a_loop_that_no_counter_ends_counts_once(change: tuple[str, str]):
    assert change[0] in TEXT
    (sent,) = hlo.collectives(TEXT.replace(*change), ("x",), (2,))
    assert sent.count == 1


def test_trip_counts_that_a_compiler_writes_beside_a_loop_are_believed():
    known = TEXT.replace("body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}\n')
    (sent,) = hlo.collectives(known, ("x",), (2,))
    assert sent.count == 5
