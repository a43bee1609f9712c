"""Operations over what the pool holds: each writes one line, or skips where nothing fits."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np

from tests.autopar.random_programs.writer import FLOAT, INT, SIZES, Skip, Value, Writer


def unary(w: Writer) -> Value:
    x = w.value(dtype=FLOAT)
    match w.pick("-", "abs", "square", "relu", "sign", "sin", "tanh", "logsumexp", "softmax", "checkpoint", "fraction"):
        case "-":
            return w.write(f"-{x.name}", x, bound=x.bound)
        case "square":
            return w.write(f"jnp.square({x.name})", x, bound=x.bound**2)
        case "abs" | "sign" as name:
            x = w.value(dtype=FLOAT, exact=True)
            return w.write(f"jnp.{name}({x.name})", x, bound=x.bound)
        case "relu":
            x = w.value(dtype=FLOAT, exact=True)
            return w.write(f"jax.nn.relu({x.name})", x, bound=x.bound)
        case "sin" | "tanh" as name:
            return w.write(f"jnp.{name}({x.name})", x, bound=1, exact=False)
        case "logsumexp" | "softmax" as name:
            x = w.value(dtype=FLOAT, rank=1, exact=True)
            return w.write(f"jax.nn.{name}({x.name}, {w.axis(x)})", x, bound=x.bound + 7, exact=False)
        case "checkpoint":
            line = f"jax.checkpoint(lambda t: jnp.sin(t) * t)({x.name})"
            return w.write(line, x, bound=x.bound, exact=False)
        case _:
            return w.write(f"{x.name} / (1 + {x.name} ** 2)", x, bound=1, exact=False)


def fitting(w: Writer, dtype: str, *, exact: bool = False) -> tuple[Value, Value, str]:
    """Two values, and the second as it is written to broadcast against the first."""
    x, y = w.value(dtype=dtype, exact=exact), w.value(dtype=dtype, exact=exact)
    written = y.name
    if x.rank and y.rank and w.flag():
        written = f"{y.name}[..., None]"
        shape = (*y.shape, 1)
    else:
        shape = y.shape
    try:
        np.broadcast_shapes(x.shape, shape)
    except ValueError:
        raise Skip from None
    return x, y, written


def binary(w: Writer) -> Value:
    operator = w.pick("+", "-", "*", "maximum", "minimum")
    if operator.isalpha():
        x, y, second = fitting(w, FLOAT, exact=True)
        return w.write(f"jnp.{operator}({x.name}, {second})", x, y, bound=max(x.bound, y.bound))
    x, y, second = fitting(w, FLOAT)
    bound = x.bound * y.bound if operator == "*" else x.bound + y.bound
    return w.write(f"{x.name} {operator} {second}", x, y, bound=bound)


def integers(w: Writer) -> Value:
    x, y, second = fitting(w, INT)
    operator = w.pick("+", "*", "%", "^", "<<")
    second = {"%": f"({second} ** 2 % 7 + 1)", "<<": f"({second} ** 2 % 4)"}.get(operator, second)
    return w.write(f"{x.name} {operator} {second}", x, y, bound=x.bound * y.bound + 16 * x.bound + y.bound)


def select(w: Writer) -> Value:
    x, y, second = fitting(w, FLOAT)
    p, q, other = fitting(w, w.pick(FLOAT, INT), exact=True)
    try:
        np.broadcast_shapes(x.shape, y.shape, p.shape, q.shape)
    except ValueError:
        raise Skip from None
    compare = w.pick("<", ">=", "==", "!=")
    line = f"jnp.where({p.name} {compare} {other}, {x.name}, {second})"
    try:
        return w.write(line, x, y, p, q, bound=max(x.bound, y.bound))
    except ValueError:  # the four broadcast one way as pairs and another way together
        raise Skip from None


def reduction(w: Writer) -> Value:
    x = w.value(rank=1)
    axes = tuple(d for d in range(x.rank) if w.flag())
    written = f"{axes}, keepdims=True" if w.flag() else f"{axes}"
    over = math.prod(x.shape[d] for d in axes)
    match w.pick("sum", "mean", "max", "min", "var"):
        case "sum":
            return w.write(f"{x.name}.sum({written})", x, bound=x.bound * over)
        case "mean" | "var" as name:
            x = x if x.dtype == FLOAT and axes else w.value(dtype=FLOAT, rank=1 + max(axes, default=98))
            return w.write(f"{x.name}.{name}({written})", x, bound=x.bound**2 + 1, exact=False)
        case name:
            if not (axes and x.exact):
                raise Skip
            return w.write(f"{x.name}.{name}({written})", x, bound=x.bound)


def arg(w: Writer) -> Value:
    x = w.value(rank=1, exact=True)
    name = w.pick("argmax", "argmin", "argsort")
    return w.write(f"jnp.{name}({x.name}, {w.axis(x)})", x, bound=8, exact=True)


def truth(w: Writer) -> Value:
    x = w.value(rank=1, exact=True)
    name = w.pick("any", "all")
    return w.write(f"jnp.{name}({x.name} > 0, {w.axis(x)}).astype({w.pick(INT, FLOAT)!r})", x, bound=1)


def shape(w: Writer) -> Value:
    x = w.value(rank=1)
    axis = w.axis(x)

    def written(text: str) -> Value:
        return w.write(text, x, bound=x.bound)

    match w.pick("transpose", "reshape", "squeeze", "expand", "broadcast", "flip", "roll", "tile", "repeat"):
        case "transpose":
            return written(f"{x.name}.transpose({w.draw(st.permutations(range(x.rank)))})")
        case "reshape":
            return written(f"{x.name}.reshape({refactored(w, x.shape)})")
        case "squeeze":
            ones = tuple(d for d, size in enumerate(x.shape) if size == 1)
            return written(f"{x.name}.squeeze({ones})")
        case "expand":
            return written(f"jnp.expand_dims({x.name}, {w.integer(0, x.rank)})")
        case "broadcast":
            return written(f"jnp.broadcast_to({x.name}, {(w.pick(*SIZES), *x.shape)})")
        case "roll":
            return written(f"jnp.roll({x.name}, {w.integer(-3, 3)}, {axis})")
        case "tile":
            return written(f"jnp.tile({x.name}, {w.integer(1, 3)})")
        case "repeat":
            return written(f"jnp.repeat({x.name}, {w.integer(1, 3)}, {axis})")
        case _:
            return written(f"jnp.flip({x.name}, {axis})")


def refactored(w: Writer, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    left, found = math.prod(sizes), []
    while left > 1 and len(found) < 3:
        found.append(w.pick(*(d for d in range(1, left + 1) if left % d == 0)))
        left //= found[-1]
    return (*found, left)


def joined(w: Writer) -> Value:
    x = w.value(rank=1)
    axis = w.axis(x)
    alike = [
        y for y in w.pool if (y.dtype, y.rank) == (x.dtype, x.rank) and without(y.shape, axis) == without(x.shape, axis)
    ]
    y = w.draw(st.sampled_from(alike))
    bound = max(x.bound, y.bound)
    if x.shape == y.shape and w.flag():
        return w.write(f"jnp.stack([{x.name}, {y.name}], {w.integer(0, x.rank)})", x, y, bound=bound)
    return w.write(f"jnp.concatenate([{x.name}, {y.name}], {axis})", x, y, bound=bound)


def without(sizes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return sizes[:axis] + sizes[axis + 1 :]


def padded(w: Writer) -> Value:
    x = w.value(dtype=FLOAT, rank=1)
    edges = tuple((w.integer(-1, 2), w.integer(0, 2), w.integer(0, 1)) for _ in x.shape)
    return w.write(f"lax.pad({x.name}, 7.0, {edges})", x, bound=max(x.bound, 7))


def sliced(w: Writer) -> Value:
    x = w.value(rank=1)
    limits = []
    for size in x.shape:
        begin = w.integer(0, size - 1)
        limits.append(w.pick(":", f"{begin}:", f":{begin + 1}", f"{begin}::2", "::-1", str(begin)))
    return w.write(f"{x.name}[{', '.join(limits)}]", x, bound=x.bound)


def index(w: Writer) -> Value:
    """An integer that is not known before the program runs."""
    return w.draw(st.sampled_from([v for v in w.pool if v.dtype == INT and v.rank == 0]))


def dynamic(w: Writer) -> Value:
    """A slice or an update whose place is in bounds: XLA misplaces slices of slices elsewhere (openxla/xla#49121)."""
    x, n = w.value(rank=1), index(w)
    axis = w.axis(x)
    size = w.integer(1, x.shape[axis])
    begin = f"{n.name} % {x.shape[axis] - size + 1}"
    piece = f"lax.dynamic_slice_in_dim({x.name}, {begin}, {size}, {axis})"
    if w.flag():
        return w.write(piece, x, n, bound=x.bound)
    other = w.integer(0, x.shape[axis] - size)
    update = f"lax.dynamic_update_slice_in_dim({x.name}, 2 * {piece}, {other}, {axis})"
    return w.write(update, x, n, bound=2 * x.bound)


def gathered(w: Writer) -> Value:
    x, i = w.value(rank=1), w.value(dtype=INT)
    axis, how = w.axis(x), w.pick("'clip'", "'wrap'", "'fill', fill_value=5")
    bound = max(x.bound, 5)
    if x.rank == i.rank and without(x.shape, axis) == without(i.shape, axis):
        line = f"jnp.take_along_axis({x.name}, {i.name}, {axis}, mode='clip')"
    elif x.rank > 1 and w.flag():
        line = f"{x.name}.at[{i.name}, {i.name} % {x.shape[1]}].get(mode='clip')"
    else:
        line = f"jnp.take({x.name}, {i.name}, {axis}, mode={how})"
    return w.write(line, x, i, bound=bound)


def scattered(w: Writer) -> Value:
    x, how = w.value(dtype=FLOAT, rank=1), w.pick("add", "add", "max", "min", "set")
    if how == "set":
        order = w.draw(st.permutations(range(x.shape[0])))[: w.integer(2, 8)]
        return placed(w, x, order)
    i = w.value(dtype=INT)
    mode = w.pick("drop", "clip")
    whole = [y for y in w.pool if y.dtype == FLOAT and y.shape == (*i.shape, *x.shape[1:])]
    y = w.draw(st.sampled_from(whole)) if whole else w.value(dtype=FLOAT)
    written = y.name if whole else f"{y.name}.sum()"
    bound = x.bound + y.bound * math.prod(i.shape) * (1 if whole else max(math.prod(y.shape), 1))
    if how in ("max", "min") and not (x.exact and y.exact and not w.smooth):
        raise Skip
    return w.write(f"{x.name}.at[{i.name}].{how}({written}, mode={mode!r})", x, i, y, bound=bound)


def placed(w: Writer, x: Value, order: list[int]) -> Value:
    """Some rows set; each once, as which of several updates to one row wins is not defined."""
    if len(order) < 2:
        raise Skip
    return w.write(f"{x.name}.at[jnp.array({order})].set(2 * {x.name}[0], unique_indices=True)", x, bound=2 * x.bound)


def product(w: Writer) -> Value:
    """An einsum whose letters are drawn: any of them may be shared, summed or kept."""
    x, y = w.value(dtype=FLOAT, rank=1), w.value(dtype=FLOAT, rank=1)
    letters = iter("abcdefgh")
    first = {next(letters): size for size in x.shape}
    second: dict[str, int] = {}
    for size in y.shape:
        shared = [letter for letter, n in first.items() if n == size and letter not in second]
        second[w.pick(*shared, None) or next(letters) if shared else next(letters)] = size
    both = first | second
    kept = [letter for letter in both if w.flag()]
    kept = list(w.draw(st.permutations(kept)))
    summed = math.prod(size for letter, size in both.items() if letter not in kept)
    text = f"{''.join(first)},{''.join(second)}->{''.join(kept)}"
    return w.write(f"jnp.einsum({text!r}, {x.name}, {y.name})", x, y, bound=x.bound * y.bound * summed)


def converted(w: Writer) -> Value:
    match w.pick("int", "float", "bool", "one_hot"):
        case "int":
            x = w.value(dtype=FLOAT, exact=True)
            return w.write(f"{x.name}.astype({INT!r})", x, bound=x.bound)
        case "float":
            x = w.value(dtype=INT)
            return w.write(f"{x.name}.astype({FLOAT!r})", x, bound=x.bound)
        case "bool":
            x = w.value(exact=True)
            return w.write(f"{x.name}.astype(bool).astype({FLOAT!r})", x, bound=1)
        case _:
            x = w.value(dtype=INT)
            return w.write(f"jax.nn.one_hot({x.name}, {w.pick(*SIZES)}, dtype={FLOAT!r})", x, bound=1)


def counted(w: Writer) -> Value:
    sizes = tuple(w.pick(*SIZES) for _ in range(w.integer(1, 3)))
    dtype = w.pick(FLOAT, INT)
    return w.write(f"lax.broadcasted_iota({dtype!r}, {sizes}, {w.integer(0, len(sizes) - 1)})", bound=8, exact=True)


def random_bits(w: Writer) -> Value:
    n = index(w)
    sizes = tuple(w.pick(*SIZES) for _ in range(w.integer(1, 2)))
    name = w.pick("uniform", "normal")
    return w.write(f"jax.random.{name}(jax.random.key({n.name}), {sizes}, {FLOAT!r})", n, bound=8, exact=False)


def cumulative(w: Writer) -> Value:
    x = w.value(rank=1)
    axis = w.axis(x)
    name = w.pick("cumsum", "cumsum", "cummax")
    if name == "cummax" and not x.exact:
        raise Skip
    bound = x.bound * (x.shape[axis] if name == "cumsum" else 1)
    return w.write(f"lax.{name}({x.name}, {axis}, reverse={w.flag()})", x, bound=bound)


def ordered(w: Writer) -> Value:
    x = w.value(rank=1, exact=True)
    if w.flag():
        return w.write(f"lax.top_k({x.name}, {w.integer(1, x.shape[-1])})[0]", x, bound=x.bound)
    return w.write(f"jnp.sort({x.name}, {w.axis(x)})", x, bound=x.bound)


def loop(w: Writer) -> Value:
    x = w.value(dtype=FLOAT, rank=1)
    y = w.draw(st.sampled_from([y for y in w.pool if y.dtype == FLOAT and y.shape in (x.shape, x.shape[1:])]))
    steps = x.shape[0]
    both = x.bound + y.bound
    if y.shape == x.shape[1:] and w.flag():
        part = w.integer(0, 1)
        line = f"lax.scan(lambda c, r: (c + r, c - r), {y.name}, {x.name}, reverse={w.flag()})[{part}]"
        return w.write(line, x, y, bound=both * (steps + 1))
    if y.shape != x.shape:
        return w.write(f"lax.map(lambda r: (r * {y.name}).sum(), {x.name})", x, y, bound=x.bound * y.bound * 512)
    match w.pick("fori", "scan", "swap", "while"):
        case "fori":
            return w.write(f"lax.fori_loop(0, 3, lambda i, c: c + i * {y.name}, {x.name})", x, y, bound=4 * both)
        case "scan":
            body = f"lambda c, _: (jnp.roll(c, 1, 0) + {y.name}, c.sum(0))"
            line = f"lax.scan({body}, {x.name}, None, length=2)[{w.integer(0, 1)}]"
            return w.write(line, x, y, bound=8 * (x.bound + 2 * y.bound))
        case "swap":
            line = f"lax.scan(lambda c, _: ((c[1], c[0] + c[1]), None), ({x.name}, {y.name}), None, length=3)[0][1]"
            return w.write(line, x, y, bound=3 * both)
        case _:
            n = index(w)
            if w.smooth:
                raise Skip  # a while loop has no reverse-mode derivative
            test, body = f"lambda s: s[1] < {n.name} % 4", f"lambda s: (s[0] + {y.name}, s[1] + 1)"
            return w.write(f"lax.while_loop({test}, {body}, ({x.name}, 0))[0]", x, y, n, bound=4 * both)


def branch(w: Writer) -> Value:
    x, n = w.value(rank=1), index(w)
    axis = w.axis(x)
    first, second = f"lambda t: jnp.flip(t, {axis})", f"lambda t: t + t.sum({axis}, keepdims=True)"
    if w.flag():
        line = f"lax.switch({n.name}, [{first}, {second}, lambda t: t * 2], {x.name})"
    else:
        line = f"lax.cond({n.name} > 1, {first}, {second}, {x.name})"
    return w.write(line, x, n, bound=x.bound * (x.shape[axis] + 1))


OPERATIONS = (
    unary,
    binary,
    integers,
    select,
    reduction,
    arg,
    truth,
    shape,
    joined,
    padded,
    sliced,
    dynamic,
    gathered,
    scattered,
    product,
    converted,
    counted,
    random_bits,
    cumulative,
    ordered,
    loop,
    branch,
)
