"""examples/rollout.py: rollout and trainer agree to the bit, and rewards rise."""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import rollout as script
import torch

from dtensor_sample import SamplingParams
from tests.pool import Ranks, worlds
from tests.test_examples import run

pytestmark = pytest.mark.slow


def trained(mesh, rounds: int, seed: int = 0, compile_step: bool = False) -> tuple[list, int]:
    """Rewards and compiled graphs of a small run; it ends if rollout and trainer differ."""
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return script.train(mesh, rounds=rounds, seed=seed, compile_step=compile_step)


@worlds("cpu:1", "cpu:2", "cuda:2")
def test_rewards_rise(ranks: Ranks) -> None:
    """Catches a gradient of the wrong sign, and advantages of other samples."""
    for rewards, _ in ranks.run(trained, 20):
        assert len(rewards) == 20
        assert sum(rewards[:3]) / 3 < 0.2
        assert sum(rewards[-3:]) / 3 > 0.8


@worlds("cpu:2")
def test_weights_change_without_compiling_again(ranks: Ranks) -> None:
    """Catches a compiled step that bakes weights in, and rounds that are not reproducible."""
    first, second = (ranks.run(trained, 4, compile_step=True) for _ in range(2))
    assert first == second
    for rewards, graphs in first:
        assert graphs == 1
        assert rewards[-1] > rewards[0]


def generated(mesh) -> torch.Tensor:
    model = script.build(mesh, seed=0)
    starts_BW = torch.ones(16, script.W, dtype=torch.int64, device=mesh.device_type)
    tokens_BL, _ = script.generate(model, starts_BW, SamplingParams(seed=3).spawn(16), 4)
    return tokens_BL


@worlds("cpu:2")
def test_samples_of_a_prompt_are_distinct(ranks: Ranks) -> None:
    """Catches one random stream for a whole group: 16 equal samples have no advantage."""
    for tokens_BL in ranks.run(generated):
        assert len(tokens_BL.unique(dim=0)) > 12


@pytest.mark.slow
def test_script(tmp_path: Path) -> None:
    """The script as users start it."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    options = ("--rounds", 3, "--compile", "--json")
    stdout, _ = run(*torchrun, Path(script.__file__), *options, folder=tmp_path)
    report = json.loads(stdout)
    assert len(report["rewards"]) == 3
    assert report["ranks"] == 2
    assert report["compiled"] == 1
