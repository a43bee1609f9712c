"""Tools around a train step: batches fetched ahead, a log line for each step, and regular checks."""

from autopar.training.batches import Batches
from autopar.training.step_checks import StepChecks
from autopar.training.step_log import Record, StepLog, as_text

__all__ = ["Batches", "Record", "StepChecks", "StepLog", "as_text"]
