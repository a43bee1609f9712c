"""The rewrites that accelerators' compilers make of a plan's collectives, undone, so that bytes can be compared.

    padded      a reduce-scatter with room for what does not divide evenly, and permutes that realign its pieces
    halves      an all-reduce as a reduce-scatter and an all-gather
    as a sum    an all-gather or a reduce-scatter as an all-reduce of the whole array
    narrowed    a tensor sent before it is widened, in half the bytes: a gradient in bfloat16 and not in float32
    ring        an all-gather or reduce-scatter as permutes from neighbour to neighbour (collective matmul)
    combined    several tensors of one kind sent as one, or one in parts: as many bytes along the same axes

The rest is compared by kind and axes: bytes beyond the plan are unplanned, planned bytes that are never sent are
missing. XLA:GPU combines; XLA:TPU makes all six. Checked on jax 0.10.2 with jax-cuda12-pjrt 0.10.2 and libtpu 0.0.42.1.

Reference: XLA, `AllReduceCombiner`, `AllGatherCombiner` and `ReduceScatterCombiner`; the pieces of XLA:TPU's
asynchronous collectives and its padded reduce-scatters are read as one in autopar/checks/hlo.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

Key = tuple[str, tuple[str, ...], str, int]
"""The kind, axes, dtype and bytes that equal collectives share."""

Sort = tuple[str, tuple[str, ...]]
"""The kind and axes under which bytes are compared."""

NARROWER: Mapping[str, tuple[str, ...]] = MappingProxyType({"float32": ("bfloat16", "float16")})
"""The dtypes of half the width in which a tensor may have been computed, before it is widened."""

PADDING = 0.5
"""The share of a result that may be padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The bytes of all tensors of one kind along the same axes: planned, and compiled once `rewrites` are undone."""

    kind: str
    axes: tuple[str, ...]
    planned_nbytes: int
    compiled_nbytes: int
    planned: int
    compiled: int
    rewrites: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The bytes as JSON data."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "planned_nbytes": self.planned_nbytes,
            "compiled_nbytes": self.compiled_nbytes,
            "planned": self.planned,
            "compiled": self.compiled,
            "rewrites": list(self.rewrites),
        }


class Undoing:
    """The planned and compiled tensors that are not accounted for yet, while rewrites are undone.

    `sent` are the keys of both; `rewritten` maps a key to the rewrite that accounted for its tensors, and `accounted` a
    sort to the compiled bytes that stand for planned ones.
    """

    def __init__(
        self,
        planned: Counter[Key],
        compiled: Counter[Key],
        padded: Iterable[Key],
        ranks: Callable[[tuple[str, ...]], int],
    ) -> None:
        same = planned & compiled
        self.all_planned = planned
        self.planned, self.compiled = planned - same, compiled - same
        self.sent = frozenset(same)
        self.padded = set(padded)
        self.ranks = ranks
        self.rewritten: dict[Key, str] = {}
        self.rewrites: dict[Sort, dict[str, None]] = {}
        self.accounted: Counter[Sort] = Counter()
        for key, count in same.items():
            self.accounted[key[:2]] += count * key[3]

    def undo(self) -> None:
        """Accounts for all tensors that rewrites explain."""
        self._padded()
        self._halves()
        self._narrowed()
        self._sums()
        self._rings()
        for sort in sorted({key[:2] for key in (*self.planned, *self.compiled)}):
            self._combined(sort)

    def unaccounted(self) -> Counter[Sort]:
        """The compiled bytes that nothing accounts for, by sort."""
        nbytes: Counter[Sort] = Counter()
        for key, count in self.compiled.items():
            nbytes[key[:2]] += count * key[3]
        return nbytes

    def _account(self, target: Key, used: Iterable[tuple[Key, int]], count: int, rewrite: str) -> None:
        """Removes `count` planned tensors and the (key, number) compiled ones that stand for them."""
        for key in (target, *(key for key, _ in used)):
            self.rewritten.setdefault(key, rewrite)
        self.planned[target] -= count
        for key, number in used:
            self.compiled[key] -= number
        self.rewrites.setdefault(target[:2], {})[rewrite] = None
        self.accounted[target[:2]] += count * target[3]
        self.planned, self.compiled = +self.planned, +self.compiled

    def _padded(self) -> None:
        """Accounts for padded reduce-scatters, each by the largest planned one that it has room for; then for its
        permutes.
        """
        for key in sorted(self.padded & self.compiled.keys(), key=lambda key: -key[3]):
            _, axes, dtype, nbytes = key
            fitting = [k for k in self.planned if k[:3] == key[:3] and k[3] <= nbytes <= (1 + PADDING) * k[3]]
            if not fitting:
                continue
            target = max(fitting, key=lambda k: k[3])
            count = min(self.planned[target], self.compiled[key])
            slack = (self.ranks(axes) - 1) * (nbytes - target[3])
            moved = [k for k in self.compiled if k[:3] == ("permute", axes, dtype) and k[3] <= slack]
            used = [(k, min(count, self.compiled[k])) for k in moved]
            self._account(target, [(key, count), *used], count, "padded")

    def _halves(self) -> None:
        """Accounts for a reduce-scatter and an all-gather of one tensor by a planned all-reduce."""
        for key in [k for k in self.compiled if k[0] == "reduce_scatter"]:
            _, axes, dtype, nbytes = key
            whole = self.ranks(axes) * nbytes
            target, gathered = ("all_reduce", axes, dtype, whole), ("all_gather", axes, dtype, whole)
            count = min(self.planned[target], self.compiled[gathered], self.compiled[key])
            if count:
                self._account(target, [(key, count), (gathered, count)], count, "halves")

    def _sums(self) -> None:
        """Accounts for all-reduces of whole arrays by planned all-gathers or reduce-scatters.

        They move more than was planned, as the rewrite's name says. Planned tensors that were not sent at all are taken
        first: others may be repeated ones that are sent once.
        """
        for target in sorted(self.planned, key=lambda key: (key in self.sent, -key[3])):
            kind, axes, dtype, nbytes = target
            if kind not in ("all_gather", "reduce_scatter"):
                continue
            whole = nbytes if kind == "all_gather" else self.ranks(axes) * nbytes
            for sent, share in ((dtype, 1), *((narrow, 2) for narrow in NARROWER.get(dtype, ()))):
                summed = ("all_reduce", axes, sent, whole // share)
                if count := min(self.planned[target], self.compiled[summed]):
                    self._account(target, [(summed, count)], count, "as a sum" if share == 1 else "as a narrow sum")

    def _narrowed(self) -> None:
        """Accounts for tensors of a dtype half as wide by planned ones of the wide dtype; the narrow bytes count."""
        for target in sorted(self.planned, key=lambda key: -key[3]):
            kind, axes, dtype, nbytes = target
            for narrow in NARROWER.get(dtype, ()):
                sent = (kind, axes, narrow, nbytes // 2)
                if count := min(self.planned[target], self.compiled[sent]):
                    self._account(target, [(sent, count)], count, "narrowed")
                    self.accounted[target[:2]] -= count * (nbytes - sent[3])

    def _rings(self) -> None:
        """Accounts for permutes of pieces, whole or in halves both ways, by a planned all-gather or reduce-scatter."""
        for target in sorted(self.planned, key=lambda key: -key[3]):
            kind, axes, dtype, nbytes = target
            ranks = self.ranks(axes)
            if kind not in ("all_gather", "reduce_scatter") or ranks < 2:
                continue
            piece = nbytes // ranks if kind == "all_gather" else nbytes
            for ways in (1, 2):
                step = ("permute", axes, dtype, piece // ways)
                hops = ways * (ranks - 1)
                count = min(self.planned[target], self.compiled[step] // hops)
                if count:
                    extra = min(count * ways, self.compiled[step] - count * hops)  # a loop's last turn sends once more
                    self._account(target, [(step, count * hops + extra)], count, "ring")

    def _combined(self, sort: Sort) -> None:
        """Accounts for compiled tensors of a sort by all planned ones, of as many bytes or more where some are
        repeated.
        """
        planned = Counter({key: count for key, count in self.planned.items() if key[:2] == sort})
        compiled = Counter({key: count for key, count in self.compiled.items() if key[:2] == sort})
        target, sent = _nbytes(planned), _nbytes(compiled)
        repeated = sum((self.all_planned[key] - 1) * key[3] for key in self.all_planned if key[:2] == sort)
        if not planned or not compiled or not target - repeated <= sent <= target:
            return
        rewrite = "combined" if sum(compiled.values()) <= sum(planned.values()) else "in parts"
        self.rewritten.update(dict.fromkeys((*planned, *compiled), rewrite))
        self.rewrites.setdefault(sort, {})[rewrite] = None
        self.accounted[sort] += sent
        self.planned, self.compiled = self.planned - planned, self.compiled - compiled


def _nbytes(counts: Counter[Key]) -> int:
    return sum(count * key[3] for key, count in counts.items())


def moved(planned: Counter[Key], compiled: Counter[Key], undoing: Undoing) -> tuple[Moved, ...]:
    """The bytes by kind and axes, largest first."""
    beyond = undoing.unaccounted()
    sorts = dict.fromkeys((*(k[:2] for k in planned), *undoing.accounted, *beyond))
    rows = [
        Moved(
            kind=sort[0],
            axes=sort[1],
            planned_nbytes=_nbytes(Counter({k: n for k, n in planned.items() if k[:2] == sort})),
            compiled_nbytes=undoing.accounted[sort] + beyond[sort],
            planned=sum(n for k, n in planned.items() if k[:2] == sort),
            compiled=sum(n for k, n in compiled.items() if k[:2] == sort),
            rewrites=tuple(undoing.rewrites.get(sort, ())),
        )
        for sort in sorts
    ]
    return tuple(sorted(rows, key=lambda row: (-max(row.planned_nbytes, row.compiled_nbytes), row.kind, row.axes)))
