"""Seconds to send an array from the devices of one stage to those of the next.

Sender i of s holds the i-th of s equal shares, receiver j of r wants the j-th of r, and everything crosses once. With
f_d the share of the array that device d sends or receives, and g_h the share that leaves or enters host h, n bytes take

    s + a_i + max f_d n / w_i                                    on one host
    s + a_x + max(max f_d n / w_i, max g_h n / w_x)              else: a host's devices share its link

for links of latency a and bandwidth w (`i` inside a host, `x` across), w_x falling with the hosts that talk. Of w_i
counts what the wiring has between two devices; of w_x, the adapters of those that send; of both, what one array reaches
(`Link.sent`). s is `DeviceSpec.send_seconds`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from passes.cluster.cluster import HostGroup
from passes.cluster.collectives import Cost
from passes.cluster.wiring import is_torus, reach


def boundary_seconds(hosts: HostGroup, senders: range, receivers: range, nbytes: int) -> float:
    """Seconds to send an array of `nbytes` from some devices of a cluster to others; 0 for no bytes."""
    if not nbytes:
        return 0.0
    moved = min(senders.start, receivers.start) // hosts.devices_per_host * hosts.devices_per_host
    cost = boundary_cost(hosts, _before(senders, moved), _before(receivers, moved))
    return cost.latency_seconds + nbytes * cost.seconds_per_byte


@lru_cache(maxsize=65536)
def boundary_cost(hosts: HostGroup, senders: range, receivers: range) -> Cost:
    """The latency of sending an array, and seconds for every byte of it."""
    pieces = _pieces(senders, receivers)
    torus = is_torus(hosts.wiring)
    crossing = [] if torus else [p for p in pieces if _host(hosts, p.sender) != _host(hosts, p.receiver)]
    near = {(p.sender, p.receiver) for p in pieces if p.sender != p.receiver} - {
        (p.sender, p.receiver) for p in crossing
    }
    share = 1.0 if hosts.wiring == "switch" else min((reach(hosts, pair).share for pair in near), default=1.0)
    rate = hosts.intra.bytes_per_second * hosts.intra.sent * share
    device = max(1 / len(senders), 1 / len(receivers)) / rate
    start = hosts.device.send_seconds
    if not crossing:
        return Cost(latency_seconds=start + hosts.intra.alpha_seconds, seconds_per_byte=device)
    return Cost(
        latency_seconds=start + hosts.inter.alpha_seconds,
        seconds_per_byte=max(device, _crossing_seconds(hosts, crossing)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The part of an array that one device sends to another, as a share of the whole array."""

    sender: int
    receiver: int
    share: float


def _pieces(senders: range, receivers: range) -> list[_Piece]:
    """The pieces that every device sends to every other."""
    n_senders, n_receivers = len(senders), len(receivers)
    ends = sorted({i * n_receivers for i in range(n_senders + 1)} | {j * n_senders for j in range(n_receivers + 1)})
    return [
        _Piece(
            sender=senders[start // n_receivers],
            receiver=receivers[start // n_senders],
            share=(end - start) / (n_senders * n_receivers),
        )
        for start, end in pairwise(ends)
    ]


def _crossing_seconds(hosts: HostGroup, crossing: Sequence[_Piece]) -> float:
    """Seconds per byte of the array on the busiest network link of a host, over the adapters of the devices that send
    or receive there.
    """
    ends = [("out", _host(hosts, p.sender), p.sender, p.share) for p in crossing]
    ends += [("in", _host(hosts, p.receiver), p.receiver, p.share) for p in crossing]
    talking = {host for _, host, _, _ in ends}
    rate = hosts.inter.bytes_per_second * hosts.inter.sent * len(talking) ** -hosts.inter.congestion
    shares, devices = defaultdict[tuple[str, int], float](float), defaultdict[tuple[str, int], set[int]](set)
    for way, host, device, share in ends:
        shares[way, host] += share
        devices[way, host].add(device)
    return max(share / (rate * hosts.adapted(len(devices[link]))) for link, share in shares.items())


def _host(hosts: HostGroup, device: int) -> int:
    return device // hosts.devices_per_host


def _before(devices: range, first: int) -> range:
    return range(devices.start - first, devices.stop - first)
