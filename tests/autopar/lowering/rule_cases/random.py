"""Keys and random bits."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from tests.autopar.lowering.rule_cases.case import Case, floats


def cases() -> list[Case]:
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(7), (4, 8))
    widths = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
    return [
        *(
            Case("random_bits", partial(jax.random.bits, shape=(4, 8, 12), dtype=dtype), (key,), f"of {width} bits")
            for width, dtype in widths.items()
        ),
        Case(
            "random_bits", jax.vmap(partial(jax.random.bits, shape=(8,))), (jax.random.split(key, 4),), "of many keys"
        ),
        Case("random_bits", jax.vmap(jax.vmap(jax.random.uniform)), (keys,), "of keys in two dimensions"),
        Case("random_wrap", jax.random.wrap_key_data, (np.array([1, 2], np.uint32),)),
        Case("random_wrap", jax.random.wrap_key_data, (np.arange(16, dtype=np.uint32).reshape(8, 2),), "of many"),
        Case("random_unwrap", jax.random.key_data, (key,)),
        Case("random_unwrap", jax.random.key_data, (keys,), "of many"),
        Case("random_fold_in", lambda key: jax.random.fold_in(key, 3), (key,)),
        Case("random_fold_in", jax.vmap(jax.random.fold_in), (keys[0], np.arange(8)), "of each"),
        Case("random_fold_in", lambda n: jax.vmap(partial(jax.random.fold_in, key))(n), (np.arange(8),), "of one"),
        Case("random_split", lambda key: jax.random.split(key, 4), (key,)),
        Case("random_split", jax.vmap(jax.random.split), (keys[0],), "of many"),
        Case("random_seed", jax.random.key, (3,)),
        Case("random_seed", jax.vmap(jax.random.key), (np.arange(8),), "of many"),
        Case("random_clone", jax.random.clone, (key,)),
        Case("random_clone", jax.random.clone, (keys,), "of many"),
        Case("random_gamma", jax.random.gamma, (key, floats(8, low=0.5)), "of one key"),
        Case("random_gamma", jax.vmap(jax.vmap(jax.random.gamma)), (keys, floats(4, 8, 2, low=0.5)), "of many keys"),
    ]
