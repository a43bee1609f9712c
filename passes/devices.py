"""Known accelerators and the hosts they come in, each number with its source; clusters from text, JSON and JAX devices.

Peaks of matrix units and memory are data-sheet values. What is reached of them, and what links give, is measured:

- Inside a host: bandwidth fitted where a collective was measured, else `LINK_SHARE` of the data sheet.
- Between hosts: `LINK_SHARE` of the data sheet on a fabric without congestion, except for H100, where both are fitted.
- Latency: 10 us a hop. From 5 to 15 us the published measurements fit about equally well.

`python -m benchmarks.collectives --fit` fits them again, to measurements that papers and repositories have published.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from passes.cluster import Cluster, DeviceSpec, HostGroup, Link
from passes.errors import ClusterError, close, explain

MATMUL_EFFICIENCY = 0.80
"""Where it was not measured: the median of where it was (A100 0.87, H100 0.80, B200 0.78, GB200 0.73, v6e 0.90)."""

LINK_SHARE = 0.74
"""What collectives get of a link's data sheet: H200 0.81, B200 0.76, A100 0.68 on NVLink, H100 0.74 between hosts."""

ALPHA_SECONDS = 10e-6

PCIE_SHARE = 0.5
"""Of PCIe without peer access, assumed: what one device sends another crosses the host's memory."""

ICI_SHARE = 0.65
"""Of all of a TPU's links: 236 of 360 GB/s, psum on 256 v6e chips (AI-Hypercomputer/tpu-recipes), as bus bandwidth.

An axis of the mesh that rides on one dimension of the torus has a half (2D) or a third (3D) of it: not modelled.
"""

ICI_ALPHA_SECONDS = 1e-6

CPU = "cpu"
"""The name of virtual CPU devices, which share the memory of their machine."""

CPU_CORE_FLOPS_PER_SECOND = 85e9
CPU_MEMORY_BYTES_PER_SECOND = 24e9
"""Of a machine, which its virtual devices share; measured like the rest of `cpu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A device and the host it usually comes in; `kinds` are the names that JAX gives it (`Device.device_kind`)."""

    device: DeviceSpec
    devices_per_host: int
    intra: Link
    inter: Link
    kinds: tuple[str, ...] = ()

    def cluster(self, hosts: int, devices_per_host: int | None = None, name: str = "") -> Cluster:
        """So many of these hosts, named `2x8:h100` unless told otherwise."""
        each = devices_per_host or self.devices_per_host
        group = HostGroup(hosts=hosts, devices_per_host=each, device=self.device, intra=self.intra, inter=self.inter)
        text = f"{each}:{self.device.name}" if hosts == 1 else f"{hosts}x{each}:{self.device.name}"
        return Cluster(name=name or text, groups=(group,))


def known() -> tuple[str, ...]:
    """The names in the table."""
    return tuple(_HOSTS)


def host_spec(name: str) -> HostSpec:
    """The table's entry. Raises ClusterError for a name it does not have."""
    return _entry(name, f"device {name!r}")


def _entry(name: str, what: str) -> HostSpec:
    """The table's entry for a name that stands in `what`."""
    found = _HOSTS.get(name.lower())
    if found is None:
        remedy = close(name.lower(), _HOSTS) or "pass a Cluster or a JSON file, or add the device with register_device"
        raise ClusterError(explain(what, f"no device is called {name!r}", f"known: {', '.join(_HOSTS)}", remedy))
    return found


def register_device(spec: HostSpec) -> None:
    """Adds a device to the table, under its name in lower case. Raises ClusterError if another one has the name."""
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
    text = os.fspath(text_or_path).strip()
    if text.lower().endswith(".json") or Path(text).is_file():
        return _read_file(Path(text))
    shown = f"cluster {text!r}"
    found = _SPEC_TEXT.fullmatch(text)
    if not found:
        rule = "should be hosts x devices : device, or a JSON file"
        example = f"8:{text.lower()}" if text.lower() in _HOSTS else "2x8:a100-80g"
        remedy = f"write, say, {example!r}"
        raise ClusterError(explain(shown, rule, f"known devices: {', '.join(_HOSTS)}", remedy))
    hosts, devices = int(found["hosts"] or 1), int(found["devices"])
    if not hosts or not devices:
        raise ClusterError(explain(shown, "should have a device", f"it is {hosts} x {devices}", "count both from 1"))
    return _entry(found["device"], shown).cluster(hosts, devices, name=text)


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
    """The JSON of a cluster where devices given by name are replaced by what the table says about them."""
    if not isinstance(data, dict) or not isinstance(groups := cast(Json, data).get("groups"), list):
        return cast(object, data)
    return {**cast(Json, data), "groups": [_expanded_group(group) for group in cast(list[object], groups)]}


def _expanded_group(group: object) -> object:
    if not isinstance(group, dict) or not isinstance(name := cast(Json, group).get("device"), str):
        return cast(object, group)
    table = asdict(host_spec(name).cluster(1).group())
    return {**table, **cast(Json, group), "device": table["device"]}


class LocalDevice(Protocol):
    """What this module reads of a `jax.Device`."""

    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


def local_cluster(devices: Sequence[LocalDevice]) -> Cluster:
    """The cluster of these devices, as `jax.devices()` lists them: one host for each process.

    Virtual CPU devices share their machine, so each gets its part of the cores and the memory; on one process, memory
    is what the devices report. Raises ClusterError for no devices, several kinds, an unknown kind or uneven hosts.
    """
    kinds = tuple(dict.fromkeys(device.device_kind for device in devices))
    remedy = "pass cluster=, with a description such as '8:h100', a Cluster or a JSON file"
    if len(kinds) != 1:
        rule = "must be of one kind" if kinds else "are needed to plan for, and there are none"
        seen = f"{len(devices)} devices, of kinds: {', '.join(kinds) or 'none'}"
        raise ClusterError(explain("the devices here", rule, seen, remedy))
    per_process = [[d for d in devices if d.process_index == p] for p in sorted({d.process_index for d in devices})]
    counts = [len(local) for local in per_process]
    if len(set(counts)) > 1:
        seen = f"devices of each process: {', '.join(map(str, counts))}"
        raise ClusterError(explain("the devices here", "are not spread evenly", seen, "use as many of each process"))
    spec = _spec_of_kind(kinds[0], remedy)
    if spec.device.name == CPU:
        spec = replace(spec, device=_virtual_cpu(os.cpu_count() or 1, _machine_nbytes(), counts[0]))
    elif len(counts) == 1:
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
    """Bytes that JAX's allocator may use on the device, which is less than the device has; None if it does not say."""
    ask = getattr(device, "memory_stats", None)
    stats = ask() if callable(ask) else None
    return cast(dict[str, int], stats).get("bytes_limit") if isinstance(stats, dict) else None


def _machine_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _virtual_cpu(cores: int, memory_nbytes: int, devices: int) -> DeviceSpec:
    """One of `devices` virtual CPU devices that share a machine."""
    return DeviceSpec(
        name=CPU,
        flops_per_second={"float32": cores * CPU_CORE_FLOPS_PER_SECOND / devices},
        matmul_efficiency=1.0,
        memory_nbytes=memory_nbytes // devices,
        memory_bytes_per_second=CPU_MEMORY_BYTES_PER_SECOND / devices,
        launch_seconds=6e-6,
        source="measured on 2 cores (Xeon, 2.5 GHz, AVX-512) with 8 virtual devices at once: "
        "python -m benchmarks.collectives --local; between processes assumed: loopback; "
        "widened: float-normalization-bf16 in the CPU compiler's pipeline, xla_dump_hlo_pass_re, jaxlib 0.10",
        widened={"bfloat16": "float32"},
    )


def _link(gb_per_second: float, *, alpha_seconds: float = ALPHA_SECONDS, reduces: bool = False) -> Link:
    return Link(alpha_seconds=alpha_seconds, bytes_per_second=gb_per_second * 1e9, reduces=reduces)


def _network(gb_per_second: float) -> Link:
    """A host's link by its data sheet, on a fabric that gives every host its own."""
    return _link(LINK_SHARE * gb_per_second)


def _gpu(
    name: str,
    *kinds: str,
    tflops: Mapping[str, float],
    memory_gib: int,
    memory_gb_per_second: float,
    intra: Link,
    inter: Link,
    source: str,
    matmul_efficiency: float = MATMUL_EFFICIENCY,
    devices_per_host: int = 8,
    launch_seconds: float = 3e-6,
) -> HostSpec:
    return HostSpec(
        device=DeviceSpec(
            name=name,
            flops_per_second={dtype: rate * 1e12 for dtype, rate in tflops.items()},
            matmul_efficiency=matmul_efficiency,
            memory_nbytes=memory_gib * 2**30,
            memory_bytes_per_second=memory_gb_per_second * 1e9,
            launch_seconds=launch_seconds,
            source=source,
        ),
        devices_per_host=devices_per_host,
        intra=intra,
        inter=inter,
        kinds=kinds,
    )


def _tensor_cores(half: float, float32: float, float8: float = 0.0) -> Mapping[str, float]:
    """Dense peaks in TFLOP/s; JAX multiplies float32 as TF32 by default where there is TF32."""
    eights = {"float8_e4m3fn": float8, "float8_e5m2": float8} if float8 else {}
    return {"bfloat16": half, "float16": half, "float32": float32, **eights}


def _tpu(
    name: str,
    *kinds: str,
    tflops: float,
    memory_gib: int,
    memory_gb_per_second: float,
    ici_gb_per_second: float,
    devices_per_host: int,
    source: str,
    matmul_efficiency: float = MATMUL_EFFICIENCY,
) -> HostSpec:
    """A slice of one pod: hosts, too, are joined by ICI. JAX multiplies float32 in one bfloat16 pass by default."""
    ici = ICI_SHARE * ici_gb_per_second
    return _gpu(
        name,
        *kinds,
        tflops={"bfloat16": tflops, "float32": tflops},
        memory_gib=memory_gib,
        memory_gb_per_second=memory_gb_per_second,
        intra=_link(ici, alpha_seconds=ICI_ALPHA_SECONDS),
        inter=_link(ici * devices_per_host, alpha_seconds=ICI_ALPHA_SECONDS),
        source=source,
        matmul_efficiency=matmul_efficiency,
        devices_per_host=devices_per_host,
        launch_seconds=1.6e-6,
    )


_H100_NETWORK = Link(alpha_seconds=ALPHA_SECONDS, bytes_per_second=296e9, congestion=0.57)

_TABLE = (
    _gpu(
        "v100-16g",
        "Tesla V100-SXM2-16GB",
        tflops={"float16": 125, "float32": 15.7},
        memory_gib=16,
        memory_gb_per_second=900,
        intra=_link(LINK_SHARE * 150),
        inter=_network(3.125),
        source="data sheet; AWS p3.16xlarge (25 Gb/s); no bfloat16 units, so bfloat16 runs at the float32 rate",
    ),
    _gpu(
        "v100-32g",
        "Tesla V100-SXM2-32GB",
        "Tesla V100-SXM3-32GB",
        tflops={"float16": 125, "float32": 15.7},
        memory_gib=32,
        memory_gb_per_second=900,
        intra=_link(LINK_SHARE * 150),
        inter=_network(12.5),
        source="data sheet; AWS p3dn.24xlarge (100 Gb/s); no bfloat16 units, so bfloat16 runs at the float32 rate",
    ),
    _gpu(
        "a100-40g",
        "NVIDIA A100-SXM4-40GB",
        tflops=_tensor_cores(312, 156),
        memory_gib=40,
        memory_gb_per_second=1555,
        intra=_link(204),
        inter=_network(50),
        source="data sheet; AWS p4d.24xlarge (4 x 100 Gb/s); matmul 271.2 TFLOP/s: stas00/ml-engineering; "
        "NVLink fitted: Galvatron's 8-GPU nodes",
        matmul_efficiency=271.2 / 312,
    ),
    _gpu(
        "a100-80g",
        "NVIDIA A100-SXM4-80GB",
        tflops=_tensor_cores(312, 156),
        memory_gib=80,
        memory_gb_per_second=2039,
        intra=_link(204),
        inter=_network(200),
        source="data sheet; DGX A100 (8 x 200 Gb/s); matmul 271.2 TFLOP/s: stas00/ml-engineering; "
        "NVLink fitted: Galvatron's 8-GPU nodes",
        matmul_efficiency=271.2 / 312,
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        tflops=_tensor_cores(989, 494.5, 1979),
        memory_gib=80,
        memory_gb_per_second=3350,
        intra=_link(366, reduces=True),
        inter=_H100_NETWORK,
        source="data sheet; matmul 794.5 TFLOP/s: stas00/ml-engineering; NVLink as on H200; network fitted: nanotron "
        "playbook, medians on 1 to 64 AWS p5 hosts of a shared cluster, which is congested",
        matmul_efficiency=794.5 / 989,
    ),
    _gpu(
        "h200",
        "NVIDIA H200",
        tflops=_tensor_cores(989, 494.5, 1979),
        memory_gib=140,
        memory_gb_per_second=4800,
        intra=_link(366, reduces=True),
        inter=_network(400),
        source="data sheet; AWS p5en.48xlarge (3200 Gb/s); matmul as on H100; NVLink fitted: stas00/ml-engineering",
        matmul_efficiency=794.5 / 989,
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        tflops=_tensor_cores(2250, 1125, 4500),
        memory_gib=179,
        memory_gb_per_second=8000,
        intra=_link(680, reduces=True),
        inter=_network(400),
        source="data sheet; AWS p6-b200.48xlarge (3200 Gb/s); matmul 1745 TFLOP/s and NVLink (fitted): "
        "stas00/ml-engineering",
        matmul_efficiency=1745 / 2250,
    ),
    _gpu(
        "gb200",
        "NVIDIA GB200",
        tflops=_tensor_cores(2500, 1250, 5000),
        memory_gib=185,
        memory_gb_per_second=8000,
        intra=_link(680, reduces=True),
        inter=_link(4 * 680),
        source="data sheet; matmul 1822 TFLOP/s: stas00/ml-engineering; NVLink as on B200, also between the trays of "
        "an NVL72 (18), which is as far as this entry reaches",
        matmul_efficiency=1822 / 2500,
        devices_per_host=4,
    ),
    _gpu(
        "gb300",
        "NVIDIA GB300",
        tflops=_tensor_cores(2500, 1250, 5000),
        memory_gib=277,
        memory_gb_per_second=8000,
        intra=_link(680, reduces=True),
        inter=_link(4 * 680),
        source="data sheet, memory of B300 assumed; matmul and NVLink as on GB200, up to one NVL72",
        matmul_efficiency=1822 / 2500,
        devices_per_host=4,
    ),
    _gpu(
        "l4",
        "NVIDIA L4",
        tflops=_tensor_cores(121, 60, 242.5),
        memory_gib=22,
        memory_gb_per_second=300,
        intra=_link(PCIE_SHARE * 31),
        inter=_network(12.5),
        source="data sheet; AWS g6.48xlarge (100 Gb/s); half of the peak assumed: a 72 W card does not sustain it",
        matmul_efficiency=0.5,
    ),
    _gpu(
        "a10g",
        "NVIDIA A10G",
        tflops=_tensor_cores(70, 35),
        memory_gib=22,
        memory_gb_per_second=600,
        intra=_link(PCIE_SHARE * 31),
        inter=_network(12.5),
        source="data sheet (70 TFLOP/s; the A10's says 125); AWS g5.48xlarge (100 Gb/s)",
    ),
    _gpu(
        "4090",
        "NVIDIA GeForce RTX 4090",
        tflops=_tensor_cores(165.2, 82.6, 330.3),
        memory_gib=24,
        memory_gb_per_second=1008,
        intra=_link(PCIE_SHARE * 31),
        inter=_network(1.25),
        source="NVIDIA Ada white paper; no peer access, so data goes through the host; 10 Gb/s Ethernet assumed",
    ),
    _tpu(
        "tpu-v3",
        "TPU v3",
        tflops=61.5,
        memory_gib=16,
        memory_gb_per_second=450,
        ici_gb_per_second=200,
        devices_per_host=8,
        source="vendor figures, halved: each of a chip's two cores is a JAX device",
    ),
    _tpu(
        "tpu-v4",
        "TPU v4",
        tflops=275,
        memory_gib=32,
        memory_gb_per_second=1200,
        ici_gb_per_second=270,
        devices_per_host=4,
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v5e",
        "TPU v5 lite",
        "TPU v5e",
        tflops=197,
        memory_gib=16,
        memory_gb_per_second=810,
        ici_gb_per_second=180,
        devices_per_host=8,
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v5p",
        "TPU v5",
        "TPU v5p",
        tflops=459,
        memory_gib=95,
        memory_gb_per_second=2765,
        ici_gb_per_second=540,
        devices_per_host=4,
        source="vendor figures: jax-ml/scaling-book, tpus.md",
    ),
    _tpu(
        "tpu-v6e",
        "TPU v6 lite",
        "TPU v6e",
        tflops=918,
        memory_gib=32,
        memory_gb_per_second=1640,
        ici_gb_per_second=360,
        devices_per_host=8,
        source="vendor figures: jax-ml/scaling-book, tpus.md; matmul 827.5 TFLOP/s: AI-Hypercomputer/tpu-recipes",
        matmul_efficiency=827.5 / 918,
    ),
    _tpu(
        "tpu-7x",
        "TPU7x",
        "TPU v7x",
        tflops=1153.5,
        memory_gib=96,
        memory_gb_per_second=3690,
        ici_gb_per_second=300,
        devices_per_host=8,
        source="vendor figures, halved: each half of a chip is a JAX device; matmul 956 TFLOP/s: "
        "AI-Hypercomputer/tpu-recipes",
        matmul_efficiency=956 / 1153.5,
    ),
    HostSpec(
        device=_virtual_cpu(cores=2, memory_nbytes=16 * 2**30, devices=8),
        devices_per_host=8,
        intra=_link(0.93, alpha_seconds=15e-6),
        inter=_link(1, alpha_seconds=100e-6),
        kinds=("cpu",),
    ),
)

_HOSTS = {spec.device.name: spec for spec in _TABLE}
