"""A small training that saves checkpoints and resumes from the last one, for `benchmarks.kills` to disturb.

It runs under `autopar run`. Each process prints its pid, its steps and, at the end, a digest of the parameters. SIGUSR1
makes a process close all its connections. With a last argument `large`, all arrays go over the connections of large
ones.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.checkpoint.digests import digest, partial_sum, pieces_of
from autopar.runtime import cross_process

WIDTH, LAYERS, ROWS = 16, 4, 8


def init(key: jax.Array) -> Any:
    """Random weights of a few square layers."""
    return {"layers": [jax.random.normal(k, (WIDTH, WIDTH)) * 0.2 for k in jax.random.split(key, LAYERS)]}


def train_step(params: Any, batch: jax.Array | np.ndarray) -> Any:
    """One step of gradient descent on the mean square of what the layers make of a batch."""

    def loss(params: Any) -> jax.Array:
        x = batch
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def batch_of(number: int) -> np.ndarray:
    """The batch of a step, the same whenever it is drawn."""
    return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)


def cut(number: int, frame: object) -> None:
    """Shuts every connection of this process down."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
            copy.shutdown(socket.SHUT_RDWR)
            copy.close()
        except OSError:  # no socket, or one that listens
            continue


def main(planner: str, steps: int, every: int, *, large: bool) -> None:
    """Trains from the last checkpoint on, prints each step, and digests of the parameters at the end."""
    cross_process.LARGE_NBYTES = 0 if large else cross_process.LARGE_NBYTES
    autopar.distributed.initialize()
    signal.signal(signal.SIGUSR1, cut)
    step = autopar.parallelize(train_step, planner=eval(planner, dict(vars(autopar))), donate_argnums=0)
    print("pid", os.getpid(), flush=True)
    with autopar.Checkpoints() as checkpoints:
        types = jax.eval_shape(init, jax.random.key(0))
        (like, _), _ = step.placement(types, batch_of(0))
        saved = checkpoints.restore(like)
        params, first = (saved.state, saved.position) if saved else (step.init(init, jax.random.key(0)), 0)
        print("from", first, flush=True)
        for number in range(first, steps):
            params, loss = step(params, batch_of(number))
            print("step", number, float(loss), flush=True)
            preempted = checkpoints.preempted(number)
            if (number + 1) % every == 0 or preempted:
                checkpoints.save(number + 1, params, position=number + 1)
            if preempted:
                print("preempted", number + 1, flush=True)
                return
            time.sleep(0.05)
    sums = [partial_sum(pieces_of(leaf, is_global=True), leaf.shape) for leaf in params["layers"]]
    print("parameters", *(digest([value]) for value in sums), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), large="large" in sys.argv[4:])
