"""Checkpoints of a training run in a folder that all its processes share."""

from __future__ import annotations

import functools
import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.checkpoint.arrays import Arrays, Shards, check_leaf, check_paths, words, written
from autopar.checkpoint.background import awaited, begun
from autopar.checkpoint.digests import digest, partial_sum, pieces_of
from autopar.checkpoint.folder import Folder
from autopar.checkpoint.manifest import STATE, CheckpointError, Leaf, Manifest, RefusedError, files_of
from autopar.checkpoint.numbers import as_like, as_stored, dtype_name
from autopar.checkpoint.plain import decoded, encoded, fields_of_plan, key, whole_number, words_of_key
from autopar.checkpoint.survey import Survey
from autopar.distributed import Memory, Processes, among
from autopar.errors import ArgumentError, PlanningError, check_folder, explain
from autopar.jax_compat import PyTreeDef
from passes.plan import AnyPlan, plan_from_json

KEEP = 3
"""The number of checkpoints that are kept: the last may turn out to be damaged."""

_MEMORY = Memory(most_nbytes=math.inf)
"""Buffers for copies of states on CPUs, as large as one state from the first save on."""

_DISPATCH_SECONDS = 0.02
"""Seconds that the next step has to be dispatched before a save is written: Python runs one thread at a time and
switches every 5 ms (`sys.getswitchinterval`), so that dispatching, which gives way a few times, takes 0.6 ms or 9.
"""

_RESUMED: ContextVar[str] = ContextVar("autopar folder to resume in", default="")


def resumed_in(folder: str) -> None:
    """Makes a folder the default of `Checkpoints()`, for a script that runs inside this context."""
    _RESUMED.set(folder)


@functools.cache
def _terminated() -> threading.Event:
    """An event that is set when SIGTERM arrives, which from now on has no other effect."""
    arrived = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: arrived.set())
    return arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint as it is restored: the state, and what was saved beside it."""

    step: int
    state: Any
    position: Any = None
    rng: Any = None
    plan: AnyPlan | None = None


class Checkpoints:
    """The checkpoints in `folder`, of which the last `keep` good ones are kept; by default the folder of `autopar run
    --resume`.

    The one that was saved last is kept as well, even if `keep` later steps have one. All processes of a program must
    make the same calls in the same order.
    """

    def __init__(self, folder: str | Path | None = None, *, keep: int = KEEP) -> None:
        folder = folder or _RESUMED.get()
        if not folder:
            rule = "there is no folder, and none that the script is to resume in"
            raise ArgumentError(explain("Checkpoints()", rule, "", "pass one, or start with `autopar run --resume`"))
        if not isinstance(keep, SupportsIndex) or index(keep) < 1:
            raise ArgumentError(explain(f"keep={keep!r:.60}", "should be a whole number from 1", "", "write, say, 3"))
        check_folder(f"Checkpoints({folder!r:.60})", folder, "checkpoints are in a folder")
        self.keep, self._folder = keep, Folder(Path(folder).absolute())
        self._processes = among(jax.devices()) if jax.distributed.is_initialized() else None
        self._arrays: Arrays | None = None
        self._writing: Future[None] | None = None
        self._survey = Survey(self._processes)
        self._shared = ""  # the name under which the processes have told each other of the last save

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, the last one first; some may be damaged or unfinished."""
        return self._folder.steps()

    def save(
        self,
        step: int,
        state: Any,
        *,
        position: Any = None,
        rng: Any = None,
        plan: AnyPlan | None = None,
    ) -> None:
        """Begins to save the state of a step, which may be donated to the next step when this returns.

        It is a checkpoint only when all of it is there. `position` is where the data goes on, as plain data (such as a
        count of batches; tuples come back as lists), `rng` a key or an array, `plan` the step's plan.

        Raises CheckpointError where an earlier one could not be written, ArgumentError for a step, a state or a
        position that cannot be, or where the step's folder is not a checkpoint's; warns where there are checkpoints of
        later steps, of which `restore` gives the last.
        """
        step = whole_number(step)
        self.wait()
        self._folder.check_free(step)
        self._orbax()
        check_paths([path for path, _ in tree_flatten_with_path(state)[0]])
        paths, leaves = _flattened(state)
        for path, leaf in zip(paths, leaves, strict=True):
            check_leaf(path, leaf)
        if self._leads and (later := self._folder.later(step)):
            warnings.warn(_behind(self._folder.path, step, later), stacklevel=2)
        is_global = self._survey.of(leaves)
        copies = [written(leaf, everywhere, _MEMORY) for leaf, everywhere in zip(leaves, is_global, strict=True)]
        manifest = Manifest(
            step=step,
            leaves={
                path: Leaf(shape=tuple(np.shape(leaf)), dtype=dtype_name(leaf), digest="")
                for path, leaf in zip(paths, leaves, strict=True)
            },
            files={},
            position=encoded(position),
            rng=words_of_key(rng),
            plan=fields_of_plan(plan),
        )
        name = self._processes.fresh_name() if self._processes else ""
        read = threading.Event()
        tree = jax.tree.structure(state)
        self._writing = begun(_written_by, self._write, self._folder.of(step), manifest, copies, tree, name, read)
        if not _are_copied(copies):
            read.wait()

    def preempted(self, step: int) -> bool:
        """Whether to save and leave now: a process has received SIGTERM, and all have come to this step.

        All processes ask at each step, and get the answer True at the same one.
        """
        if self._processes:
            return multihost_utils.reached_preemption_sync_point(step)
        return _terminated().is_set()

    def wait(self) -> None:
        """Waits until what was saved is on the disk. Raises CheckpointError where it could not be written."""
        writing, self._writing = self._writing, None
        if writing and (error := awaited(writing)):
            raise error

    def restore(self, like: Any) -> Saved | None:
        """The last good checkpoint, with arrays in the shardings of `like`; None where there is none at all.

        `like` is a state of the same pytree and types, made of arrays or `jax.ShapeDtypeStruct`s, as
        `train_step.init(...)` makes it. A checkpoint that is unfinished, truncated, corrupted or of another program is
        skipped with a warning that names it and the reason, and the one before it is used. Raises CheckpointError if
        there are some, and none can be used.
        """
        self.wait()
        refused: list[str] = []
        for step, reason, is_unfinished in self._candidates():
            try:
                if reason:
                    raise RefusedError(reason)
                return self._read(step, like)
            except RefusedError as error:
                text = f"{self._folder.place(step)}: {error}"
                warnings.warn(f"a checkpoint is not used: {text}", stacklevel=2)
                refused += [] if is_unfinished else [text]  # a run ended before it had saved for the first time
        if refused:
            rule = f"none of {len(refused)} can be used: " + "; ".join(refused)
            remedy = "restore the state of the program that wrote them, or choose an empty folder"
            raise CheckpointError(explain(f"checkpoints in {self._folder.path}", rule, "", remedy))
        return None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    @property
    def _leads(self) -> bool:
        return self._processes is None or self._processes.leads

    def _orbax(self) -> Arrays:
        self._arrays = self._arrays or Arrays.of(self._processes)
        return self._arrays

    def _write(
        self, manifest: Manifest, copies: Sequence[Any], tree: PyTreeDef, name: str, read: threading.Event
    ) -> None:
        """Writes a checkpoint, in the background; `read` is set as soon as no more is read from devices."""
        arrays, folder, processes = self._orbax(), self._folder.of(manifest.step), self._processes
        if _are_copied(copies):
            time.sleep(_DISPATCH_SECONDS)
        try:
            pieces = [[] if copy is None else pieces_of(copy, is_global=isinstance(copy, Shards)) for copy in copies]
            if self._leads:
                self._folder.begin(manifest.step)
            arrays.save(folder / STATE, jax.tree.unflatten(tree, copies))
        finally:
            read.set()
        sums = [partial_sum(parts, copy.shape if parts else ()) for parts, copy in zip(pieces, copies, strict=True)]
        arrays.checkpointer.wait_until_finished()
        of_all = _gathered(processes, name, sums) if processes else [sums]
        if self._leads:
            done = replace(manifest, leaves=_digested(manifest, of_all), files=files_of(folder))
            done.write(folder)
            self._folder.prune(self.keep, manifest.step)
        if processes and self._leads:
            processes.share(f"{name}/done", "")
            if self._shared:  # a process gives its sums once it has read the end of the save before
                processes.forget(self._shared)
            self._shared = name
        elif processes:
            processes.shared(f"{name}/done", processes.ranks[0])

    def _candidates(self) -> list[tuple[int, str, bool]]:
        """(step, reason it is no checkpoint or empty, whether it is unfinished), the last step first."""
        processes, listed = self._processes, lambda: json.dumps(self._folder.candidates())
        return json.loads(processes.broadcast("the checkpoints", listed) if processes else listed())

    def _read(self, step: int, like: Any) -> Saved:
        """A checkpoint. Raises RefusedError, on all processes, with the reason why it cannot be used.

        Whatever one of them meets, all come to the same exchanges in the same order.
        """
        reason, state, manifest, stored, folder = "", None, None, None, self._folder.place(step)
        try:
            manifest = Manifest.read(folder)
            _check_types(manifest, stored := as_stored(like, manifest))
            state = _restored(self._orbax(), folder, stored)
        except RefusedError as error:
            reason = str(error)
        reason = next(filter(None, self._of_all(f"reading the checkpoint of step {step}", reason)), "")
        if reason or manifest is None:
            raise RefusedError(reason)
        leaves = jax.tree.leaves(state)
        is_global = self._survey.of(leaves)
        sums = [_sum(leaf, everywhere) for leaf, everywhere in zip(leaves, is_global, strict=True)]
        of_all = self._of_all(f"the checkpoint of step {step}", sums)
        if reason := _difference(manifest, _flattened(like)[0], of_all):
            raise RefusedError(reason)
        state = as_like(state, stored, like)
        position, rng = decoded(manifest.position), key(manifest.rng)
        return Saved(step=step, state=state, position=position, rng=rng, plan=_plan(manifest, folder))

    def _of_all(self, topic: str, fields: Any) -> list[Any]:
        """The fields that each process gives, as JSON data, by rank."""
        text = json.dumps(fields)
        return [json.loads(text) for text in (self._processes.gather(topic, text) if self._processes else [text])]


def _written_by(write: Callable[..., None], folder: Path, *args: Any) -> None:
    """Makes a checkpoint in a folder. Raises CheckpointError, for who waits for it, or for the end of the program."""
    try:
        write(*args)
    except BaseException as error:
        rule = f"it could not be written: {_both_ends(repr(error))}"
        remedy = "see that all processes can write to the folder, and that the disk is not full"
        raise CheckpointError(explain(f"the checkpoint {folder}", rule, "", remedy)) from error


def _behind(folder: Path, step: int, later: Sequence[int]) -> str:
    """The warning about a step that is saved while there are checkpoints of these later ones."""
    steps = ", ".join(map(str, later))
    rule = f"{folder} has checkpoints of later steps ({steps}), of which restore gives the last good one"
    remedy = "to go on from this one, delete the later ones, or choose another folder for this run"
    return explain(f"save(step={step})", rule, "", remedy)


def _restored(arrays: Arrays, folder: Path, like: Any) -> Any:
    """The state in a checkpoint's folder. Raises RefusedError where Orbax cannot read it."""
    try:
        return arrays.restore(folder / STATE, like)
    except Exception as error:  # of whatever kind: what is on the disk is not what was written
        reason = f"it cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise RefusedError(reason) from error


def _plan(manifest: Manifest, folder: Path) -> AnyPlan | None:
    """The plan in a manifest; None, with a warning, where it is of an autopar that wrote plans otherwise: the state is
    good all the same.
    """
    try:
        return manifest.plan and plan_from_json(manifest.plan)
    except PlanningError as error:
        warnings.warn(f"{folder}: the state is restored without the plan beside it: {error}", stacklevel=4)
        return None


def _flattened(state: Any) -> tuple[list[str], list[Any]]:
    """The paths and leaves of a pytree."""
    pairs = tree_flatten_with_path(state)[0]
    return [keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]


def _sum(leaf: Any, is_global: bool) -> int:
    """The sum for the digest over the parts of a leaf that this process accounts for."""
    plain = words(leaf) if is_global else np.array(words(leaf))
    return partial_sum(pieces_of(plain, is_global=is_global), np.shape(plain))


def _gathered(processes: Processes, name: str, sums: list[int]) -> list[list[int]]:
    """The sums of all processes, exchanged under a name of their own, as main threads exchange other things
    meanwhile.
    """
    processes.share(f"{name}/{processes.rank}", json.dumps(sums))
    if not processes.leads:
        return []
    return [json.loads(processes.shared(f"{name}/{rank}", rank)) for rank in processes.ranks]


def _check_types(manifest: Manifest, like: Any) -> None:
    """Raises RefusedError for a state whose arrays have other paths or types."""
    paths, leaves = _flattened(like)
    expected = {path: (tuple(np.shape(leaf)), dtype_name(leaf)) for path, leaf in zip(paths, leaves, strict=True)}
    present = {path: (leaf.shape, leaf.dtype) for path, leaf in manifest.leaves.items()}
    if expected == present:
        return
    for path in [*expected, *present]:
        if expected.get(path) != present.get(path):
            there, here = (_type_text(types.get(path)) for types in (present, expected))
            raise RefusedError(f"it is of another program: {path} is {there} there, and {here} here")


def _are_copied(copies: Sequence[Any]) -> bool:
    """Whether nothing is read from devices any more."""
    return all(copy.is_copied for copy in copies if isinstance(copy, Shards))


def _digested(manifest: Manifest, of_all: Sequence[Sequence[int]]) -> dict[str, Leaf]:
    """The leaves with their digests, from the sums of all processes."""
    columns = zip(*of_all, strict=True)
    pairs = zip(manifest.leaves.items(), columns, strict=True)
    return {path: replace(leaf, digest=digest(column)) for (path, leaf), column in pairs}


def _difference(manifest: Manifest, paths: Sequence[str], of_all: Sequence[Sequence[int]]) -> str:
    """The first leaf whose contents, by the sums of all processes, are not those that were saved; empty if there is
    none.

    `paths` are in the order of the sums; in the manifest they are sorted, which is the order of no pytree but dicts.
    """
    for path, column in zip(paths, zip(*of_all, strict=True), strict=True):
        if (present := digest(column)) != manifest.leaves[path].digest:
            return f"{path} is corrupted: its digest is {present} in place of {manifest.leaves[path].digest}"
    return ""


def _both_ends(text: str) -> str:
    """A text on one line; a long one without its middle, as Orbax puts the system's reason at the end."""
    text = " ".join(text.split())
    return text if len(text) < 300 else f"{text[:120]} ... {text[-160:]}"


def _type_text(type: tuple[tuple[int, ...], str] | None) -> str:
    return f"{type[1]}[{','.join(map(str, type[0]))}]" if type else "missing"
