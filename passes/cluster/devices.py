"""Clusters from text, JSON and JAX devices, by the table of known accelerators (passes/cluster/accelerators.py)."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, cast

from passes.cluster.accelerators import TABLE
from passes.cluster.cluster import Cluster
from passes.cluster.hosts import CPU, HostSpec, virtual_cpu
from passes.errors import ClusterError, close, explain


def known() -> tuple[str, ...]:
    """The names of all devices in the table."""
    return tuple(_HOSTS)


def host_spec(name: str) -> HostSpec:
    """The table's entry for a device's name. Raises ClusterError for a name it does not have."""
    return _entry(name, f"device {name!r}")


def _entry(name: str, what: str) -> HostSpec:
    """The table's entry for a device's name, which is part of `what` the user wrote. Raises ClusterError for unknown
    names.
    """
    spec = _HOSTS.get(name.lower())
    if spec is None:
        remedy = close(name.lower(), _HOSTS) or "pass a Cluster or a JSON file, or add the device with register_device"
        raise ClusterError(explain(what, f"no device is called {name!r}", f"known: {', '.join(_HOSTS)}", remedy))
    return spec


def register_device(spec: HostSpec) -> None:
    """Adds a device to the table, under its name in lower case. Raises ClusterError if another one has the name."""
    if not isinstance(cast(object, spec), HostSpec):
        remedy = "pass HostSpec(device=DeviceSpec(...), devices_per_host=8, intra=Link(...), inter=Link(...))"
        raise ClusterError(explain(f"register_device({spec!r:.60})", "a device comes in a HostSpec", "", remedy))
    name = spec.device.name.lower()
    if _HOSTS.get(name, spec) != spec:
        remedy = "choose another name"
        raise ClusterError(explain(f"device {name!r}", "is in the table with other numbers", str(_HOSTS[name]), remedy))
    _HOSTS[name] = spec


Json = dict[str, object]

_SPEC_TEXT = re.compile(r"(?:(?P<hosts>\d+)x)?(?P<devices>\d+):(?P<device>.+)")


def parse_cluster(text_or_path: str | os.PathLike[str]) -> Cluster:
    """The cluster of `8:a100-80g` (one host of 8), `2x8:a100-80g` (two such hosts) or a JSON file.

    In the file, a group's `device` may be a name from the table; `hosts` then defaults to 1, and `devices_per_host`,
    `intra` and `inter` to the table's. Raises ClusterError for what it cannot read.
    """
    if not isinstance(cast(object, text_or_path), str | os.PathLike):
        rule = "a cluster is a description, a JSON file or an autopar.Cluster"
        remedy = "write, say, cluster='8:h100', or devices=jax.devices()[:8] for devices that are here"
        raise ClusterError(explain(f"cluster={text_or_path!r:.60}", rule, "", remedy))
    text = os.fspath(text_or_path).strip()
    if text.lower().endswith(".json") or os.path.isfile(text):  # which is False for what is no path
        return _read_file(Path(text))
    shown = f"cluster {text!r}"
    match = _SPEC_TEXT.fullmatch(text)
    if not match:
        rule = "should be hosts x devices : device, or a JSON file"
        example = f"8:{text.lower()}" if text.lower() in _HOSTS else "2x8:a100-80g"
        remedy = f"write, say, {example!r}"
        raise ClusterError(explain(shown, rule, f"known devices: {', '.join(_HOSTS)}", remedy))
    hosts, devices = int(match["hosts"] or 1), int(match["devices"])
    if not hosts or not devices:
        raise ClusterError(explain(shown, "should have a device", f"it is {hosts} x {devices}", "count both from 1"))
    return _entry(match["device"], shown).cluster(hosts, devices, name=text)


def _read_file(path: Path) -> Cluster:
    remedy = "write what Cluster.to_json gives, or, shorter, groups of hosts whose device is a name from the table"
    try:
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        where = f"looked for {path.absolute()}"
        raise ClusterError(explain(f"cluster {str(path)!r}", "cannot be read", where, str(error))) from error
    except ValueError as error:
        raise ClusterError(explain(f"cluster {str(path)!r}", "is not JSON", str(error), remedy)) from error
    try:
        return Cluster.from_json(_expanded(data))
    except ClusterError as error:
        raise ClusterError(f"cluster {str(path)!r}: {error}") from error


def _expanded(data: object) -> object:
    """The JSON of a cluster in which devices given by name are replaced by their entries of the table."""
    if not isinstance(data, dict) or not isinstance(groups := cast(Json, data).get("groups"), list):
        return cast(object, data)
    return {**cast(Json, data), "groups": [_expanded_group(group) for group in cast(list[object], groups)]}


def _expanded_group(group: object) -> object:
    if not isinstance(group, dict) or not isinstance(name := cast(Json, group).get("device"), str):
        return cast(object, group)
    per_host = cast(Json, group).get("devices_per_host")
    table = asdict(host_spec(name).cluster(1, per_host if isinstance(per_host, int) and per_host > 0 else None).group())
    return {**table, **cast(Json, group), "device": table["device"]}


class LocalDevice(Protocol):
    """The attributes of a `jax.Device` that this module reads."""

    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


def local_cluster(
    devices: Sequence[LocalDevice], hosts: Mapping[int, str] | None = None, *, are_here: bool = True
) -> Cluster:
    """The cluster of these devices, as `jax.devices()` lists them.

    `hosts` has the name of each process's host, where several processes may share one; without it each process is a
    host of its own. Virtual CPU devices share their machine, so each gets its part of the cores and the memory. On one
    process, memory is what the devices report, if they `are_here`, and not only compiled for. Raises ClusterError for
    no devices, several kinds of them, an unknown kind or uneven hosts.
    """
    kinds = tuple(dict.fromkeys(device.device_kind for device in devices))
    remedy = "pass cluster=, with a description such as '8:h100', a Cluster or a JSON file"
    if len(kinds) != 1:
        rule = "must be of one kind" if kinds else "are needed to plan for, and there are none"
        description = f"{len(devices)} devices, of kinds: {', '.join(kinds) or 'none'}"
        raise ClusterError(explain("the devices here", rule, description, remedy))
    processes = [device.process_index for device in devices]
    per_host = Counter((hosts or {}).get(process, str(process)) for process in processes)
    counts = list(per_host.values())
    if len(set(counts)) > 1:
        description = f"devices of each host: {', '.join(map(str, counts))} (hosts {', '.join(per_host)})"
        raise ClusterError(
            explain("the devices here", "are not spread evenly", description, "use as many of each host")
        )
    spec = _spec_of_kind(kinds[0], remedy)
    if spec.device.name == CPU:
        spec = replace(spec, device=virtual_cpu(os.cpu_count() or 1, _machine_nbytes(), counts[0]))
    elif are_here and len(set(processes)) == 1:
        reported = [nbytes for device in devices if (nbytes := _reported_nbytes(device))]
        memory_nbytes = min(reported, default=spec.device.memory_nbytes)
        spec = replace(spec, device=replace(spec.device, memory_nbytes=memory_nbytes))
    return spec.cluster(len(counts), counts[0])


def _spec_of_kind(kind: str, remedy: str) -> HostSpec:
    by_kind = {name.lower(): spec for spec in _HOSTS.values() for name in spec.kinds}
    if kind.lower() not in by_kind:
        names = f"known kinds: {', '.join(name for spec in _HOSTS.values() for name in spec.kinds)}"
        raise ClusterError(explain(f"device kind {kind!r}", "is not in the table", names, remedy))
    return by_kind[kind.lower()]


def _reported_nbytes(device: LocalDevice) -> int | None:
    """Bytes that JAX's allocator may use on a device, which are less than it has; None if it does not report them."""
    ask = getattr(device, "memory_stats", None)
    stats = ask() if callable(ask) else None
    return cast(dict[str, int], stats).get("bytes_limit") if isinstance(stats, dict) else None


def _machine_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_HOSTS = {spec.device.name: spec for spec in TABLE}
