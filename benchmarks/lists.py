"""Parsers of options that take a list, `A,B`: each is the `type` of an argument of argparse."""

import argparse
from collections.abc import Callable, Collection


def words(text: str) -> tuple[str, ...]:
    """The parts of `A,B`, whatever they are."""
    return tuple(text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    """The whole numbers of `1,2`. Raises ValueError, which argparse reports, for a part that is none."""
    return tuple(int(part) for part in words(text))


def some_of(choices: Collection[str]) -> str:
    """The help of an option that takes some of these names, by default all."""
    return f"some of {', '.join(choices)} (default: all)"


def names(kind: str, choices: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of `A,B` that raises ArgumentTypeError, with the `kind` of thing and all `choices`, for another name."""

    def parse(text: str) -> tuple[str, ...]:
        if unknown := [name for name in words(text) if name not in choices]:
            raise argparse.ArgumentTypeError(f"no {kind} is called {unknown[0]!r}; there are {', '.join(choices)}")
        return words(text)

    return parse
