"""The heap in which buffers have one place each: against what lives at once, and against every way to place them."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from passes.memory.packing import Span, gaps_as_they_come, gaps_nbytes, heap_nbytes, live_nbytes

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


def test_live_bytes_are_the_most_of_any_moment():
    spans = [Span(3, 0, 2), Span(4, 2, 3), Span(5, 3, 3)]
    assert live_nbytes(spans) == max(
        sum(span.nbytes for span in spans if span.first <= moment <= span.last) for moment in range(4)
    )


def test_a_small_buffer_between_two_large_ones_leaves_a_gap():
    """As the Hessian of a sum: two of four bytes are never there at once, and each meets one of two small ones."""
    spans = [Span(4, 0, 2), Span(1, 2, 6), Span(1, 6, 7), Span(4, 7, 8)]
    assert live_nbytes(spans) == 5
    assert gaps_nbytes(spans) == 1


def test_the_longest_lived_come_first_if_that_leaves_less():
    """Placed by size, the largest first, these take 8; placed by how long they live, 7, which is what is live."""
    spans = [(4, 5, 6), (3, 0, 4), (2, 4, 8), (2, 1, 4)]
    assert gaps_nbytes([Span(*span) for span in spans]) == 0
    assert heap_nbytes(sorted((Span(*s) for s in spans), key=lambda s: (-s.nbytes, s.first - s.last))) == 8


def test_of_equal_buffers_the_one_of_least_rank_is_placed_first():
    """Whether the first or the last of two that live equally long is placed first decides if others find room."""

    def gaps(first: int, last: int) -> int:
        others = [Span(3, 0, 1, rank=1), Span(1, 5, 6, rank=2), Span(2, 3, 4, rank=3)]
        return gaps_nbytes([Span(2, 3, 5, rank=first), Span(2, 1, 3, rank=last), *others])

    assert (gaps(0, 4), gaps(4, 0)) == (1, 0)


@given(SPANS)
def test_placing_as_they_come_is_one_of_the_orders(spans: list[Span]):
    ordered = sorted(spans, key=lambda span: (span.first, -span.nbytes))
    assert live_nbytes(spans) + gaps_as_they_come(spans) == heap_nbytes(ordered)


def test_a_large_buffer_that_comes_late_finds_no_room_between_those_that_stay():
    """A vector that stays lies where the two buffers before it were, and 5 find no room of 6 that is in one piece."""
    spans = [Span(3, 0, 2), Span(1, 1, 9), Span(3, 2, 4), Span(5, 5, 6)]
    assert live_nbytes(spans) == 7
    assert gaps_as_they_come(spans) == 2
    assert gaps_nbytes(spans) == 0
