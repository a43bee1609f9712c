"""One program on many processes: how they start, agree on what they run, and hand arrays to each other."""

from autopar.distributed.agreement import Processes, among, digest_of
from autopar.distributed.connections import Connections
from autopar.distributed.initialization import made
from autopar.distributed.pieces import nowhere, placed
from autopar.distributed.startup import initialize

__all__ = ["Connections", "Processes", "among", "digest_of", "initialize", "made", "nowhere", "placed"]
