"""Fixtures that all tests share."""

from collections.abc import Iterator
from importlib.util import find_spec

import hypothesis
import pytest
import torch

from tests.pool import WORLDS, Pools, Ranks, World, start_server, world_params

# The same examples in every run, and no time limit on one: the first may start worker processes.
hypothesis.settings.register_profile("dtensor_sample", derandomize=True, deadline=None)
hypothesis.settings.load_profile("dtensor_sample")

# What imports the examples needs the extra "examples", which a machine with its own torch may lack.
collect_ignore = [] if find_spec("gguf") else ["test_examples.py", "test_integrations.py"]


def pytest_report_header() -> list[str]:
    return [
        f"{name} is left out: it needs gguf (pip install '.[examples]')" for name in collect_ignore
    ]


def pytest_collection(session: pytest.Session) -> None:
    """Workers' imports go on while the tests are collected."""
    start_server()


@pytest.fixture(scope="session")
def pools(pytestconfig: pytest.Config) -> Iterator[Pools]:
    """The worker processes of many-rank tests, under the same warning filters as the tests."""
    pools = Pools(filters=pytestconfig.getini("filterwarnings"))
    yield pools
    pools.close()


# Of module scope, so that hypothesis tests may use it and files still run one after another.
@pytest.fixture(scope="module", params=world_params(*WORLDS))
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Ranks:
    """A world of ranks to run a body on: see tests/pool.py."""
    world = World.parse(request.param)
    if world.device_type == "cuda" and (found := torch.cuda.device_count()) < world.size:
        pytest.skip(f"needs {world.size} CUDA devices, found {found}")
    return Ranks(pools, world)
