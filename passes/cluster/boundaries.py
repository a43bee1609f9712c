"""Seconds to send an array from the devices of one stage to those of the next.

Sender i of s holds the i-th of s equal shares, receiver j of r wants the j-th of r, and everything crosses once. With
f_d the share of the array that device d sends or receives, and g_h the share that leaves or enters host h, n bytes take

    a_i + max f_d n / w_i                                        on one host
    a_x + max(max f_d n / w_i, max g_h n / w_x)                  else: a host's devices share its link

for links of latency a and bandwidth w (`i` inside a host, `x` across), w_x falling with the hosts that talk.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise

from passes.cluster.cluster import HostGroup
from passes.cluster.collectives import Cost


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
    device = max(1 / len(senders), 1 / len(receivers)) / hosts.intra.bytes_per_second
    leaving, entering = _between_hosts(hosts.devices_per_host, senders, receivers)
    if not leaving:
        return Cost(latency_seconds=hosts.intra.alpha_seconds, seconds_per_byte=device)
    rate = hosts.inter.bytes_per_second * len({*leaving, *entering}) ** -hosts.inter.congestion
    host = max(*leaving.values(), *entering.values()) / rate
    return Cost(latency_seconds=hosts.inter.alpha_seconds, seconds_per_byte=max(device, host))


def _between_hosts(per_host: int, senders: range, receivers: range) -> tuple[dict[int, float], dict[int, float]]:
    """The share of the array that leaves each host, and the share that enters each."""
    leaving, entering = defaultdict[int, float](float), defaultdict[int, float](float)
    n_senders, n_receivers = len(senders), len(receivers)
    ends = sorted({i * n_receivers for i in range(n_senders + 1)} | {j * n_senders for j in range(n_receivers + 1)})
    for start, end in pairwise(ends):
        source = senders[start // n_receivers] // per_host
        target = receivers[start // n_senders] // per_host
        if source != target:
            leaving[source] += (end - start) / (n_senders * n_receivers)
            entering[target] += (end - start) / (n_senders * n_receivers)
    return leaving, entering


def _before(devices: range, first: int) -> range:
    return range(devices.start - first, devices.stop - first)
