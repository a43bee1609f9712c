"""The heap in which buffers have one place each: against what lives at once, and against every way to place them."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from passes.memory.packing import Span, gaps_nbytes, heap_nbytes, live_nbytes

SPANS = st.lists(
    st.builds(
        lambda n, first, more: Span(n, first, first + more), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3)
    ),
    max_size=5,
)


@given(SPANS)
def test_a_heap_is_between_what_lives_at_once_and_all_of_it(spans: list[Span]):
    assert live_nbytes(spans) <= heap_nbytes(spans) <= sum(span.nbytes for span in spans)
    assert gaps_nbytes(spans) >= 0


@given(SPANS)
def test_some_order_of_placing_has_the_heap_and_none_less_than_is_live(spans: list[Span]):
    heaps = {heap_nbytes(order) for order in permutations(spans)}
    assert live_nbytes(spans) + gaps_nbytes(spans) in heaps
    assert min(heaps) >= live_nbytes(spans)


def test_what_lives_at_once_is_counted_moment_by_moment():
    spans = [Span(3, 0, 2), Span(4, 2, 3), Span(5, 3, 3)]
    assert live_nbytes(spans) == max(
        sum(span.nbytes for span in spans if span.first <= moment <= span.last) for moment in range(4)
    )


def test_a_small_buffer_between_two_large_ones_leaves_a_gap():
    """Two of four bytes take turns in one place each; what bridges them finds neither free."""
    spans = [Span(4, 0, 1), Span(4, 1, 2), Span(2, 2, 4), Span(4, 4, 5)]
    assert live_nbytes(spans) == 8
    assert (
        gaps_nbytes([*spans, Span(4, 5, 6)])
        == heap_nbytes(sorted([*spans, Span(4, 5, 6)], key=lambda s: -s.nbytes)) - 8
    )
