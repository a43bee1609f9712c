"""The command line of `benchmarks.gpt`, and the pipelines that the training scripts offer."""

import argparse

import autopar
from models import gpt

OPTIMIZERS = ("adamw", "sgd")
PIPELINES = ("gpipe", "1f1b")
PLANNERS = ("auto", "dp", "megatron", "zero3", *PIPELINES, "jit")
STAGES = 4
MICROBATCHES = 8


def positive(text: str) -> int:
    """`text` as a whole number of at least 1; argparse reports the ValueError of any other."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


NUMBER = {"type": positive, "metavar": "N"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpt",
        description="Train a GPT on the Python standard library's own sources, in parallel as autopar plans it.",
        epilog="example: python -m benchmarks.gpt --planner megatron --tensor 2 --steps 50 --compare jit",
    )
    _add_training(parser)
    _add_parallelism(parser)
    args = parser.parse_args(argv)
    if args.planner == "jit" and args.microbatches:
        parser.error(f"--microbatches {args.microbatches} needs a planner: jit computes the batch at once")
    try:
        schedule = args.planner if args.planner in PIPELINES else None
        args.pipeline = make_pipeline(schedule, args.stages, args.microbatches, args.batch)
    except ValueError as error:
        parser.error(str(error))
    return args


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Options of the model and of its training."""
    model = parser.add_argument_group("model")
    model.add_argument("--preset", default="tiny", choices=gpt.PRESETS, help="its size (default: %(default)s)")
    model.add_argument(
        "--dropout",
        default=0.0,
        type=float,
        metavar="P",
        help="probability of dropping a feature (default: %(default)s)",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--steps", default=200, **NUMBER, help="optimizer steps (default: %(default)s)")
    training.add_argument("--batch", default=16, **NUMBER, help="sequences a step, all devices (default: %(default)s)")
    training.add_argument(
        "--optimizer", default="adamw", choices=OPTIMIZERS, help="sgd has momentum 0.9 (default: %(default)s)"
    )
    training.add_argument(
        "--learning-rate", default=1e-3, type=float, metavar="X", help="constant (default: %(default)s)"
    )
    training.add_argument(
        "--seed", default=0, type=int, metavar="N", help="of parameters, batches and dropout (default: %(default)s)"
    )


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    """Options of the plan and of what is done with it."""
    parallelism = parser.add_argument_group("parallelism")
    parallelism.add_argument(
        "--planner",
        default="auto",
        choices=PLANNERS,
        help="autopar's search (auto), a hand-made plan (dp, megatron, zero3, and the pipelines gpipe and 1f1b) or "
        "none (jit: plain jax.jit on one device, the baseline) (default: %(default)s)",
    )
    parallelism.add_argument(
        "--devices", **NUMBER, help="virtual devices to make on a CPU (default: 8, or 1 with jit); others are all used"
    )
    parallelism.add_argument(
        "--tensor", default=2, **NUMBER, help="devices that split each matrix, with megatron (default: %(default)s)"
    )
    add_pipeline(parallelism)

    results = parser.add_argument_group("results")
    add_saved_plan(results)
    results.add_argument(
        "--compare", choices=("jit",), help="train again with plain jax.jit and print how far the losses differ"
    )


def add_pipeline(options: argparse._ActionsContainer) -> None:
    """Adds the options of a pipeline: its stages and microbatches."""
    options.add_argument("--stages", **NUMBER, help=f"of the pipeline, with gpipe or 1f1b (default: {STAGES})")
    options.add_argument(
        "--microbatches",
        **NUMBER,
        help=f"equal parts of each batch, whose gradients are summed (default: {MICROBATCHES} in a pipeline, else 1)",
    )


def add_saved_plan(options: argparse._ActionsContainer) -> None:
    """Adds the options of where the plan is saved, and of whether one of an earlier run is taken."""
    options.add_argument(
        "--out", default="plan.json", metavar="PATH", help="where to save the plan (default: %(default)s)"
    )
    options.add_argument(
        "--no-cache",
        action="store_true",
        help="plan again and keep nothing (default: take the plan of an earlier run of the same step, if it was kept)",
    )


def make_pipeline(
    schedule: str | None, stages: int | None, microbatches: int | None, batch: int
) -> autopar.Pipeline | None:
    """The pipeline of that schedule with so many stages and microbatches, or None without a schedule.

    Raises ValueError for stages without a schedule, and for a number of microbatches that does not divide the batch.
    """
    count = microbatches or (MICROBATCHES if schedule else 1)
    if batch % count:
        raise ValueError(f"--microbatches {count} does not divide --batch {batch}: choose a divisor")
    if schedule:
        return autopar.Pipeline(stages=stages or STAGES, microbatches=count, schedule=schedule)
    if stages is not None:
        raise ValueError(f"--stages {stages} needs a pipeline: choose --planner gpipe or 1f1b, or leave --stages out")
    return None
