"""Values that are shown as tables and kept in files."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from typing import Self

from passes.errors import PlanningError, explain
from passes.plan import json as plan_json
from passes.text import Table


def renamed(name: str) -> property:
    """The property that reads the attribute of this name under its former one, with a warning."""

    def former(self: object) -> object:
        warnings.warn(f"this attribute is called {name!r} now", DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    return property(former)


class Storable(ABC):
    """A value as text, as JSON data and in a file."""

    __slots__ = ()

    @abstractmethod
    def tables(self, *, operators: bool = False) -> tuple[Table, ...]:
        """The plan as tables, header first; `operators` adds every operator and every line that communicates."""

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """The plan as JSON data; `from_json` gives an equal plan back."""

    @classmethod
    @abstractmethod
    def from_json(cls, data: object) -> Self:
        """The plan that `to_json` described. Raises PlanningError, with the place, for anything that is not one."""

    def format(self, *, operators: bool = False, width: int = 80) -> str:
        """The plan as text of `width` columns."""
        return "\n\n".join(table.format(width) for table in self.tables(operators=operators))

    def __str__(self) -> str:
        return self.format()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan; a reader sees the old file or the whole new one. Raises PlanningError where it cannot."""
        _check_path(f"{type(self).__name__}.save", path)
        plan_json.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan in a file. Raises PlanningError, with the place, for a file that holds none."""
        _check_path(f"{cls.__name__}.load", path)
        try:
            return cls.from_json(plan_json.read(path))
        except PlanningError as error:
            raise type(error)(f"{path}: {error}") from error


def _check_path(call: str, path: object) -> None:
    """Raises PlanningError, by the call that was made, for what is the path of no file."""
    if not isinstance(path, str | os.PathLike):
        raise PlanningError(explain(f"{call}({path!r:.60})", "a file goes by its path", "", "write, say, 'plan.json'"))
