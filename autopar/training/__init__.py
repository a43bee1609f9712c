"""The surroundings of a train step: batches fetched ahead, and a line for each step."""

from autopar.training.batches import Batches
from autopar.training.step_log import StepLog

__all__ = ["Batches", "StepLog"]
