"""Plans kept on disk under a key of all that they follow from, so that the same step is planned once.

An entry is the file that `plan.save` writes with one more field, `cache`: the whole key, how the plan was found, and a
digest of both and of the rest. An entry that is damaged, or not what its name says, is ignored with a warning and
replaced. Files are written whole, so any number of processes may read and write one folder. Nothing is ever deleted:
the folder is the user's to empty.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import passes
from autopar.errors import ArgumentError, check_folder, explain
from autopar.frontend import Traced
from passes.cluster import Cluster
from passes.errors import PlanningError
from passes.files import write_whole
from passes.inter_op import SCHEDULES
from passes.inter_op import build as schedule
from passes.ir import Graph, Node
from passes.plan import SCHEMA, AnyPlan, Operator, plan_from_json
from passes.plan import json as plan_json
from passes.planners import Manual, Planner
from passes.rules import known_primitives, rule_of
from passes.step import Step

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Everything that a plan follows from, as JSON data."""

    data: Mapping[str, object]

    @property
    def digest(self) -> str:
        """32 hex digits that name the content."""
        return _digest(json.dumps(self.data, sort_keys=True))[:32]


def key_of(
    step: Step,
    cluster: Cluster,
    planner: Planner,
    options: Mapping[str, object],
) -> Key | None:
    """The key of the plan of a step with these settings; None for a planner that is not autopar's own, and for a saved
    plan.

    `options` are further settings, as plain data. Names and scopes of the user's code are part of the key, its line
    numbers are not. Of a user's own sharding rules, those of this step are part of it, as they come out for the step;
    of own schedules, the tasks for a few stages.
    """
    described = _described(planner)
    if described is None:
        return None
    graph = step.graph
    data: dict[str, object] = {
        "autopar": plan_json.version(),
        "schema": SCHEMA,
        "code": _code_digest(),
        "program": graph.fingerprint,
        "names": _digest(repr((graph.input_names, graph.output_names, [node.scope for _, node in _nodes(graph)]))),
        "rules": _digest("\n".join(_own_rules(graph))),
        "schedules": _digest("\n".join(_own_schedules())),
        "state_pairs": step.state_pairs,
        "donated": [i for i, is_donated in enumerate(step.donated) if is_donated],
        "batch": [i for i, is_batch in enumerate(step.named) if is_batch],
        "cluster": cluster.to_json(),
        "planner": described,
        **options,
    }
    return Key(data=json.loads(json.dumps(data)))


@dataclass(frozen=True, slots=True)
class PlanCache:
    """The plans in a folder, which is created when the first one is written.

    Raises ArgumentError for anything but its path.
    """

    folder: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not self.folder:
            rule = "a cache is a folder, by its path"
            raise ArgumentError(explain(f"PlanCache({self.folder!r:.60})", rule, "", "write, say, PlanCache('plans')"))

    def path(self, key: Key) -> Path:
        """The file for the plan of a key, whether it exists or not."""
        return Path(self.folder) / f"{key.digest}.json"

    def read(self, key: Key, accept: Callable[[AnyPlan, plan_json.Fields], Found | None]) -> Found | None:
        """The result of `accept` on the cached plan of a key; None for an entry that is missing, unreadable or not
        accepted.

        An entry that cannot be used brings a warning. `accept` also gets how the plan was searched for; it raises
        PlanningError for a plan of another step, and returns None for one to be passed over.
        """
        path = self.path(key)
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):  # a folder that cannot be made is told of by `write`
            return None
        except (OSError, ValueError) as error:
            return _ignored(path, str(error))
        try:
            return accept(*_entry_of(text, key))
        except (PlanningError, ValueError, RecursionError) as error:
            return _ignored(path, str(error))

    def write(self, key: Key, plan: AnyPlan, how: Mapping[str, object] | None = None) -> None:
        """Writes a plan with how it was found, as plain data, unless its search was interrupted; warns where
        it cannot.
        """
        if plan.is_interrupted:
            return
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _entry(key, plan, how or {}).encode())
        except OSError as error:
            warnings.warn(f"{path}: the plan is not kept in the cache: {error.strerror}", stacklevel=2)


def checked_cache(cache: Any) -> PlanCache | None:
    """The cache that the user's option stands for. Raises ArgumentError."""
    if cache is None or cache is False:
        return None
    if isinstance(cache, PlanCache):
        return cache
    if (isinstance(cache, str) and cache) or isinstance(cache, os.PathLike):
        check_folder(f"cache={cache!r:.60}", cache, "a cache is a folder")
        return PlanCache(cache)
    rule = "a cache is a folder, by its path, or an autopar.PlanCache"
    raise ArgumentError(
        explain(f"cache={cache!r:.60}", rule, "", "write, say, cache='plans', or leave it out for none")
    )


def relocated(plan: AnyPlan, traced: Traced) -> AnyPlan | None:
    """A plan of this very step with the source lines that it has now; None where one line has become several."""
    sources: dict[str, str] = {}
    for program, graph in zip(plan.programs, plan.graphs(traced.graph, traced.state_pairs), strict=True):
        for before, now in _sources(program.operators, graph):
            if sources.setdefault(before, now) != now:
                return None
    if all(before == now for before, now in sources.items()):
        return plan
    return plan.from_json(_renamed(plan.to_json(), sources))


def _sources(operators: Sequence[Operator], graph: Graph) -> Iterator[tuple[str, str]]:
    """(source in the plan, source now) of every operator, those in loops and branches included."""
    for operator, node in zip(operators, graph.nodes, strict=True):
        if operator.source:
            yield operator.source, node.source
        for inside, body in zip(operator.bodies, node.subgraphs, strict=False):
            yield from _sources(inside, body)


def _renamed(data: object, sources: Mapping[str, str]) -> object:
    """JSON data in which `FILE:LINE` and `PRIMITIVE at FILE:LINE` are replaced by their new lines."""
    if isinstance(data, str):
        head, at, source = data.rpartition(" at ")
        return head + at + sources.get(source, source)
    if isinstance(data, Mapping):
        return {name: _renamed(value, sources) for name, value in data.items()}
    return [_renamed(value, sources) for value in data] if isinstance(data, list) else data


def _entry(key: Key, plan: AnyPlan, how: Mapping[str, object]) -> str:
    """The text of an entry; its second line is the one that a plan's own file does not have."""
    body = plan_json.text(plan.to_json()).removeprefix("{\n")
    head = json.dumps({"key": key.data, "how": how, "digest": _digest(json.dumps(how) + body)})
    return f'{{\n  "cache": {head},\n{body}'


def _entry_of(text: str, key: Key) -> tuple[AnyPlan, plan_json.Fields]:
    """(the plan, how it was found) of an entry. Raises PlanningError or ValueError unless it is whole and the key's."""
    _, _, rest = text.partition("\n")
    head, _, body = rest.partition("\n")
    if not head.startswith('  "cache": '):
        raise PlanningError("this is no entry of the cache")
    cache = json.loads(head.removeprefix('  "cache": ').removesuffix(","))
    if not isinstance(cache, dict) or cache.get("key") != key.data:
        raise PlanningError("the entry is another step's")
    if cache.get("digest") != _digest(json.dumps(cache.get("how")) + body):
        raise PlanningError("the entry has been damaged")
    return plan_from_json(json.loads("{" + body)), plan_json.as_object(cache["how"], "how")


def _ignored(path: Path, why: str) -> None:
    warnings.warn(f"{path}: this plan in the cache is ignored, and replaced by a new one: {why}", stacklevel=3)


def _described(planner: Planner) -> object:
    """A planner's kind and fields as plain data; None for a planner of the user's own, and for a saved plan."""
    if not type(planner).__module__.startswith("passes.") or isinstance(planner, Manual):
        return None
    return _plain(planner)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        compared = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.compare}
        return {"kind": type(value).__qualname__, **compared}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _nodes(graph: Graph) -> Iterator[tuple[Graph, Node]]:
    """Every node with its graph, those in bodies of loops and branches included."""
    for node in graph.nodes:
        yield graph, node
        for body in node.subgraphs:
            yield from _nodes(body)


def _own_rules(graph: Graph) -> Iterator[str]:
    """The sharding rules of the nodes whose primitives have no rule of autopar's own."""
    known = known_primitives()
    for inside, node in _nodes(graph):
        if node.primitive not in known and not node.subgraphs:
            yield f"{node.primitive} {rule_of(node, inside)!r}"


_SEEN_ON = ((2, 4), (4, 8))
"""The numbers of stages and microbatches for which a user's schedule is part of the key: it is a function, and an edit
of it shows there.
"""


def _own_schedules() -> Iterator[str]:
    """The schedules that users have added, by their tasks."""
    for name, builder in SCHEDULES.items():
        if not getattr(builder, "__module__", "").startswith("passes."):
            for stages, microbatches in _SEEN_ON:
                yield f"{name} {_scheduled(name, stages, microbatches)}"


def _scheduled(name: str, stages: int, microbatches: int) -> str:
    try:
        return repr(schedule(name, stages, microbatches))
    except Exception as error:  # of the user's function, which need not take every number: that is what it does
        return repr(error)


@functools.cache
def _code_digest() -> str:
    """A digest of autopar's own source: a checkout changes while its version stays the same."""
    roots = [Path(__file__).parent, Path(cast("str", passes.__file__)).parent]
    paths = [path for root in roots for path in sorted(root.rglob("*.py"))]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
