"""`@parallelize`: an ordinary JAX function, planned for many devices at its first call and run by that plan.

The function means what it means under `jax.jit`, and so do the options that both have.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload

import jax
from jax.sharding import Sharding

from autopar.cache import PlanCache
from autopar.compilation import Compilations
from autopar.distributed import made
from autopar.errors import ArgumentError, explain
from autopar.frontend import Names, Positions, Traced, modules, signature_of
from autopar.jax_compat import Device
from autopar.options import Arriving, Options, Settings
from autopar.plan import PipelinePlan, Plan
from autopar.profiling import Calibration, StepReport
from autopar.reporting import report, zeros
from autopar.rewrite import TracedStep
from autopar.runtime import Compiled, Lowered
from autopar.training import Batches, Record, StepChecks, as_text
from passes.cluster import Cluster
from passes.gc_pause import without_gc
from passes.planners import Planner
from passes.progress import Report
from passes.transforms import Coupling, Kept

__all__ = ["Compiled", "Lowered", "ParallelFunction", "parallelize"]

JIT = (
    *("in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("keep_unused", "inline", "compiler_options"),
)
"""The options that are `jax.jit`'s."""


Params = ParamSpec("Params")
Result = TypeVar("Result")
Instance = TypeVar("Instance")
Others = ParamSpec("Others")


@overload
def parallelize(fun: Callable[Params, Result], **options: Unpack[Options]) -> ParallelFunction[Params, Result]: ...


@overload
def parallelize(
    fun: None = None, **options: Unpack[Options]
) -> Callable[[Callable[Params, Result]], ParallelFunction[Params, Result]]: ...


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    planner: Planner | None = None,
    devices: Sequence[Device] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Positions = None,
    static_argnames: Names = None,
    donate_argnums: Positions = None,
    donate_argnames: Names = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    placed: Arriving = "moved",
    follow: ParallelFunction[Any, Any] | None = None,
    batch_argnums: Positions = None,
    batch_argnames: Names = None,
    microbatches: int | None = None,
    microbatch_semantics: Coupling = "exact",
    memory_limit: int | str | None = None,
    remat: Kept | Sequence[Kept] | None = None,
    cache: str | os.PathLike[str] | PlanCache | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    progress: Report | Literal[False] | None = None,
) -> Any:
    """`fun` as a ParallelFunction; without `fun`, a decorator that makes one.

    `cluster` is what to plan for, by description (`"8x8:a100-80g"`) or as a value; by default it is made of the
    `devices`, which are by default all of JAX's. `planner` chooses the plan, `Auto()` by default. The batch is what
    looks like one, or what `batch_argnums` and `batch_argnames` name: arguments, or parts of them (`"data['images']"`).
    It is computed in `microbatches` whose results add up to those of the whole batch; an operator that couples
    microbatches (batch normalisation) is an error, unless `microbatch_semantics` is `"independent"`: then each takes
    its own statistics, and results are averaged.

    No device may need more than `memory_limit` (bytes, or text such as `"12 GiB"`), by default the device's memory less
    a reserve. Where the step does not fit as it is, `Auto` shards its state further, computes in more microbatches or
    lets layers recompute what they do not keep, whichever is cheapest. `remat` decides the latter instead: what each
    layer keeps for the backward pass, `"everything"`, `"matmuls"` (results of products with weights) or `"inputs"`, as
    one word for all layers or one for each. Plans are kept in the folder `cache` and found there the next time; by
    default they are not. `calibration` is a file of earlier reports, or their contents: devices are then planned with
    as many times their predicted seconds as steps took in these reports; by default they are not. `progress` is called
    with an `autopar.Progress` at each step of a search; by default a search of more than two seconds shows a progress
    bar if stderr is a terminal, and False turns that off. A line for each phase goes to the logger `autopar`.

    The other options are `jax.jit`'s: arrays that `in_shardings` and `out_shardings` place stay there, and the rest is
    planned around them. Arguments that arrive in other shardings are moved to where the plan reads them, with a
    warning, unless `placed` is `"keep"`: then the plan takes them as they are. `follow` is a parallel function that has
    a plan: this function takes its state as that plan places it, stages included, as an evaluation does after a train
    step.

    Raises ClusterError for a description that cannot be read, ArgumentError for a planner or devices that are none.
    """
    options = {name: value for name, value in locals().items() if name != "fun"}
    jit = {name: value for name in JIT if (value := options.pop(name)) is not None}
    decorate = partial(ParallelFunction, jit=jit, settings=Settings.of(options))
    return decorate if fun is None else decorate(fun)


class ParallelFunction(Generic[Params, Result]):
    """A function that plans itself for a cluster; made by `parallelize`.

    As under `jax.jit`, it is traced, planned and lowered once for each combination of pytree, types, static values and
    configuration of JAX, and then run.
    """

    def __init__(self, fun: Callable[Params, Result], jit: Mapping[str, Any], settings: Settings) -> None:
        if isinstance(fun, ParallelFunction):
            name = fun.signature.function
            rule = "it is one that parallelize returned, with a plan of its own"
            remedy = f"write {name}.replan(planner=..., cluster=...), or pass the function that it was made of"
            raise ArgumentError(explain(f"parallelize({name})", rule, "", remedy))
        functools.update_wrapper(self, fun)
        self._fun, self._jit, self._settings = fun, jit, settings
        self.signature = signature_of(fun, jit.get("static_argnums"), jit.get("static_argnames"))
        self.compilations = Compilations(fun=fun, signature=self.signature, jit=jit, settings=settings)
        jax.jit(fun, **jit)  # an option that jit refuses is refused here and now

    def __repr__(self) -> str:
        return f"<ParallelFunction of {self.signature.source or self.signature.function}>"

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._fun(*args, **kwargs)
        try:
            return self.compilations.run(args, kwargs)
        except Exception as error:
            if reason := self.signature.unusable(args, kwargs, error):
                error.add_note(f"  {reason}")
            raise

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: ParallelFunction[Concatenate[Instance, Others], Result], instance: Instance, owner: type | None = None
    ) -> Callable[Others, Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The program of `fun(*args, **kwargs)` as it was planned; before planning, as it is given to planners."""
        return self.compilations.of(args, kwargs).now()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results of `fun(*args, **kwargs)` as `jax.ShapeDtypeStruct`s; nothing is planned."""
        dynamic, _ = self.signature.split(args, kwargs)
        if not modules.EQUINOX.is_in(dynamic):
            return jax.jit(self._fun, **self._jit).eval_shape(*args, **kwargs)
        args, kwargs = self.signature.merge(modules.without_leaves(dynamic), args, kwargs)
        return modules.with_leaves(jax.jit(modules.EQUINOX.pure(self._fun), **self._jit).eval_shape(*args, **kwargs))

    def clear_cache(self) -> None:
        """Forgets all traces, plans and compiled programs; plans that are kept in files stay there."""
        self.compilations.clear()

    def step(self, *args: Any, **kwargs: Any) -> TracedStep:
        """The step `fun(*args, **kwargs)` as it is given to planners: `planner.plan(step, cluster)` plans it."""
        return self.compilations.of(args, kwargs).step()

    def plan(self, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """The plan by which `fun(*args, **kwargs)` will run; `jax.ShapeDtypeStruct`s are enough. No device is touched.

        Without a `cluster`, JAX is asked which devices there are. Raises PlanningError where no plan is possible.
        """
        with without_gc():
            return self.compilations.of(args, kwargs).plan()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program of `fun(*args, **kwargs)` for the plan's devices: a `Lowered`, for a pipeline a
        `LoweredPipeline`.

        The devices must be present, or be described by `autopar.topology`. `.compile()` comes next.
        """
        return self.compilations.lower(args, kwargs)

    def placement(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The pair (args, kwargs), without static arguments, as `jax.ShapeDtypeStruct`s with the shardings in which
        `fun(*args, **kwargs)` reads them.

        This is what `Checkpoints.restore` takes. A batch has the sharding of its rows.
        """
        dynamic, _ = self.signature.split(args, kwargs)
        compilation = self.compilations.of(args, kwargs)
        leaves = [
            jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding, weak_type=struct.weak_type)
            for struct, sharding in zip(compilation.structs, compilation.placements(), strict=True)
        ]
        return modules.with_leaves(jax.tree.unflatten(jax.tree.structure(modules.without_leaves(dynamic)), leaves))

    def init(self, init_fn: Callable[..., Any], *args: Any, others: Sequence[Any] = ()) -> Any:
        """The state `init_fn(*args)`, the first argument of this function, with each array made where it will be read.

        Each device makes its own shards: no device or host ever holds the whole state. It is planned with the
        function's `others` (a batch, say, or its types), which may be left out if the function was planned or called
        with such a state before. Raises ArgumentError if it was not, and DeviceError on devices that are only
        described.
        """
        if not isinstance(others, tuple | list):
            rule = "these are all arguments behind the state"
            raise ArgumentError(explain(f"init(others={others!r:.60})", rule, "", "write, say, others=(batch,)"))

        def arrays(*args: Any) -> Any:
            return modules.without_leaves(init_fn(*args))

        state = jax.eval_shape(arrays, *args)
        known = self.compilations.about(state)
        compilation = self.compilations.of((state, *others), {}) if others else known and known[0]
        if compilation is None:
            rule = "it has not been planned for such a state, and what else it takes is not known"
            remedy = "pass that, or its types: init(init_fn, key, others=(batch,))"
            raise ArgumentError(explain(f"{self.signature.function}.init()", rule, self.signature.source, remedy))
        count = len(jax.tree.leaves(state))
        return modules.with_leaves(made(arrays, args, compilation.placements()[:count]))

    def batches(
        self, source: Iterable[Any], *, prefetch: int = 2, position: Any = None, own_rows: bool = False
    ) -> Batches:
        """The elements of `source`, for the second argument of this function, fetched ahead and put on their devices.

        A thread fetches `prefetch` elements while steps run. From the second on they are put where the function reads
        them. Each of several processes has the whole batch in its source; with `own_rows`, as many rows of it as each
        of the others. `position` is where to continue, as the result's `.position` was: see `Batches`.
        """

        def shardings(batch: Any) -> list[Sharding] | None:
            known = self.compilations.about(batch, 1)
            return known[0].placements()[known[1]] if known else None

        return Batches(source, shardings, prefetch, position, own_rows=own_rows)

    def checks(self, every: int = 100, *, slow: float = 1.5, write: Callable[[Record], None] = as_text) -> StepChecks:
        """Checks to be called behind each step, as `checks(number, state, loss=loss)`; they look at every few steps.

        Values that are not finite, and copies that differ between devices, are errors with the first leaf, process and
        host. Of several processes, one that takes `slow` times as long as it should is a warning. See `StepChecks`.
        """
        return StepChecks(compilation=lambda: self.compilations.last, every=every, slow=slow, write=write)

    def report(self, *args: Any, **kwargs: Any) -> StepReport:
        """A report of predicted and measured seconds of `fun(*args, **kwargs)` by cause and stage, to be printed.

        Some steps are taken on copies of the donated arguments, so a device holds that much more meanwhile, and the
        arguments stay valid. Without arguments, steps are taken on zeros of the types of the last function compiled.
        Other calls of the function are neither timed nor profiled. The factors between both are kept in
        `calibration.json` beside the plans, if these are kept (`cache=`), for `parallelize(calibration=)`. Raises
        ArgumentError before the first call if arguments are left out.
        """
        last = self.compilations.last
        if not args and not kwargs and last is not None:
            return report(last, zeros(last))
        if not args and not kwargs and self.signature.parameters:
            rule = "it has not been called yet, and so there is nothing to measure"
            remedy = "pass what it is called with: report(state, batch)"
            raise ArgumentError(explain(f"{self.signature.function}.report()", rule, self.signature.source, remedy))
        return report(*self.compilations.given(args, kwargs))

    def replan(
        self,
        *,
        cluster: str | os.PathLike[str] | Cluster | None = None,
        planner: Planner | None = None,
        devices: Sequence[Device] | None = None,
        microbatches: int | None = None,
        memory_limit: int | str | None = None,
        remat: Kept | Sequence[Kept] | None = None,
        cache: str | os.PathLike[str] | PlanCache | Literal[False] | None = None,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        progress: Report | Literal[False] | None = None,
    ) -> ParallelFunction[Params, Result]:
        """The same function with the same options of `jax.jit`, and other options of `parallelize`.

        `cache=False` goes without a cache, `calibration=False` without a calibration.
        """
        options = {
            "cluster": cluster,
            "planner": planner,
            "devices": devices,
            "microbatches": microbatches,
            "memory_limit": memory_limit,
            "remat": remat,
            "cache": cache,
            "calibration": calibration,
            "progress": progress,
        }
        return ParallelFunction(self._fun, self._jit, self._settings.but(options))
