"""The audit of collectives: it counts as the textbook does, finds nothing in sound plans, and names what is planted."""

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from benchmarks import audit, textbook
from benchmarks.audit import Planned, style_of
from benchmarks.causes import Program
from benchmarks.experts import Experts, seconds_with_experts
from benchmarks.megatron import megatron
from benchmarks.textbook import EARLY, judge
from benchmarks.trainings import MODELS, make_state, make_step
from benchmarks.verdicts import Style
from passes.errors import PlanningError
from passes.sharding import ShardingSpec
from tests.sample import slow

CLUSTER = "8:a100-80g"


def planned(model, *, remat=False, **sizes):
    """A model of the zoo in its least sizes, two layers of it, as the audit plans it."""
    entry, optimizer = MODELS[model], optax.adam(1e-3)
    config = replace(entry.least, **sizes, **({"remat": True} if remat else {}))
    state = jax.eval_shape(lambda key: make_state(entry.module, config, optimizer, key), jax.random.key(0))
    batch = jax.eval_shape(lambda key: entry.module.example_batch(config, 16, key), jax.random.key(1))
    return Planned(make_step(entry.module, config, optimizer), (state, batch))


def dense():
    """Two dense layers with a mean over the batch between them, by momentum."""

    def loss(params, x):
        hidden = jnp.tanh(x @ params["up"])
        return jnp.mean(((hidden - hidden.mean(axis=0)) @ params["down"] - x) ** 2)

    def step(state, x):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), value

    struct = jax.ShapeDtypeStruct
    params = {"up": struct((256, 1024), jnp.float32), "down": struct((1024, 256), jnp.float32)}
    return Planned(step, ((params, params), struct((512, 256), jnp.float32)))


def edited(program, operator, **placement):
    """The program under its plan with one operator placed otherwise."""
    operators = list(program.plan.operators)
    old = operators[operator]
    operators[operator] = replace(old, placement=replace(old.placement, **placement))
    return Program(
        graph=program.graph, plan=replace(program.plan, operators=tuple(operators)), state_pairs=program.state_pairs
    )


def operator(program, primitive, phase):
    """The first operator of that primitive in the forward or backward pass."""
    backward = phase == "backward"
    nodes = enumerate(program.graph.nodes)
    return next(i for i, n in nodes if n.primitive == primitive and ("transpose(" in n.scope) == backward)


@pytest.mark.parametrize(("model", "remat"), [slow("gpt", False), slow("gpt", True), ("gpt-scan", True)])
def test_megatron_reduces_twice_a_block_each_way(model, remat):
    program = planned(model, remat=remat, layers=2).program(CLUSTER, "megatron")
    counts = Counter()
    for one in megatron(program, Style(data=("data",), tensor=("tensor",))):
        assert one.axes == ("tensor",)
        if one.layer.startswith("Block"):
            assert one.nbytes == one.count * 16 * 8 * 16 * 4 // 2  # [batch/data, sequence, hidden]
            counts[one.phase] += one.count
    # The table of positions is merely added: it stays whole, and is not gathered.
    assert not [s for s in program.sent() if s.role == "parameter" and "positions" in s.tensor]
    # Nothing reads a block's last product again, so JAX recomputes only the first.
    assert counts == {"forward": 4, "backward": 4} | ({"recomputed": 2} if remat else {})


def test_every_gradient_is_reduced_once():
    program, verdict = planned("gpt").verdict(CLUSTER, "dp")
    sent = [s for s in program.sent() if s.role == "gradient"]
    assert len(sent) == len(program.parameters)
    assert {s.parameter for s in sent} == program.parameters
    assert {(s.role, s.kind) for s in program.sent()} == {("gradient", "all_reduce"), ("statistic", "all_reduce")}
    assert not verdict.findings


@pytest.mark.parametrize(
    ("planner", "role", "phases"),
    [
        ("zero1", "updated parameter", {"apply"}),
        ("zero3", "parameter", {"forward", "backward"}),
    ],
)
def test_zero_gathers_and_scatters(planner, role, phases):
    program, verdict = dense().verdict(CLUSTER, planner)
    gathered = {(s.parameter, s.phase) for s in program.sent() if s.role == role}
    assert {phase for _, phase in gathered} <= phases
    assert {parameter for parameter, _ in gathered} == program.parameters
    wanted = {a.phase: a.count for a in audit.by_phase(verdict.allowed).values() if a.role == role}
    assert wanted == dict.fromkeys(phases, len(program.parameters))
    assert not verdict.findings


@pytest.mark.parametrize(
    ("model", "planners"),
    [
        ("gpt-scan", ["dp", "zero3", "megatron"]),
        slow("llama", ["zero2", "megatron"]),
        slow("llama", audit.PLANNERS),
    ],
)
def test_plans_are_explained(model, planners):
    plans = planned(model, remat=True, layers=2)
    for planner in planners:
        _, verdict = plans.verdict(CLUSTER, planner)
        assert not verdict.findings, planner


def test_a_superfluous_gather_of_an_activation_is_named():
    program = dense().program(CLUSTER, "dp")
    at = operator(program, "tanh", "forward")
    whole = ShardingSpec(dims=((), ()))
    found = judge(edited(program, at, operands=(whole,), results=(whole,)), style_of("dp", program)).findings
    (one,) = found
    assert (one.sent.role, one.sent.kind, one.sent.axes) == ("activation", "all_gather", ("data",))
    assert one.sent.nbytes == 512 * 1024 * 4
    assert one.sent.tensor == "dot_general float32[512,1024]"
    assert "in loss" in one.sent.where or "(dense.<locals>.loss)" in one.sent.where
    assert one.surplus_seconds == one.sent.seconds > 0


def test_a_gathered_parameter_is_named():
    program = dense().program(CLUSTER, "dp")
    inputs = list(program.plan.inputs)
    position = program.graph.input_names.index("state[0]['up']")
    inputs[position] = ShardingSpec(dims=((), ("data",)))
    other = Program(
        graph=program.graph, plan=replace(program.plan, inputs=tuple(inputs)), state_pairs=program.state_pairs
    )
    found = judge(other, style_of("dp", program)).findings
    assert [(f.sent.role, f.sent.tensor, f.sent.kind) for f in found] == [
        ("parameter", "state[0]['up']", "all_gather"),
    ]


def test_summands_that_are_reduced_each_are_named():
    program = planned("llama", layers=1).program(CLUSTER, "megatron")
    style = style_of("megatron", program)
    assert not judge(program, style).findings
    nodes = program.graph.nodes
    heavy = [
        i
        for i, n in enumerate(nodes)
        if n.primitive == "add_any" and program.plan.operators[i].placement.operands[0].partial == ("tensor",)
    ]
    old = program.plan.operators[heavy[0]].placement
    whole = replace(old.results[0], partial=())
    other = edited(program, heavy[0], operands=(whole, whole), results=(whole,))
    assert EARLY in {f.why for f in judge(other, style).findings}


def test_a_sum_over_the_batch_is_reduced_once():
    program, verdict = dense().verdict(CLUSTER, "dp")
    sent = Counter(s.nbytes for s in program.sent() if s.role == "statistic")
    assert sent == {4: 1, 1024 * 4: 2}  # the loss; the mean, and what its gradient sums
    assert Counter(a.nbytes for a in verdict.allowed if a.role == "statistic") == sent
    assert not verdict.findings


def test_a_sum_that_a_scales_gradient_and_the_rest_of_the_backward_pass_follow_from_is_reduced_whole():
    """Batch normalisation multiplies its scale by 1/std: the gradient of their product is one sum for both."""

    def loss(params, x):
        scale, weights = params
        hidden = x @ weights
        centred = hidden - hidden.mean(axis=0)
        return jnp.mean((centred * (jax.lax.rsqrt((centred**2).mean(axis=0) + 1e-5) * scale)) ** 4)

    def step(state, x):
        params, moments = state
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    struct = jax.ShapeDtypeStruct
    params = struct((1024,), jnp.float32), struct((256, 1024), jnp.float32)
    program, verdict = Planned(step, ((params, params), struct((512, 256), jnp.float32))).verdict(
        "2x8:a100-80g", "zero1"
    )
    assert {s.parameter for s in program.sent() if s.role == "gradient"} == {1}
    assert not verdict.findings


def test_narrow_summands_of_a_gradient_are_scattered_each_or_cast_and_summed_first():
    """A table that is read twice, each time in bfloat16: the textbook allows for the casts where it reduces once."""

    def loss(table, x):
        return jnp.mean((jnp.tanh(x @ table.astype("bfloat16").T) @ table.astype("bfloat16")) ** 2)

    def step(state, x):
        table, moment = state
        moment = 0.9 * moment + jax.grad(loss)(table, x)
        return table - 0.1 * moment, moment

    table = jax.ShapeDtypeStruct((32768, 1024), jnp.float32)
    given = (table, table), jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16)
    program, verdict = Planned(step, given).verdict(CLUSTER, "zero1")
    sent = [s for s in program.sent() if s.role == "gradient"]
    assert [(s.kind, s.dtype) for s in sent] == [("reduce_scatter", "bfloat16")] * 2
    assert not verdict.findings
    assert textbook.casting_seconds(program, sent, "bfloat16") == 0.0
    (allowed,) = [a for a in verdict.allowed if a.role == "gradient"]
    elements, device = 32768 * 1024, program.mesh.cluster.group().device
    casts = elements * (2 * (2 + 4) + 3 * 4) * (1 - 1 / 8) / device.achieved_bytes_per_second
    once = textbook.seconds_of(program, "reduce_scatter", allowed.axes, elements * 4)
    assert allowed.seconds == pytest.approx(once + casts)


def test_a_searched_plan_may_not_be_slower_than_the_best_hand_made_one(monkeypatch, capsys):
    planned = dense()
    program = planned.program(CLUSTER, "dp")
    at = operator(program, "tanh", "forward")
    whole = ShardingSpec(dims=((), ()))
    slow = edited(program, at, operands=(whole,), results=(whole,))
    seconds = dict(slow.plan.seconds) | {"all_gather": sum(s.seconds for s in slow.sent() if s.kind == "all_gather")}
    planned.plans[CLUSTER, "auto"] = (program, replace(slow.plan, seconds=seconds))
    monkeypatch.setattr(Planned, "of", classmethod(lambda cls, *names, remat: planned))
    arguments = ["--model", "gpt", "--cluster", CLUSTER, "--dtype", "float32", "--remat", "off", "--planner"]
    assert audit.main([*arguments, "auto", "--json"]) == 1
    (judged,) = json.loads(capsys.readouterr().out)["audited"]
    causes = judged["unexplained"]
    (gathered,) = [one for one in causes if one["tensor"] == "dot_general float32[512,1024]"]
    assert (gathered["kind"], gathered["surplus_seconds"]) == ("all_gather", seconds["all_gather"])
    assert gathered["share"] == gathered["surplus_seconds"] / judged["step_seconds"]
    # Megatron is the best hand-made one. Beyond the gather, what it does not reduce makes up the rest.
    assert {one["role"] for one in causes} == {"activation", "gradient"}
    best = min(planned.program(CLUSTER, name).plan.step_seconds for name in audit.PLANNERS[:-1])
    assert sum(one["surplus_seconds"] for one in causes) == pytest.approx(judged["step_seconds"] - best, rel=1e-5)
    assert audit.main([*arguments, "dp"]) == 0
    assert "1 plans, 0 with something unexplained" in capsys.readouterr().out
    assert audit.main([*arguments, "auto", "--causes"]) == 1
    assert "all_gather@data, activation, forward: dot_general float32[512,1024]" in capsys.readouterr().out


def test_a_searched_plan_is_judged_where_no_hand_made_one_fits(monkeypatch):
    """The best of none was asked for."""
    planned, unfit = dense(), Planned.program

    def program(self, cluster, planner):
        if planner != "auto":
            raise PlanningError("needs more memory than there is")
        return unfit(self, cluster, planner)

    monkeypatch.setattr(Planned, "program", program)
    assert planned.verdict(CLUSTER, "auto")[1].findings == []


def test_an_unknown_planner_is_refused(capsys):
    with pytest.raises(SystemExit):
        audit.arguments(["--planner", "dp,zero4"])
    assert "zero4" in capsys.readouterr().err


def test_running_statistics_keep_no_layer_from_cutting_the_batch():
    """ZeRO-3 would cut them like parameters; small layers were then computed whole on every device."""

    def loss(params, mean, x):
        hidden = x @ params
        now = hidden.mean(axis=0)
        return jnp.mean((hidden - now) ** 4), 0.9 * mean + 0.1 * now

    def step(state, x):
        params, mean = state
        (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(params, mean, x)
        return (params - 0.1 * gradient, mean), value

    struct = jax.ShapeDtypeStruct
    state = struct((64, 512), jnp.float32), struct((512,), jnp.float32)
    program, verdict = Planned(step, (state, struct((128, 64), jnp.float32))).verdict("2x8:a100-80g", "zero3")
    assert {s.role for s in program.sent()} <= {"parameter", "updated parameter", "gradient", "statistic"}
    assert not [f for f in verdict.findings if f.sent.role.startswith("activation")]


@pytest.mark.parametrize("remat", [slow(False), True])
def test_experts_are_met_by_two_exchanges_a_layer_each_way(remat):
    program = planned("moe", remat=remat).program(CLUSTER, "dp")
    experts = Experts(program=program)
    assert {program.graph.input_names[i].rpartition("[")[2] for i in experts.parameters} == {"'up']", "'down']"}
    config = MODELS["moe"].least
    slots = 2 * 16 * config.sequence_length * config.hidden * 4  # every token takes two
    sent = Counter()
    for one in experts.exchanges(("data",)):
        assert one.nbytes == slots // 8
        sent[one.phase] += one.count
    layers = config.sparse_layers
    assert sent == {"forward": 2 * layers, "backward": 2 * layers} | ({"recomputed": 2 * layers} if remat else {})
    assert not Experts(program=planned("gpt").program(CLUSTER, "dp")).layers


@pytest.mark.slow
def test_a_searched_plan_exchanges_tokens_as_often_as_the_textbook(monkeypatch):
    """Experts that one axis cuts: tokens go to them and back once each way, and no gradient of theirs is reduced."""
    plain = audit.planner_of
    monkeypatch.setattr(audit, "planner_of", lambda n, c: autopar.Auto(max_axes=1) if n == "auto" else plain(n, c))
    program = Planned.of("moe", "float32", remat=False).program(CLUSTER, "auto")
    experts = Experts(program=program)
    assert experts.axes == program.mesh.axes
    assert not [s for s in program.sent() if s.parameter in experts.parameters]
    exchanged = [s for s in program.sent() if s.kind == "all_to_all" and s.layer == "Block_0"]
    wanted = list(experts.exchanges(experts.axes))
    assert sum(s.count for s in exchanged) == len(wanted) == 4
    assert sum(s.total_nbytes for s in exchanged) == sum(one.nbytes for one in wanted)


def test_a_searched_plan_may_not_be_slower_than_the_best_hand_made_one_with_experts_cut(monkeypatch):
    monkeypatch.setattr(audit, "PLANNERS", ("zero1", "auto"))
    plans = Planned.of("moe", "float32", remat=False)
    program, found = plans.verdict(CLUSTER, "zero1")
    assert seconds_with_experts(program, found) < program.plan.step_seconds
    traced, plan = plans.plans[CLUSTER, "zero1"]
    plans.plans[CLUSTER, "auto"] = traced, replace(plan, solution=replace(plan.solution, bound=plan.solution.objective))
    _, verdict = plans.verdict(CLUSTER, "auto")
    assert any("with experts would take" in f.why for f in verdict.findings)
