"""Calls whose arguments come again: told by identity, and never taken for others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.frontend import types_of
from autopar.recurring import Recurring
from autopar.runtime.argument_groups import grouped

ARRAYS = (jnp.zeros(3), jnp.zeros(3, jnp.int32), jnp.zeros(4), jnp.asarray(1.0), np.zeros(3, np.float32), 1.0, 1, True)


@pytest.mark.parametrize("before", [[], *([array] for array in ARRAYS)], ids=str)
def test_leaves_fit_exactly_if_their_types_are_equal(before: list[Any]):
    """An oracle: comparing all types anew."""
    for first in ARRAYS:
        known = Recurring(types_of([first, first]))
        for leaf in before:
            known.fit([leaf, first])
        for second in ARRAYS:
            for leaves in ([first, second], [second, first]):
                assert known.fit(leaves) == (types_of(leaves) == known.types)


@pytest.mark.parametrize(
    "flags", [(), (True,), (False,), (True, True, False), (False, True, False, False, True)], ids=str
)
def test_groups_are_the_arguments_in_their_order(flags: tuple[bool, ...]):
    groups = grouped(flags)
    lists = groups(range(len(flags)))
    assert [i for each in lists for i in each] == list(range(len(flags)))
    assert [flags[i] for each in lists for i in each] == [
        n in groups.donated for n, each in enumerate(lists) for _ in each
    ]


def test_one_array_in_two_places_is_refused_where_the_other_moves():
    """XLA sees a copy and says nothing; under `jax.jit` it is one buffer, given away and read."""
    step = autopar.parallelize(lambda a, b: (a + 1, b.sum()), planner=autopar.DataParallel(), donate_argnums=0)
    a = jax.device_put(jnp.ones((8, 8)), step.lower(jnp.ones((8, 8)), jnp.ones((8, 8))).compile().input_shardings[0][0])
    with pytest.raises((autopar.ArgumentError, ValueError), match="donate"):
        step(a, a)
