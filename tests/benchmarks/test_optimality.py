"""Plans of random networks keep to the bounds that they print, and the benchmark that says so sees what is wrong."""

import json
import math
import operator
import os
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

import autopar
from benchmarks import optimality, proof, tying
from benchmarks.child import Child, CrashError
from benchmarks.networks import BLOCKS, KINDS, Design, drawn
from benchmarks.optimality import CLUSTERS, Held, proof_of
from benchmarks.proof import brute_force, problems, proven
from passes.cluster import parse_cluster
from tests.sample import slow

SOUND = Held(
    nodes=9,
    strategies=31,
    entries=255.0,
    status="near optimal",
    step_seconds=1.0,
    objective=1.0,
    bound=0.9,
    known=0.95,
    least=0.94,
    way="untied",
    cpu=0.5,
    wall=0.6,
)


def stack(*blocks, kind="mixed", width=256, batch=16, optimizer="sgd"):
    return Design(kind=kind, blocks=blocks, width=width, batch=batch, optimizer=optimizer)


def tiny():
    """A network that has 55,296 plans on two devices, and its problems."""
    network = stack("plain").network()
    step = autopar.parallelize(network.step, cluster="2:a100-80g").step(network.state, network.batch)
    return list(problems(step, parse_cluster("2:a100-80g")))


@pytest.mark.parametrize(
    ("design", "cluster", "way"),
    [
        (stack("plain"), "2:a100-80g", "all tried"),
        (stack("biased", width=1024, batch=64), "2:a100-80g", "all tried"),
        slow(stack("gated", "residual", "shared", width=2048, batch=64), "4:h100", "untied"),
        (stack(*["plain"] * 4, width=4096), "8:a100-80g", "untied"),
        slow(
            Design(kind="recurrent", blocks=("recurrent",) * 3, width=256, batch=128, optimizer="adam"),
            "8:a100-80g",
            "untied",
        ),
    ],
    ids=str,
)
def test_plans_are_what_they_say(design, cluster, way):
    one = proof_of(design, cluster)
    assert one.violations == []
    assert one.way == way
    assert one.excess <= one.gap + proof.EXACT


def test_a_plan_without_a_proof_is_held_against_its_own_bound(monkeypatch):
    design, cluster = drawn(3, 0), CLUSTERS[0]
    monkeypatch.setattr(optimality, "proven", lambda *_: pytest.fail("a proof was asked for"))
    alone = proof_of(design, cluster, "none")
    assert (alone.way, alone.known, alone.least) == ("none", alone.objective, alone.bound)
    assert alone.violations == []
    assert replace(alone, status="optimal", bound=alone.objective / 2).violations != []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_random_plans_are_what_they_say(fresh_seed, number):
    design, cluster = drawn(fresh_seed, number), CLUSTERS[number % len(CLUSTERS)]
    print(f"--seed={fresh_seed}: {design} on {cluster}")
    assert proof_of(design, cluster).violations == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"bound": 0.96}, "printed bound is 0.96"),
        ({"objective": 0.9, "step_seconds": 0.9, "known": 0.9}, "the proof says at least 0.94"),
        ({"step_seconds": 1.1}, "parts take 1.1"),
        ({"step_seconds": 0.94}, "parts take 0.94"),
        ({"status": "optimal"}, "called optimal with a gap of 10 %"),
    ],
)
def test_wrong_numbers_of_a_plan_are_violations(changed, says):
    assert SOUND.violations == []
    (found,) = replace(SOUND, **changed).violations
    assert says in found


def test_trying_all_answers_finds_the_least():
    (problem,) = tiny()
    allowed = [np.flatnonzero(np.isfinite(own)) for own in problem.seconds]
    least, rng = brute_force(problem), np.random.default_rng(0)
    drawn_at_random = (problem.evaluate([rng.choice(own) for own in allowed]) for _ in range(300))
    assert least <= min(drawn_at_random)
    assert proven([problem], math.inf, None, None).objective == least
    (own, *rest) = problem.seconds
    free = replace(problem, seconds=(own + 1.0, *rest))
    assert brute_force(free) == pytest.approx(least + 1.0)


def test_a_problem_without_a_bound_goes_to_a_solver_of_pulp(monkeypatch):
    (problem,) = tiny()
    least, solve = brute_force(problem), proof.solve

    def without_a_bound(problem, options, *rest, **more):
        answer = solve(problem, options, *rest, **more)
        return answer if options.solver else replace(answer, bound=0.0)

    monkeypatch.setattr(proof, "solve", without_a_bound)
    monkeypatch.setattr(proof, "_TINY", 1)
    found = proven([problem], math.inf, "highs", 30.0)
    assert found.way == "untied, highs"
    assert found.objective == pytest.approx(least)
    assert found.bound == pytest.approx(least, rel=2 * proof.EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_are_train_steps(kind):
    blocks = (kind,) * 3 if kind in BLOCKS else ("recurrent", "shared", "attention")
    network = stack(*blocks, kind=kind, optimizer="adam").network()
    state, loss = jax.eval_shape(network.step, network.state, network.batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), network.state
    )
    assert loss.shape == ()


def test_a_network_is_drawn_again_by_its_numbers():
    assert [drawn(3, number) for number in range(40)] == [drawn(3, number) for number in range(40)]
    assert len({drawn(3, number).kind for number in range(200)}) == len(KINDS)


def test_a_process_that_dies_is_a_crash_and_the_next_call_works():
    with Child() as child:
        with pytest.raises(CrashError, match="SIGABRT"):
            child.call(os.abort)
        assert child.call(operator.add, 1, 2, seconds=60) == 3
        with pytest.raises(CrashError, match="ZeroDivisionError"):
            child.call(operator.truediv, 1, 0)
        with pytest.raises(CrashError, match="no answer within 0 s"):
            child.call(time.sleep, 60, seconds=0.1)


class Instead:
    """A child whose calls are made up: one network is sound, one's bound is wrong, one crashes."""

    def __enter__(self):
        self.calls = iter([SOUND, replace(SOUND, bound=0.96), CrashError("the process ended: SIGSEGV")])
        return self

    def __exit__(self, *_):
        pass

    def call(self, *_, **__):
        match = next(self.calls)
        if isinstance(match, CrashError):
            raise match
        return match


@pytest.mark.parametrize(("count", "status"), [(1, 0), (2, 1), (3, 1)])
def test_status_and_summary(monkeypatch, capsys, count, status):
    monkeypatch.setattr(optimality, "Child", Instead)
    options = ["--count", str(count), "--clusters", "8:a100-80g"]
    assert optimality.main(options) == status
    text = capsys.readouterr().out
    assert ("WRONG" in text, "SIGSEGV" in text) == (count > 1, count > 2)
    assert optimality.main([*options, "--json"]) == status
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["networks"], summary["crashes"], summary["violations"]) == (count, count // 3, count // 2)


def test_tying_prints_a_problem_a_row_and_no_tied_bound_is_above_an_answer(capsys):
    arguments = ["--seed", "500", "--first", "1", "--count", "1", "--cluster", "4:h100"]  # four plain layers
    assert tying.main(arguments) == 0
    printed = capsys.readouterr().out
    pairs_found = tying.pairs(500, [1], "4:h100")
    assert printed.count("plain 4, width 256") == len(pairs_found) > 1
    for pair in pairs_found:
        assert pair.tied.bound <= pair.apart.objective * (1 + 1e-9)
        assert pair.apart.bound <= pair.tied.objective * (1 + 1e-9)


@pytest.mark.slow
def test_a_sum_that_several_readers_want_is_counted_as_it_is_reduced():
    """The plan took .3 % less than its solution, and than its bound: its sums were reduced once, and counted twice."""
    held = proof_of(drawn(2026, 65), "2x4:v100-16g", "none")
    assert held.violations == []
    assert held.bound <= held.step_seconds * (1 + 1e-9)
