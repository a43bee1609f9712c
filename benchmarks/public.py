"""Small train steps like those of public code, under every planner: equal to `jax.jit`, or refused with a reason.

    python -m benchmarks.public --planner auto dp zero3 megatron microbatches pipeline stages --json

Each of twenty losses, as examples of JAX's libraries have them, is trained in three ways: parameters beside Optax's
state, Flax's TrainState with metrics and a key, and a dict with averages and gradients accumulated in a scan.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar

ROWS, WIDTH, LENGTH, CLASSES = 16, 16, 8, 8
STEPS = 2
TOLERANCE = 1e-4
"""The difference from `jax.jit` relative to an array's largest entry: float32 is summed in another order, for two steps
of an optimizer."""

Loss = Callable[[Any, Any, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Shape:
    """A loss of (parameters, batch, key), with the shapes of both; one that ends in `int` is of whole numbers."""

    loss: Loss
    params: Mapping[str, tuple[int, ...]]
    batch: Mapping[str, tuple[Any, ...]]


def _dense(params: Any, name: str, x: jax.Array) -> jax.Array:
    return x @ params[name] + params.get(name + "_b", 0.0)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _norm(x: jax.Array, axis: Any = -1) -> jax.Array:
    return (x - x.mean(axis, keepdims=True)) * jax.lax.rsqrt(x.var(axis, keepdims=True) + 1e-5)


def _attention(params: Any, x: jax.Array, memory: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    q, k, v = (jnp.einsum("bld,dhe->blhe", y, params[n]) for y, n in ((x, "q"), (memory, "k"), (memory, "v")))
    return x + jnp.einsum("blhe,hed->bld", jax.nn.dot_product_attention(q, k, v, mask=mask), params["o"])


HEADS = {**dict.fromkeys("qkv", (WIDTH, 2, WIDTH // 2)), "o": (2, WIDTH // 2, WIDTH)}
UP, DOWN = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)


def _block(params: Any, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    x = _attention(params, _norm(x), _norm(x), mask)
    return x + jax.nn.gelu(_norm(x) @ params["up"]) @ params["down"]


def mlp(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A classifier of two layers."""
    return _entropy(_dense(params, "out", jax.nn.relu(_dense(params, "up", batch["x"]))), batch["label"])


def dropout_mlp(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A classifier with dropout."""
    hidden = jnp.tanh(_dense(params, "up", batch["x"]))
    kept = jax.random.bernoulli(key, 0.75, hidden.shape)
    return _entropy(_dense(params, "out", jnp.where(kept, hidden / 0.75, 0)), batch["label"])


def convolutions(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A classifier of images."""
    conv = partial(jax.lax.conv_general_dilated, padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    hidden = jax.nn.relu(conv(batch["image"], params["first"], (1, 1)))
    hidden = jax.nn.relu(conv(hidden, params["second"], (2, 2)))
    return _entropy(hidden.mean((1, 2)) @ params["out"], batch["label"])


def batch_normed(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A classifier with batch normalisation."""
    hidden = jax.nn.relu(_norm(batch["x"] @ params["up"], 0) * params["scale"])
    return _entropy(hidden @ params["out"], batch["label"])


def variational(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A variational autoencoder."""
    mean, log_var = jnp.split(jnp.tanh(batch["x"] @ params["encode"]), 2, axis=-1)
    code = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
    divergence = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)
    return jnp.mean(((code @ params["decode"] - batch["x"]) ** 2).sum(-1) + divergence)


def language_model(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A causal language model."""
    tokens = batch["tokens"]
    x = params["embed"][tokens] + params["position"]
    x = _block(params, x, jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None])
    return _entropy((x @ params["embed"].T)[:, :-1], tokens[:, 1:])


def masked_model(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A masked language model."""
    shown = jnp.where(batch["mask"] == 0, 0, batch["tokens"])
    logits = _block(params, params["embed"][shown] + params["position"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    hidden = (batch["mask"] == 0).astype(jnp.float32)
    return (losses * hidden).sum() / jnp.maximum(hidden.sum(), 1.0)


def patches(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A vision transformer over patches."""
    rows = batch["image"].reshape(ROWS, 4, 2, 4, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(ROWS, 16, 8)
    return _entropy(_block(params, rows @ params["patch"]).mean(1) @ params["out"], batch["label"])


def translation(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A decoder that attends to an encoder."""
    memory = _block(params, params["embed"][batch["source"]])
    x = _attention(params, params["embed"][batch["tokens"]], memory)
    return _entropy(x @ params["out"], batch["tokens"])


def recurrent(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A recurrent network in a scan."""

    def cell(carry: Any, x: jax.Array) -> tuple[Any, None]:
        hidden, memory = carry
        gates = jnp.concatenate([x, hidden], -1) @ params["gates"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

    start = jnp.zeros((ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH))
    (hidden, _), _ = jax.lax.scan(cell, start, batch["sequence"].swapaxes(0, 1))
    return _entropy(hidden @ params["out"], batch["label"])


def graphs(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A graph network, which adds up messages where edges end."""
    sent = jnp.take_along_axis(batch["sequence"] @ params["up"], batch["tokens"][..., None], axis=1)
    received = jax.vmap(lambda messages, to: jax.ops.segment_sum(messages, to, LENGTH))(sent, batch["source"])
    return _entropy(jax.nn.relu(received).sum(1) @ params["out"], batch["label"])


def q_learning(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Q-learning, whose targets have no gradient."""

    def values(x: jax.Array) -> jax.Array:
        return _dense(params, "out", jax.nn.relu(_dense(params, "up", x)))

    target = batch["reward"] + 0.9 * jax.lax.stop_gradient(values(batch["next"]).max(-1))
    chosen = jnp.take_along_axis(values(batch["x"]), batch["label"][:, None], 1)[:, 0]
    return optax.huber_loss(chosen, target).mean()


def policy(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A clipped policy gradient with a bonus for entropy."""
    log_probs = jax.nn.log_softmax(_dense(params, "out", jnp.tanh(_dense(params, "up", batch["x"]))))
    chosen = jnp.take_along_axis(log_probs, batch["label"][:, None], 1)[:, 0]
    ratio = jnp.exp(chosen + jnp.log(float(CLASSES)))
    clipped = jnp.minimum(ratio * batch["reward"], jnp.clip(ratio, 0.8, 1.2) * batch["reward"])
    return -clipped.mean() + 0.01 * (jnp.exp(log_probs) * log_probs).sum(-1).mean()


def contrastive(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A contrastive loss between two views."""
    rows, columns = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in _towers(params, batch))
    logits = rows @ columns.T * jnp.exp(params["scale"].mean())
    labels = jnp.arange(ROWS)
    return (_entropy(logits, labels) + _entropy(logits.T, labels)) / 2


def _towers(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(batch["x"] @ params["up"]), jnp.tanh(batch["next"] @ params["other"])


def diffusion(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """The prediction of noise."""
    keys = jax.random.split(key, 2)
    noise, time = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.uniform(keys[1], (ROWS, 1))
    noisy = jnp.sqrt(1 - time) * batch["x"] + jnp.sqrt(time) * noise
    return jnp.mean((jax.nn.silu(noisy @ params["up"] + time) @ params["down"] - noise) ** 2)


def recommendation(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Lookups in tables, and what they share."""
    embedded = jax.vmap(lambda table, ids: table[ids], (0, 1), 1)(params["tables"], batch["tokens"])
    features = jnp.concatenate([embedded, (batch["x"] @ params["up"])[:, None, :WIDTH]], 1)
    crossed = jnp.einsum("bie,bje->bij", features, features)[:, *jnp.triu_indices(LENGTH + 1, 1)]
    return optax.sigmoid_binary_cross_entropy(crossed.sum(-1), batch["reward"] > 0).mean()


def experts(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A mixture of experts, each of which takes every row."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("bd,edf->ebf", batch["x"], params["experts"]))
    return _entropy(jnp.einsum("be,ebf->bf", gates, hidden) @ params["out"], batch["label"])


def ordinary_equation(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """An ordinary differential equation, solved step by step."""
    end = jax.lax.fori_loop(0, 4, lambda _, y: y + 0.25 * jnp.tanh(y @ params["up"]) @ params["down"], batch["x"])
    return jnp.mean((end - batch["next"]) ** 2)


def flow(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A normalising flow."""
    still, moved = jnp.split(batch["x"], 2, axis=-1)
    scale, shift = jnp.split(jnp.tanh(still @ params["couple"]), 2, axis=-1)
    moved = moved * jnp.exp(scale) + shift
    return jnp.mean(0.5 * (still**2).sum(-1) + 0.5 * (moved**2).sum(-1) - scale.sum(-1))


def adaptation(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Meta-learning: the loss after a step of adaptation."""

    def error(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - y) ** 2)

    def adapted(x: jax.Array, y: jax.Array) -> jax.Array:
        inner = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(error)(params, x, y))
        return error(inner, y, x)

    return jax.vmap(adapted)(batch["sequence"], jnp.roll(batch["sequence"], 1, 1)).mean()


X, LABEL, TOKENS = {"x": (ROWS, WIDTH)}, {"label": (ROWS, int)}, {"tokens": (ROWS, LENGTH, int)}
NEXT, REWARD, SEQUENCE = {"next": (ROWS, WIDTH)}, {"reward": (ROWS,)}, {"sequence": (ROWS, LENGTH, WIDTH)}
IMAGE, SOURCE, OUT = {"image": (ROWS, 8, 8, 2)}, {"source": (ROWS, LENGTH, int)}, {"out": (WIDTH, CLASSES)}
DENSE = {"up": (WIDTH, WIDTH), "up_b": (WIDTH,), "out": (WIDTH, CLASSES), "out_b": (CLASSES,)}
EMBED, BLOCK = {"embed": (CLASSES, WIDTH)}, {**HEADS, "up": UP, "down": DOWN}
POSITION = {"position": (LENGTH, WIDTH)}

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "mlp": Shape(mlp, DENSE, X | LABEL),
        "dropout": Shape(dropout_mlp, DENSE, X | LABEL),
        "convolutions": Shape(convolutions, {"first": (3, 3, 2, 8), "second": (3, 3, 8, WIDTH)} | OUT, IMAGE | LABEL),
        "batch norm": Shape(batch_normed, {"up": (WIDTH, WIDTH), "scale": (WIDTH,)} | OUT, X | LABEL),
        "vae": Shape(variational, {"encode": (WIDTH, 8), "decode": (4, WIDTH)}, X),
        "gpt": Shape(language_model, EMBED | POSITION | BLOCK, TOKENS),
        "bert": Shape(masked_model, EMBED | POSITION | BLOCK | OUT, TOKENS | {"mask": (ROWS, LENGTH, int)}),
        "vit": Shape(patches, {"patch": (8, WIDTH)} | BLOCK | OUT, IMAGE | LABEL),
        "translation": Shape(translation, EMBED | BLOCK | OUT, TOKENS | SOURCE),
        "lstm": Shape(recurrent, {"gates": (2 * WIDTH, 4 * WIDTH)} | OUT, SEQUENCE | LABEL),
        "graphs": Shape(graphs, {"up": (WIDTH, WIDTH)} | OUT, SEQUENCE | TOKENS | SOURCE | LABEL),
        "q learning": Shape(q_learning, DENSE, X | NEXT | REWARD | LABEL),
        "policy": Shape(policy, DENSE, X | REWARD | LABEL),
        "clip": Shape(contrastive, {"up": (WIDTH, WIDTH), "other": (WIDTH, WIDTH), "scale": (1,)}, X | NEXT),
        "diffusion": Shape(diffusion, {"up": UP, "down": DOWN}, X),
        "dlrm": Shape(recommendation, {"tables": (LENGTH, CLASSES, WIDTH), "up": UP}, X | TOKENS | REWARD),
        "experts": Shape(experts, {"gate": (WIDTH, 4), "experts": (4, WIDTH, WIDTH)} | OUT, X | LABEL),
        "neural ode": Shape(ordinary_equation, {"up": UP, "down": DOWN}, X | NEXT),
        "flow": Shape(flow, {"couple": (8, WIDTH)}, X),
        "maml": Shape(adaptation, {"up": UP, "down": DOWN}, SEQUENCE),
    }
)


def _draw(rng: np.random.Generator, shape: tuple[Any, ...], scale: float = 1.0) -> jax.Array:
    if shape[-1] is int:
        return jnp.asarray(rng.integers(0, CLASSES, shape[:-1]), jnp.int32)
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


def _with_optax(loss: Loss, params: Any) -> tuple[Callable[..., Any], Any]:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch, jax.random.key(0))
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (params, tx.init(params))


def _with_train_state(loss: Loss, params: Any) -> tuple[Callable[..., Any], Any]:
    tx = optax.sgd(optax.cosine_decay_schedule(0.1, 10))

    def step(state: TrainState, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        return state.apply_gradients(grads=grads), {"loss": value, "norm": optax.global_norm(grads)}

    return step, TrainState.create(apply_fn=None, params=params, tx=tx).replace(step=jnp.zeros((), jnp.int32))


def _with_averages(loss: Loss, params: Any) -> tuple[Callable[..., Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        def accumulate(total: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, values = jax.lax.scan(accumulate, zeros, jax.random.split(jax.random.key(2), 2))
        params = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], grads)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return {"params": params, "average": average, "count": state["count"] + 1}, values.mean()

    return step, {"params": params, "average": params, "count": jnp.zeros((), jnp.int32)}


WAYS = MappingProxyType({"optax": _with_optax, "train state": _with_train_state, "averages": _with_averages})
NAMES = tuple(f"{shape}, {way}" for shape in SHAPES for way in WAYS)


def planners(devices: int) -> dict[str, dict[str, Any]]:
    """The options of `parallelize` by the name of a planner."""
    return {
        "auto": {},
        "dp": {"planner": autopar.DataParallel()},
        "zero3": {"planner": autopar.Zero(3)},
        "megatron": {"planner": autopar.Megatron(data=2, tensor=devices // 2)},
        "microbatches": {"microbatches": 4},
        "pipeline": {"planner": autopar.Pipeline(stages=2, microbatches=4)},
        "stages": {"planner": autopar.Auto(pipeline=True)},
    }


def made(name: str) -> tuple[Callable[..., Any], Any, list[Any]]:
    """(the step of this name, its state, a batch for each step)."""
    shape_name, way = name.split(", ")
    shape, rng = SHAPES[shape_name], np.random.default_rng(0)
    params = {key: _draw(rng, dims, 0.3) for key, dims in shape.params.items()}
    step, state = WAYS[way](shape.loss, params)
    return step, state, [{key: _draw(rng, dims) for key, dims in shape.batch.items()} for _ in range(STEPS)]


def outcome(name: str, options: Mapping[str, Any], devices: int) -> str:
    """The word `equal`; the first line of a refusal; or by how much the results differ from `jax.jit`'s."""
    step, state, batches = made(name)
    try:
        parallel = autopar.parallelize(step, devices=jax.devices()[:devices], **options)
        ours = list(_run(parallel, state, batches))
    except autopar.PlanningError as refusal:
        return f"refused: {str(refusal).splitlines()[0]}"
    plain = list(_run(jax.jit(step), state, batches))
    worst = np.max([_difference(x, y) for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)])
    return "equal" if worst <= TOLERANCE else f"differs by {worst:.1e} of the largest entry"


def _difference(ours: Any, plain: Any) -> float:
    """The difference of two arrays relative to the plain one's largest entry; NaN where either has one."""
    return float(np.max(np.abs(ours - plain), initial=0)) / max(float(np.max(np.abs(plain), initial=0)), 1e-6)


def _run(step: Callable[..., Any], state: Any, batches: list[Any]) -> Iterator[Any]:
    for batch in batches:
        state, metrics = step(state, batch)
        yield jax.tree.map(np.asarray, (state, metrics))


def main() -> int:
    """The exit status: 1 where a step differs from `jax.jit`'s, or the search refuses one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="virtual CPUs (default: %(default)s)")
    parser.add_argument("--planner", nargs="+", default=["auto"], choices=list(planners(8)), help="(default: auto)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only steps whose name contains TEXT, as `gpt, optax`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    is_wrong = False
    for planner in args.planner:
        options = planners(args.devices)[planner]
        outcomes = {name: outcome(name, options, args.devices) for name in NAMES if args.only in name}
        is_wrong |= any(o.startswith("differs") or (planner == "auto" and o != "equal") for o in outcomes.values())
        if args.json:
            print(json.dumps({"planner": planner, "outcomes": outcomes}, indent=1), flush=True)
            continue
        for reason, count in Counter(outcomes.values()).most_common():
            where = ", ".join(name for name, o in outcomes.items() if o == reason) if reason != "equal" else ""
            print(f"{planner:12}  {count:3}  {reason}  {where}", flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
