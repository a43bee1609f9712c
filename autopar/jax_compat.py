"""Everything that differs between JAX 0.10 and 0.11, or that only private JAX offers; nothing else imports `jax._src`.

Checked on jax 0.10.2 (Python 3.11) and 0.11.2 (Python 3.12).
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import source_info_util  # no public way to the user's line of an equation
from jax._src.lib.mlir import ir as _mlir  # noqa: F401  (jax initialises its MLIR bindings on import)
from jax.extend import core as jex_core
from jax.extend.random import threefry2x32_p

Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var", "threefry2x32_p"]


def is_jaxpr(value: object) -> bool:
    """Whether a parameter is a jaxpr, closed or open; 0.11 merged the two classes."""
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def open_jaxpr(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jaxpr, constants) of a closed or open jaxpr in either version."""
    constants = tuple(getattr(value, "consts", ()) or ())
    return getattr(value, "jaxpr", value), constants


def source_of(equation: Any) -> str:
    """`file:line (function)` of the user's code that made an equation, empty if unknown."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return ""
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


def scope_of(equation: Any) -> str:
    """The name stack of an equation, such as `transpose(jvp(GPT))/Block_0/mlp`."""
    return str(equation.source_info.name_stack)


def bind_params(equation: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters to bind an equation's primitive with; both versions return one dict."""
    found = equation.primitive.get_bind_params(params)
    return dict(found[-1]) if isinstance(found, tuple) else dict(found)


def key_data(key: jax.Array) -> jax.Array:
    """The two 32-bit words of a typed Threefry key."""
    return jax.random.key_data(key)
