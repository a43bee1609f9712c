"""Functions for which no plan is possible, run under `jax.jit` instead: the same results, and a warning with the
reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from autopar.frontend import Signature
from autopar.options import Settings
from passes.errors import PlanningError
from passes.planners import Auto

_WORDS = "until then it runs as under jax.jit: XLA's partitioner cuts what no shard_map does, and nothing is planned"


def unplanned(
    reason: PlanningError,
    settings: Settings,
    signature: Signature,
    jitted: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Callable[[list[Any]], Any]:
    """The jitted function of flat arguments; the static ones of this call are bound.

    Raises the `reason` itself if the user has asked for something that only a plan has: a planner, a limit,
    microbatches.
    """
    asked_for = (settings.memory_limit, settings.microbatches, settings.remat, settings.follow)
    if settings.planner != Auto() or any(option is not None for option in asked_for):
        raise reason
    warnings.warn(f"{reason}\n  {_WORDS}", stacklevel=4)
    dynamic, _ = signature.split(args, kwargs)
    without = signature.merge(((None,) * len(dynamic[0]), dict.fromkeys(dynamic[1])), args, kwargs)
    tree = jax.tree.structure(dynamic)

    def run(leaves: list[Any]) -> Any:
        given, named = signature.merge(jax.tree.unflatten(tree, leaves), *without)
        return jitted(*given, **named)

    return run
