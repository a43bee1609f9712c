"""What makes planning fast changes no answer: tying, leaving out what is dominated, arrays in place of a model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.trace import trace
from models import gpt
from passes.bundles import group
from passes.devices import parse_cluster
from passes.intra_op import SolverOptions, solve
from passes.mesh import Mesh
from passes.problem import assemble, without_dominated
from passes.resharding import Resharder

MESH = Mesh(axes=("x", "y"), sizes=(2, 4), cluster=parse_cluster("2x4:a100-80g"))
EXACT = SolverOptions(gap=1e-10, time_limit=120.0)


def traced_step(loss, params, batch):
    optimizer = optax.adamw(1e-3)

    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = (params, jax.eval_shape(optimizer.init, params))
    return trace(step, (state, batch), {}, donate_argnums=(0,))


def mlp():
    """Three equal layers, then one that is not."""
    sizes = [(256, 256)] * 3 + [(256, 64)]
    params = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    def loss(params, batch):
        x, y = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    shapes = tuple(jax.ShapeDtypeStruct((512, width), jnp.float32) for width in (256, 64))
    return traced_step(loss, params, shapes)


def small_gpt(layers=1):
    config = replace(gpt.Config.tiny(), layers=layers)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = jax.eval_shape(lambda: gpt.example_batch(config, 16, jax.random.key(0)))
    return traced_step(lambda params, batch: gpt.loss(config, params, batch), params, batch)


def assembled(traced):
    resharder = Resharder(MESH)
    grouping = group(traced.graph)
    return assemble(traced.graph, MESH, grouping, resharder, traced.tied, refetch=False), resharder


@pytest.fixture(scope="module", params=[mlp, small_gpt])
def assembly(request):
    return assembled(request.param())


def test_dominated_strategies_are_not_missed(assembly):
    whole, resharder = assembly
    options = replace(EXACT, tie_radius=None)
    few, all_of_them = solve(without_dominated(whole, resharder), options), solve(whole.problem, options)
    assert few.objective == pytest.approx(all_of_them.objective, rel=1e-9)


def test_tying_costs_nothing(assembly):
    problem = without_dominated(*assembly)
    tied, apart = solve(problem, EXACT), solve(problem, replace(EXACT, tie_radius=None))
    assert tied.objective == pytest.approx(apart.objective, rel=1e-9)
    assert tied.variables <= apart.variables


def test_a_model_in_pulp_and_arrays_agree(assembly):
    problem = without_dominated(*assembly)
    arrays, model = solve(problem, EXACT), solve(problem, replace(EXACT, solver="cbc"))
    assert arrays.objective == pytest.approx(model.objective, rel=1e-9)


def test_equal_layers_share_their_tables_and_placements():
    whole, _ = assembled(small_gpt(layers=3))
    tables = {id(table) for table in whole.root.tables}
    assert len(tables) < len(whole.root.tables) / 2
    crossings = [c for crossings in whole.crossings for c in crossings]
    contents = {(c.type, c.specs, c.incoming, c.weight) for c in crossings}
    assert len(set(map(id, crossings))) == len(contents)


def test_classes_are_kept_as_their_representatives():
    for bundle in group(small_gpt().graph).bundles:
        for classes in (*bundle.factor_classes.values(), *bundle.value_classes.values()):
            assert [bundle.find(cls) for cls in classes] == classes
