"""The search finds by itself what people found by hand: tests on clusters that are not here, from shapes alone."""

import collections
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from models import alexnet, dlrm, gpt, moe
from tests.sample import slow

ONE_AXIS, MEGATRON = autopar.Auto(max_axes=1), autopar.Megatron(data=1, tensor=8)


@functools.cache
def plan(model, config, batch_size, cluster="8:a100-80g", planner=ONE_AXIS):
    """The plan of one step of gradient descent."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(functools.partial(model.loss, config))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
    batch = jax.eval_shape(functools.partial(model.example_batch, config, batch_size), jax.random.key(0))
    return autopar.parallelize(step, cluster=cluster, planner=planner).plan(params, batch)


def counts(plan):
    counts = collections.Counter()
    for c in plan.collectives:
        counts[c.kind] += c.count
    return dict(counts)


def inputs(plan):
    return dict(zip(plan.input_names, map(str, plan.inputs), strict=True))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


@pytest.mark.parametrize(
    ("planner", "layers"), [(ONE_AXIS, 2), slow(ONE_AXIS, 3), *(slow(MEGATRON, layers) for layers in (2, 3))]
)
def test_small_activations_give_megatron(planner, layers):
    """A block reduces after its row-split matrices (attention's and the MLP's second), and in the backward pass before
    its column-split ones: 2 forward, 2 backward (Shoeybi et al. 2019, figure 4). Around the blocks: the vocabulary-cut
    embedding's sum, the gradient of the vocabulary-cut logits' input, and three numbers a token in the loss (largest
    logit, sum of exponentials, target's logit). In all 4 L + 5.
    """
    config = gpt.Config(vocab_size=16384, sequence_length=128, hidden=1024, layers=layers, heads=16, dtype="bfloat16")
    planned = plan(gpt, config, 8, planner=planner)
    assert counts(planned).get("all_reduce") == 4 * layers + 5
    if planner is ONE_AXIS:
        assert set(counts(planned)) == {"all_reduce"}
        specs = inputs(planned)
        assert specs["params['Block_0']['attention']['qkv']['kernel']"] == "[-, -, x, -]"
        assert specs["params['Block_0']['attention']['out']['kernel']"] == "[x, -, -]"
        assert specs["params['Block_0']['mlp']['up']['kernel']"] == "[-, x]"
        assert specs["params['Block_0']['mlp']['down']['kernel']"] == "[x, -]"
        assert specs["params['embed']['embedding']"] == "[x, -]"


def test_large_activations_give_sequence_parallelism():
    """Each of Megatron's all-reduces becomes a reduce-scatter and an all-gather, between which norms, residuals and
    dropout work on a piece of the tokens (Korthikanti et al. 2022, figure 5): 4 pairs a block, one for the embedding
    and one for the logits. What is still reduced whole are three numbers a token, and gradients of norms and biases.
    """
    config = gpt.Config(vocab_size=51200, sequence_length=1024, hidden=4096, layers=1, heads=32, dtype="bfloat16")
    planned = plan(gpt, config, 4)
    assert counts(planned)["reduce_scatter"] == counts(planned)["all_gather"] == 6
    assert max(c.nbytes for c in planned.collectives if c.kind == "all_reduce") <= 4 * 4096


def test_one_weird_trick_on_alexnet():
    """Convolutions cut the batch and keep their few weights whole; dense layers cut their many weights
    (Krizhevsky 2014). In between, activations change sides by one all-to-all each way. Over a hybrid cube mesh the last
    two convolutions, whose kernels are larger than what they read, are cut by columns and rows.
    """
    planned = plan(alexnet, alexnet.Config.preset("full"), 128, cluster="8:v100-16g")
    specs = inputs(planned)
    assert specs["batch['images']"] == "[x, -, -, -]"
    convolutions = [
        spec for name, spec in specs.items() if name.startswith(("params['Conv_0", "params['Conv_1", "params['Conv_2"))
    ]
    assert len(convolutions) == 6
    assert all("x" not in spec for spec in convolutions)
    assert all("x" in specs[f"params['Dense_{i}']['kernel']"] for i in range(3))
    assert counts(planned)["all_to_all"] == 2


def test_expert_parallelism_on_a_mixture_of_experts():
    """Every device has its own experts; tokens go to them and come back by all-to-all (Lepikhin et al. 2020)."""
    planned = plan(moe, replace(moe.Config.preset("380M"), layers=2), 16)
    specs = inputs(planned)
    assert specs["params['Block_0']['experts']['up']"] == specs["params['Block_0']['experts']['down']"] == "[x, -, -]"
    assert specs["params['Block_1']['mlp']['up']['kernel']"] in ("[-, -]", "[x, -]")  # whole, or gathered where read
    assert counts(planned)["all_to_all"] >= 4


def test_dlrm_cuts_tables_and_copies_its_mlps():
    """Tables are too large to reduce their gradients, MLPs too small to cut (Naumov et al. 2019, section 3.2); vectors
    go from the tables' cuts to the batch's by all-to-all.
    """
    planned = plan(dlrm, dlrm.Config.preset("1B"), 8192)
    specs = inputs(planned)
    tables = [spec for name, spec in specs.items() if "Table" in name]
    assert tables
    assert all("x" in spec for spec in tables)
    assert {spec for name, spec in specs.items() if "kernel" in name} == {"[-, -]"}
    assert counts(planned)["all_to_all"] >= 1


def gradients(loss, *args):
    step = jax.value_and_grad(loss, argnums=tuple(range(len(args))))
    return autopar.parallelize(step, cluster="8:a100-80g", planner=ONE_AXIS).plan(*args)


def test_collectives_of_an_mlp_block():
    """Few rows against large matrices: the first matrix cut by columns, the second by rows. One sum for the output,
    one for the input's gradient, of which each device returns a part; every other gradient is where its matrix is.
    """

    def loss(x, up, down):
        return ((jax.nn.gelu(x @ up) @ down).astype(jnp.float32) ** 2).sum()

    planned = gradients(loss, array(64, 4096), array(4096, 16384), array(16384, 4096))
    assert counts(planned) == {"all_reduce": 1, "reduce_scatter": 1}


def test_collectives_of_an_attention_block():
    """Heads are cut: queries, keys and values by columns, the output matrix by rows: one sum each way."""

    def loss(x, qkv, out):
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthe->bsthe", x, qkv), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k) / 8)
        return (jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, out).astype(jnp.float32) ** 2).sum()

    planned = gradients(loss, array(1, 128, 4096), array(4096, 3, 32, 128), array(32, 128, 4096))
    assert counts(planned) == {"all_reduce": 1, "reduce_scatter": 1}


def test_collectives_of_a_mixture_block():
    """Groups of tokens are cut over devices around the experts, experts inside: all-to-all to them and back, and the
    same for both gradients: 4. Experts' gradients are where the experts are; the two matrices outside sum theirs, the
    loss is one more sum.
    """

    def loss(x, before, gate, up, down):
        x = jnp.tanh(x @ before)
        chosen = jax.nn.softmax((x @ gate).astype(jnp.float32)).astype(x.dtype)
        dispatch = chosen[..., None] * jax.nn.one_hot(jnp.arange(x.shape[1]) % 32, 32, dtype=x.dtype)[:, None, :]
        tokens = jnp.einsum("gsd,gsec->gecd", x, dispatch)
        made = jnp.einsum("gecf,efd->gecd", jax.nn.gelu(jnp.einsum("gecd,edf->gecf", tokens, up)), down)
        return (jnp.einsum("gecd,gsec->gsd", made, dispatch).astype(jnp.float32) ** 2).sum()

    step = jax.value_and_grad(loss, argnums=(1, 2, 3, 4))
    args = (array(64, 128, 1024), array(1024, 1024), array(1024, 8), array(8, 1024, 4096), array(8, 4096, 1024))
    planned = autopar.parallelize(step, cluster="8:a100-80g", planner=ONE_AXIS).plan(*args)
    totals = counts(planned)
    assert totals.pop("all_to_all") == 4
    assert totals.keys() <= {"all_reduce", "reduce_scatter"}
    assert sum(totals.values()) == 3
