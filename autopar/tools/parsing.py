"""The parser of the command line, whose errors about unknown commands or options suggest the one that may be meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from passes.errors import close


class Parser(argparse.ArgumentParser):
    """A parser, of the program or of a command, whose errors guess at what was meant."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """The arguments; unknown ones are an error with the usage of their command."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_guessed(f"unrecognized arguments: {' '.join(unknown)}", unknown, self._option_string_actions))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, _guessed(error.message, [value], action.choices or ())) from None


def _guessed(message: str, written: Sequence[str], known: Iterable[str]) -> str:
    """The message, with a suggestion for the first word that resembles a known one."""
    guesses = (close(word.partition("=")[0], known) for word in written)
    return "\n  ".join(filter(None, (message, next(filter(None, guesses), ""))))


class Once(argparse.Action):
    """An option that may be given once only: of two values one would be ignored silently."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = getattr(namespace, self.dest, self.default)
        if option and given is not self.default:
            raise argparse.ArgumentError(self, f"is given twice, as {str(given)!r} and {str(values)!r}: choose one")
        setattr(namespace, self.dest, values)


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of the commands of the program's parser, by name."""
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
