"""`autopar explain`: the reasons for the placement of an array, or for what a plan does at a source line, as text."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

from autopar.tools import fit, targets
from autopar.tools.command import DONE, Command, Output
from autopar.tools.command_options import limit_of
from autopar.tools.targets import UsageError
from passes.errors import close, explain
from passes.intra_op import pins
from passes.plan import AnyPlan, Plan, load_plan
from passes.plan import json as plan_json
from passes.plan import text as plan_text
from passes.planners import Auto, reasons
from passes.text import Table, quantities

_HELP = """\
Say in words why an array lies as it does: what the plan chose, what a step
would take with each other placement, everything else solved again around it,
and what rules others out. Or say what a layer costs, or a line of your source.

WHAT is the end of an array's path, * for anything: mlp/up/kernel or
params/*/kernel; a layer: Block_3; or a source line: models/gpt.py:145. Arrays
that are alike are taken together. Without WHAT, what each layer costs."""

_MORE = """\
example:
  autopar explain plan.json
  autopar explain plan.json params/*/kernel
  autopar explain plan.json train.py:7

The step is traced again, from the MODULE:FUNCTION that `autopar plan --out`
noted in PLAN, or from --target. Of a pipeline, and without a target, the plan
alone answers: what was chosen, not what else there was.

exit status: 0 explained, 2 there is no such array or line."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `autopar plan --out` wrote")
    parser.add_argument("what", nargs="?", metavar="WHAT", help="an array, a layer or a source line; see above")
    parser.add_argument("--target", metavar="MODULE:FUNCTION", help="the step (default: as noted)")
    parser.add_argument("--memory-limit", metavar="SIZE", help='of a device, as "12 GiB"')


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    plan, memory_limit = load_plan(arguments.plan), limit_of(arguments.memory_limit)
    if not arguments.what or any(layer.name == arguments.what for p in plan.programs for layer in p.layers):
        return (by_layer(plan, arguments.what or None),), DONE
    if ".py" in arguments.what:
        return at_line(plan, arguments.what), DONE
    described = described_arrays(plan, arguments.what)
    target = arguments.target or target_of(arguments.plan)
    if not target or plan.timeline is not None:
        why = "a pipeline's plan" if target else "a plan without a target (--target MODULE:FUNCTION)"
        return f"{described}\n{why.capitalize()} does not say what else there was.", DONE
    jax.config.update("jax_platforms", "cpu")
    (program,) = plan.programs
    with Console(stderr=True, highlight=False).status("tracing") as status:
        step = fit.planned_step(plan, fit.Example.of(*targets.example(target)))
        limit = Auto(memory_limit=memory_limit).limit(plan.cluster)
        return reasons(step, program, arguments.what, limit, status.update).text(), DONE


def by_layer(plan: AnyPlan, name: str | None) -> Table:
    """The cost of each layer, or of the one of that name. Raises UsageError for a plan without costs of layers."""
    if not any(program.layers for program in plan.programs):
        rule = "this plan does not say what its layers cost: an earlier autopar wrote it"
        raise UsageError(explain("explain PLAN", rule, "", "plan again, or name an array or a source line"))
    return plan_text.layers_table([program.layers for program in plan.programs], name)


def target_of(path: Path) -> str:
    """The MODULE:FUNCTION that a plan's file notes, empty where it does not."""
    target = plan_json.as_object(plan_json.read(path), "the plan").data.get("target", "")
    return target if isinstance(target, str) else ""


def described_arrays(plan: AnyPlan, what: str) -> str:
    """The placements of the arrays that a pattern names. Raises UsageError where it names none."""
    lines: list[str] = []
    for stage, program in enumerate(plan.programs):
        of = f"stage {stage}: " if len(plan.programs) > 1 else ""
        names = [pins.path_of(program.input_names[i]) for i in pins.matching(what, program.input_names)]
        specs = [program.inputs[i] for i in pins.matching(what, program.input_names)]
        for spec, count in Counter(specs).items():
            first = names[specs.index(spec)]
            more = f" and {quantities.count(count - 1, 'array')} more" if count > 1 else ""
            lines.append(f"{of}{first}{more} as {spec} on mesh {program.mesh}")
    if not lines:
        layers = dict.fromkeys(layer.name for program in plan.programs for layer in program.layers)
        known = ("" if "/" in what else close(what, layers)) or pins.guesses(what, plan.input_names)
        rule = "no layer and no array that enters the step has such a name"
        raise UsageError(explain(repr(what), rule, known, "name one, a layer or a source line"))
    return "\n".join(lines)


def at_line(plan: AnyPlan, line: str) -> str:
    """The text of what a plan does at a source line. Raises UsageError if no operator comes from that line."""
    paragraphs = [text for stage, program in enumerate(plan.programs) for text in _at_line(stage, program, line)]
    if not paragraphs:
        sources = dict.fromkeys(plan_text.short(op.source) for p in plan.programs for op in p.operators if op.source)
        known = ", ".join(list(sources)[:5])
        raise UsageError(explain(repr(line), "no operator of the plan is of this line", known, "name one of these"))
    return "\n".join(paragraphs)


def _at_line(stage: int, program: Plan, line: str) -> Iterator[str]:
    def is_there(source: str) -> bool:
        place = _place(source)
        return place == _place(line) or place.endswith(f"/{_place(line)}")

    counted = Counter(
        (op.primitive, plan_text.placement_text(op.placement))
        for op in plan_text.everything(program.operators)
        if is_there(op.source)
    )
    if not counted:
        return
    yield f"stage {stage}, mesh {program.mesh}:" if program.mesh and stage else f"{line} on mesh {program.mesh}:"
    for (primitive, placement), count in counted.most_common():
        yield f"  {count:>5} x {primitive} {placement}"
    sent = [c for c in program.collectives if is_there(c.where)]
    seconds = sum(c.seconds(program.mesh) for c in sent)
    if not sent:
        yield "  nothing is sent for it"
        return
    of_step = quantities.share(seconds, program.step_seconds)
    yield f"  sends for {quantities.seconds(seconds)}, {of_step} of the step if nothing hides or combines it:"
    for c in sorted(sent, key=lambda c: -c.seconds(program.mesh))[:5]:
        yield f"    {c.count:,} x {c.kind} over {'+'.join(c.axes)}, {quantities.nbytes(c.nbytes)} each"


def _place(source: str) -> str:
    """The `file:line` of a source, or of one as errors and tables write it: `train.py:36 (train_step)`."""
    return source.rpartition(" (")[0] or source


COMMAND = Command(
    name="explain",
    summary="say why a plan is as it is",
    description=_HELP,
    more=_MORE,
    add_arguments=_add_arguments,
    run=_run,
)
