"""Eight CPU devices for every test and a quick compiler; the GPU only for a run that asks for it with `-m gpu`."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

from autopar.checks import hlo

EMITTERS = "xla_cpu_use_fusion_emitters"
"""False: loops as XLA's CPU compiler wrote them before 2025; the same passes over HLO, half the time of compiling."""
SPLITS = "xla_cpu_parallel_codegen_split_count"
"""1: machine code in one go and not in 32 pieces side by side, for which two busy cores need a fifth longer."""
HAS_OPTIONS = jax.__version_info__ < (0, 11)
"""Later XLA has not all of these options any more, and ends a process that asks for one by a flag."""
TRACED_ALIKE = jax.__version_info__ < (0, 11)
"""Whether JAX traces functions to the operators of the golden texts: later, a tanh's derivative is one of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, help="of what slow tests draw at random (default: a fresh one, which the header names)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Every worker and every command that a test starts would compile all sources again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if config.option.seed is None:
        config.option.seed = getattr(config, "workerinput", {}).get("seed", secrets.randbelow(2**32))
    # These settings count only before JAX starts its backend, hence here and not in a fixture.
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    if HAS_OPTIONS:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{EMITTERS}=false --{SPLITS}=1".strip()
    asks_for_gpu = "gpu" in str(config.getoption("markexpr")).replace("not gpu", "")
    if not asks_for_gpu:
        jax.config.update("jax_platforms", "cpu")


SLOW_SECONDS = 7200
"""The timeout of a test for the slow run, unless it has one of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and thousands of collected tests are no garbage: looking through them was a tenth of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of pytest-xdist draw from one seed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"what slow tests draw at random: --seed={config.option.seed}"


@pytest.fixture(scope="session")
def fresh_seed(pytestconfig: pytest.Config) -> int:
    """Another one in every run, unless `--seed` replays one; a test that draws from it prints it."""
    return pytestconfig.option.seed


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled as users do it: for what is held against the compiler's own figures, and a sample of everything else."""
    given = hlo.compiler_options

    def options(platform: str, user_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return ({EMITTERS: True} if HAS_OPTIONS else {}) | given(platform, user_options)

    monkeypatch.setattr(hlo, "compiler_options", options)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def float64() -> Iterator[None]:
    """64-bit arrays, in which a sum of another order differs by less than any mistake does."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Commands keep no plans in the cache of whoever runs the tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and a run with -m gpu")
