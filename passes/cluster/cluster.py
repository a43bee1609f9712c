"""Clusters: devices, the hosts that they are in, and the links between them, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Literal, Self, cast, get_args

from passes.cluster.json_fields import Fields
from passes.errors import ClusterError, close, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network under the alpha-beta model: `alpha_seconds` a message, then `bytes_per_second` in one direction.

    `reduces`: the switch adds what passes through it (NVLink SHARP). `low_latency`: short messages may take protocols
    of less latency and bandwidth (`collectives.PROTOCOLS`). `congestion` is the exponent by which a shared network
    slows as more hosts talk at once: over h hosts, h^-congestion of the bandwidth is left; 0 is a full fabric. One
    array sent from device to device, as between stages, reaches `sent` of the bandwidth.
    """

    alpha_seconds: float
    bytes_per_second: float
    reduces: bool = False
    low_latency: bool = False
    congestion: float = 0.0
    sent: float = 1.0


Wiring = Literal["switch", "hybrid cube mesh", "2d torus of 16", "3d torus of 4"]
"""The devices that links join. `switch`: any two at full bandwidth. `hybrid cube mesh`: 8 devices of 6 links, of which
two devices share 2, 1 or none. A torus: the devices of all hosts in a grid, nearest ones joined; a dimension of the
whole pod's 16 wraps around, or, of 4, every multiple of it."""

WIRINGS: tuple[Wiring, ...] = get_args(Wiring)

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
"""The kinds of collectives."""

KINDS: tuple[Kind, ...] = get_args(Kind)

HOST_BYTES_PER_SECOND = 12e9
"""The rate that PCI Express 3 x16 gives, of 15.75 GB/s."""

DISPATCH_SECONDS = 50e-6
"""Seconds that a host takes to start one task of a stage: on virtual CPU devices 25 to 48 us for one device, rounded up
here, and 94 to 213 us for four (`python -m benchmarks.pipeline`). The host's work is the same for an accelerator, and
we know of no publication that times it, so every device of the table has this until it is measured there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, each number with its `source`.

    Products: `flops_per_second` maps dtype names to the dense peak, of which large products reach `matmul_efficiency`.
    Each extent e of a product (rows, columns, inner) slows it by 1 + `half_extent` / e (0: not at all). With `cores`,
    products are cut into tiles that the cores take in waves, and each tile begins and ends in the time of `half_inner`
    steps along the inner dimension. Convolutions reach `convolution_efficiency` times the rate of products. `widened`
    maps dtypes for which the compiler has no arithmetic to those in which it computes instead.

    Memory: operators that compute little reach `memory_efficiency` of `memory_bytes_per_second`; one fused kernel takes
    at least `launch_seconds`. Elements change their order at `strided_bytes_per_second` (0: at no cost): in transposes,
    products whose batch dimensions come after others, convolutions whose channels do not come last, and collectives
    that cut or join another dimension than the first, for their larger side; at 0 a CPU's or GPU's copy the smaller
    side (`Resharder`). Batched products that are one call each,
    as on CPUs with the rows of the left operand last, take `product_seconds` more each; convolutions that are products
    of patches take `pixel_seconds` for each pixel of each patch, and gradients of max pooling for each element of each
    window.

    Host: arrays go to and from its memory at `host_bytes_per_second` (0: there is no way), by default what PCI Express
    3 x16 gives, the slowest such link of the table.

    Pipelines: the host takes `dispatch_seconds` to start a stage's task, which delays an idle device. Sending an array
    to the next stage takes `send_seconds` beside its bytes; the sender computes during the share `send_overlap`.

    Compiler: the share `collective_overlap` of collectives that gather weights ahead of their use, or reduce gradients
    during the backward pass, is hidden behind computing. Gradients are reduced in buckets of `bucket_nbytes` (0: one by
    one). With `fuses_attention` the scores of attention exist inside one kernel alone, forward and backward; with
    `unrolls` loops copy no slices, as if layers were written out: some software has these, XLA neither.
    """

    name: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    memory_nbytes: int
    memory_bytes_per_second: float
    launch_seconds: float
    source: str
    half_extent: float = 0.0
    cores: int = 0
    half_inner: float = 0.0
    memory_efficiency: float = 1.0
    strided_bytes_per_second: float = 0.0
    product_seconds: float = 0.0
    convolution_efficiency: float = 1.0
    pixel_seconds: float = 0.0
    host_bytes_per_second: float = HOST_BYTES_PER_SECOND
    dispatch_seconds: float = DISPATCH_SECONDS
    send_seconds: float = 0.0
    send_overlap: float = 1.0
    collective_overlap: float = 0.0
    bucket_nbytes: float = 0.0
    fuses_attention: bool = False
    unrolls: bool = False
    widened: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def achieved_bytes_per_second(self) -> float:
        """The rate at which operators read and write memory."""
        return self.memory_bytes_per_second * self.memory_efficiency

    def matmul_flops_per_second(self, dtype: str) -> float:
        """The rate that large matrix products of `dtype` reach; an unlisted dtype runs at the slowest listed peak."""
        peaks = self.flops_per_second
        return peaks.get(dtype, min(peaks.values())) * self.matmul_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds that one kind of collective was measured to take among `ranks` devices of a host, while all such groups
    communicate.

    `nbytes` is the larger side of one device's buffer, as for `collectives.seconds`. Of several measurements for one
    kind and number of ranks the slowest counts: long messages may leave caches that short ones stay in.
    """

    kind: str
    ranks: int
    alpha_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """`hosts` equal machines with `devices_per_host` devices each.

    `intra` is all links of a device to the others on its host, and `wiring` which of them it joins. `inter` is a host's
    link to the network, shared by its devices over `adapters`: each uses one, or a part of one. Collectives that were
    `measured` inside a host take the measured seconds, whatever `intra` is.
    """

    hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra: Link
    inter: Link
    adapters: int = 1
    wiring: Wiring = "switch"
    measured: tuple[Measured, ...] = ()

    def adapted(self, devices: int) -> float:
        """The part of a host's network link that some of its devices reach over their adapters, which are one
        at least.
        """
        return min(1.0, max(1, devices * self.adapters // self.devices_per_host) / self.adapters)

    def with_devices(self, per_host: int) -> HostGroup:
        """The same hosts with another number of devices each; fewer devices keep their part of the adapters and of the
        link.
        """
        adapters = max(1, self.adapters * min(per_host, self.devices_per_host) // self.devices_per_host)
        inter = replace(self.inter, bytes_per_second=self.inter.bytes_per_second * adapters / self.adapters)
        return replace(self, devices_per_host=per_host, adapters=adapters, inter=inter)

    @property
    def n_devices(self) -> int:
        """The number of devices of all hosts together."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        """The text that `parse_cluster` reads, such as `2x8:h100`, or `8:h100` for one host."""
        devices = f"{self.devices_per_host}:{self.device.name}"
        return devices if self.hosts == 1 else f"{self.hosts}x{devices}"


MOST_DEVICES = 2**20
"""The most devices of a cluster: planning lists them one by one, which takes 0.7 s for this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The hosts that a plan is for: groups of equal ones in order, whose devices are numbered host by host."""

    name: str
    groups: tuple[HostGroup, ...]

    def __post_init__(self) -> None:
        """Raises ClusterError for more devices than planning lists one by one."""
        if self.n_devices > MOST_DEVICES:
            each = " + ".join(f"{group.hosts:,} hosts x {group.devices_per_host:,}" for group in self.groups)
            rule = f"a cluster has at most {MOST_DEVICES:,} devices, and this has {self.n_devices:,}"
            raise ClusterError(explain(f"cluster {self.name[:60]!r}", rule, each, "count hosts and devices anew"))

    def __hash__(self) -> int:
        """A hash of the name, which tells most clusters apart: they are keys of many tables."""
        return hash(self.name)

    @property
    def n_devices(self) -> int:
        """The number of devices of all groups together."""
        return sum(group.n_devices for group in self.groups)

    def group(self) -> HostGroup:
        """The only host group. Raises ClusterError for a cluster of several kinds of hosts."""
        if len(self.groups) != 1:
            raise ClusterError(f"cluster {self.name!r} has {len(self.groups)} kinds of hosts, and a plan is for one")
        return self.groups[0]

    def to_json(self) -> dict[str, object]:
        """The cluster as plain dictionaries and lists; `from_json` gives an equal cluster back."""
        return {"name": self.name, "groups": [_group_json(group) for group in self.groups]}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The cluster that `to_json` described. Raises ClusterError, naming the field, for anything that is not one."""
        read = Fields.of(data, "the cluster", ("name", "groups"))
        groups = read.objects("groups", ("hosts", "devices_per_host", "device", "intra", "inter"), _OPTIONAL)
        if not groups:
            raise read.wrong("groups", "should be a list of at least one group of hosts", "write [{...}]")
        return cls(name=read.text("name"), groups=tuple(map(_host_group, groups)))

    def __str__(self) -> str:
        return self.name


def _group_json(group: HostGroup) -> dict[str, object]:
    """A group as plain dictionaries and lists; what was not measured is not mentioned."""
    written: dict[str, object] = asdict(group)
    del written["measured"]
    for name, usual in (("adapters", 1), ("wiring", "switch")):
        if written[name] == usual:
            del written[name]
    for name, link in (("intra", group.intra), ("inter", group.inter)):
        usual = asdict(Link(alpha_seconds=link.alpha_seconds, bytes_per_second=link.bytes_per_second))
        written[name] = {key: value for key, value in asdict(link).items() if key in _LINK or value != usual[key]}
    written["device"] = {
        name: value for name, value in asdict(group.device).items() if name not in _SEEN or value != _usual(name)
    }
    return written | ({"measured": [asdict(m) for m in group.measured]} if group.measured else {})


def _usual(name: str) -> object:
    """The default value of a device's field."""
    device_field = next(field for field in fields(DeviceSpec) if field.name == name)
    return device_field.default if device_field.default_factory is MISSING else device_field.default_factory()


def _host_group(read: Fields) -> HostGroup:
    return HostGroup(
        hosts=read.count("hosts"),
        devices_per_host=read.count("devices_per_host"),
        device=_device(read.object("device", _DEVICE, _SEEN)),
        intra=_link(read, "intra"),
        inter=_link(read, "inter"),
        adapters=read.count("adapters") if "adapters" in read.data else 1,
        wiring=_wiring(read) if "wiring" in read.data else "switch",
        measured=tuple(map(_measured, read.objects("measured", tuple(Measured.__dataclass_fields__)))),
    )


def _wiring(read: Fields) -> Wiring:
    name = read.text("wiring")
    if name not in WIRINGS:
        raise read.wrong("wiring", f"should be one of: {', '.join(WIRINGS)}", close(name, WIRINGS) or "leave it out")
    return name


def _measured(read: Fields) -> Measured:
    kind = read.text("kind")
    if kind not in KINDS:
        raise read.wrong("kind", f"should be one of: {', '.join(KINDS)}", close(kind, KINDS) or "leave it out")
    return Measured(
        kind=kind,
        ranks=read.count("ranks"),
        alpha_seconds=read.at_least_0("alpha_seconds"),
        bytes_per_second=read.rate("bytes_per_second"),
    )


_LINK = ("alpha_seconds", "bytes_per_second")
_OPTIONAL = ("adapters", "wiring", "measured")
_RATES = (
    *("half_extent", "half_inner", "strided_bytes_per_second", "product_seconds", "pixel_seconds"),
    *("host_bytes_per_second", "dispatch_seconds", "send_seconds", "bucket_nbytes"),
)
_PARTS = ("send_overlap", "collective_overlap")
_EFFICIENCIES = ("memory_efficiency", "convolution_efficiency")
_SEEN = (*_RATES, *_PARTS, *_EFFICIENCIES, "cores", "fuses_attention", "unrolls", "widened")
_DEVICE = tuple(name for name in DeviceSpec.__dataclass_fields__ if name not in _SEEN)


def _device(read: Fields) -> DeviceSpec:
    peaks = cast(Mapping[str, object], read.data["flops_per_second"])
    dtypes = tuple(peaks) if isinstance(peaks, dict) and peaks else ("float32",)
    rates = read.object("flops_per_second", dtypes)
    return DeviceSpec(
        name=read.text("name"),
        flops_per_second={dtype: rates.rate(dtype) for dtype in dtypes},
        matmul_efficiency=read.rate("matmul_efficiency"),
        memory_nbytes=read.count("memory_nbytes"),
        memory_bytes_per_second=read.rate("memory_bytes_per_second"),
        launch_seconds=read.at_least_0("launch_seconds"),
        source=read.text("source"),
        cores=int(read.at_least_0("cores")),
        fuses_attention=read.flag("fuses_attention"),
        unrolls=read.flag("unrolls"),
        widened=_texts(read, "widened"),
        **{name: read.rate(name) for name in _EFFICIENCIES if name in read.data},
        **{name: read.at_least_0(name) for name in _RATES if name in read.data},
        **{name: read.part(name) for name in _PARTS if name in read.data},
    )


def _texts(parent: Fields, name: str) -> dict[str, str]:
    """The value of a field that maps names to names; empty where the field is missing."""
    if not isinstance(named := parent.data.get(name, {}), dict):
        raise parent.wrong(name, "should be an object", 'write {"bfloat16": "float32"}')
    keys = tuple(cast(Mapping[str, object], named))
    read = parent.object(name, keys) if keys else None
    return {key: read.text(key) for key in keys} if read else {}


def _link(parent: Fields, name: str) -> Link:
    read = parent.object(name, _LINK, tuple(n for n in Link.__dataclass_fields__ if n not in _LINK))
    return Link(
        alpha_seconds=read.at_least_0("alpha_seconds"),
        bytes_per_second=read.rate("bytes_per_second"),
        reduces=read.flag("reduces"),
        low_latency=read.flag("low_latency"),
        congestion=read.at_least_0("congestion"),
        sent=read.share("sent", 1.0),
    )
