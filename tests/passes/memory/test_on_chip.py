"""Arrays in a TPU's on-chip memory: they fit at every moment, and follow the rules of XLA's MemorySpaceAssignment."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from passes.cluster import parse_cluster
from passes.memory import on_chip
from passes.memory.moments import Cost, Moments, nothing
from passes.memory.on_chip import FETCHED, STAYS, Chip
from passes.memory.packing import Span
from passes.memory.tpu_chips import room_nbytes, slice_tables

SEEDS = range(50)
ROOM = 100


def chip(room: int = ROOM) -> Chip:
    """A chip of which all of so much room is copied in that many seconds."""
    return Chip(room_nbytes=room, bytes_per_second=1.0, cost_of=nothing)


def timed(costs: Iterable[Cost], *loops: tuple[int, int]) -> Moments:
    """Moments of kernels that cost so much."""
    made = tuple(costs)
    return Moments(sources=("",) * len(made), costs=made, begins=tuple(range(len(made) + 1)), loops=frozenset(loops))


def off_chip(spans: Sequence[Span], chip: Chip, moments: Moments, arguments: Sequence[Span] = ()) -> list[Span]:
    """The spans beside the chip."""
    return on_chip.off_chip(spans, chip, moments, arguments).spans


QUICK = timed([Cost(0.0, 1.0)] * 12)


def test_the_room_is_what_kernels_leave() -> None:
    devices = {name: parse_cluster(f"8:{name}").group().device for name in ("tpu-v3", "tpu-v5e", "tpu-v5p", "tpu-v6e")}
    assert {name: room_nbytes(device) for name, device in devices.items()} == {
        "tpu-v3": 0,
        "tpu-v5e": 117_440_512,
        "tpu-v5p": 48 * 2**20,
        "tpu-v6e": 96 * 2**20,
    }


def test_large_arrays_are_fetched_in_slices() -> None:
    """As libtpu 0.0.42 cuts what it fetches of vision transformers and a LLaMA."""
    v5e, v5p, v6e = (parse_cluster(f"8:tpu-{name}").group().device for name in ("v5e", "v5p", "v6e"))
    sizes = (2**19, 2**20, 23068672, 67108864)
    assert [slice_tables(v5e, nbytes) for nbytes in sizes] == [0, 8, 8, 8]
    assert [slice_tables(v6e, nbytes) for nbytes in sizes] == [0, 0, 12, 32]
    assert not any(slice_tables(v5p, nbytes) for nbytes in sizes)
    moments = timed([Cost(0.0, 1.0), *[Cost(0.0, STAYS * ROOM)] * 2, *[Cost(0.0, 1.0)] * 3])
    cut = Chip(room_nbytes=ROOM, bytes_per_second=1.0, cost_of=nothing, tables_of=lambda nbytes: nbytes // 5)
    span = Span(10, 0, 5, events=(3, 5))
    assert on_chip.off_chip([span], cut, moments) == ([span._replace(last=3)], 2)
    assert on_chip.off_chip([span], chip(), moments).tables == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_spans_on_the_chip_have_room_there_at_every_moment(seed: int) -> None:
    r, count = random.Random(seed), 12
    spans = [
        Span(r.randrange(1, 60), first, r.randrange(first, count), made_by=i)
        for i, first in enumerate(r.choices(range(count), k=20))
    ]
    outside = {span.made_by for span in off_chip(spans, chip(), QUICK)}
    inside = [span for span in spans if span.made_by not in outside]
    for moment in range(count):
        assert sum(span.nbytes for span in inside if span.first <= moment <= span.last) <= ROOM
    assert off_chip(spans, chip(0), QUICK) == spans
    assert off_chip(spans, chip(60 * len(spans)), QUICK) == []
    large = [span for span in spans if span.nbytes > ROOM // 4]
    assert {span.made_by for span in off_chip(spans, chip(ROOM // 4), QUICK)} >= {span.made_by for span in large}


def test_a_span_that_waits_too_long_for_its_reader_lies_beside_the_chip() -> None:
    """As activations of a large step, which the backward pass reads milliseconds later, and none of a small one."""
    for seconds, stays in ((STAYS * ROOM, True), (STAYS * ROOM + 1, False)):
        moments = timed([Cost(0.0, 1.0), Cost(0.0, seconds), Cost(0.0, 1.0)])
        span = Span(10, 0, 2, events=(2,))
        assert off_chip([span], chip(), moments) == ([] if stays else [span])
        assert off_chip([span._replace(events=(1, 2))], chip(), moments) == []
        assert off_chip([span._replace(events=(0, 2))], chip(), timed(moments.costs, (0, 2))) == []


def test_a_fetched_span_has_no_place_beside_the_chip_after_that() -> None:
    moments = timed([Cost(0.0, 1.0), *[Cost(0.0, STAYS * ROOM)] * 2, *[Cost(0.0, 1.0)] * 3])
    span = Span(10, 0, 5, events=(3, 5))
    assert off_chip([span], chip(), moments) == [span._replace(last=3)]
    soon = timed([Cost(0.0, 1.0), Cost(0.0, STAYS * 10 * ROOM), *[Cost(0.0, 1.0)] * 3])
    assert off_chip([Span(10, 0, 2, events=(1, 2))], chip(9), soon) == [Span(10, 0, 2, events=(1, 2))]


def test_arguments_take_room_as_they_are_fetched() -> None:
    copied = 60.0
    moments = timed([Cost(0.0, FETCHED * copied)] * 3)
    made, weights = Span(50, 0, 2, events=(2,)), Span(60, 0, 2, events=(2,))
    assert off_chip([made], chip(), moments) == []
    assert off_chip([made], chip(), moments, [weights]) == [made]


def test_spans_read_by_kernels_that_wait_for_memory_come_first() -> None:
    """As results of elementwise kernels before those of products."""
    costs = [Cost(9.0, 1.0), Cost(0.0, 9.0), Cost(9.0, 1.0), Cost(0.0, 9.0)]
    product, elementwise = Span(60, 0, 2, events=(2,)), Span(60, 1, 3, events=(3,))
    assert off_chip([product, elementwise], chip(), timed(costs)) == [product]


def test_one_place_is_kept_until_all_have_read_it() -> None:
    """What comes and goes leaves gaps that a large buffer does not fit: there is room for it in all, and no place."""
    early, long = Span(40, 0, 3, events=(1, 2, 3)), Span(30, 0, 5, events=(1, 2, 5))
    late = Span(65, 4, 5, events=(5,))
    assert off_chip([early, long, late], chip(100), QUICK) == [late]
    assert off_chip([long, late], chip(100), QUICK) == []
    assert off_chip([early, long, late], chip(40 + 30 + 65), QUICK) == []


def test_spans_that_begin_beside_the_chip_are_copied_there_if_there_is_room() -> None:
    spans = [Span(60, 0, 9, beside=3), Span(60, 2, 9), Span(30, 5, 9, beside=9)]
    assert off_chip(spans, chip(120), QUICK) == [spans[0]._replace(last=3), spans[2]]
    assert off_chip(spans, chip(0), QUICK) == spans
