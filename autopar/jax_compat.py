"""Everything that differs between JAX 0.10, 0.11 and 0.12, or is private: no other module imports `jax._src`.

Checked on jax 0.10.2 (Python 3.11), 0.11.2 (Python 3.12) and 0.12.0.1 (Python 3.13).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Protocol, cast
from typing import Literal as OneOf

import jax
from jax._src import checkify as _checkify  # no public way to ask who stages a call
from jax._src import config as _config  # no public way to all configuration that a trace reads, nor to `check_vma`
from jax._src import core as _core  # no public way to ask whether a trace is under way
from jax._src import distributed as _distributed  # no public way to the coordination service's key-value store
from jax._src import effects as _effects  # no public way to ask whether an effect is ordered or names a reference
from jax._src import source_info_util  # no public way to the user's line of an equation
from jax._src.api_util import InternalFloatingPointError as NanFoundError  # no public name of what a program raises
from jax._src.array import ArrayImpl as _Array  # no public name of the class, whose methods cost less than a property
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention  # no public way to trace it without a GPU
from jax._src.lib import (
    _jax as _jaxlib,  # no public way to start the coordination service elsewhere  # pyright: ignore[reportPrivateImportUsage]
)
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend.random import threefry2x32_p
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jax.lax import convert_element_type_p, optimization_barrier_p
from jax.sharding import AxisType

from passes.ir import CALLBACKS, CONTROL

Literal = jex_core.Literal
Primitive = jex_core.Primitive
Device = Any  # what JAX exports under this name and the next is no type to a type checker
PyTreeDef = Any

__all__ = [
    "Device",
    "Literal",
    "NanFoundError",
    "Primitive",
    "PyTreeDef",
    "are_there",
    "at_disconnection",
    "bind_params",
    "call_local",
    "compiled",
    "configuration",
    "coordination_client",
    "coordinator_host",
    "cudnn_attention",
    "dtype_of",
    "has_ambient_mesh",
    "has_plain_type",
    "is_array_type",
    "is_checked",
    "is_concrete",
    "is_jaxpr",
    "is_manual",
    "is_ordered",
    "is_staged",
    "is_staging",
    "is_traced",
    "key_implementation",
    "manual_axes",
    "no_mesh",
    "open_jaxpr",
    "optimization_barrier_p",
    "planned_mesh",
    "process_of_how_many",
    "scan_counts",
    "scope_of",
    "service_by",
    "sharding_objects",
    "source_of",
    "threefry2x32_p",
    "traced_shardings",
    "unkept_effect",
    "with_weakness",
]

_OURS = os.path.dirname(__file__) + os.sep
_FRAMEWORK = re.compile(r"[\\/](?:site|dist)-packages[\\/](?:flax|optax|chex|haiku|equinox)[\\/]")
_GENERATORS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


class HasPrimitive(Protocol):
    """A JAX equation, or a value of ours that stands for one."""

    @property
    def primitive(self) -> Primitive: ...


def is_jaxpr(value: object) -> bool:
    """Whether a parameter is a jaxpr, closed or open; 0.11 merged the two classes."""
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def open_jaxpr(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jaxpr, constants) of a closed or open jaxpr in either version."""
    constants = tuple(getattr(value, "consts", ()) or ())
    return getattr(value, "jaxpr", value), constants


def call_local(params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a `shard_map` equation's body on one device's operands, inside a `shard_map` over equal axes.

    A body that was checked for what varies between devices runs only where that is tracked.
    """
    body = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(params["jaxpr"], ()))
    if not params["check_vma"]:
        return list(body(*operands))
    with _config._check_vma(True):  # pyright: ignore[reportPrivateUsage]
        typed_operands = zip(operands, params["jaxpr"].invars, strict=True)
        return list(body(*(_varying(x, _varies(v.aval)) for x, v in typed_operands)))


def _varying(x: Any, axes: frozenset[str]) -> Any:
    """`x` with a type that varies over these axes, over some of which it may vary already."""
    more = tuple(sorted(axes - _varies(jax.typeof(x))))
    return jax.lax.pcast(x, more, to="varying") if more else x


def _varies(aval: Any) -> frozenset[str]:
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


def manual_axes(params: Mapping[str, Any]) -> frozenset[str]:
    """The axes that a `shard_map` equation with these parameters makes manual; 0.10.1 has them by another name."""
    return frozenset(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])


def scan_counts(params: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a scan's constants and carries; 0.11 has trees in place of the numbers."""
    if "num_consts" in params:
        return {"num_consts": params["num_consts"], "num_carry": params["num_carry"]}
    constants, carries, _ = params["ft_in"].unpack()
    return {"num_consts": len(constants), "num_carry": len(carries)}


def is_array_type(aval: Any) -> bool:
    """Whether a JAX type is an array's; mutable references have a shape too, and tokens have none."""
    return hasattr(aval, "shape") and hasattr(aval, "dtype") and not hasattr(aval, "inner_aval")


def source_of(equation: Any, call: str = "") -> str:
    """`file:line (function)` of the user's code that made an equation, empty if unknown.

    JAX and its neural-network libraries are not the user's code. Where nothing else led to an equation, it is the line
    of the `call` around it, then a library's own.
    """
    line, library = _lines_of(equation.source_info.traceback)
    return line or call or library


@lru_cache(maxsize=4096)  # equal layers have equal tracebacks
def _lines_of(traceback: Any) -> tuple[str, str]:
    """(the user's line nearest to an equation, else the innermost one of a library that the user called), or empty."""
    innermost = ""
    for code, instruction in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        kind = _whose(code.co_filename)
        if kind == "ours":
            break
        if (kind == "library" and innermost) or kind == "jax":
            continue
        frame = source_info_util.raw_frame_to_frame(code, instruction)
        innermost = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if kind == "user":
            return innermost, ""
    return "", innermost


@cache
def _whose(file_name: str) -> OneOf["jax", "ours", "library", "user"]:
    """The author of a file: JAX or Python, this project, a neural-network library, or the user."""
    if not source_info_util.is_user_filename(file_name) or file_name.endswith("autopar/frontend/constraints.py"):
        return "jax"  # or ours that a step calls, as it calls JAX's
    if file_name.startswith(_OURS):
        return "ours"
    return "library" if _FRAMEWORK.search(file_name) else "user"


def scope_of(equation: Any) -> str:
    """The name stack of an equation, such as `transpose(jvp(GPT))/Block_0/mlp`."""
    return str(equation.source_info.name_stack)


def unkept_effect(equation: Any) -> str:
    """The effect of an equation that a plan cannot keep, in words; empty for none."""
    if any(not is_array_type(v.aval) for v in (*equation.invars, *equation.outvars)):
        return "uses a mutable reference"
    for effect in equation.effects:
        if isinstance(effect, _effects.JaxprInputEffect):
            return "uses a mutable reference"
        if _effects.ordered_effects.contains(effect) and equation.primitive.name not in CALLBACKS | CONTROL:
            return "has a side effect that must happen in program order"
    return ""


def is_ordered(params: Mapping[str, Any]) -> bool:
    """Whether a callback with these parameters must run in program order."""
    effect = params.get("effect")
    return bool(params.get("ordered")) or (effect is not None and _effects.ordered_effects.contains(effect))


def bind_params(equation: HasPrimitive, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters to bind an equation's primitive with; both versions return one dict."""
    subfuns_and_params = equation.primitive.get_bind_params(params)
    return dict(subfuns_and_params[-1]) if isinstance(subfuns_and_params, tuple) else dict(subfuns_and_params)


def is_checked() -> bool:
    """Whether the call is staged by `jax.experimental.checkify`, which adds checks to each operator that it sees."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _checkify.__file__:
        frame = frame.f_back
    return frame is not None


def is_manual() -> bool:
    """Whether the call is inside a `shard_map`, where arrays are one device's."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def no_mesh() -> AbstractContextManager[Any]:
    """A context without an ambient mesh, whatever `jax.set_mesh` the caller has used."""
    try:
        return jax.set_mesh(None)
    except ValueError:  # inside a trace, where only the abstract mesh counts
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


@contextmanager
def planned_mesh() -> Iterator[Any]:
    """A context for traces with the caller's ambient mesh, its axes left to the plan; None is no mesh.

    A PartitionSpec in the program is on that mesh. Values on axes that JAX's types track would not be planned.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        yield None
        return
    names, auto = abstract.axis_names, (AxisType.Auto,) * len(abstract.axis_names)
    mesh = None if is_staging() else jax.sharding.get_mesh()
    if mesh is None or mesh.empty:  # inside a trace only the abstract mesh counts
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(abstract.axis_sizes, names, auto)):
            yield None
        return
    with jax.set_mesh(jax.sharding.Mesh(mesh.devices, names, axis_types=auto)):
        yield mesh


def traced_shardings(traced: Any, count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(in_shardings, out_shardings) of a traced function's `count` flat arguments, captured ones left out."""
    inputs, outputs = (tuple(traced._params[side]) for side in ("in_shardings", "out_shardings"))
    return inputs[len(inputs) - count :], outputs


def has_ambient_mesh() -> bool:
    """Whether the caller has set a mesh, which would leak into what is traced and clash with the plan's own."""
    return not jax.sharding.get_abstract_mesh().empty


def configuration() -> Hashable:
    """All of JAX's configuration that a trace may depend on (x64, promotion, precision, generator) as a key.

    It is what `jax.jit` keys its own traces by; of an ambient mesh, only how it resolves PartitionSpecs counts.
    """
    if not has_ambient_mesh():
        return _config.trace_context()
    mesh = jax.sharding.get_abstract_mesh() if is_staging() else jax.sharding.get_mesh()
    with no_mesh():
        return _config.trace_context(), mesh


def coordination_client() -> Any:
    """The client of the service that connects the processes of a program; None where there is one process alone."""
    return _distributed.global_state.client


@contextmanager
def service_by(start: Callable[..., Any]) -> Iterator[None]:
    """A context in which `jax.distributed.initialize` starts its service by `start(address, count, **timeouts)`."""
    given = _jaxlib.get_distributed_runtime_service
    _jaxlib.get_distributed_runtime_service = cast("Any", start)
    try:
        yield
    finally:
        _jaxlib.get_distributed_runtime_service = given


def at_disconnection(action: Callable[[], object]) -> None:
    """Registers `action`, called once this process has left the others, which is when all have ended."""
    service = _distributed.global_state.service

    def shutdown() -> None:
        if service is not None:
            service.shutdown()
        action()

    _distributed.global_state.service = cast("Any", SimpleNamespace(shutdown=shutdown))


def process_of_how_many() -> tuple[int, int]:
    """(rank, number of processes), which `jax.process_index()` knows only once there are devices."""
    state = _distributed.global_state
    return state.process_id, state.num_processes or 1


def coordinator_host() -> str:
    """The host name or address over which the processes of a program reach the first one."""
    return (_distributed.global_state.coordinator_address or "127.0.0.1:0").rpartition(":")[0].strip("[]")


def with_weakness(x: jax.Array, weak: bool) -> jax.Array:
    """`x` typed weakly if `weak`, as results of Python scalars are; `jax.lax.convert_element_type` cannot say so."""
    if not weak or x.weak_type:
        return x
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def is_traced(x: object) -> bool:
    """Whether `x` stands for an array in one of JAX's transformations."""
    return isinstance(x, Tracer)


def has_plain_type(x: object) -> bool:
    """Whether JAX's type of `x` says nothing of devices: no transformation's value, on no explicit mesh."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is None
    return not isinstance(x, Tracer) and set(jax.typeof(x).sharding.mesh.axis_types) <= {AxisType.Auto}


def sharding_objects(leaves: Sequence[Any]) -> list[Any]:
    """The sharding of each array; None for anything else, and for values of a transformation.

    The public property costs twice as much.
    """
    return [getattr(leaf, "_sharding", None) for leaf in leaves]


def is_staged(x: object) -> bool:
    """Whether `x` stands for an array in a program under construction (of `jit` or a loop), not in a derivative."""
    return isinstance(x, DynamicJaxprTracer)


def is_staging() -> bool:
    """Whether one of JAX's transformations is under way."""
    return not _core.trace_state_clean()


def is_writing() -> bool:
    """Whether a program is under construction, in which even calls on arrays alone become operations."""
    return is_staging() and (_core.unsafe_am_i_under_a_jit() or _core.nonempty_axis_env())


def is_concrete(x: object) -> bool:
    """Whether `x` is an array with contents rather than a number or a value that is being traced."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def are_there(leaves: Sequence[Any]) -> bool:
    """Whether no array of these has been deleted: 0.06 us each where all are arrays."""
    try:
        return not any(map(_Array.is_deleted, leaves))
    except TypeError:  # a number, or a key
        return not any(is_concrete(leaf) and leaf.is_deleted() for leaf in leaves)


def dtype_of(name: str) -> Any:
    """The dtype that planning calls by this name; keys of each generator have one."""
    if not name.startswith("key<"):
        return jax.dtypes.float0 if name == "float0" else jax.numpy.dtype(name)
    return jax.eval_shape(lambda: jax.random.key(0, impl=_GENERATORS[name])).dtype


def key_implementation(dtype: Any) -> str:
    """The name of the generator of keys of this dtype."""
    return _GENERATORS[dtype.name]


def compiled(lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """The executable of a lowered program, which also takes sub-byte numbers, whose bits JAX's arrays hide."""
    executable = lowered.compile(compiler_options=options)
    inner = executable._executable
    inner._xla_in_layouts = [None if at and at.sub_byte_element_size_in_bits else at for at in inner._xla_in_layouts]
    return executable


def is_described(device: Device) -> bool:
    """Whether a device is of a topology and only described: JAX ends the process if it is used (0.10.2)."""
    return device.client.runtime_type == "compile_only_runtime"
