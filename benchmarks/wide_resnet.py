"""Train a tiny Wide-ResNet on handwritten digits as autopar plans it: `python -m benchmarks.wide_resnet --help`.

The digits are those that come with scikit-learn, 8 x 8 pixels, each pixel made 4 x 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits

from benchmarks.loop import Task, options, parser, run
from models import wide_resnet

CLASSES = 16  # ten digits, and six classes without images, as 8 devices can share 16 classes and not 10
WHITE = 16.0  # the value of a pixel that is all ink in scikit-learn's digits, where 0 is none
HELD_OUT_EVERY = 5  # one digit in five


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """`images` float32[n, 32, 32, 3] between -1 and 1, `labels` int32[n]."""

    images: np.ndarray
    labels: np.ndarray

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {"images": self.images[index], "labels": self.labels[index]}


def read(size: int) -> tuple[Digits, Digits]:
    """The digits to train on and those held out, `size` pixels square."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.reshape(-1, 8, 8) * (2 / WHITE) - 1
    factor = size // pixels.shape[1]
    pixels = pixels.repeat(factor, axis=1).repeat(factor, axis=2).astype(np.float32)
    images = np.repeat(pixels[..., None], 3, axis=-1)
    is_held_out = np.arange(len(labels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    train, held_out = (
        Digits(images=images[chosen], labels=labels[chosen].astype(np.int32)) for chosen in (~is_held_out, is_held_out)
    )
    return train, held_out


def batches(digits: Digits, size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits drawn at random; the same `seed` gives the same."""
    generator = np.random.default_rng(seed)
    while True:
        yield digits[generator.integers(0, len(digits.labels), size=size)]


def main(argv: list[str] | None = None) -> None:
    """Trains as the command line says, and prints the plan and the results."""
    command_line = parser(
        "wide_resnet",
        "Train a Wide-ResNet on scikit-learn's handwritten digits, in parallel as planned. In microbatches, batch "
        "normalisation takes each one's own statistics.",
        batch=64,
        learning_rate=3e-3,
    )
    args = options(command_line, argv)
    config = replace(wide_resnet.Config.preset("tiny"), classes=CLASSES)
    train, held_out = read(config.image_size)

    def judge(state: Any) -> tuple[str, str]:
        params, stats, _ = state
        logits = jax.jit(partial(wide_resnet.logits, config))(params, stats, held_out.images)
        right = float(np.mean(np.argmax(logits, axis=-1) == held_out.labels))
        return "held-out digits", f"{100 * right:.1f} % of {len(held_out.labels)} read right"

    run(
        Task(
            module=wide_resnet,
            config=config,
            batches=partial(batches, train),
            unit="images",
            units_a_sample=1,
            judge=judge,
            coupled=True,
        ),
        args,
    )


if __name__ == "__main__":
    main()
