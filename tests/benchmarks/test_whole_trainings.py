"""MosaicML's and MaxText's trainings: their models, and what their tables print, as published rows are planned."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.published import maxtext_llama, megatron_gpt, mpt
from benchmarks.published.foundry import FOUNDRY
from benchmarks.published.maxtext import MAXTEXT, flops
from benchmarks.published.planned import Configuration
from benchmarks.published.rows import Row, Source
from benchmarks.published.sources import DATA
from models import gpt, llama
from tests.sample import slow

GPT = gpt.Config(vocab_size=64, sequence_length=16, hidden=32, layers=2, heads=4, scan_layers=True)
LLAMA = llama.Config(
    vocab_size=64, sequence_length=16, hidden=32, layers=2, heads=4, kv_heads=4, mlp=64, scan_layers=True
)


def rows_of(source: Source, name: str) -> dict[str, Row]:
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return {row.name: row for row in source.read(list(csv.DictReader(file)))}


ROWS = rows_of(FOUNDRY, "llm_foundry")
TRAININGS = rows_of(MAXTEXT, "maxtext")


def question(row: Row) -> Configuration:
    assert isinstance(row.question, Configuration)
    return row.question


@pytest.mark.parametrize(
    ("trained", "module", "config"),
    [
        (mpt, gpt, GPT),
        slow(mpt, gpt, replace(GPT, remat=True)),
        slow(maxtext_llama, llama, LLAMA),
        (maxtext_llama, llama, replace(LLAMA, remat=True)),
    ],
    ids=["mpt", "mpt recomputed", "maxtext", "maxtext recomputed"],
)
def test_their_models_compute_what_the_zoos_do(
    monkeypatch: pytest.MonkeyPatch, trained: ModuleType, module: ModuleType, config: Any
):
    """The loss and every gradient, with the least variance of a norm that Flax has."""
    monkeypatch.setattr(megatron_gpt, "EPSILON", 1e-6)
    params, batch = module.init(config, jax.random.key(0)), module.example_batch(config, 4, jax.random.key(1))
    ours, theirs = (jax.value_and_grad(lambda p, of=of: of.loss(config, p, batch))(params) for of in (trained, module))
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("MPT-125M on 8 A100-SXM4-80GB, 2 x 32 of 2048", 125_311_488),
        ("MPT-760M on 8 H100-SXM5-80GB, 2 x 96 of 512", 758_111_232),
        ("MPT-7B on 8 A100-SXM4-80GB, 2 x 1 of 65536, recomputed", 6_918_905_856),
        ("MPT-70B on 64 H100-SXM5-80GB, 4 x 8 of 2048, recomputed", 64_862_437_376),
    ],
)
def test_mpt_has_the_parameters_that_its_table_prints(name: str, parameters: int):
    job = question(ROWS[name]).job
    shapes = jax.eval_shape(lambda key: mpt.init(job.config, key), jax.random.key(0))
    assert sum(math.prod(shape.shape) for shape in jax.tree.leaves(shapes)) == parameters


def test_a_row_of_mpt_is_its_batch_at_its_rate():
    row = ROWS["MPT-7B on 8 H100-SXM5-80GB, 1 x 6 of 2048"]
    assert row.seconds == pytest.approx(48 * 2048 / 85144)
    assert row.out_of_memory is False
    of = question(row)
    assert (of.job.batch, of.microbatches, of.data, of.zero, of.job.config.remat) == (48, 1, 8, 3, False)
    assert of.cluster.group().device.fuses_attention


@pytest.mark.parametrize(
    ("name", "share", "peak"),
    [("32B on 256 tpu-v5e", 0.6686, 197), ("64B on 64 tpu-v5p", 0.7031, 459), ("22B on 64 tpu-v4", 0.567, 275)],
)
def test_a_row_of_maxtext_keeps_the_printed_share_of_the_peak_busy(name: str, share: float, peak: float):
    row = TRAININGS[name]
    of = question(row)
    assert row.seconds is not None
    rate = flops(of.job.config, of.job.batch) / row.seconds / of.cluster.n_devices
    assert rate / (peak * 1e12) == pytest.approx(share, rel=0.01)
    assert of.data * of.tensor == of.cluster.n_devices
