"""The cause of every collective of a plan: the tensor that it sends, the tensor's role and layer, the axes, the phase.

A plan says how every value is sharded, and `passes.placement.reshardings` which values have to be resharded for it.
Each step of a resharding that communicates gets a cause here, by analysis of the program: the role of a value follows
from the inputs that it depends on and from which of its dimensions is the batch's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from benchmarks.regions import Region, Value, depend, leaving, placed, spread
from passes.cluster import Mesh, collectives
from passes.ir import Graph, Node, TensorType, phase
from passes.placement import Background, Resharding, resharding_plan
from passes.plan import Plan
from passes.rules import rule_of
from passes.sharding import Resharder, ShardingSpec

LAYER = re.compile(r"[A-Za-z]\w*_\d+$|^Block$")
"""A part of a scope that names a layer: a module that flax has numbered, or the block that a loop repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A collective that a plan sends `count` times in a train step: one step of a resharding.

    `nbytes` are those of one result on one device. `role` is parameter, gradient, updated parameter, optimizer state,
    activation, activation gradient, statistic (what is reduced over the batch: a loss, a mean) or constant;
    `parameter` is the position of the input that a parameter, its gradient or its update belongs to. The tensor is
    resharded from `before` to `after`. All of them take `seconds`, of which the program waits for `waited_share` and
    computes during the rest.
    """

    role: str
    tensor: str
    layer: str
    kind: collectives.Kind
    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    count: int
    seconds: float
    waited_share: float
    phase: str
    where: str
    value: Value
    parameter: int | None
    type: TensorType
    before: ShardingSpec
    after: ShardingSpec

    @property
    def total_nbytes(self) -> int:
        """Bytes of the results on one device, of all of them."""
        return self.nbytes * self.count


def layer_of(scope: str) -> str:
    """The numbered module that a scope lies in, else its first module; `Block` for one that a loop repeats."""
    parts = [p for p in re.split(r"/", re.sub(r"(?:transpose|jvp)\(|\)|rematted_computation", "", scope)) if p]
    numbered = [part for part in parts if LAYER.search(part)]
    return numbered[0] if numbered else next((part for part in parts[1:] if "<lambda>" not in part), "model")


def when(node: Node) -> str:
    """The phase of a node: `forward`, `recomputed` (a part of the backward phase otherwise), `backward` or `apply`."""
    return "recomputed" if node.is_recomputed else phase(node)


def computes_activations(node: Node) -> bool:
    """Whether a node computes activations, not gradients; what has no gradient (a softmax's maximum) has no phase."""
    return when(node) != "backward"


@dataclass(kw_only=True)
class Program:
    """A traced step under a plan, with the roles of its values."""

    graph: Graph
    plan: Plan
    state_pairs: Sequence[tuple[int, int]]
    root: Region = field(init=False)
    resharder: Resharder = field(init=False)

    def __post_init__(self) -> None:
        self.resharder = Resharder(self.plan.mesh)
        reshardings = resharding_plan(self.graph, self.plan.layout, self.resharder, regather=self.plan.regather)
        self.root = placed(Background.of(self.graph), self.plan.layout, reshardings, 1, 1.0, "output", count())

    @property
    def mesh(self) -> Mesh:
        """The mesh that the plan is for."""
        return self.plan.mesh

    @cached_property
    def regions(self) -> Mapping[int, Region]:
        """The regions by number."""
        return {region.number: region for region in self.root.all()}

    @cached_property
    def returned(self) -> frozenset[int]:
        """The positions of the inputs that the step returns updated: parameters and optimizer state."""
        return frozenset(i for _, i in self.state_pairs)

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The positions of inputs that are returned and read by the forward pass."""
        graph = self.graph
        return frozenset(
            i
            for i in self.returned
            if any(phase(graph.nodes[r]) == "forward" for r in graph.consumers.get(graph.inputs[i], ()))
        )

    @cached_property
    def batch(self) -> Mapping[Value, frozenset[int]]:
        """The batch dimensions of every value; values without one are absent."""
        dims_of: dict[Value, set[int]] = defaultdict(set)
        for i, v in enumerate(self.graph.inputs):
            type = self.graph.types[v]
            if i not in self.returned and type.rank and not type.dtype.startswith("key<"):
                dims_of[0, v].add(0)
        before = -1
        while before != (before := sum(map(len, dims_of.values()))):
            for region in self.root.all():
                spread(region, dims_of)
        return {value: frozenset(dims) for value, dims in dims_of.items() if dims}

    @cached_property
    def sources(self) -> Mapping[Value, int]:
        """The inputs that every value depends on, as a set of bits by position."""
        masks: dict[Value, int] = {(0, v): 1 << i for i, v in enumerate(self.graph.inputs)}
        before: object = None
        while before != (before := sum(bits.bit_count() for bits in masks.values())):
            for region in self.root.all():
                depend(region, masks)
        return masks

    @cached_property
    def families(self) -> Mapping[Value, int]:
        """The position of the parameter that each gradient or update belongs to.

        They are found from the updated parameters backwards, through operators whose operands have the result's size.
        """
        families: dict[Value, int] = {}
        for o, i in self.state_pairs:
            if i in self.parameters:
                self._family((0, self.graph.outputs[o]), i, families)
        return families

    def _family(self, value: Value, parameter: int, families: dict[Value, int]) -> None:
        if value in families or value in self.batch:
            return
        region, v = self.regions[value[0]], value[1]
        producer = region.graph.producers.get(v)
        if producer is None:
            return
        node = region.graph.nodes[producer]
        if phase(node) == "forward":
            return
        families[value] = parameter
        if producer in region.controls:
            control, bodies = region.controls[producer]
            port = control.results[node.outputs.index(v)].port
            for inner, out in leaving(control, bodies, port):
                self._family((inner.number, out), parameter, families)
            return
        rule = rule_of(node, region.graph)
        if rule.alias:
            self._family((region.number, node.inputs[node.outputs.index(v)]), parameter, families)
        elif rule.light:
            size = region.graph.types[v].size
            for operand in node.inputs:
                if region.graph.types[operand].size == size:
                    self._family((region.number, operand), parameter, families)

    def is_shared(self, value: Value) -> bool:
        """Whether a value that a parameter's gradient is computed from is read by the rest of the backward pass, too.

        So it is where batch normalisation multiplies its scale by 1/std: all devices then need this sum over the batch.
        """
        region, v = self.regions[value[0]], value[1]
        readers = [region.graph.nodes[r] for r in region.graph.consumers.get(v, ())]
        ways_on = [n for n in readers if phase(n) == "backward" and n.outputs]
        return any(self.families.keys().isdisjoint((region.number, o) for o in n.outputs) for n in ways_on)

    def depends_on_batch(self, value: Value) -> bool:
        """Whether a value depends on an input that is no state; a mask with a batch dimension may not."""
        bits = self.sources.get(value, 0)
        return any(bits >> i & 1 for i in range(len(self.graph.inputs)) if i not in self.returned)

    def role(self, value: Value) -> tuple[str, int | None]:
        """The role of a value (see `Sent`), and the position of the parameter that it belongs to, if any."""
        region, v = self.regions[value[0]], value[1]
        producer = region.graph.producers.get(v)
        node = region.graph.nodes[producer] if producer is not None else None
        bits = self.sources.get(value, 0)
        positions = [i for i in range(bits.bit_length()) if bits >> i & 1]
        if positions and self.parameters.issuperset(positions):
            return "parameter", positions[0]
        if value in self.families and not self.is_shared(value):
            late = node is not None and phase(node) == "apply"
            return ("updated parameter" if late else "gradient"), self.families[value]
        if value in self.batch and self.depends_on_batch(value):
            is_forward = node is None or computes_activations(node)
            return ("activation" if is_forward else "activation gradient"), None
        if positions and self.returned.issuperset(positions):
            return "optimizer state", None
        return ("statistic" if positions else "constant"), None

    def describe(self, value: Value, role: str, parameter: int | None) -> str:
        """The name of the parameter or input that a value belongs to or is, else its primitive and type."""
        region, v = self.regions[value[0]], value[1]
        if parameter is not None:
            return self.graph.input_names[parameter]
        if value[0] == 0 and v in self.graph.inputs:
            return self.graph.input_names[self.graph.inputs.index(v)]
        producer = region.graph.producers.get(v)
        made = f"{region.graph.nodes[producer].primitive} " if producer is not None else "carried "
        return made + str(region.graph.types[v])

    def sent(self) -> Iterator[Sent]:
        """Every collective of the plan with its cause, in program order."""
        for region in self.root.all():
            for index, before in enumerate(region.reshardings.before):
                node = region.graph.nodes[index] if index < len(region.graph.nodes) else None
                for move in before:
                    yield from self._steps(region, node, move)

    def _steps(self, region: Region, node: Node | None, move: Resharding) -> Iterator[Sent]:
        graph, value = region.graph, (region.number, move.value)
        type, spec = graph.types[move.value], move.before
        role, parameter = self.role(value)
        producer = graph.producers.get(move.value)
        maker = graph.nodes[producer] if producer is not None else None
        for step in move.steps:
            source, spec = spec, step.apply(spec)
            if step.kind == "slice" or step.kind == "keep":
                continue
            reduces = step.kind in ("all_reduce", "reduce_scatter")
            placed = maker if reduces and maker is not None else node or maker
            at = when(placed) if placed else "apply"
            alone = self.resharder.cost(type, source, spec)
            waited = self.resharder.cost(type, source, spec, region.background.behind(move.value))
            yield Sent(
                role=role,
                tensor=self.describe(value, role, parameter),
                layer=layer_of(placed.scope) if placed else "model",
                kind=step.kind,
                axes=step.axes,
                dtype=type.dtype,
                nbytes=spec.local_nbytes(type, self.mesh),
                count=region.trips,
                seconds=region.trips * region.share * alone,
                waited_share=waited / alone if alone else 1.0,
                phase="forward" if at == "apply" and role in ("activation", "statistic", "constant") else at,
                where=node.source if node else region.end,
                value=value,
                parameter=parameter,
                type=type,
                before=source,
                after=spec,
            )
