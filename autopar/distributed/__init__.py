"""One program on many processes: how they start, agree on what they run, and send arrays to each other."""

from autopar.distributed.agreement import Processes, among, digest_of
from autopar.distributed.connections import LARGE_NBYTES, Connections
from autopar.distributed.initialization import made
from autopar.distributed.pieces import check_here, nowhere, placed
from autopar.distributed.startup import LOST_SECONDS, initialize
from autopar.distributed.streams import Memory
from autopar.distributed.watch import LOST

__all__ = [
    "LARGE_NBYTES",
    "LOST",
    "LOST_SECONDS",
    "Connections",
    "Memory",
    "Processes",
    "among",
    "check_here",
    "digest_of",
    "initialize",
    "made",
    "nowhere",
    "placed",
]
