"""Primitives of Equinox, which other libraries bind through it."""

from __future__ import annotations

import equinox.internal as eqxi
import numpy as np
from equinox.internal._loop.common import select_if_vmap_p  # no public function binds it alone

from tests.autopar.lowering.rule_cases.case import Case, floats, ints


def cases() -> list[Case]:
    x, y = floats(4, 8), floats(4, 8, seed=1)
    return [
        Case("unvmap_any", eqxi.unvmap_any, (x > 1.9,)),
        Case("unvmap_all", eqxi.unvmap_all, (x > -1.9,)),
        Case("unvmap_max", eqxi.unvmap_max, (ints(4, 8),)),
        Case("nonbatchable", eqxi.nonbatchable, (x,)),
        Case("select_if_vmap", select_if_vmap_p.bind, (np.array(True), x, y)),
    ]
