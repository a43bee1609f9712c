"""Libraries of operations: linear algebra, sorting, convolutions, indexing, special functions, `jax.shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.autopar.jit_cases.table import Table, ints, mesh_of, x

case = Table()


@case(slow=("searched",))
def linear_algebra():
    def f(a, b):
        spd = a @ a.mT + 8 * jnp.eye(a.shape[-1])
        factor = jnp.linalg.cholesky(spd)
        solved = jnp.linalg.solve(spd, b)
        half = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
        return factor, solved, half, jnp.linalg.slogdet(spd), jnp.linalg.inv(spd), jnp.linalg.norm(a, axis=-1)

    return f, (x(8, 4, 4), x(8, 4, 2))


@case(slow=("searched", "random"))
def linear_algebra_under_gradient():
    def f(a, b):
        def loss(a):
            spd = a @ a.mT + 8 * jnp.eye(a.shape[-1])
            return jnp.log(jnp.diagonal(jnp.linalg.cholesky(spd), axis1=-2, axis2=-1)).sum() + jnp.sum(
                jnp.linalg.solve(spd, b) ** 2
            )

        return jax.value_and_grad(loss)(a)

    return f, (x(8, 4, 4), x(8, 4, 2))


@case(slow=("searched", "random"))
def decompositions():
    def f(a):
        q, r = jnp.linalg.qr(a)
        values = jnp.linalg.eigvalsh(a @ a.mT)
        return q @ r, values, jnp.linalg.svd(a, compute_uv=False), jnp.linalg.det(a), jax.scipy.linalg.expm(a[0] / 4)

    return f, (x(8, 4, 4),)


@case(slow=("searched",))
def fourier_transforms():
    return lambda a: (jnp.fft.rfft(a), jnp.fft.ifft2(a).real, jnp.fft.irfft(jnp.fft.rfft(a, axis=0), axis=0)), (
        x(8, 16),
    )


@case(slow=("searched",))
def sorting():
    def f(a, n):
        top, where = lax.top_k(a, 3)
        return (
            jnp.sort(a, 0),
            jnp.argsort(n, 1, stable=True),
            top,
            where,
            jnp.argmin(a, 0),
            jnp.searchsorted(a[0], a[1]),
            lax.sort((n, a), dimension=1, num_keys=1),
            jnp.median(a, 1),
            jnp.unique(n, size=8, fill_value=-1),
        )

    return f, (x(8, 16), ints(8, 16))


@case(slow=("searched",))
def scans_along_a_dimension():
    return lambda a: (jnp.cumsum(a, 0), jnp.cumprod(a, 1), lax.cummax(a, 0), lax.cumlogsumexp(a, 1), jnp.diff(a)), (
        x(8, 16),
    )


@case(slow=("searched", "random"))
def convolutions():
    def conv(a, k, **options):
        return lax.conv_general_dilated(a, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    def f(a, whole, groups, depth):
        def loss(kernels):
            whole, groups, depth = kernels
            h = jax.nn.relu(conv(a, whole))
            h = conv(h, groups, feature_group_count=4)
            h = conv(h, depth, feature_group_count=8, rhs_dilation=(2, 2))
            return (h**2).mean()

        return jax.value_and_grad(loss)((whole, groups, depth))

    return f, (x(4, 8, 8, 4), x(3, 3, 4, 8), x(3, 3, 2, 8), x(3, 3, 1, 8))


@case(slow=("searched",))
def transposed_convolution():
    def f(a, k):
        return lax.conv_transpose(a, k, (2, 2), "SAME"), lax.conv_general_dilated(
            a.transpose(0, 3, 1, 2), k.transpose(3, 2, 0, 1), (2, 2), ((1, 0), (0, 1)), lhs_dilation=(2, 1)
        )

    return f, (x(4, 6, 6, 2), x(3, 3, 2, 8))


@case(slow=("searched",))
def pooling():
    def f(a):
        def pools(a):
            highest = lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            mean = lax.reduce_window(a, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") / 9
            return highest, mean

        return pools(a), jax.grad(lambda a: sum((p**2).sum() for p in pools(a)))(a)

    return f, (x(4, 8, 8, 2),)


@case(slow=("searched",))
def segments():
    def f(a, ids, weights):
        def loss(a):
            sums = jax.ops.segment_sum(a, ids, num_segments=8)
            return (sums**2).sum(), (sums, jax.ops.segment_max(a, ids, 8), jnp.bincount(ids, weights, length=8))

        return jax.value_and_grad(loss, has_aux=True)(a)

    return f, (x(16, 4), ints(16), x(16))


@case(slow=("searched",))
def one_hot_einsum():
    def f(table, tokens, w):
        def loss(table):
            hidden = jnp.einsum("bsv,vd->bsd", jax.nn.one_hot(tokens, 32, dtype=table.dtype), table)
            mixed = jnp.einsum("bsd,bte,de->bst", hidden, hidden, w)
            return (jax.nn.softmax(mixed) * jnp.einsum("bss->bs", mixed)[..., None]).sum()

        return jax.value_and_grad(loss)(table)

    return f, (x(32, 8), ints(4, 8, below=32), x(8, 8))


@case(slow=("searched",))
def indexing():
    def f(a, n):
        return (
            a[n],
            a[:, ::2],
            a[1:-1],
            a[..., None, 0],
            a.at[n].add(1.0),
            a.at[n, 0].max(2.0, mode="drop"),
            a[a.shape[0] - 1],
            jnp.take(a, n, axis=1, mode="clip"),
            a[-n],
            jnp.roll(a, 3, 0),
            jnp.nonzero(a > 0, size=8, fill_value=-1),
        )

    return f, (x(8, 16), ints(8))


@case(seed=1, sizes=(8,))
def one_column_set():
    """Beside another reader, which keeps the array whole, so that it is cut just before."""
    return lambda a, n: (a.at[:, 3].set(0), a[n]), (x(8, 16), ints(8))


@case(seed=0, sizes=(8,))
def rows_read_out_of_bounds():
    return lambda a, n: a[n + 5], (x(8, 16), ints(8))


@case(sizes=(8,))
def rows_set_out_of_bounds():
    return lambda a, n: (a.at[n + 5].set(0), a.at[n + 5].get(mode="fill"), a.at[n + 5].get(mode="clip")), (
        x(8, 16),
        ints(8),
    )


@case(slow=("searched",))
def shapes():
    def f(a):
        return (
            a.reshape(-1),
            a.reshape(4, 2, 16).swapaxes(0, 2),
            jnp.stack([a, -a], 1),
            jnp.split(a, [3], 1),
            jnp.pad(a, ((0, 0), (2, 1)), "reflect"),
            jnp.repeat(a, 2, 0),
            jnp.tril(a),
            jnp.flip(a, 0),
            jnp.kron(a[:2, :2], a[:4, :2]),
            jnp.meshgrid(a[0], a[1]),
            a.reshape(8, 4, 4).diagonal(axis1=1, axis2=2),
            jnp.broadcast_to(a[:, None], (8, 3, 16)),
        )

    return f, (x(8, 16),)


@case(random="XLA's CPU all-reduce drops NaN from a maximum")
def special_values():
    def f(a):
        return jnp.log(a), 1 / (a * 0), jnp.isnan(a), jnp.nanmean(a), a.max(0), jnp.where(a > 0, a, jnp.nan)

    return f, (x(8, 4).at[2, 1].set(jnp.nan).at[3, 3].set(jnp.inf),)


@case(slow=("searched",))
def special_functions():
    def f(a):
        scipy = jax.scipy.special
        return scipy.erf(a), scipy.gammaln(a**2 + 1), scipy.logsumexp(a, 0), jax.nn.gelu(a), scipy.digamma(a**2 + 1)

    return f, (x(8, 16),)


@case
def bit_casts():
    def f(a, n):
        return lax.bitcast_convert_type(a, jnp.int32), n.view(jnp.uint32), lax.population_count(n), lax.clz(n)

    return f, (x(8, 4, dtype=jnp.float32), ints(8, 4))


@case(slow=("searched",))
def dot_products_of_narrow_types():
    def f(a, b, n):
        wide = lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        whole = lax.dot_general(n, n.T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return wide, whole, jnp.matmul(a, b, precision="highest")

    return f, (x(8, 16, dtype=jnp.bfloat16), x(16, 8, dtype=jnp.bfloat16), ints(8, 16, dtype=jnp.int8))


@case(sizes=(8,))
def shard_map_inside():
    def f(w, a):
        mapped = jax.shard_map(
            lambda a: (a * lax.axis_index("a"), lax.psum(a.sum(0), "a")),
            mesh=mesh_of(8),
            in_specs=P("a"),
            out_specs=(P("a"), P()),
        )
        local, total = mapped(a @ w)
        return local, total, (local * 2).sum()

    return f, (x(16, 4), x(8, 16))


@case(sizes=(2, 4))
def shard_map_under_gradient():
    def f(w, a):
        def product(a, w):
            return lax.psum(a @ w, "b")

        mapped = jax.shard_map(product, mesh=mesh_of(2, 4), in_specs=(P("a", "b"), P("b")), out_specs=P("a"))
        return jax.value_and_grad(lambda w: (mapped(a, w) ** 2).sum())(w)

    return f, (x(16, 4), x(8, 16))
