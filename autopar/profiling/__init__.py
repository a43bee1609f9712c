"""Measured steps: timed, profiled, compared with predictions, and kept to calibrate later plans."""

from autopar.profiling.calibration import NAME as CALIBRATION_NAME
from autopar.profiling.calibration import Calibration, Factors
from autopar.profiling.events import COMPUTE, Event, Profile, covered_seconds, profiled, seconds_by_cause
from autopar.profiling.report import StepReport, measured_shares, predicted_shares
from autopar.profiling.steps import Clock, Stepper, Steps, timed, warm_up
from autopar.profiling.timeline import Run, measured_spans

__all__ = [
    "CALIBRATION_NAME",
    "COMPUTE",
    "Calibration",
    "Clock",
    "Event",
    "Factors",
    "Profile",
    "Run",
    "StepReport",
    "Stepper",
    "Steps",
    "covered_seconds",
    "measured_shares",
    "measured_spans",
    "predicted_shares",
    "profiled",
    "seconds_by_cause",
    "timed",
    "warm_up",
]
