"""The events of devices in profiles: how they are read, and how their seconds are divided by cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.checks import hlo_kinds
from autopar.profiling.events import CAUSES, Event, events, seconds_by_cause

OPCODES = {
    ("jit_step", "dot.1"): "dot",
    ("jit_step", "psum.3"): "all-reduce",
    ("jit_step", "gathered"): "all-gather-start",
    ("jit_step", "loop"): "while",
}


def event(name: str, start: float, end: float, device: int = 0, module: str = "jit_step") -> Event:
    return Event(name=name, module=module, device=device, start=start * 1e9, end=end * 1e9)


def spent(*seen: Event, steps: int = 1, devices: tuple[int, ...] = (0,)) -> tuple[dict[str, Any], ...]:
    """Seconds by cause of each device, what is nothing left out."""
    by_device = seconds_by_cause(seen, OPCODES, devices, steps)
    assert all(set(seconds) == set(CAUSES) for seconds in by_device)
    return tuple({cause: pytest.approx(s) for cause, s in seconds.items() if s} for seconds in by_device)


def test_operators_count_by_the_opcode_of_their_name():
    seen = [event("dot.1", 0, 2), event("psum.3", 2, 5), event("gathered", 5, 6), event("unheard-of", 6, 7)]
    assert spent(*seen) == ({"compute": 3.0, "all_reduce": 3.0, "all_gather": 1.0},)


def test_a_collective_counts_where_nothing_is_computed_meanwhile():
    seen = [event("psum.3", 0, 4), event("dot.1", 1, 2), event("dot.1", 3, 6), event("gathered", 3.5, 7)]
    assert spent(*seen) == ({"compute": 4.0, "all_reduce": 2.0, "all_gather": 1.0},)


def test_operators_side_by_side_count_once_and_loops_by_what_is_in_them():
    seen = [event("dot.1", 0, 2), event("dot.1", 1, 3), event("loop", 0, 10)]
    assert spent(*seen) == ({"compute": 3.0},)


def test_other_programs_and_copies_are_transfers():
    seen = [event("slice", 0, 1, module="jit__multi_slice"), event("MemcpyP2P", 2, 4, module="")]
    assert spent(*seen) == ({"transfers": 3.0},)


def test_each_device_counts_by_itself_and_a_step_is_one_of_several():
    seen = [event("dot.1", 0, 2), event("psum.3", 0, 4, device=7), event("dot.1", 9, 10)]
    assert spent(*seen, steps=2, devices=(7, 0, 1)) == ({"all_reduce": 2.0}, {"compute": 1.5}, {})


def test_parts_add_up_to_what_is_covered():
    seen = [event(name, k, k + 1.5) for k, (_, name) in enumerate(OPCODES)]
    (by_cause,) = seconds_by_cause(seen, OPCODES, (0,), 1)
    assert sum(by_cause.values()) == pytest.approx(3.5)  # of 4.5 seconds the last of all is the loop alone


def profile(**planes: list[tuple[str, dict[str, Any]]]) -> Any:
    """A profile with one line a plane, whose events last from 1 to 3 microseconds."""

    def of(name: str, stats: dict[str, Any]) -> Any:
        return SimpleNamespace(name=name, stats=stats.items(), start_ns=1000.0, duration_ns=2000.0)

    return SimpleNamespace(
        planes=[
            SimpleNamespace(name=name, lines=[SimpleNamespace(name="line", events=[of(*both) for both in several])])
            for name, several in planes.items()
        ]
    )


def test_events_of_operators_are_read_on_cpu_and_on_accelerators():
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_step"}
    host = [("dot.1", stats | {"device_ordinal": 3}), ("ThreadpoolListener::StartRegion", {}), ("no device", stats)]
    gpu = [("gemm_kernel", stats), ("MemcpyP2P", {}), ("a kernel of nobody's", {})]
    seen = list(events(profile(**{"/host:CPU": host, "/device:GPU:1": gpu, "Task Environment": []})))
    assert seen == [
        Event(name="dot.1", module="jit_step", device=3, start=1000.0, end=3000.0),
        Event(name="dot.1", module="jit_step", device=1, start=1000.0, end=3000.0),
        Event(name="MemcpyP2P", module="", device=1, start=1000.0, end=3000.0),
    ]


def test_opcodes_are_those_of_the_compiled_program():
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def summed(x: jax.Array) -> jax.Array:
        body = jax.shard_map(
            lambda y: jax.lax.psum(y @ y.T, "d"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(body(y)) @ y[:1] * 0.5 + y, x)

    text = jax.jit(summed).lower(jnp.ones((8, 16))).compile().as_text() or ""
    codes = hlo_kinds.opcodes([text])
    assert {module for module, _ in codes} == {"jit_summed"}
    kinds = [hlo_kinds.kind_of(code) for code in codes.values()]
    assert {"all_reduce", "around", "compute"} <= set(kinds)
    assert sum(code == "all-reduce" for code in codes.values()) == text.count(" all-reduce(")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-reduce.17", "all_reduce"),
        ("all-gather-start.2", "all_gather"),
        ("reduce-scatter-done", "reduce_scatter"),
        ("collective-permute", "permute"),
        ("ragged-all-to-all.1", "all_to_all"),
        ("while.4", "around"),
        ("all-reduce-fusion", "compute"),
        ("call_fusion.1", "compute"),
    ],
)
def test_an_event_without_an_opcode_is_classified_by_its_name(name: str, kind: str):
    assert hlo_kinds.kind_of(name) == kind
