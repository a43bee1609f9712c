"""Chains of operations that `autopar measure` times: how often each runs, on what, and what waits for what."""

import jax
import jax.numpy as jnp
import pytest

from autopar.tools import chains, measurement
from autopar.tools.measurement import NBYTES
from passes.cluster import Mesh, parse_cluster


@pytest.mark.parametrize(("run_seconds", "runs"), [(0.05, chains.REPEATS), (0.2, chains.FEWER)])
def test_long_runs_are_fewer_and_one_program_serves_all_lengths(run_seconds, runs, monkeypatch):
    """A clock of the test's own says how long each run takes; operations are counted by what they do to the array."""
    now, ended, traced = [0.0], [], []

    def clock():
        now[0] += run_seconds
        return now[0]

    def recorded(x):
        traced.append(x)
        return x + 1

    monkeypatch.setattr(chains, "clock_of", lambda devices: (clock, 1))
    jitted = jax.jit

    def jit(f, donate_argnums=(), **options):
        run = jitted(f, donate_argnums=donate_argnums, **options)
        return (lambda x, count: ended.append(int(count)) or run(x, count)) if donate_argnums == 0 else run

    monkeypatch.setattr(jax, "jit", jit)
    chains.seconds(recorded, (4,), Mesh(axes=(), sizes=(), cluster=parse_cluster("1:cpu")), jax.devices()[:1], times=2)
    assert ended == [2] * (runs + 1) + [2 * chains.LONGER] * (runs + 1)
    assert len(traced) == 1


@pytest.mark.parametrize(("elements", "arrays"), [(4, 16), (1 << 18, 16), (1 << 20, 4), (1 << 27, 4)])
def test_large_arrays_are_fewer(elements, arrays, monkeypatch):
    """As many as no cache holds: 1 MiB is read from 16 of them, 4 MiB and more from 4."""
    shapes = []
    monkeypatch.setattr(chains, "_fastest", lambda chain, shape, *rest: shapes.append((shape, rest[4])) or [1.0])
    mesh = Mesh(axes=(), sizes=(), cluster=parse_cluster("1:cpu"))
    assert chains.apart_seconds(jnp.sin, (elements,), mesh, jax.devices()[:1]) == 1 / arrays
    assert shapes == [((arrays, elements), (arrays,))]
    assert chains.between_products(jnp.sin, elements, mesh, jax.devices()[:1]).count == arrays


def test_a_chain_of_collectives_is_run_for_a_while_in_each_round_and_its_middle_half_counts(monkeypatch):
    """A clock of the test's own says that a run takes 8 ms, but for two that a busy machine lengthens or hides."""
    mesh = Mesh(axes=(), sizes=(), cluster=parse_cluster("1:cpu"))
    chain = chains.between_products(jnp.sin, 4, mesh, jax.devices()[:1])
    durations = iter([0.008, 0.5, *[0.008] * 3, 0.001, *[0.008] * 3])
    now, starting = [0.0], [True]

    def clock():
        if not starting[0]:
            now[0] += next(durations)
        starting[0] = not starting[0]
        return now[0]

    monkeypatch.setattr(chains.time, "perf_counter", clock)
    for _ in range(3):
        chain.go_on()
    assert [round(each * chain.count, 6) for each in chain.spent] == [0.008, 0.5, *[0.008] * 3, 0.001, *[0.008] * 3]
    assert chain.seconds == pytest.approx(0.008 / chain.count)


def test_chains_that_are_alike_are_one_and_all_are_come_back_to(monkeypatch):
    """What stands around three kinds of collectives is the same, among 2 and among 4 of 8 devices."""
    begun, rounds = [], []

    class Recorded:
        seconds = 1.0

        def go_on(self):
            rounds.append(self)

    def recorded(operation, n, mesh, devices, before):
        begun.append((operation, n, mesh.sizes, before))
        return Recorded()

    monkeypatch.setattr(measurement, "between_products", recorded)
    announced = []
    curves = list(measurement._curves(parse_cluster("8:cpu"), jax.devices(), announced.append))
    scaled = [case for case in begun if case[0] is measurement._scaled]
    assert sorted({sizes for _, _, sizes, _ in begun}) == [(2, 4), (4, 2), (8,)]
    assert len(scaled) == len(set(scaled)) == len(NBYTES) * 2 + 1  # in groups, in one, and the short one across groups
    assert [rounds.count(chain) for chain in set(rounds)] == [chains.ROUNDS] * len(begun)
    assert len(curves) == 5 * 3
    assert announced[-1] == f"collectives, round {chains.ROUNDS} of {chains.ROUNDS}"


def test_copies_are_measured_on_one_array_after_another():
    seen = []

    def recorded(x):
        jax.debug.callback(lambda first: seen.append(float(first)), x[0])
        return x + 1

    cluster = parse_cluster("1:cpu")
    spent = chains.apart_seconds(recorded, (4,), Mesh(axes=(), sizes=(), cluster=cluster), jax.devices()[:1])
    jax.effects_barrier()
    assert spent > 0
    runs = len(seen) // chains.ARRAYS
    assert chains.FEWER + 1 <= runs <= chains.REPEATS + 1
    assert sorted(seen) == [run + 0.5 for run in range(runs) for _ in range(chains.ARRAYS)]


def test_collectives_are_measured_between_products_on_one_array_after_another():
    seen = []

    def recorded(x):
        jax.debug.callback(lambda values: seen.append(values.tolist()), x)
        return x + 1

    cluster = parse_cluster("1:cpu")
    mesh = Mesh(axes=(), sizes=(), cluster=cluster)
    chain = chains.between_products(recorded, 4, mesh, jax.devices()[:1])
    chain.go_on()
    jax.effects_barrier()
    assert chain.seconds > 0
    firsts, others = [values[0] for values in seen], [x for values in seen for x in values[1:]]
    runs = len(chain.spent) + 1
    assert runs >= 2
    assert sorted(others) == [run + 0.5 for run in range(runs) for _ in range(3 * chains.ARRAYS)]
    # The product before it changes one number of each array, by next to nothing: tanh of anything but 0 is 0 to 1.
    assert all(0 < x - round(x - 0.5) - 0.5 < 1e-4 for x in firsts)


def test_a_product_waits_for_the_collective_before_it_and_the_next_collective_for_that():
    mesh = Mesh(axes=(), sizes=(), cluster=parse_cluster("1:cpu"))
    texts = []

    def marked(x):
        return jnp.sin(x)

    jitted = jax.jit
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "jit", lambda f, **options: texts.append(jax.make_jaxpr(f)) or jitted(f, **options))
        chains.between_products(marked, 4, mesh, jax.devices()[:1])
    jaxpr = texts[0](jnp.full((chains.ARRAYS, 4), 0.5), chains.ARRAYS)
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    body = loop.params["jaxpr" if loop.primitive.name == "scan" else "body_jaxpr"].jaxpr
    made = {}
    for eqn in body.eqns:
        above = set().union(*(made.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        for out in eqn.outvars:
            made[out] = above | {eqn.primitive.name}
    arrays, matrix = (made[v] for v in body.outvars[-2:])
    assert "dot_general" in arrays
    assert "sin" in matrix
