"""Steps while they run: timed, profiled, held against what was predicted, and kept for the next plan's calibration."""

from autopar.profiling.calibration import NAME as CALIBRATION_NAME
from autopar.profiling.calibration import Calibration, Factors
from autopar.profiling.events import profiled, seconds_by_cause
from autopar.profiling.report import StepReport, measured_shares
from autopar.profiling.steps import Clock, Stepper, Steps, timed, warm_up

__all__ = [
    "CALIBRATION_NAME",
    "Calibration",
    "Clock",
    "Factors",
    "StepReport",
    "Stepper",
    "Steps",
    "measured_shares",
    "profiled",
    "seconds_by_cause",
    "timed",
    "warm_up",
]
