"""nanotron's model, stages and collectives, as published rows are planned with them."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.published import nanotron_llama
from benchmarks.published.nanotron import (
    HOP_SECONDS,
    NANOTRON,
    SLOW_TRANSFER_SECONDS,
    STAGED_FAR_SECONDS,
    STAGED_HOP_SECONDS,
    STAGED_START_SECONDS,
    START_SECONDS,
    OnNanotron,
    nanotron_layers,
    stage_layers,
)
from benchmarks.published.planned import Configuration, Job
from benchmarks.published.rows import Answer, Fields
from models import llama
from passes.cluster import parse_cluster

SMALL = llama.Config(
    vocab_size=64, sequence_length=16, hidden=32, layers=2, heads=4, kv_heads=4, mlp=64, scan_layers=True
)
LARGE = replace(
    SMALL, vocab_size=131072, sequence_length=4096, hidden=4096, layers=32, heads=32, kv_heads=32, mlp=14336
)
STAGED = OnNanotron(
    job=Job(module=nanotron_llama, config=LARGE, batch=256, precision="float32 gradients"),
    cluster=parse_cluster("8:h100"),
    microbatches=128,
    data=2,
    tensor=2,
    pipeline=2,
    layers=(18, 14),
)


@pytest.mark.slow
def test_nanotrons_kernels_compute_what_the_zoos_model_does() -> None:
    """The loss and every gradient."""
    params = nanotron_llama.init(SMALL, jax.random.key(0))
    batch = nanotron_llama.example_batch(SMALL, 4, jax.random.key(1))
    modules = nanotron_llama, llama
    ours, theirs = (jax.value_and_grad(lambda p, m=m: m.loss(SMALL, p, batch))(params) for m in modules)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@pytest.mark.parametrize(("stages", "first"), [(2, 18), (4, 9), (8, 5), (16, 3)])
def test_the_first_stage_goes_past_its_share(stages: int, first: int) -> None:
    layers = stage_layers(LARGE, stages)
    assert (layers[0], sum(layers), min(layers) > 0) == (first, 32, True)


def test_a_head_alone_leaves_the_first_stage_a_layer_more_than_the_plan_has() -> None:
    layers = nanotron_layers(LARGE, 32)
    assert (layers[0], layers[-1], stage_layers(LARGE, 32)) == (2, 0, (1,) * 32)
    deep = replace(STAGED, pipeline=32, layers=(1,) * 32)
    embedding = 131072 * 4096 / 2 * (2 + 4 + 12)
    assert deep.moved_nbytes(embedding + 1e9) == pytest.approx(1e9)
    assert STAGED.moved_nbytes(1e12) == 0.0


def test_collectives_of_the_fullest_stage_are_waited_for() -> None:
    job = Job(module=nanotron_llama, config=LARGE, batch=256, precision="float32 gradients")
    one = OnNanotron(job=job, cluster=parse_cluster("8:h100"), microbatches=256, tensor=8)
    assert one.collectives_seconds == pytest.approx(256 * 32 * 8 * (START_SECONDS + 7 * HOP_SECONDS))
    staged = replace(one, tensor=4, pipeline=2, layers=(18, 14))
    near = STAGED_START_SECONDS + 3 * STAGED_HOP_SECONDS
    assert staged.collectives_seconds == pytest.approx((256 * 18 + 14) * 8 * near)
    wide = replace(staged, cluster=parse_cluster("4x8:h100"), tensor=16)
    far = STAGED_START_SECONDS + 7 * STAGED_HOP_SECONDS + 8 * STAGED_FAR_SECONDS
    assert wide.collectives_seconds == pytest.approx((256 * 18 + 14) * 8 * far)
    assert replace(one, tensor=1).collectives_seconds == 0.0


def test_stages_of_large_jobs_wait_for_their_transfers() -> None:
    large = replace(STAGED, cluster=parse_cluster("64x8:h100"), microbatches=8, data=32, tensor=4, pipeline=4)
    assert large.has_slow_transfers
    assert large.slow_transfers_seconds == pytest.approx((7 * 4 + 6) * SLOW_TRANSFER_SECONDS)
    in_two = replace(large, tensor=8, pipeline=2)
    assert in_two.slow_transfers_seconds == pytest.approx((7 * 2 + 2) * SLOW_TRANSFER_SECONDS)
    assert not replace(large, tensor=16, pipeline=1).has_slow_transfers
    assert replace(large, tensor=16, pipeline=1).slow_transfers_seconds == 0.0
    halved = replace(large, cluster=parse_cluster("32x8:h100"), tensor=2)
    assert not halved.has_slow_transfers
    assert replace(halved, microbatches=4).has_slow_transfers
    assert replace(halved, zero=1).has_slow_transfers


@pytest.mark.parametrize(("data", "tensor", "stages", "waits"), [(4, 2, 2, True), (2, 2, 4, False), (2, 8, 4, True)])
def test_copies_of_smaller_jobs_wait_too_under_zero_0(data: int, tensor: int, stages: int, waits: bool) -> None:
    hosts = data * tensor * stages // 8
    cluster, count = parse_cluster(f"{hosts}x8:h100"), 256 // data
    job = replace(STAGED, cluster=cluster, microbatches=count, data=data, tensor=tensor, pipeline=stages)
    assert job.has_slow_transfers == waits
    assert not replace(job, zero=1).has_slow_transfers
    assert not replace(job, microbatches=count // 2).has_slow_transfers
    assert replace(job, zero=1, tensor=32, pipeline=2).has_slow_transfers


@pytest.mark.parametrize("fits", [True, False])
def test_a_configuration_that_does_not_fit_waits_for_its_transfers(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    answer = Answer(seconds=1000.0, nbytes=1e9, limit_nbytes=1e12 if fits else 2e9)
    monkeypatch.setattr(Configuration, "answer", lambda self: answer)
    seconds = STAGED.answer().seconds
    assert seconds == pytest.approx(1000.0 + (0 if fits else (127 * 2 + 2) * SLOW_TRANSFER_SECONDS))


def test_views_keep_six_bytes_of_each_layer_on_its_way() -> None:
    assert STAGED.views_nbytes == 6 * 4096 * 4096 / 2 * 18 * 2


def test_tensor_devices_of_a_host_keep_a_gathered_input_of_each_layer() -> None:
    assert STAGED.whole_nbytes == 2 * 4096 * 4096 * 18 * 2
    assert replace(STAGED, tensor=1).whole_nbytes == replace(STAGED, tensor=16).whole_nbytes == 0.0
    assert replace(STAGED, cluster=parse_cluster("64x8:h100")).whole_nbytes == 0.0


def test_zero_1_keeps_the_sums_of_gradients_whole() -> None:
    sharded = replace(STAGED, zero=1, tensor=1, data=4)
    parameters = 18 * (4 * 4096**2 + 3 * 4096 * 14336) + 131072 * 4096
    assert sharded.sums_nbytes == 4 * parameters * 3 / 4
    in_one = replace(sharded, pipeline=1, layers=())
    assert in_one.sums_nbytes == 3 * (32 * (4 * 4096**2 + 3 * 4096 * 14336) + 2 * 131072 * 4096)
    assert replace(sharded, zero=0).sums_nbytes == replace(sharded, tensor=2).sums_nbytes == 0.0


def _line(tensor: int, stages: int, data: int, micro: int, count: int, peak: float | None, zero: int = 0) -> Fields:
    """A line of the source, of an 8B; without a peak it has no result."""
    sizes = {"vocab": 131072, "seq_len": 4096, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn": 14336}
    cuts = {"tp": tensor, "pp": stages, "dp": data, "zero_stage": zero, "num_gpus": tensor * stages * data}
    batch = {"microbatch_seqs": micro, "grad_accum": count, "global_batch_seqs": micro * count * data}
    words = {"model": "8B", "tied_embeddings": "no", "status": "measured" if peak else "no_result"}
    figures = {"tokens_per_s": "1e5" if peak else "", "peak_mem_GB": str(peak or "")}
    return words | figures | {name: str(value) for name, value in (sizes | cuts | batch).items()}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (_line(1, 8, 1, 1, 256, 62.5), None),  # alone it ran, so copies need no more
        (_line(1, 8, 1, 1, 256, 77.0), True),  # hardly
        (_line(1, 8, 1, 1, 4, 62.5), True),  # fewer microbatches on their way
        (_line(2, 8, 1, 1, 256, 62.5), True),  # weights are cut
        (_line(1, 4, 1, 1, 256, 62.5), True),  # other stages are not compared
        (_line(1, 8, 2, 1, 128, 54.4, zero=1), True),  # nor other ZeRO
    ],
)
def test_no_result_is_out_of_memory_unless_what_needs_no_less_ran(other: Fields, expected: bool | None) -> None:
    failed, ran = NANOTRON.read([_line(1, 8, 8, 1, 32, None), other])
    assert failed.out_of_memory is expected
    assert ran.out_of_memory is False


def test_state_that_zero_cuts_over_more_devices_needs_less() -> None:
    lines = [
        _line(1, 4, 8, 1, 32, None, zero=1),
        _line(1, 4, 4, 1, 64, 60.0, zero=1),
        _line(1, 4, 2, 1, 128, None, zero=1),
    ]
    assert [row.out_of_memory for row in NANOTRON.read(lines)] == [None, False, True]
