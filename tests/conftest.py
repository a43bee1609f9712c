"""Eight CPU devices for every test; the GPU only for a run that asks for it with `-m gpu`."""

from __future__ import annotations

import os

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Both settings count only before JAX starts its backend, hence here and not in a fixture.
    jax.config.update("jax_num_cpu_devices", 8)
    asks_for_gpu = "gpu" in str(config.getoption("markexpr")).replace("not gpu", "")
    if not asks_for_gpu:
        jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands keep no plans in the cache of whoever runs the tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and a run with -m gpu")
