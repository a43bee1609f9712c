"""The forms of a traced step: in microbatches, with layers that compute again what they do not keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax

from autopar.frontend import Traced
from autopar.rewrite.microbatch import microbatched
from autopar.rewrite.remat import recomputed
from passes.intra_op import Form, Variant
from passes.transforms import Coupling, Kept, layers, loops

COUNTS = (1, 2, 4, 8, 16, 32)
"""The numbers of microbatches that are tried where none is asked for."""


@dataclass(kw_only=True)
class TracedForms:
    """The forms of one traced step of flat arguments `structs`, all in `count` microbatches if that is given.

    `fixed` if what layers keep has been decided.
    """

    traced: Traced
    structs: Sequence[jax.ShapeDtypeStruct]
    coupling: Coupling = "exact"
    count: int | None = None
    fixed: bool = False
    known: dict[Variant, Traced] = field(default_factory=dict[Variant, Traced])

    @property
    def layers(self) -> int:
        """The layers of the forward pass, 0 where there is no backward pass or nothing to choose."""
        return self._layers

    @cached_property
    def _layers(self) -> int:
        found = 0 if self.fixed else len(layers(self.traced.graph))
        return found if found > 1 or loops(self.traced.graph) else 0

    @property
    def counts(self) -> Sequence[int]:
        return COUNTS if self.count is None else (self.count,)

    def form(self, variant: Variant) -> Form:
        found = self.program(variant)
        return Form(graph=found.graph, state_pairs=found.state_pairs, donated=found.donated)

    def program(self, variant: Variant) -> Traced:
        """The step in one form. Raises PlanningError where it has none such."""
        key = replace(variant, offload=False)
        if key not in self.known:
            self.known[key] = formed(self.traced, self.structs, variant.kept, variant.microbatches, self.coupling)
        return self.known[key]


def formed(
    traced: Traced,
    structs: Sequence[jax.ShapeDtypeStruct],
    kept: Sequence[Kept],
    count: int,
    coupling: Coupling,
) -> Traced:
    """A step with layers that keep `kept` (nothing: as written), in `count` microbatches."""
    traced = recomputed(traced, kept) if kept else traced
    return microbatched(traced, structs, count, coupling) if count > 1 else traced
