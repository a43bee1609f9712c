"""cuDNN's attention for GPUs that are not here: JAX asks the library and a device of this process what they can do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from autopar.jax_compat import cudnn_attention
from passes.cluster import Cluster

VERSION = 91100
"""cuDNN 9.11, the newest that JAX 0.10 to 0.12 ask for, before they trace attention for a GPU of capability 10.3."""

_ANSWERS = {
    "check_cudnn_version": VERSION,
    "check_compute_capability": True,
    "is_cuda_compute_capability_equal": False,
}
"""JAX's questions, and what a GPU of today with this version of cuDNN answers."""

_is_assumed: ContextVar[bool] = ContextVar("is_assumed", default=False)


@contextmanager
def assumed_cudnn(cluster: Cluster | None) -> Iterator[None]:
    """A context in which `jax.nn.dot_product_attention(..., implementation="cudnn")` is traced for a cluster of GPUs by
    a process that has none.
    """
    if cluster is None or not cluster.group().device.cores or jax.default_backend() == "gpu":
        yield
        return
    _install()
    token = _is_assumed.set(True)
    try:
        yield
    finally:
        _is_assumed.reset(token)


@functools.cache
def _install() -> None:
    """Puts answers of ours before JAX's own, once; outside of the context JAX's are given."""
    for name, answer in _ANSWERS.items():
        if known := getattr(cudnn_attention, name, None):
            setattr(cudnn_attention, name, _answering(known, answer))


def _answering(known: Callable[..., Any], answer: int) -> Callable[..., Any]:
    @functools.wraps(known)
    def answered(*args: Any) -> Any:
        return answer if _is_assumed.get() else known(*args)

    return answered
