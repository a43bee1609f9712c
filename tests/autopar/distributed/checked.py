"""A training whose steps are checked, and of which the second process is slow: a script for `launch`.

Arguments: the planner, and what is slow, its `host` or its `device`: that one is stopped four fifths of the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

STEPS, EVERY, WIDTH = 12, 4, 256
STOPPING = """
import os, signal, sys, time
pid = int(sys.argv[1])
while os.getppid() == pid:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.04)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.01)
"""


def step(params: Any, batch: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def main(planner: str, how: str) -> None:
    parallel = autopar.parallelize(step, planner=eval(planner, vars(autopar)))
    checks = parallel.checks(every=EVERY, slow=2, write=lambda record: print("slow", record["process"], flush=True))
    params: Any = [np.eye(WIDTH, dtype=np.float32)] * 4
    for number in range(1, STEPS + 1):
        is_slow = jax.process_index() == 1 and number > 2
        if is_slow and how == "host":
            time.sleep(0.5)
        if is_slow and how == "device" and number == 3:
            subprocess.Popen([sys.executable, "-c", STOPPING, str(os.getpid())])
        params, loss = parallel(params, np.ones((64, WIDTH), np.float32))
        checks(number, params, loss=loss)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
