"""Training state on disk: saved sharded and in the background, restored under any other plan, bit for bit."""

from autopar.checkpoint.checkpoints import Checkpoints, Saved, resumed_in
from autopar.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Saved", "resumed_in"]
