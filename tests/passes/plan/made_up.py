"""A made-up plan, of two layers on a made-up cluster, and another one of the same program."""

import json
from dataclasses import replace

from passes.cluster import Cluster, Collective, DeviceSpec, HostGroup, Mesh
from passes.cluster.cluster import Link
from passes.inter_op import StageCost, Transfer
from passes.ir import Graph, Node, TensorType
from passes.placement import Placement
from passes.plan import Operator, PipelinePlan, Plan, Solution
from passes.plan.json import text
from passes.sharding import parse_spec, replicated

LINK = Link(alpha_seconds=5e-6, bytes_per_second=150e9)
DEVICE = DeviceSpec(
    name="made-up",
    flops_per_second={"bfloat16": 312e12, "float32": 156e12},
    matmul_efficiency=0.7,
    memory_nbytes=80 * 2**30,
    memory_bytes_per_second=2e12,
    launch_seconds=3e-6,
    source="made up for this test",
)
CLUSTER = Cluster(
    name="2x4:made-up", groups=(HostGroup(hosts=2, devices_per_host=4, device=DEVICE, intra=LINK, inter=LINK),)
)
MESH = Mesh(axes=("data", "tensor"), sizes=(4, 2), cluster=CLUSTER)


def floats(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32")


def matmul(left: int, right: int, result: int, line: int, layer: int) -> Node:
    return Node(
        primitive="dot_general",
        inputs=(left, right),
        outputs=(result,),
        params={"dimension_numbers": (((1,), (0,)), ((), ()))},
        source=f"mlp.py:{line} (Layer.__call__)",
        scope=f"jvp(h_{layer})",
    )


GRAPH = Graph(
    types=(floats(64, 512), *[floats(512, 512)] * 4, *[floats(64, 512)] * 5, floats(), floats(64, 512)),
    nodes=(
        matmul(0, 1, 5, 12, 0),
        matmul(5, 2, 6, 13, 0),
        matmul(6, 3, 7, 12, 1),
        matmul(7, 4, 8, 13, 1),
        Node(
            primitive="broadcast_in_dim",
            inputs=(10,),
            outputs=(11,),
            params={"shape": (64, 512), "broadcast_dimensions": ()},
            source="mlp.py:20",
        ),
        Node(primitive="optimization_barrier", inputs=(8,), outputs=(9,), source="mlp.py:21 (apply)"),
    ),
    inputs=(0, 1, 2, 3, 4),
    outputs=(9, 1),
    literals={10: 0.0},
    input_names=("batch['x']", *(f"params['h_{i}']['{w}']" for i in (0, 1) for w in ("up", "down"))),
    output_names=("result[0]", "result[1]"),
)


def placed(written: str) -> Placement:
    operands, _, results = written.partition(" -> ")
    sides = ([parse_spec(s.strip()) for s in side.split(" | ")] for side in (operands, results))
    return Placement(**dict(zip(("operands", "results"), map(tuple, sides), strict=True)))


UP = placed("[data, -] | [-, tensor] -> [data, tensor]")
DOWN = placed("[data, tensor] | [tensor, -] -> [data, -] add@tensor")
REST = (placed("[] -> [-, -]"), placed("[data, -] -> [data, -]"))


def make_plan() -> Plan:
    specs = ("[data, -]", "[-, tensor]", "[tensor, -]", "[-, tensor]", "[tensor, -]")
    return Plan(
        fingerprint=GRAPH.fingerprint,
        cluster=CLUSTER,
        mesh=MESH,
        operators=tuple(
            Operator(primitive=node.primitive, source=node.source, scope=node.scope, placement=placement)
            for node, placement in zip(GRAPH.nodes, (UP, DOWN, UP, DOWN, *REST), strict=True)
        ),
        inputs=tuple(map(parse_spec, specs)),
        outputs=(parse_spec("[data, -]"), parse_spec("[-, tensor]")),
        input_names=GRAPH.input_names,
        output_names=GRAPH.output_names,
        collectives=(
            Collective(
                kind="all_reduce", axes=("tensor",), dtype="float32", nbytes=2**15, count=2, where=GRAPH.nodes[1].source
            ),
            Collective(
                kind="all_reduce", axes=("tensor",), dtype="float32", nbytes=2**15, count=1, where=GRAPH.nodes[0].source
            ),
            Collective(
                kind="all_gather", axes=("data", "tensor"), dtype="float32", nbytes=2**21, count=1, where="output"
            ),
        ),
        seconds={"compute": 0.00123, "all_reduce": 4.56e-4, "copies": 7.8e-6},
        nbytes={"arguments": 3 * 2**20, "outputs": 2**17, "temporaries": 2**29},
        solution=Solution(
            planner="megatron 4x2",
            status="optimal",
            objective=0.0017,
            bound=0.0016915,
            phase_seconds={"trace": 0.4, "tables": 0.05, "solve": 1.25},
        ),
        replicated=("mystery at mlp.py:30 (odd)", "fft at mlp.py:31 (odd)"),
        input_types=tuple(GRAPH.types[v] for v in GRAPH.inputs),
        output_types=tuple(GRAPH.types[v] for v in GRAPH.outputs),
    )


def make_other() -> Plan:
    """The same program, data parallel."""
    plan = make_plan()
    alone = placed("[data, -] | [-, -] -> [data, -]")
    return replace(
        plan,
        operators=tuple(replace(op, placement=alone) if op.primitive == "dot_general" else op for op in plan.operators),
        inputs=(plan.inputs[0], *[replicated(2)] * 4),
        collectives=plan.collectives[2:],
        seconds={"compute": 0.00246, "copies": 7.8e-6},
        nbytes={**plan.nbytes, "arguments": 5 * 2**20},
        solution=replace(plan.solution, planner="data parallel"),
    )


def edited(plan: Plan, old: str, new: str) -> object:
    written = text(plan.to_json())
    assert old in written
    return json.loads(written.replace(old, new, 1))


def make_pipeline() -> PipelinePlan:
    """Two stages of equal plans, each on a cluster's devices of its own, with two microbatches."""
    stage, cost = make_plan(), StageCost(forward_seconds=1.0, backward_seconds=2.0, persistent_nbytes=100)
    (group,) = CLUSTER.groups
    return PipelinePlan(
        fingerprint=stage.fingerprint,
        cluster=replace(CLUSTER, groups=(replace(group, hosts=2 * group.hosts),)),
        planner="made up",
        schedule_name="1f1b",
        chunks=1,
        microbatches=2,
        firsts=(0, 1),
        stages=(stage, stage),
        costs=(cost, replace(cost, persistent_nbytes=300)),
        transfers=(Transfer(forward_seconds=0.25, backward_seconds=0.5),),
        sent_nbytes=(8, 0),
        input_names=stage.input_names,
        output_names=stage.output_names,
    )
