"""The form of a program that runs in microbatches, of those that compute the same: the first that needs one loop."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.frontend import Traced
from autopar.rewrite.counts_apart import with_counts_apart
from autopar.rewrite.late_factor import with_late_factor
from autopar.rewrite.parted_rows import with_rows_parted
from autopar.rewrite.rows_first import with_rows_first
from passes.errors import InternalError, PlanningError
from passes.transforms import Coupling, Turn, in_turn

Equivalent = tuple[Traced, tuple[int, ...]]
"""A program that computes the same, and the positions of the inputs whose first two dimensions it has exchanged."""


def with_turns(traced: Traced, count: int, coupling: Coupling) -> tuple[Equivalent, tuple[Turn, ...]]:
    """(the program, its loops over microbatches): rewritten if it needs none or several as it is, and then one.

    Raises PlanningError as `in_turn` does for the program as it is.
    """
    several: tuple[Equivalent, tuple[Turn, ...]] | None = None
    refusal: PlanningError | None = None
    for program, behind in _equivalent(traced, count):
        pairs, named = program.state_pairs, program.named
        try:
            turns = in_turn(program.graph, count, state_pairs=pairs, named=named, coupling=coupling)
        except PlanningError as error:
            refusal = refusal or error
            continue
        if len(turns) == 1:
            return (program, behind), turns
        several = several or ((program, behind), turns)
    if several is None:
        raise refusal or InternalError("no program is in microbatches")
    return several


def _equivalent(traced: Traced, count: int) -> Iterator[Equivalent]:
    """The program, and rewritten forms of it that may have one loop over microbatches where it has none."""
    yield from ((program, ()) for program in _with_sums_late(traced, count))
    if count > 1 and (swapped := with_rows_first(traced)):
        program, behind = swapped
        yield from ((written, behind) for written in _with_sums_late(program, count))


def _with_sums_late(traced: Traced, count: int) -> Iterator[Traced]:
    """The program, with counts apart, with loops over rows in parts, and with a factor of the whole batch late."""
    yield traced
    if apart := with_counts_apart(traced):
        yield apart
    parted = with_rows_parted(traced, count) if count > 1 else None
    if parted:
        yield parted
        if apart := with_counts_apart(parted):
            yield apart
    if count > 1 and (late := with_late_factor(parted or traced)):
        yield late
