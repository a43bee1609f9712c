"""Train a tiny mixture-of-experts GPT on real text as autopar plans it: `python -m benchmarks.moe --help`."""

import statistics
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import jax

from benchmarks import corpus
from benchmarks.gpt import HELD_OUT_BATCHES
from benchmarks.gpt_options import NUMBER
from benchmarks.loop import Task, options, parser, run
from models import moe

HELD_OUT_BATCH = 8  # sequences of each batch of the held-out text


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says, and prints the plan and the results."""
    command_line = parser(
        "moe",
        "Train a mixture-of-experts GPT on the Python standard library's own sources, in parallel as planned.",
        batch=16,
        learning_rate=1e-3,
    )
    command_line.add_argument("--layers", default=2, **NUMBER, help="every even one has experts (default: %(default)s)")
    args = options(command_line, argv)
    config = replace(moe.Config.preset("tiny"), layers=args.layers)
    text = corpus.read()
    length = config.sequence_length

    def judge(state: Any) -> tuple[str, str]:
        batches = corpus.batches(text.held_out, batch_size=HELD_OUT_BATCH, sequence_length=length, seed=0)
        loss = jax.jit(partial(moe.loss, config))
        losses = [float(loss(state[0], batch)) for batch in islice(batches, HELD_OUT_BATCHES)]
        return "held-out loss", f"{statistics.fmean(losses):.3f} nats, with the load-balancing loss"

    run(
        Task(
            module=moe,
            config=config,
            batches=lambda size, seed: corpus.batches(text.train, batch_size=size, sequence_length=length, seed=seed),
            unit="tokens",
            units_a_sample=length,
            judge=judge,
        ),
        args,
    )


if __name__ == "__main__":
    main()
