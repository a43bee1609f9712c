"""What goes in and comes out: types of every width, keys, empty arrays, pytrees, static and donated arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.autopar.jit_cases.table import Table, ints, x

case = Table()


@case
def identity():
    return lambda a: a, (x(8, 16),)


@case
def constant_output():
    table = np.arange(16.0).reshape(8, 2)
    return lambda a: (jnp.ones((8, 4)), table, 3, 2.5, True, a + 1), (x(8),)


@case
def constants_alone():
    return lambda a: (7, jnp.arange(8)), (x(8),)


@case
def scalars_alone():
    return lambda a, n: (a * 2, n // 3, a < n, jnp.sqrt(a)), (jnp.asarray(3.0), jnp.asarray(7))


@case
def no_arguments():
    return lambda: {"iota": jnp.arange(24).reshape(8, 3), "one": 1}, ()


@case
def nothing_at_all():
    return lambda: None, ()


@case
def one_array_twice():
    a = x(8, 8)
    return lambda a, b: (a, b, a, a @ b), (a, a)


@case
def unused_arguments():
    return lambda a, unused, tree: a.sum(0), (x(8, 16), x(3), {"also": x(8), "key": jax.random.key(0)})


@case
def integers_and_booleans():
    return lambda a, n: (a > 0, n % 3, (a > 0).any(1), (a > 0).all(), (a > 0).sum(0), n << 1, ~n), (
        x(8, 16),
        ints(8, 16, below=99),
    )


@case(slow=("searched",))
def typed_keys():
    def f(key, keys):
        left, right = jax.random.split(key)
        drawn = jax.vmap(lambda k: jax.random.normal(k, (4,), jnp.float32))(keys)
        return left, jax.random.fold_in(right, 3), keys, drawn, jax.random.key_data(right)

    return f, (jax.random.key(1), jax.random.split(jax.random.key(2), 8))


@case(slow=("searched",))
def raw_keys():
    def f(key, keys):
        return jax.random.split(key), keys, jax.random.uniform(key, (8, 4)), jax.random.permutation(keys[0], 16)

    return f, (jax.random.PRNGKey(1), jax.random.split(jax.random.PRNGKey(2), 8))


@case(slow=("searched", "random"))
def random_distributions():
    def f(key):
        one, two, three, four = jax.random.split(key, 4)
        return (
            jax.random.randint(one, (8, 4), 0, 99),
            jax.random.categorical(two, jnp.zeros((8, 5))),
            jax.random.exponential(three, (8, 4)),
            jax.random.choice(four, 32, (8,), replace=False),
            jax.random.truncated_normal(one, -1, 1, (16,), jnp.bfloat16),
        )

    return f, (jax.random.key(5),)


@case(slow=("searched",))
def other_key_types():
    def f(key):
        return jax.random.split(key, 8), jax.random.normal(key, (8, 4))

    return f, (jax.random.key(3, impl="rbg"),)


@case(slow=("searched",))
def types_of_every_width():
    def f(tree):
        moved = jax.tree.map(lambda a: a.T @ a if a.dtype.kind in "fcV" else a.T * a.T, tree)
        return moved, jax.tree.map(lambda a: a.sum(), tree), jax.tree.map(lambda a: a * 2, tree)

    names = "bfloat16 float16 float64 int8 uint8 complex64".split()
    return f, ({name: ints(8, 16, dtype=name) for name in names},)


@case
def complex_numbers():
    def f(a):
        return jnp.abs(a), a.conj().T @ a, jnp.angle(a), a.real, a * (1 + 2j)

    return f, ((x(8, 16) + 1j * x(8, 16, seed=1)).astype(jnp.complex64),)


@case(slow=("searched",))
def mixed_types():
    return lambda a, b, n: (a * b, a + n, n / 2, a.astype(jnp.int32) * n, jnp.where(n > 3, a, 0)), (
        x(8, 16, dtype=jnp.bfloat16),
        x(16, dtype=jnp.float32),
        ints(8, 16),
    )


@case(seed=1)
def empty_product():
    return lambda a, b: (a @ b, jnp.concatenate([a, a], 0)), (x(8, 0), x(0, 16))


@case(seed=12)
def empty_result():
    return lambda a: a * 2, (x(8, 0),)


@case(seed=1)
def empty_among_others():
    if jax.__version_info__ >= (0, 11):
        pytest.skip("jaxlib 0.11's CPU compiler crashes on these empty arrays, under plain jax.shard_map too")
    return lambda a, b: (a[:, :0], b.sum(0), b * 2, a @ jnp.ones((16, 0)), a.sum(0)), (x(8, 16), x(0, 16))


@case
def dimensions_of_one():
    return lambda a, b: (a * b, a @ b, (a + b).sum(0), a.squeeze(1), jnp.tile(a, (1, 4))), (x(8, 1), x(1, 8))


@case
def nothing_divides():
    return lambda a, b: (a @ b, a.sum(0), jnp.tanh(a).mean(), a.T, jnp.sort(a, 1)), (x(7, 13), x(13, 5))


class State(NamedTuple):
    params: Any
    count: Any
    nothing: Any = None


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    inputs: Any
    extras: dict[str, Any]
    size: int = field(default=0, metadata={"static": True})


@case
def nested_pytrees():
    def f(state, batch, empty):
        total = batch.inputs @ state.params["w"]
        state = State({"w": state.params["w"] + total.sum(0)}, state.count + 1)
        return state, Batch(total, {"squares": total**2, "none": None}), (empty, [], {"deep": ({"er": total[0]},)})

    return f, (State({"w": x(16, 4)}, jnp.asarray(0)), Batch(x(8, 16), {"none": None}), None)


class Held:
    """A pytree node of one array; what it makes of a leaf that is none tells its kinds apart."""

    def __init__(self, array: Any):
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _aux: None, children: tuple[Any]):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Checked(Held):
    def __init__(self, array: Any):
        if not isinstance(array, jax.Array):
            raise TypeError(f"an array, not {type(array).__name__}")
        super().__init__(array)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("array"), self.array),), None


@jax.tree_util.register_pytree_node_class
class Doubled(Held):
    def __init__(self, array: Any):
        super().__init__(array)
        self.double = array * 2


@case
def nodes_that_take_arrays_alone():
    def f(state, batch):
        return Checked(state.array + batch.double.sum(0)), {"batch": Doubled(batch.array * 3)}

    return f, (Checked(x(16)), Doubled(x(8, 16)))


@case
def auxiliary_outputs():
    def f(w, a):
        def loss(w):
            hidden = jnp.tanh(a @ w)
            return (hidden**2).sum(), {"hidden": hidden, "positive": (hidden > 0).sum(), "name": None}

        return jax.value_and_grad(loss, has_aux=True)(w)

    return f, (x(16, 8), x(8, 16))


@case
def numpy_and_python_numbers():
    return lambda a, n, scale, flag: (a * scale, a + n, n * 2, scale * 2, jnp.where(flag, a, -a)), (
        np.arange(16.0).reshape(8, 2),
        3,
        0.5,
        True,
    )


@case
def numpy_scalars():
    return lambda a, n, z: (a * n, n + z, a.sum()), (np.arange(8, dtype=np.int8), np.float32(2), np.complex64(1j))


@case
def static_arguments():
    def f(a, mode, *, power=1):
        return a**power if mode == "up" else -a

    return functools.partial(f, power=3), (x(8, 4), "up"), {"static_argnums": 1}


@case
def donated_arguments():
    return lambda a, b: (a + b, b.sum()), (x(8, 4), x(8, 4, seed=1)), {"donate_argnums": (0,)}


@case
def weak_types():
    return lambda a, n: (a * n, n, n + 1, jnp.sin(n), jnp.where(a > 0, n, 0), jnp.full(8, n)), (x(8), 2)
