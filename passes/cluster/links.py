"""The shares of their data sheets that links reach, and the time of a hop, each with its source."""

from __future__ import annotations

from dataclasses import replace

from passes.cluster.cluster import Link

LINK_SHARE = 0.74
"""The share of a link's data sheet that collectives get: H200 0.81, B200 0.76, A100 0.68 on NVLink."""


ALPHA_SECONDS = 5e-6
"""Seconds that a hop of long messages takes to start on NVLink or PCI Express: 3.4 and 5.7 us in a host, up to 1.9
times that in rings over several (NCCL, src/graph/tuning.cc, ring and Simple)."""


NETWORK_ALPHA_SECONDS = 14e-6
"""Seconds that a hop of long messages takes to start between hosts (NCCL, src/graph/tuning.cc, Simple: 9.6 us in 2.8,
14 since)."""


NETWORK_SHARE = 0.55
"""The share of the data sheet of a host's adapters that collectives get in training: 0.42 on Selene (57, 53 and 85 GB/s
of 200 where 2, 4 and 8 groups a host sum gradients, 163 where one does, 101 for the largest model: Megatron-LM SC 2021,
Figs. 14 and 15 and section 5.9), 0.45 to 0.65 on Galvatron's hosts, 0.74 and less the more hosts there are on AWS
p5."""


SENT_INSIDE = 0.36
SENT_ACROSS = 0.85
"""The shares of collectives' bandwidth that one array gets from stage to stage, in a host and between hosts: NCCL's
send and receive use few channels. 73 of 204 GB/s on NVLink (Zero Bubble, table 6, hosts of 8 A100: 10.5 to 28.3 MB take
0.19 ms and 73 GB/s); 9.3 of 11 GB/s of an adapter (Megatron-LM SC 2021, section 5.9: 892 GB/s both ways over the 48
adapters of a bisection)."""


SEND_SECONDS = 190e-6
"""Seconds that an array takes from stage to stage beside its bytes, by the same fit to Zero Bubble's table 6."""


SEND_OVERLAP = 0.0
"""The share of a transfer between stages during which its sender computes: with the times of Zero Bubble's table 6
given, its table 4 (36 runs on A100) is predicted 5.9 % too fast if it is 1 (order within a model: tau 0.71), 3.0 % if
it is 0 (0.93).
"""


COLLECTIVE_OVERLAP = 0.5
"""The share of gathers of weights and reductions of gradients that is hidden behind computing, where there is enough of
that (`passes/placement/background.py`): XLA starts them asynchronously, and waits after the few products that its
schedule has between. Half is chosen, not measured: neither all nor nothing is then more than twice as far. Of GPT 350M
on 8 H100 under XLA:GPU's default scheduler, 24 of 25 buckets of gradients, data parallel, and 41 of 51 gathers of
ZeRO-3 have 1 to 11 products beside them, the others none (`python -m benchmarks.compilers`, jax 0.10.2). XLA:TPU's
scheduler hides latency by default; that it hides as much is assumed."""


BUCKET_NBYTES = 30 * 2**20
"""Bytes up to which XLA combines collectives of one kind (xla, collective_utils.h, kDefaultAllReduceCombineThreshold
and its siblings); that XLA:TPU combines as many is assumed."""


PCIE_SHARE = 0.5
"""The share of PCI Express that is left without peer access, assumed: what one device sends another goes through the
host's memory.
"""


ICI_SHARE = 0.65
"""The share of all of a TPU's links that collectives get: 236 of 360 GB/s, psum on 256 v6e chips
(AI-Hypercomputer/tpu-recipes), as bus bandwidth.

An axis of the mesh that rides on one dimension of the torus has a half (2D) or a third (3D) of it, and half of that
again where the dimension does not wrap around (`wiring.reach`).
"""


ICI_ALPHA_SECONDS = 1e-6
"""Seconds that a hop between chips takes to start, about (jax-ml/scaling-book, sharding.md)."""


def plain(gb_per_second: float, alpha_seconds: float) -> Link:
    """A link of this many GB/s without protocols of less latency."""
    return Link(alpha_seconds=alpha_seconds, bytes_per_second=gb_per_second * 1e9)


def gpu_link(gb_per_second: float, *, reduces: bool = False) -> Link:
    """The link of a GPU to the others in its host, driven by NCCL."""
    link = plain(gb_per_second, ALPHA_SECONDS)
    return replace(link, reduces=reduces, low_latency=True, sent=SENT_INSIDE)


def network(gb_per_second: float) -> Link:
    """A host's link to the network by its data sheet, on a fabric that gives every host its full bandwidth."""
    link = plain(NETWORK_SHARE * gb_per_second, NETWORK_ALPHA_SECONDS)
    return replace(link, low_latency=True, sent=SENT_ACROSS)
