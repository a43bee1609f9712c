"""Plans of random networks within memory limits: `python -m benchmarks.limits --help`.

Each network (`benchmarks.networks`) is planned without a limit, then within shares of what that plan needs, and within
what each hand-made plan needs. No plan may be slower than one within a smaller limit, nor than a hand-made one that
keeps its limit, and no limit may be refused that one of these plans keeps.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

import autopar
from benchmarks.console import json_text, stdout
from benchmarks.memory_limit import measures_of
from benchmarks.networks import Design, add_arguments, drawn
from passes.cluster import parse_cluster
from passes.errors import OverBudgetError, PlanningError
from passes.text import quantities

CLUSTERS = ("8:a100-80g", "2x4:v100-16g")
SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
ROOM = 1.02
"""The limit within which a plan is known, as a multiple of the bytes of that plan: none has to be met exactly."""
SAME = 1e-6
"""The relative difference of seconds that rounding makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """A plan within a limit of bytes; its bytes, seconds and bound are infinite where none was found.

    `why` names the limit and `how` what the plan does to fit; `cpu` is processor seconds of planning.
    """

    why: str
    limit: float
    nbytes: float
    seconds: float
    bound: float
    how: str
    cpu: float

    @property
    def is_refused(self) -> bool:
        """Whether there is no plan."""
        return np.isinf(self.seconds)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.limits",
        description="Plan random networks without a memory limit, within shares of what that plan needs, and within "
        "what hand-made plans need. Prints steps as multiples of the one without a limit, and the processor time of "
        "planning. Names every plan that is slower than one within a smaller limit, or than a hand-made one that keeps "
        "its limit, and every limit that is refused though a plan keeps it; exits with 1 if there are any.",
        epilog="example: python -m benchmarks.limits --seed 3 --count 5 --clusters 8:a100-80g --shares 0.3,0.6",
    )
    add_arguments(parser, 10, CLUSTERS)
    parser.add_argument(
        "--shares",
        default=SHARES,
        type=lambda text: tuple(sorted(map(float, text.split(",")))),
        metavar="X,Y",
        help=f"limits, of what the plan without one needs (default: {','.join(map(str, SHARES))})",
    )
    parser.add_argument("--max-axes", default=2, type=int, metavar="N", help="of meshes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(argv)


def within_limits(
    design: Design, cluster: str, shares: Sequence[float], max_axes: int = 2
) -> tuple[Within, list[Within], list[str]]:
    """The plan without a limit, those within limits in ascending order, and what is wrong with them, in words."""
    network = design.network()

    def planned(planner: Any, limit: float | None, why: str) -> Within:
        """The plan within a limit, or that there is none."""
        began = time.process_time()
        most = None if limit is None else int(limit)
        step = autopar.parallelize(network.step, cluster=cluster, planner=planner, donate_argnums=0, memory_limit=most)
        try:
            plan: Any = step.plan(network.state, network.batch)
        except OverBudgetError as error:
            least: Any = error.least_memory_plan
            how = f"refused, {quantities.nbytes(least.peak_nbytes)} at least" if least else "refused"
            nbytes = seconds = bound = np.inf
        else:
            how, nbytes, seconds, bound = measures_of(plan), plan.peak_nbytes, plan.step_seconds, plan.solution.bound
        cpu = time.process_time() - began
        limit = np.inf if limit is None else float(limit)
        return Within(why=why, limit=limit, nbytes=nbytes, seconds=seconds, bound=bound, how=how, cpu=cpu)

    auto = autopar.Auto(max_axes=max_axes)
    free = planned(auto, None, "no limit")
    hand_made = list[Within]()
    for name, planner in (("data parallel", autopar.DataParallel()), ("zero 3", autopar.Zero(3)), *_megatron(cluster)):
        try:
            hand_made.append(planned(planner, None, name))
        except PlanningError:  # it has no batch, or nothing that is cut as this planner does
            continue
    limits = [(share * free.nbytes, f"{share:g} of it") for share in shares]
    limits += [(ROOM * plan.nbytes, f"{plan.why} fits") for plan in hand_made if ROOM * plan.nbytes < free.nbytes]
    limited = [planned(auto, limit, why) for limit, why in sorted(limits)]
    return free, limited, _violations(limited, [free, *hand_made])


def _megatron(cluster: str) -> list[tuple[str, Any]]:
    """Megatron's planner, over all devices and over half of them."""
    n_devices = parse_cluster(cluster).n_devices
    halves = [(1, n_devices), (2, n_devices // 2)]
    return [(f"megatron {data}x{tensor}", autopar.Megatron(data=data, tensor=tensor)) for data, tensor in halves]


def _violations(plans: Sequence[Within], unlimited: Sequence[Within]) -> list[str]:
    """Everything that is wrong with plans, in words; `plans` are in ascending order of their limits.

    Each is compared with those within smaller limits, and with the unlimited ones, searched and hand-made.
    """
    wrong = list[str]()
    for place, plan in enumerate(plans):
        known = [other for other in (*plans[:place], *unlimited) if other.nbytes <= plan.limit]
        fastest = min(known, key=lambda other: other.seconds, default=None)
        if plan.nbytes > plan.limit and not plan.is_refused:
            wrong.append(f"{plan.why}: the plan needs {plan.nbytes / plan.limit:.3f} of the limit")
        if fastest is None:
            continue
        if plan.is_refused:
            wrong.append(f"{plan.why}: refused, and '{fastest.why}' keeps the limit")
        elif plan.seconds > (1 + SAME) * fastest.seconds:
            wrong.append(f"{plan.why}: {plan.seconds / fastest.seconds:.3f} times '{fastest.why}', which fits")
        if plan.bound > (1 + SAME) * fastest.seconds and not plan.is_refused:
            wrong.append(f"{plan.why}: a bound of {plan.bound:.6g} s, and '{fastest.why}' takes {fastest.seconds:.6g}")
    return wrong


def table(free: Within, limited: Sequence[Within], title: str) -> Table:
    """The plans of one network, a limit a row, the plan without a limit last."""
    printed = Table(title=title, title_justify="left")
    for heading in ("limit", "MiB", "step", "/ no limit", "plan", "planning, CPU s"):
        printed.add_column(heading, justify="left" if heading in ("limit", "plan") else "right")
    for plan in (*limited, free):
        printed.add_row(
            plan.why,
            "" if np.isinf(plan.limit) else f"{plan.limit / 2**20:.0f}",
            "" if plan.is_refused else quantities.seconds(plan.seconds),
            "" if plan.is_refused else f"{plan.seconds / free.seconds:.2f}",
            plan.how,
            f"{plan.cpu:.1f}",
        )
    return printed


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each network; 1 if a plan is slower than it may be or a limit is refused wrongly, else 0."""
    args = arguments(argv)
    console, rows, wrong = stdout(), list[dict[str, Any]](), list[str]()
    clusters: tuple[str, ...] = args.clusters
    for number, cluster in itertools.product(range(args.first, args.first + args.count), clusters):
        design = drawn(args.seed, number)
        title = f"{args.seed}/{number} {design} on {cluster}"
        free, limited, here = within_limits(design, cluster, args.shares, args.max_axes)
        wrong += [f"{title}: {line}" for line in here]
        rows += [{"network": title, **asdict(plan)} for plan in (*limited, free)]
        if not args.json:
            console.print(table(free, limited, title))
            for line in here:
                console.print(f"MISSED {line}", markup=False)
    cpu = [row["cpu"] for row in rows if np.isfinite(row["limit"])]
    summary = (
        f"{len(cpu)} plans within limits in {np.median(cpu):.1f} s of processor time (median), "
        f"{np.quantile(cpu, 0.95):.1f} s (95 %), {max(cpu):.1f} s (most); {len(wrong)} missed"
    )
    if args.json:
        print(json_text({"rows": rows, "missed": wrong, "summary": summary}))
    else:
        console.print(summary)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
