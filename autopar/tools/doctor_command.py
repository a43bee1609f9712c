"""`autopar doctor`: what is installed and which devices are present, and what of it would be in the way."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata

import jax

from autopar.tools.command import DONE, Command, Output
from passes.cluster import known, local_cluster
from passes.errors import PlanningError
from passes.plan import json as plan_json
from passes.text import Column, Table, quantities

PROBLEM = 1  # the exit status of a machine on which something is missing

_HELP = """\
Say which versions, devices and links are here, what is optional and missing,
and what would limit you."""

_MORE = """\
example:
  autopar doctor

exit status: 0 nothing is in the way, 1 something is; the last table names it."""

OPTIONAL = {
    "matplotlib": "--plot: pip install 'autopar[plot]'",
    "jax_cuda12_plugin": "autopar compile for GPUs: pip install 'autopar[gpu-compiler]'",
    "libtpu": "autopar compile for TPUs: pip install 'autopar[tpu-compiler]'",
    "orbax": "checkpoints: pip install 'autopar[checkpoint]'",
    "flatbuffers": "autopar export --format jax-export: pip install 'autopar[export]'",
}


def _versions() -> Iterator[tuple[str, str]]:
    yield "autopar", plan_json.version()
    yield "Python", ".".join(map(str, sys.version_info[:3]))
    for name in ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "pulp", "highspy"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "missing"
    for name, remedy in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield f"{name} (optional)", f"not installed; {remedy}"


def _devices() -> Iterator[tuple[str, str]]:
    devices = jax.devices()
    kinds = dict.fromkeys(device.device_kind for device in devices)
    yield "devices", f"{quantities.count(len(devices), 'device')}: {', '.join(kinds)}"
    yield "processes", str(jax.process_count())
    yield "processors", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        yield "memory of a device", quantities.nbytes(stats["bytes_limit"])
    try:
        group = local_cluster(devices).group()
    except PlanningError:
        group = None
    if group is not None:
        inside, outside = (f"{link.bytes_per_second / 1e9:.3g} GB/s" for link in (group.intra, group.inter))
        hosts = quantities.count(group.hosts, "host")
        yield (
            "links, as planned for",
            f"{inside} in a host" + (f", {outside} between {hosts}" if group.hosts > 1 else ""),
        )
    yield "devices to plan for", ", ".join(known())


def findings() -> list[tuple[str, str]]:
    """The obstacles that would be in the way, each with its remedy."""
    obstacles: list[tuple[str, str]] = []
    missing = [name for name, version in _versions() if version == "missing"]
    if missing:
        obstacles.append((f"missing: {', '.join(missing)}", "pip install autopar"))
    kind = jax.devices()[0].device_kind
    try:
        local_cluster(jax.devices())
    except PlanningError as error:
        obstacles.append((f"no data of {kind!r}", str(error).replace("\n", " ")))
    if jax.default_backend() == "cpu" and len(jax.devices()) == 1:
        remedy = "plan with --cluster; to run on virtual ones, jax.config.update('jax_num_cpu_devices', 8) at the top"
        obstacles.append(("one CPU device: nothing can be cut here", remedy))
    return obstacles


def _rows(title: str, rows: list[tuple[str, str]], note: str = "") -> Table:
    columns = (Column(heading=""), Column(heading="", flexible=True))
    return Table(title=title, columns=columns, rows=tuple(rows), note=note)


def _run(arguments: argparse.Namespace) -> tuple[Output, int]:
    in_the_way = findings()
    tables = (
        _rows("versions", list(_versions())),
        _rows("here", list(_devices())),
        _rows("what would limit you", in_the_way, "" if in_the_way else "Nothing."),
    )
    return tables, PROBLEM if in_the_way else DONE


COMMAND = Command(
    name="doctor",
    summary="say what is here and what is in the way",
    description=_HELP,
    more=_MORE,
    add_arguments=lambda parser: None,
    run=_run,
)
