"""Random instruction programs on the devices of all processes, run for real: a script for `launch`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from autopar.distributed import among
from autopar.runtime import Program, cross_process, load
from autopar.runtime.program import Donation, Feed, Run, Segment, Send, freed

SHAPE = (8, 4)
FUNCTIONS: list[Any] = [
    lambda x, y: (x + 3 * y,),
    lambda x, y: (x * y.sum(),),  # of what is cut, a collective
    lambda x, y: (x - y[::-1],),
    lambda x, y: (x @ y.T @ y,),
]


def placements(draw: np.random.Generator) -> list[Sharding]:
    """Some shardings, on random devices of one process or several."""
    chosen: list[Sharding] = []
    for _ in range(4):
        devices = draw.permutation(np.asarray(jax.devices(), dtype=object))
        size = int(draw.choice([n for n in (1, 2, 4) if n <= len(devices)]))
        mesh = Mesh(devices[:size], ("x",), axis_types=(AxisType.Auto,))
        chosen.append(NamedSharding(mesh, PartitionSpec(*draw.permutation(["x", None]))))
    return chosen


def segment(function: Any, sharding: Sharding) -> Segment:
    struct = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    held: Any = ((0, None), (1, None))
    return Segment(
        name="random",
        stage=0,
        function=function,
        inputs=held,
        outputs=held[:1],
        in_shardings=(sharding,) * 2,
        out_shardings=(sharding,),
        in_structs=(struct,) * 2,
        out_structs=(struct,),
        platform="cpu",
    )


def program_of(draw: np.random.Generator, argument: np.ndarray) -> tuple[Program, list[np.ndarray]]:
    """A program, and the results that it should have."""
    pool = placements(draw)
    values, where = {0: argument}, {0: 0}
    segments: list[Segment] = []
    instructions: list[Run | Send] = []
    for slot in range(1, int(draw.integers(5, 40))):
        source = int(draw.choice(sorted(values)))
        at = where[source]
        if draw.random() < 0.5:
            to = int(draw.choice([other for other in range(len(pool)) if other != at]))
            struct = jax.ShapeDtypeStruct(SHAPE, jnp.int32, sharding=pool[at])
            instructions.append(Send(source=source, target=slot, struct=struct, sharding=pool[to]))
            values[slot], where[slot] = values[source], to
        else:
            other = int(draw.choice([s for s in values if where[s] == at]))
            function = FUNCTIONS[draw.integers(len(FUNCTIONS))]
            instructions.append(Run(segment=len(segments), inputs=(source, other), outputs=(slot,)))
            segments.append(segment(function, pool[at]))
            values[slot] = function(values[source], values[other])[0].astype(np.int32)
            where[slot] = at
    made = [s for i in instructions if isinstance(i, Run) for s in i.outputs][-3:]
    program = Program(
        segments=tuple(segments),
        feeds=(Feed(argument=0, slot=0, sharding=pool[0]),),
        constants=(),
        instructions=tuple(freed(instructions, segments, made, ())),
        results=tuple(made),
        n_slots=1 + max(values),
        donation=Donation(names=("argument",)),
    )
    program.verify()
    return program, [values[slot] for slot in made]


def main(count: int, seed: int) -> None:
    draw, processes = np.random.default_rng(seed), among(jax.devices())
    for number in range(count):
        cross_process.LARGE_NBYTES = int(draw.choice([0, 64, 1 << 21]))  # over either kind of connection, or both
        argument = draw.integers(-9, 9, SHAPE).astype(np.int32)
        program, expected = program_of(draw, argument)
        if not expected:
            continue
        pipeline = load(program, {}, jax.tree.structure(expected), processes=processes)
        for _ in range(2):  # the second step must not meet the first one's transfers
            results = pipeline([argument])
            for result, values in zip(results, expected, strict=True):
                for shard in result.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index], f"{number}")
    print("ran", count, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
