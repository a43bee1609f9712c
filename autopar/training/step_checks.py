"""Regular checks during training: values that are not finite, copies that differ, and processes that are slow."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.compilation import Compilation
from autopar.distributed import Processes, among
from autopar.errors import ArgumentError, DeviceError, DisagreementError, explain
from autopar.profiling import Profile, predicted_shares
from autopar.training.pace import Pace, Straggler, compute_seconds, planned_seconds, stragglers
from autopar.training.replicas import findings, first_difference
from autopar.training.step_log import Record, as_text

_SAMPLED = 3
"""The number of steps before a check that are waited for and profiled; other steps may run ahead."""


@dataclass(slots=True, kw_only=True)
class StepChecks:
    """Checks to be called after each step, which look at every `every`-th one; all processes must make the same calls.

    A value that is not finite is a DeviceError, and copies of a part of an array that differ are a DisagreementError,
    with the first leaf, its process, host and device. A process that takes `slow` times as long as it should is a
    warning, once, with its host, and a record that the first process gives to `write`.
    """

    compilation: Callable[[], Compilation | None]
    every: int
    slow: float
    write: Callable[[Record], None] = as_text
    _steps: int = field(default=0, init=False)
    _sample: _Sample | None = field(default=None, init=False)
    _named: set[int] = field(default_factory=set[int], init=False)

    def __post_init__(self) -> None:
        is_count = isinstance(self.every, Integral) and not isinstance(self.every, bool) and self.every >= 1
        if not is_count or not isinstance(self.slow, Real) or not self.slow > 1:
            rule = "every should be a whole number from 1, and slow a number above 1"
            argument = f"checks(every={self.every!r:.40}, slow={self.slow!r:.40})"
            raise ArgumentError(explain(argument, rule, "", "write, say, every=100, slow=1.5"))

    def __call__(self, step: int, state: Any, **values: Any) -> None:
        """Checks the state and the values of a step, if it is due.

        Raises DeviceError for NaN and infinity, and DisagreementError for copies that differ.
        """
        self._steps += 1
        remaining = -self._steps % self.every
        processes = self._processes()
        if processes and remaining <= _SAMPLED:
            _wait((state, values))
            if self._sample:
                self._sample.add(processes)
            elif remaining:
                self._sample = _Sample()
        if remaining:
            return
        if processes and self._sample:
            sample, self._sample = self._sample, None
            self._judge(step, sample, processes)
        self._compare(step, {"state": state, **values}, processes)
        if processes and self.every == 1:
            self._sample = _Sample()

    def _processes(self) -> Processes | None:
        """The processes of the function that ran last; None if it is this one alone."""
        compilation = self.compilation()
        if not jax.distributed.is_initialized():
            return None
        return among(compilation.present() if compilation else jax.devices())

    def _compare(self, step: int, checked: Any, processes: Processes | None) -> None:
        """Raises the error for a leaf that is not finite on some process, or whose copies differ."""
        paths = tree_flatten_with_path(checked)[0]
        mine = findings((f"{path[0].key}{keystr(path[1:])}", leaf) for path, leaf in paths)
        text = json.dumps(asdict(mine))
        texts = processes.gather("the checks of a step", text) if processes else (text,)
        of_all = [json.loads(each) for each in texts]
        ranks = processes.ranks if processes else (0,)
        for rank, other in zip(ranks, of_all, strict=True):
            if other["not_finite"]:
                what = f"{other['not_finite']} of step {step} on {_name(rank, processes)}"
                remedy = "restore a checkpoint from before, with a smaller learning rate or other data"
                raise DeviceError(explain(what, "it has values that are not finite", "", remedy))
        if difference := first_difference([other["digests"] for other in of_all]):
            part, rank, device, other_rank, other_device = difference
            what = f"{part} of step {step} on {_place(ranks[rank], device, processes)}"
            rule = f"it is a copy of what {_place(ranks[other_rank], other_device, processes)} has, and differs"
            remedy = "restore a checkpoint from before; if it comes again, take that device out, or see what it reads"
            raise DisagreementError(explain(what, rule, "", remedy))

    def _judge(self, step: int, sample: _Sample, processes: Processes) -> None:
        """Warns of processes that are slow, once each."""
        pace = sample.pace(self.compilation(), processes)
        texts = processes.gather("the times of a step", json.dumps(asdict(pace)))
        paces = [Pace(**json.loads(text)) for text in texts]
        for late in stragglers(paces, self.slow):
            if processes.leads and late.rank not in self._named:
                self._named.add(late.rank)
                self._report(step, late, processes)

    def _report(self, step: int, late: Straggler, processes: Processes) -> None:
        rank = processes.ranks[late.rank]
        pace, host = late.pace, processes.host(rank)
        rule = (
            f"a step takes it {pace.alone:.3g} s of its own, {late.ratio:.1f} times the {late.due:.3g} s that the plan "
            f"gives it at the pace of the others: {pace.host:.3g} s in which it has not called the step, and "
            f"{pace.compute:.3g} s in which its devices compute (plan: {pace.planned:.3g} s)"
        )
        remedy = "see what else that host runs, its clock rate and its input; or go on without it"
        warnings.warn(explain(f"process {rank} on host {host} is slow", rule, "", remedy), stacklevel=4)
        seconds = {"seconds": pace.step, "own": pace.alone, "due": late.due, "slow": late.ratio}
        self.write({"step": step, "process": rank, "host": host, **seconds})


class _Sample:
    """The steps of this process before a check, each of which is waited for and profiled."""

    def __init__(self) -> None:
        self._profile = Profile()
        self._host: list[float] = []
        self._start = self._last = time.perf_counter()

    def add(self, processes: Processes) -> None:
        """Counts a step that has just ended."""
        self._host.append(max(0.0, processes.begun[0] - self._last))
        self._last = time.perf_counter()

    def pace(self, compilation: Compilation | None, processes: Processes) -> Pace:
        """The seconds of a step on average."""
        count, devices = max(1, len(self._host)), jax.local_devices()
        return Pace(
            step=(self._last - self._start) / count,
            host=sum(self._host) / count,
            compute=compute_seconds(self._profile.end(), len(devices)) / count,
            planned=_planned(compilation, processes.rank),
        )


def _planned(compilation: Compilation | None, rank: int) -> float:
    """The seconds in which a device of a process computes in a step, by the plan of the last function that ran."""
    if compilation is None:
        return 0.0
    shares = [(share.devices, share.seconds) for share in predicted_shares(compilation.plan())]
    return planned_seconds(shares, [device.process_index for device in compilation.present()], rank)


def _wait(results: Any) -> None:
    """Waits for the parts of results on this process."""
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(results) if getattr(leaf, "addressable_shards", ())])


def _name(rank: int, processes: Processes | None) -> str:
    return processes.name(rank) if processes else "this process"


def _place(rank: int, device: int, processes: Processes | None) -> str:
    return f"device {device} of {_name(rank, processes)}" if device >= 0 else _name(rank, processes)
