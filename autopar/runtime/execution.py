"""Planned programs as executables: one `jax.jit` of the lowered program, called on the flat arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
from jax.sharding import Sharding

from autopar import jax_compat
from autopar.checks import Verification, hlo, verify
from autopar.distributed import Processes, digest_of
from autopar.frontend import Signature, Traced, devices_of
from autopar.jax_compat import Device
from autopar.lowering import build, shardings
from autopar.phases import PhaseOf, unsaid
from autopar.plan import Plan, unflattened
from autopar.runtime.accepted import Accepted
from autopar.runtime.argument_groups import Groups, grouped
from autopar.runtime.arrivals import Arrivals
from autopar.runtime.donation import reused, unread
from autopar.runtime.executable import Executable
from autopar.runtime.footprint import CPU, Limit, needed_nbytes, temporaries_nbytes
from autopar.runtime.moves import Moves
from autopar.runtime.program import Donation
from autopar.runtime.transforms import own_function, transformable
from passes.intra_op import product_flops
from passes.memory import PERSISTENT
from passes.placement import group
from passes.plan import text as plan_text
from passes.sharding import ShardingSpec
from passes.text import Column, Table, quantities


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A traced and planned program as a jitted function of flat arguments that is not lowered yet.

    `signature` reads the calls of the user's function; `platform` is the devices' (`cpu`, `gpu`). `nested` is the
    function inside another transformation, of the caller's flat arguments in whatever shardings.
    """

    signature: Signature
    traced: Traced
    plan: Plan
    platform: str
    jitted: Any
    nested: Any
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    processes: Processes | None = None

    def executable(self, run: Callable[..., Sequence[jax.Array]] | None = None) -> Executable:
        """The program as calls run it, with `run` in place of the jitted function once it is compiled."""
        names = self.traced.graph.input_names
        gone = reused(self.traced)
        groups = _groups(self.traced)

        def ahead(*leaves: Any) -> Sequence[jax.Array]:
            return run(*groups(leaves)) if run else self.nested(*leaves)

        return Executable(
            run=run or self.jitted,
            groups=groups,
            nested=ahead if run else self.nested,
            in_shardings=self.in_shardings,
            donation=Donation(
                positions=tuple(sorted(gone)), names=names, unread=tuple(sorted(gone & unread(self.traced.graph)))
            ),
            out_tree=self.traced.out_tree,
            stacked=_stacked(self.traced),
            state=frozenset(position for _, position in self.traced.state_pairs),
            arrivals=Arrivals(self.processes, names) if self.processes else None,
            moves=Moves(names=names, source=self.signature.source),
        )


def prepare(
    signature: Signature,
    traced: Traced,
    plan: Plan,
    devices: Sequence[Device],
    processes: Processes | None = None,
) -> Prepared:
    """The jitted function of a plan on its devices, which are those of `processes` if there are several."""
    program = build(traced, plan, devices)
    # One object for equal shardings: results come back with it, and finding them in place is a test of identity.
    unique: dict[Sharding, Sharding] = {}
    in_shardings = tuple(unique.setdefault(s, s) for s in program.in_shardings)
    out_shardings = tuple(unique.setdefault(s, s) for s in as_given(traced, program.out_shardings))

    groups = _groups(traced)

    def flat(*lists: Any) -> tuple[Any, ...]:
        results = program.function(*chain.from_iterable(lists))
        # Weakness decides promotions in the next call's trace, so what jit returns weak must not come back strong.
        return tuple(map(jax_compat.with_weakness, results, traced.weak))

    flat.__name__ = flat.__qualname__ = signature.function
    jitted = partial(
        jax.jit,
        flat,
        in_shardings=tuple(groups(in_shardings)),
        out_shardings=out_shardings,
        donate_argnums=groups.donated,
        keep_unused=traced.options.keep_unused,
    )
    options = traced.options.compiler_options
    return Prepared(
        signature=signature,
        traced=traced,
        plan=plan,
        platform=devices[0].platform,
        jitted=jitted(compiler_options=hlo.compiler_options(devices[0].platform, user_options=options)),
        nested=_nested(
            # JAX takes no options of XLA inside another program, and says so where the user has some.
            jitted(inline=traced.options.inline, compiler_options=options),
            in_shardings,
            signature,
            traced,
            plan,
            devices,
        ),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        processes=processes,
    )


def as_given(traced: Traced, planned: Sequence[Sharding]) -> list[Sharding]:
    """The shardings of the results, with the user's own names of axes where they are the same shardings.

    State is returned in the sharding in which it arrived.
    """
    inputs, outputs = traced.shardings
    given = {o: inputs[i] for o, i in traced.state_pairs if inputs and inputs[i]}
    given |= {o: sharding for o, sharding in enumerate(outputs) if sharding}
    types = [traced.graph.types[value] for value in traced.graph.outputs]
    return [
        theirs
        if (theirs := given.get(o)) and devices_of(theirs) and theirs.is_equivalent_to(ours, types[o].rank)
        else ours
        for o, ours in enumerate(planned)
    ]


def _nested(
    jitted: Any,
    in_shardings: Sequence[Sharding],
    signature: Signature,
    traced: Traced,
    plan: Plan,
    devices: Sequence[Device],
) -> Callable[..., Sequence[jax.Array]]:
    """The program for use inside other transformations, where JAX takes no compiler options."""
    stacked, groups = _stacked(traced), _groups(traced)

    def planned(*leaves: Any) -> tuple[jax.Array, ...]:
        shaped = [leaf.reshape(stacked[i]) if i in stacked else leaf for i, leaf in enumerate(leaves)]
        return jitted(*groups(jax.device_put(shaped, list(in_shardings))))

    rows = (ShardingSpec(dims=spec.dims[1:]) if i in stacked else spec for i, spec in enumerate(plan.inputs))
    sides = shardings(tuple(rows), plan.mesh, devices), shardings(plan.outputs, plan.mesh, devices)
    return transformable(planned, own_function(traced.jaxpr, *sides, signature.function, signature.source))


def _groups(traced: Traced) -> Groups:
    return grouped(traced.donated)


def _stacked(traced: Traced) -> Mapping[int, tuple[int, ...]]:
    """The inputs that come as microbatches, with their shapes in that form."""
    graph = traced.graph
    return {i: graph.types[graph.inputs[i]].shape for i in traced.stacked}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program in StableHLO for its plan's devices; `compile()` is the next step."""

    _prepared: Prepared
    _accepted: Accepted
    _lowered: Any
    _limit: Limit | None = None
    _again: Callable[[int], Lowered] | None = None
    _phase: PhaseOf = unsaid

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

    def as_text(self) -> str:
        """The program as StableHLO text."""
        return self._lowered.as_text()

    def followed(self, phase: PhaseOf) -> Lowered:
        """The same program, whose compilation is reported as a `phase`."""
        return replace(self, _phase=phase)

    def unlimited(self) -> Lowered:
        """The same program without a memory limit."""
        return replace(self, _limit=None, _again=None)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """The executable; `compiler_options` are XLA's.

        Raises OverBudgetError if it needs more memory than a device may. A planner that searches gets one more try,
        within the limit less the bytes by which XLA exceeded the plan: `plan` of the executable is then the new plan.
        """
        with self._phase("compile"):
            return self._compiled(compiler_options)

    def _compiled(self, compiler_options: dict[str, Any] | None) -> Compiled:
        if processes := self._prepared.processes:
            processes.agree("the compiled program", {"its StableHLO": digest_of(self.as_text())})
        given = {**(self._prepared.traced.options.compiler_options or {}), **(compiler_options or {})}
        options = compiler_options and hlo.compiler_options(self._prepared.platform, user_options=given)
        compiled = jax_compat.compiled(self._lowered, options)  # without any, those of the jitted function
        if self._limit is not None:
            needed = needed_nbytes(self.plan, compiled.memory_analysis())
            if needed > self._limit.nbytes:
                if self._again is None:
                    raise self._limit.error(self.plan, needed)
                return self._again(needed).compile(compiler_options)
        executable = self._prepared.executable(compiled)
        return Compiled(self._prepared, self._accepted, compiled, executable, self)

    def verify(self) -> Verification:
        """The plan's collectives, and the flops of its products, compared with those that XLA makes of the program.

        The program is compiled once more, in a way that keeps collectives apart.
        """
        options = hlo.compiler_options(self._prepared.platform, user_options=hlo.UNCOMBINED)
        with self._phase("verify"):
            return self._verify(self._lowered.compile(compiler_options=options).as_text())

    def _verify(self, text: str) -> Verification:
        graph, plan = self._prepared.traced.graph, self.plan
        flops = product_flops(group(graph), plan.layout.placements, plan.mesh)
        return verify(plan, text, platform=self._prepared.platform, planned_flops=flops)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program compiled for its plan's devices, callable with arguments of the types that it was lowered for.

    Static arguments may be left out, as with `jax.jit`; given, they are those that it was lowered for.
    """

    _prepared: Prepared
    _accepted: Accepted
    _compiled: Any
    _executable: Executable
    _lowered: Lowered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._executable(self._accepted.leaves(args, kwargs))

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

    @property
    def input_shardings(self) -> tuple[Any, Any]:
        """The sharding of each argument, as the pair (args, kwargs) without static arguments."""
        return unflattened(self._prepared.traced.in_tree, self._prepared.in_shardings, "input_shardings")

    @property
    def output_shardings(self) -> Any:
        """The sharding of each result, in the function's own pytree."""
        return unflattened(self._prepared.traced.out_tree, self._prepared.out_shardings, "output_shardings")

    def as_text(self) -> str:
        """The optimized HLO."""
        return self._compiled.as_text()

    def verify(self) -> Verification:
        """The plan's collectives, and the flops of its products, compared with those that XLA makes of the program.

        On CPU it is compiled once more, in a way that keeps collectives apart.
        """
        if self._prepared.platform == CPU:
            return self._lowered.verify()
        return self._lowered._verify(self.as_text())

    def memory_analysis(self) -> Any:
        """XLA's account of one device's memory, as `jax.stages.Compiled` has it."""
        return self._compiled.memory_analysis()

    @property
    def needed_nbytes(self) -> int:
        """Bytes that one device needs by XLA's account, without those in the host's memory."""
        return needed_nbytes(self.plan, self.memory_analysis())

    def memory_report(self) -> str:
        """The plan's bytes of one device beside XLA's, as text: predicted, XLA's, and the ratio."""
        return self.memory_table().format()

    def memory_table(self) -> Table:
        """The table of `memory_report`."""
        return memory_table(self.plan, self.memory_analysis())

    def executable(self) -> Executable:
        """The program on flat arguments; inside another transformation it is traced anew."""
        return replace(self._executable, nested=self._prepared.nested)

    def cost_analysis(self) -> Any:
        """XLA's estimate of flops and bytes on one device; it counts the body of a loop once."""
        return self._compiled.cost_analysis()


def lower(prepared: Prepared, structs: Sequence[jax.ShapeDtypeStruct], statics: tuple[Any, ...] = ()) -> Lowered:
    """The program lowered for flat arguments of these types; `statics` are the (name, type, value) of static ones."""
    graph = prepared.traced.graph
    inner = [
        jax.ShapeDtypeStruct(graph.types[v].shape, struct.dtype, weak_type=struct.weak_type)
        for v, struct in zip(graph.inputs, structs, strict=True)
    ]
    accepted = Accepted.of(prepared.signature, prepared.traced, structs, statics)
    with jax_compat.no_mesh():
        return Lowered(prepared, accepted, prepared.jitted.lower(*_groups(prepared.traced)(inner)))


def memory_table(plan: Plan, analysis: Any) -> Table:
    """Predicted bytes of one device beside XLA's `memory_analysis()`; outputs that alias arguments count once."""
    outputs = plan.nbytes.get("outputs", 0)
    arguments = sum(plan.nbytes.get(cause, 0) for cause in PERSISTENT)
    pairs = {
        "arguments": (arguments, analysis.argument_size_in_bytes),
        "outputs": (outputs, analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        "temporaries": (plan.peak_nbytes - arguments - outputs, temporaries_nbytes(plan, analysis)),
    }
    pairs["peak"] = (plan.peak_nbytes, sum(xla for _, xla in pairs.values()))
    return Table(
        title="memory of one device",
        columns=(Column(heading=""), *(Column(heading=name, right=True) for name in ("predicted", "XLA", "ratio"))),
        rows=tuple(
            (name, quantities.nbytes(ours), quantities.nbytes(xla), f"{ours / xla:.3f}" if xla else "-")
            for name, (ours, xla) in pairs.items()
        ),
        note=f"predicted peak at {plan_text.short(plan.memory.where)}" if plan.memory and plan.memory.where else "",
    )
