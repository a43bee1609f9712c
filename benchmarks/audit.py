"""Every collective of every plan beside what the textbook sends: `python -m benchmarks.audit --help`.

Models are planned from shapes alone, so no device is needed. `benchmarks.causes` says what each collective is for, and
`benchmarks.textbook` derives what data parallelism, ZeRO and Megatron send for the same program. What a plan sends
beyond that, in more time and in more bytes, is unexplained: it is named with its tensor, line and share of the step.

`Auto` mixes those parallelisms and trades sending for computing, so no textbook lists its collectives. It must keep
what holds of all of them: a parameter is gathered once in each phase, a gradient and a sum over the batch are reduced
once, and nothing is reduced only to be added to what is reduced too. And its step must take no longer than that of the
best textbook plan: a hand-made plan without what is unexplained in it, also with experts cut over all devices
(`benchmarks.experts`), which no hand-made planner does. Findings that take no longer in all than the plan's own gap
allows are dropped.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Self, cast

import jax
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.frontend import Traced
from benchmarks.causes import Program, Sent
from benchmarks.console import stdout
from benchmarks.experts import Experts, seconds_with_experts
from benchmarks.lists import names, some_of, words
from benchmarks.searched import best_of, judge_any
from benchmarks.textbook import judge
from benchmarks.trainings import MODELS, make_state, make_step
from benchmarks.verdicts import Allowed, Style, Verdict, by_cause, by_phase, payload
from passes.cluster import parse_cluster
from passes.errors import PlanningError
from passes.plan import Plan
from passes.text import quantities

CLUSTERS = ("8:a100-80g", "2x8:a100-80g", "8x8:h100", "8:tpu-v5e")
PLANNERS = ("dp", "zero1", "zero2", "zero3", "megatron", "auto")
DTYPES = ("float32", "bfloat16")

TOKENS: dict[str, Any] = {"vocab_size": 32768, "sequence_length": 512, "hidden": 1024, "heads": 64, "layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt": TOKENS,
    "llama": TOKENS | {"kv_heads": 64, "mlp": 2816},
    "bert": TOKENS,
    "transformer": TOKENS | {"layers": 1},
    "moe": TOKENS | {"experts": 64, "group_size": 512, "mlp_factor": 2},
    "wide-resnet": {"base_channels": 64, "classes": 64, "width_factor": 4},
    "alexnet": {"image_size": 224, "channels": (64, 192, 384, 256, 256), "hidden": 4096, "classes": 1024},
    "dlrm": {"rows": (65536, 32768), "dense_features": 64, "bottom": (512, 64), "top": (1024, 512, 1)},
}
"""The fields of each model's configuration that are replaced: layers as large as real ones, few of them, and sizes that
64 devices divide."""

BATCH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program, a cluster and a planner by name."""

    model: str
    remat: bool
    dtype: str
    cluster: str
    planner: str

    def __str__(self) -> str:
        remat = " remat" if self.remat else ""
        return f"{self.model}{remat} {self.dtype} on {self.cluster} by {self.planner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The collectives of one cause in a step, as planned and in the textbook: tensors, bytes on a device, seconds."""

    role: str
    phase: str
    axes: str
    kinds: str
    count: int
    nbytes: int
    seconds: float
    textbook_count: int
    textbook_nbytes: int
    textbook_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained:
    """A collective that the textbook does not need, or that takes `surplus_seconds` longer than in the textbook."""

    role: str
    tensor: str
    layer: str
    phase: str
    kind: str
    axes: str
    count: int
    nbytes: int
    where: str
    surplus_seconds: float
    share: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A case's plan, its collectives by cause, and those that are unexplained, the longest surplus first."""

    case: Case
    mesh: str
    step_seconds: float
    lines: tuple[Line, ...]
    unexplained: tuple[Unexplained, ...]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit",
        description="Plan every model for every cluster under every planner and print its collectives by cause beside "
        "what the textbook sends. Exits with 1 if the textbook does not need some of them.",
        epilog="example: python -m benchmarks.audit --model gpt --cluster 8:a100-80g --planner dp,zero3 --causes",
    )
    parser.add_argument(
        "--model", default=tuple(MODELS), type=names("model", MODELS), metavar="A,B", help=some_of(MODELS)
    )
    parser.add_argument(
        "--cluster", default=CLUSTERS, type=words, metavar="A,B", help=f"(default: {','.join(CLUSTERS)})"
    )
    parser.add_argument(
        "--planner",
        default=PLANNERS,
        type=planners,
        metavar="A,B",
        help=f"of {', '.join(PLANNERS)}, megatron:DATAxTENSOR (default: all; megatron as wide as a host)",
    )
    parser.add_argument(
        "--dtype",
        default=DTYPES,
        type=names("dtype", DTYPES),
        metavar="A,B",
        help=f"of the computation; parameters are float32 (default: {','.join(DTYPES)})",
    )
    parser.add_argument("--remat", choices=("off", "on", "both"), default="both", help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N cases (default: all)")
    parser.add_argument(
        "--causes", action="store_true", help="print all collectives by cause, not only the unexplained"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser.parse_args(argv)


def planners(text: str) -> tuple[str, ...]:
    """The planners that `text` lists. Raises ArgumentTypeError for one that is not there."""
    names("planner", PLANNERS)(",".join(name.partition(":")[0] for name in words(text)))
    return words(text)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The grid that the command line asks for; recomputation only where a model has it."""
    for model, remat, dtype, cluster, planner in product(
        args.model, (False, True), args.dtype, args.cluster, args.planner
    ):
        is_selected = args.remat == "both" or remat == (args.remat == "on")
        if is_selected and (not remat or hasattr(MODELS[model].config, "remat")):
            yield Case(model=model, remat=remat, dtype=dtype, cluster=cluster, planner=planner)


def planner_of(name: str, cluster: str) -> Any:
    """The planner of that name; Megatron cuts weights over a host's devices, over half of them on a single host."""
    kind, _, sizes = name.partition(":")
    group = parse_cluster(cluster).group()
    if kind == "megatron":
        tensor = group.devices_per_host if group.hosts > 1 else group.devices_per_host // 2
        data, tensor = map(int, sizes.split("x")) if sizes else (group.hosts * group.devices_per_host // tensor, tensor)
        return autopar.Megatron(data=data, tensor=tensor)
    if kind == "auto":
        return autopar.Auto()
    return autopar.Zero(int(kind[-1])) if kind.startswith("zero") else autopar.DataParallel()


class Planned:
    """A train step with the shapes of its arguments, and its plans by cluster and planner, each made once."""

    def __init__(self, step: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.step, self.given = step, given
        self.plans: dict[tuple[str, str], tuple[Traced, Plan]] = {}

    @classmethod
    def of(cls, model: str, dtype: str, *, remat: bool) -> Self:
        """The training of a model of the zoo by AdamW, in the sizes of `SIZES`."""
        entry, optimizer = MODELS[model], optax.adamw(1e-3)
        sizes = SIZES[model.removesuffix("-scan")]
        config = replace(entry.config, **sizes, dtype=dtype, **({"remat": True} if remat else {}))
        state = jax.eval_shape(partial(make_state, entry.module, config, optimizer), jax.random.key(0))
        batch = jax.eval_shape(partial(entry.module.example_batch, config, BATCH), jax.random.key(1))
        return cls(make_step(entry.module, config, optimizer), (state, batch))

    def program(self, cluster: str, planner: str) -> Program:
        """The step as planned. Raises PlanningError where the planner cannot."""
        if (cluster, planner) not in self.plans:
            chosen = planner_of(planner, cluster)
            parallel = autopar.parallelize(self.step, cluster=cluster, planner=chosen, donate_argnums=(0,))
            plan = cast("Plan", parallel.plan(*self.given))
            self.plans[cluster, planner] = parallel.trace(*self.given), plan
        traced, plan = self.plans[cluster, planner]
        return Program(graph=traced.graph, plan=plan, state_pairs=traced.state_pairs)

    def verdict(self, cluster: str, planner: str) -> tuple[Program, Verdict]:
        """The planned program, with the textbook's collectives and what of the plan they leave unexplained."""
        program = self.program(cluster, planner)
        if planner != "auto":
            return program, judge(program, style_of(planner, program))
        hand_made: dict[str, tuple[Program, Verdict]] = {}
        for name in PLANNERS[:-1]:
            with suppress(PlanningError):  # a planner whose axes do not divide the model has no plan to compare with
                hand_made[name] = self.verdict(cluster, name)
        verdict = judge_any(program)
        rivals = {name: p.plan.step_seconds - v.waited_seconds for name, (p, v) in hand_made.items()}
        for name, (p, v) in hand_made.items():
            if name != "megatron" and (seconds := seconds_with_experts(p, v)) is not None:
                rivals[f"{name} with experts"] = seconds
        best_of(program, rivals, verdict)
        if (experts := Experts(program=program)).axes:
            verdict.allowed += experts.exchanges(experts.axes)
        admitted = program.plan.gap * program.plan.step_seconds
        return program, verdict if verdict.waited_seconds > admitted else replace(verdict, findings=[])


def style_of(planner: str, program: Program) -> Style:
    """The style of the textbook that a hand-made planner follows, by its name and the axes of its mesh."""
    axes = program.mesh.axes
    return Style(
        stage=int(planner[-1]) if planner.startswith("zero") else 0,
        data=tuple(axis for axis in axes if axis != "tensor"),
        tensor=tuple(axis for axis in axes if axis == "tensor"),
    )


def audited(case: Case, planned: Planned) -> Audited:
    """The audit of one case. Raises PlanningError where its planner cannot plan it."""
    program, verdict = planned.verdict(case.cluster, case.planner)
    plan = program.plan
    return Audited(
        case=case,
        mesh=str(plan.mesh),
        step_seconds=plan.step_seconds,
        lines=tuple(lines(program, verdict.allowed)),
        unexplained=tuple(
            Unexplained(
                role=f.sent.role,
                tensor=f.sent.tensor,
                layer=f.sent.layer,
                phase=f.sent.phase,
                kind=f.sent.kind,
                axes="+".join(f.sent.axes),
                count=f.sent.count,
                nbytes=f.sent.nbytes,
                where=f.sent.where,
                surplus_seconds=f.waited_seconds,
                share=f.waited_seconds / plan.step_seconds,
                why=f.why,
            )
            for f in sorted(verdict.findings, key=lambda f: -f.waited_seconds)
        ),
    )


def lines(program: Program, allowed: Sequence[Allowed]) -> Iterator[Line]:
    """A line for each role, phase and axes: the planned collectives beside those of the textbook."""
    planned: Mapping[Any, list[Sent]] = by_cause(program.sent())
    textbook = by_phase(allowed)
    for key in sorted({*planned, *textbook}):
        role, phase, axes = key
        sends, expected = planned.get(key, []), textbook.get(key)
        yield Line(
            role=role,
            phase=phase,
            axes="+".join(axes),
            kinds=", ".join(sorted({s.kind for s in sends})),
            count=sum(s.count for s in sends),
            nbytes=sum(payload(s, program.mesh.group(s.axes).ranks) for s in sends),
            seconds=sum(s.seconds for s in sends),
            textbook_count=expected.count if expected else 0,
            textbook_nbytes=expected.nbytes if expected else 0,
            textbook_seconds=expected.seconds if expected else 0.0,
        )


def causes_table(audited: Audited) -> Table:
    """A plan's collectives by cause."""
    title = f"{audited.case}: {audited.mesh}, {quantities.seconds(audited.step_seconds)}"
    table = Table("cause", "phase", "axes", "kinds", title=title, title_justify="left", padding=(0, 0))
    for name in ("tensors", "bytes", "time", "textbook tensors", "bytes", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in audited.lines:
        amounts = (str(line.count), quantities.nbytes(line.nbytes), quantities.seconds(line.seconds))
        expected = (
            str(line.textbook_count),
            quantities.nbytes(line.textbook_nbytes),
            quantities.seconds(line.textbook_seconds),
        )
        table.add_row(line.role, line.phase, line.axes, line.kinds, *amounts, *expected)
    return table


def findings(audited: Audited) -> Iterator[str]:
    """The collectives that the textbook does not need, a line each, equal ones together."""
    yield f"unexplained: {audited.case}, {audited.mesh}, {quantities.seconds(audited.step_seconds)}"
    alike: dict[tuple[str, ...], list[Unexplained]] = defaultdict(list)
    for line in audited.unexplained:
        alike[line.kind, line.axes, line.role, line.phase, line.where, line.why].append(line)
    for (kind, axes, role, phase, where, why), same in alike.items():
        tensors = " ".join(dict.fromkeys(line.tensor for line in same[:3])) + (" ..." if len(same) > 3 else "")
        nbytes = sum(line.count * line.nbytes for line in same)
        count, surplus = sum(line.count for line in same), sum(line.surplus_seconds for line in same)
        yield (
            f"  {count} x {kind}@{axes}, {role}, {phase}: {tensors} at {where}: {quantities.nbytes(nbytes)}, "
            f"{quantities.seconds(surplus)} beyond the textbook, {100 * (surplus / audited.step_seconds):.1f} % of the "
            f"step; {why}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the command line asks for; 1 if anything is unexplained."""
    args = arguments(argv)
    console, progress = stdout(), Console(stderr=True, highlight=False)
    grid = list(cases(args))[: args.limit]
    audits: list[Audited] = []
    refused: dict[str, list[Case]] = defaultdict(list)
    known: tuple[Any, Planned] | None = None
    began = time.perf_counter()
    with progress.status("") as status:
        for done, case in enumerate(grid):
            bad = sum(bool(audit.unexplained) for audit in audits)
            status.update(f"{done} of {len(grid)}, {time.perf_counter() - began:.0f} s, {bad} unexplained: {case}")
            key = case.model, case.remat, case.dtype
            if known is None or known[0] != key:
                known = key, Planned.of(case.model, case.dtype, remat=case.remat)
            try:
                audits.append(audited(case, known[1]))
            except PlanningError as error:
                refused[str(error).splitlines()[0]].append(case)
                continue
            if not args.json and (audits[-1].unexplained or args.causes):
                console.print(*([causes_table(audits[-1])] if args.causes else []))
                for text in findings(audits[-1]) if audits[-1].unexplained else ():
                    console.print(text, soft_wrap=True, markup=False)
    bad = [audit for audit in audits if audit.unexplained]
    if args.json:
        print(
            json.dumps(
                {
                    "audited": [asdict(audit) for audit in audits],
                    "refused": {w: [str(c) for c in cs] for w, cs in refused.items()},
                },
                indent=1,
            )
        )
        return bool(bad)
    for reason, refused_cases in refused.items():
        console.print(f"not planned: {', '.join(map(str, refused_cases))}: {reason}", soft_wrap=True)
    tensors = sum(len(audit.unexplained) for audit in bad)
    console.print(f"{len(audits)} plans, {len(bad)} with something unexplained, {tensors} tensors in all")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
