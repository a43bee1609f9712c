"""The fields of JSON objects that describe clusters, read one by one with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

from passes.errors import ClusterError, close, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Typed access to the fields of one JSON object; `where` is its place in the cluster, for error messages."""

    data: Mapping[str, object]
    where: str

    @classmethod
    def of(cls, data: object, where: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Self:
        """The fields of `data`. Raises ClusterError unless it has all that are needed, and no unknown ones."""
        names = needed + optional
        known_fields = f"its fields are {', '.join(names)}"
        if not isinstance(data, dict):
            raise ClusterError(
                explain(where, f"should be an object, and is {data!r:.60}", known_fields, "write an object")
            )
        fields = cast(dict[str, object], data)
        for name in (name for name in fields if name not in names):
            remedy = close(name, names) or "remove it"
            raise ClusterError(explain(where, f"has a field {name!r}, which means nothing here", known_fields, remedy))
        for name in needed:
            if name not in fields:
                raise ClusterError(explain(where, f"has no field {name!r}", known_fields, "add it"))
        return cls(data=fields, where=where)

    def text(self, name: str) -> str:
        """The text of a field. Raises ClusterError for another value, as all of these do."""
        value = self.data[name]
        if not isinstance(value, str):
            raise self.wrong(name, "should be text", "put it in quotes")
        return value

    def flag(self, name: str) -> bool:
        """Whether a field is true; one that is not there is not."""
        value = self.data.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "should be true or false", "write true or false, without quotes")
        return value

    def count(self, name: str) -> int:
        """A whole number from 1."""
        value = self.data[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value % 1:
            raise self.wrong(name, "should be a whole number from 1", "count hosts, devices and bytes one by one")
        return int(value)

    def rate(self, name: str) -> float:
        """A number above 0."""
        value = self.at_least_0(name)
        if value == 0:
            raise self.wrong(name, "should be above 0", "give what one second moves or computes")
        return value

    def at_least_0(self, name: str, default: float = 0.0) -> float:
        """A finite number from 0; `default` for a field that is missing."""
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.wrong(name, "should be a finite number from 0", "give it in seconds, bytes or flops, unscaled")
        return value

    def share(self, name: str, default: float) -> float:
        """A number above 0 and at most 1."""
        value = self.at_least_0(name, default)
        if not 0 < value <= 1:
            raise self.wrong(name, "should be above 0 and at most 1", "give the part of the bandwidth that it reaches")
        return value

    def part(self, name: str) -> float:
        """A number from 0 to 1."""
        value = self.at_least_0(name)
        if value > 1:
            raise self.wrong(name, "should be from 0 to 1", "0 is nothing of it, 1 everything")
        return value

    def objects(self, name: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[Fields]:
        """The fields of each object in a list; empty where the field is missing."""
        value = self.data.get(name, ())
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "should be a list", "write [{...}]")
        entries = enumerate(cast(Sequence[object], value))
        return [Fields.of(entry, f"{name}[{index}]", needed, optional) for index, entry in entries]

    def object(self, name: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> Fields:
        """The fields of an object inside this one."""
        return Fields.of(self.data[name], f"{self.where}.{name}", needed, optional)

    def wrong(self, name: str, rule: str, remedy: str) -> ClusterError:
        """The error of a field that breaks a rule."""
        return ClusterError(explain(f"{self.where}.{name}", rule, f"it is {self.data[name]!r:.60}", remedy))
