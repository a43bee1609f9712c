"""Buffers in the room of dead arguments and of outputs that are not yet made: none overlaps another that is live."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.memory.packing import Span
from passes.memory.reuse import Place, connected, unplaced

SPANS = st.lists(
    st.builds(
        lambda n, first, more: Span(n, first, first + more), st.integers(1, 4), st.integers(0, 8), st.integers(0, 3)
    ),
    max_size=6,
)
PLACES = st.lists(st.builds(Place, st.integers(1, 4), st.integers(-1, 4), st.integers(0, 12)), max_size=2)


def free(place: Place, moment: int) -> bool:
    return place.after < moment < place.before


@given(SPANS, PLACES)
def test_placed_spans_fit_at_every_moment(spans: list[Span], places: list[Place]):
    left = unplaced(spans, places)
    assert all(span in spans for span in left)
    placed = [span for span in spans if spans.count(span) > left.count(span)]
    for span in placed:
        moments = range(span.first, span.last + 1)
        assert any(span.nbytes <= place.nbytes and all(free(place, m) for m in moments) for place in places)
    for moment in range(12):
        assert sum(s.first <= moment <= s.last for s in placed if spans.count(s) == 1) <= len(places)


def test_the_largest_that_fits_goes_to_the_smallest_place():
    spans = [Span(1, 1, 2), Span(2, 1, 2), Span(3, 1, 2), Span(9, 1, 2)]
    assert unplaced(spans, [Place(8, -1, 9), Place(2, -1, 9)]) == [spans[0], spans[3]]
    assert unplaced(spans, [Place(8, 2, 9), Place(8, -1, 2)]) == spans


def test_a_span_that_an_output_writes_over_may_end_as_it_is_written():
    span = Span(4, 1, 3, chain=0)
    assert unplaced([span], [Place(4, -1, 3, frozenset({0}))]) == []
    assert unplaced([span], [Place(4, -1, 3)]) == [span]


def test_unplaced_parts_of_a_chain_that_follow_each_other_are_one_buffer():
    chain = [Span(4, 1, 3, chain=7, events=(2,)), Span(4, 3, 5, chain=7, events=(4,)), Span(4, 5, 8, chain=7)]

    def left(*places: Place) -> list[Span]:
        return connected(unplaced(chain, places))

    assert left() == [Span(4, 1, 8, chain=7, events=(2, 4))]
    assert left(Place(4, -1, 4)) == [Span(4, 3, 8, chain=7, events=(4,))]
    assert left(Place(4, 2, 6)) == [chain[0], chain[2]]
    assert left(Place(4, -1, 9)) == []
