"""Arrays that an operator takes in another order than they lie, and what that costs where it is no free choice."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from passes.cluster import Cluster, Mesh, parse_cluster
from passes.intra_op.computing import compute_seconds
from passes.intra_op.rearranging import is_one_by_one, rearranged, rearranging_seconds
from passes.ir import Graph, Node, TensorType
from passes.placement import Layout, Placement, group
from passes.rules import rule_of
from passes.sharding import ShardingSpec

RATE = 1e6


def cluster(rate: float, called: float = 0.0) -> Cluster:
    """Eight H100 that rearrange so many bytes per second, and take so many seconds to call a product."""
    plain = parse_cluster("8:h100")
    device = dataclasses.replace(plain.group().device, strided_bytes_per_second=rate, product_seconds=called)
    return dataclasses.replace(plain, groups=(dataclasses.replace(plain.group(), device=device),))


def mesh(rate: float = RATE, called: float = 0.0) -> Mesh:
    return Mesh(axes=("x",), sizes=(8,), cluster=cluster(rate, called))


def one(primitive: str, shapes: list[tuple[int, ...]], params: dict[str, object]) -> Graph:
    """A graph of one operator; the last shape is the result's."""
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in shapes)
    last = len(shapes) - 1
    node = Node(primitive=primitive, inputs=tuple(range(last)), outputs=(last,), params=params)
    return Graph(types=types, nodes=(node,), inputs=tuple(range(last)), outputs=(last,))


def product(left, right, out, contract, batch=((), ())) -> Graph:
    return one("dot_general", [left, right, out], {"dimension_numbers": (contract, batch)})


TRANSPOSE = one("transpose", [(16, 32), (32, 16)], {"permutation": (1, 0)})
HEADS = product((2, 16, 4, 8), (2, 16, 4, 8), (2, 4, 16, 16), ((3,), (3,)), ((0, 2), (0, 2)))
"""Queries by keys, whose heads lie behind positions."""


@pytest.mark.parametrize(
    ("graph", "operands"),
    [
        (TRANSPOSE, (0,)),
        (HEADS, (0, 1)),
        (product((2, 4, 16, 16), (2, 16, 4, 8), (2, 4, 16, 8), ((3,), (1,)), ((0, 1), (0, 2))), (1,)),
        (product((4, 16, 8), (4, 8, 32), (4, 16, 32), ((2,), (1,)), ((0,), (0,))), ()),
        (product((4, 8, 16), (4, 32, 8), (4, 16, 32), ((1,), (2,)), ((0,), (0,))), ()),
        (product((16, 8), (16, 32), (8, 32), ((0,), (0,))), ()),
        (product((16, 1, 8), (1, 8, 32), (1, 16, 32), ((2,), (1,)), ((1,), (0,))), ()),
        (one("reshape", [(16, 32), (512,)], {"new_sizes": (512,), "dimensions": None}), ()),
    ],
    ids=["transpose", "heads", "scores", "batch first", "sums first", "gradient of a weight", "of one", "reshape"],
)
def test_operands_that_are_taken_in_another_order(graph, operands):
    assert rearranged(rule_of(graph.nodes[0], graph)) == operands


def test_each_device_rearranges_its_pieces():
    rule = rule_of(HEADS.nodes[0], HEADS)
    reads = HEADS.types[:2]
    whole = 2 * 4 * 2 * 16 * 4 * 8 / RATE
    assert rearranging_seconds(rule, reads, (), mesh()) == pytest.approx(whole)
    heads = rule.operands[0][2]
    assert rearranging_seconds(rule, reads, (("x", heads),), mesh()) == pytest.approx(whole / 8)
    queries = rule.operands[0][1]
    assert rearranging_seconds(rule, reads, (("x", queries),), mesh()) == pytest.approx(whole / 2 * (1 + 1 / 8))
    assert rearranging_seconds(rule, reads, (), mesh(0.0)) == 0.0


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (product((4, 16, 8), (4, 8, 32), (4, 16, 32), ((2,), (1,)), ((0,), (0,))), False),
        (product((4, 8, 16), (4, 8, 32), (4, 16, 32), ((1,), (1,)), ((0,), (0,))), True),
        (product((4, 8, 16), (4, 32, 8), (4, 16, 32), ((1,), (2,)), ((0,), (0,))), True),
        (product((16, 8), (16, 32), (8, 32), ((0,), (0,))), False),
        (HEADS, False),
        (TRANSPOSE, False),
    ],
    ids=["sums last", "rows last", "rows last, sums last", "one product", "heads", "transpose"],
)
def test_products_that_are_called_one_by_one(graph, expected):
    assert is_one_by_one(rule_of(graph.nodes[0], graph)) is expected


def test_each_device_calls_its_products():
    graph = product((64, 8, 16), (64, 8, 32), (64, 16, 32), ((1,), (1,)), ((0,), (0,)))
    rule, reads = rule_of(graph.nodes[0], graph), graph.types[:2]
    numbers, rows = rule.operands[0][0], rule.operands[0][2]
    on = mesh(0.0, 1e-3)
    assert rearranging_seconds(rule, reads, (), on) == pytest.approx(64e-3)
    assert rearranging_seconds(rule, reads, (("x", numbers),), on) == pytest.approx(8e-3)
    assert rearranging_seconds(rule, reads, (("x", rows),), on) == pytest.approx(64e-3)
    assert rearranging_seconds(rule, reads, (), mesh(0.0)) == 0.0


def convolution(images: int, pixels: int, into: int, out: int, window: int) -> Graph:
    """A convolution that keeps the images' size."""
    shapes = [(images, pixels, pixels, into), (window, window, into, out), (images, pixels, pixels, out)]
    x, kernel = (jnp.zeros(shape) for shape in shapes[:2])
    layout = ("NHWC", "HWIO", "NHWC")
    run = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout)  # noqa: E731
    return autopar.parallelize(run, cluster="8:h100").step(x, kernel).graph


def slow_at_pixels() -> Mesh:
    """8 devices that take a millisecond for each pixel of a patch."""
    device = dataclasses.replace(parse_cluster("8:h100").group().device, pixel_seconds=1e-3)
    plain = cluster(0.0)
    slow = dataclasses.replace(plain, groups=(dataclasses.replace(plain.group(), device=device),))
    return Mesh(axes=("x",), sizes=(8,), cluster=slow)


def test_each_device_puts_its_patches_together():
    graph = convolution(8, 4, 16, 32, 3)
    (node,) = graph.nodes
    rule, reads = rule_of(node, graph), [graph.types[v] for v in node.inputs]
    images, channels, features = rule.operands[0][0], rule.operands[0][3], rule.results[0][3]
    on = slow_at_pixels()
    whole = 8 * 4 * 4 * 9 * 1e-3
    assert rearranging_seconds(rule, reads, (), on) == pytest.approx(whole)
    of_all = rearranging_seconds(rule, reads, (), on)
    assert rearranging_seconds(rule, reads, (("x", images),), on) == pytest.approx(of_all / 8)
    for same in (channels, features):
        assert rearranging_seconds(rule, reads, (("x", same),), on) == pytest.approx(of_all)


def test_each_device_goes_through_its_windows():
    def pooled(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2)

    graph = autopar.parallelize(jax.grad(pooled), cluster="8:h100").step(jnp.zeros((8, 16, 16, 4))).graph
    (node,) = (node for node in graph.nodes if node.primitive == "select_and_scatter_add")
    rule, reads = rule_of(node, graph), [graph.types[v] for v in node.inputs]
    on = slow_at_pixels()
    whole = 8 * 8 * 8 * 4 * 9 * 1e-3
    assert rearranging_seconds(rule, reads, (), on) == pytest.approx(whole)
    images = rule.results[0][0]
    assert rearranging_seconds(rule, reads, (("x", images),), on) == pytest.approx(whole / 8)
    (highest,) = (node for node in graph.nodes if node.primitive == "reduce_window_max")
    assert rearranging_seconds(rule_of(highest, graph), reads[:1], (), on) == 0.0


def gradients(layouts: tuple[str, str, str], groups: int = 1) -> Graph:
    """A convolution of 2 images of 8 x 8 pixels, 4 channels into 16, 3 x 3, and both of its gradients."""
    sizes = {"N": 2, "H": 8, "W": 8, "C": 4, "I": 4 // groups, "O": 16}
    x, kernel = (jnp.zeros([3 if d in "HW" and "O" in l else sizes[d] for d in l]) for l in layouts[:2])  # noqa: E741
    run = lambda x, k: jax.lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "SAME", dimension_numbers=layouts, feature_group_count=groups
    )
    both = lambda x, k: jax.vjp(run, x, k)[1](jax.nn.relu(run(x, k)))  # noqa: E731
    return autopar.parallelize(both, cluster="8:h100").step(x, kernel).graph


@pytest.mark.parametrize(
    ("layouts", "groups", "operands"),
    [
        (("NHWC", "HWIO", "NHWC"), 1, [set(), {0}, {1}]),  # the kernel's gradient sums over images, the images' over O
        (("NHWC", "HWIO", "NHWC"), 4, [set()]),
        (("NCHW", "OIHW", "NCHW"), 1, [{0, 1}, {0, 1}, {0, 1}]),
    ],
    ids=["features last", "features last, in groups", "features first"],
)
def test_convolutions_take_their_channels_last(layouts, groups, operands):
    graph = gradients(layouts, groups)
    rules = [rule_of(node, graph) for node in graph.nodes]
    found = [set(rearranged(rule)) for rule in rules if rule.convolves]
    assert found[: len(operands)] == operands


def test_a_transpose_is_no_kernel_but_what_it_rearranges():
    rows, columns = ShardingSpec(dims=(("x",), ())), ShardingSpec(dims=((), ("x",)))
    layout = Layout(placements=(Placement(operands=(rows,), results=(columns,)),), inputs=(rows,), outputs=(columns,))
    grouping = group(TRANSPOSE)
    assert sum(compute_seconds(TRANSPOSE, grouping, mesh(0.0), layout).values()) == 0.0
    spent = sum(compute_seconds(TRANSPOSE, grouping, mesh(), layout).values())
    assert spent == pytest.approx(4 * 16 * 32 / 8 / RATE)


def attention(weights, x):
    heads = (jnp.reshape(x @ w, (*x.shape[:2], 4, -1)) for w in weights)
    q, k, v = heads
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", scores, v) ** 2)


@pytest.mark.parametrize("planner", [autopar.DataParallel(), autopar.Megatron(data=2, tensor=4), autopar.Auto()])
@pytest.mark.parametrize("order", [(RATE, 0.0), (0.0, 1e-2)], ids=["copies", "calls"])
def test_a_search_and_a_plan_that_is_read_again_agree_on_what_is_rearranged(planner, order, tmp_path):
    """Strategies are priced before there is a layout, a plan that is read from its layout."""
    shapes = [jax.ShapeDtypeStruct((32, 32), "float32")] * 3, jax.ShapeDtypeStruct((8, 16, 32), "float32")
    step = jax.grad(attention)
    dear, free = (
        autopar.parallelize(step, cluster=cluster(*costs), planner=planner).plan(*shapes) for costs in (order, (0.0,))
    )
    assert dear.step_seconds > free.step_seconds + 1e-3
    dear.save(tmp_path / "plan.json")
    again = autopar.parallelize(step, cluster=cluster(*order), planner=autopar.Manual(tmp_path / "plan.json"))
    assert again.plan(*shapes).step_seconds == pytest.approx(dear.step_seconds)
