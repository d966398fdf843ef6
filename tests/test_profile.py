"""The named ranges that a profiler shows, and steps of a torch that lacks what is private to it."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    private,
    sample,
)
from dtensor_sample import profile as ranges
from tests.batches import shard_vocab
from tests.pool import worlds

V = 50


def ranges_of(mesh) -> dict[str, list[str]]:
    """The library's ranges in the order in which they begin, by kind of step."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=2, num_speculative_tokens=1, seed=0)
    for slot in range(2):
        state.add(slot, SamplingParams(top_k=3, seed=slot))
    hidden = torch.ones(4, V, device=mesh.device_type)
    sharder, sampler, verifier = BatchSharder(state), Sampler(state), RejectionSampler(state)

    def plain():
        plan = sharder.plan([0, 1])
        sampler(shard_vocab(plan.select(hidden[:2]), mesh), plan)

    def verified():
        plan = sharder.plan([0, 1], [2, 2])
        verifier(shard_vocab(plan.select(hidden), mesh), plan, [[1], [2]])

    def stateless():
        sample(shard_vocab(hidden, mesh), SamplingParams(top_p=0.9), position=0)

    found: dict[str, list[str]] = {}
    for step in (plain, verified, stateless):
        step()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            step()
        begun = sorted(recorded.events(), key=lambda event: event.time_range.start)
        own = [e.name for e in begun if e.name.startswith("dtensor_sample.")]
        found[step.__name__] = [name.removeprefix("dtensor_sample.") for name in own]
    return found


@worlds("cpu:1", "cpu:2", "cuda:2")
def test_ranges(ranks):
    """Catches a range that is gone or renamed, or that comes twice."""
    for found in ranks.run(ranges_of):
        assert found == {
            "plain": ["plan", "exchange", "draw", "threshold", "gather"],
            "verified": ["plan", "exchange", "verify", "threshold", "gather"],
            "stateless": ["exchange", "draw", "threshold", "gather"],
        }


def without_private_names(mesh) -> list[list[int]]:
    """Tokens of steps of a torch as it is, and of one without names that are private to it."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=2, seed=0)
    for slot in range(2):
        state.add(slot, SamplingParams(top_k=3, seed=slot))
    sharder, sampler, found = BatchSharder(state), Sampler(state), []
    hidden = torch.randn(2, V, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)

    def step() -> None:
        plan = sharder.plan([0, 1], positions=[5, 6])
        logits = shard_vocab(plan.select(hidden), mesh)
        found.append(sampler(logits, plan).token_ids[:, 0].tolist())

    step()
    options = [(module, f"no_{name}", value) for module, name, value in private._VARIANTS]
    with (
        mock.patch.object(private, "torch", SimpleNamespace(_C=SimpleNamespace())),
        mock.patch.object(private, "_VARIANTS", [*options, ("torch.no_config", "no_name", 1)]),
        mock.patch.object(ranges, "profiler_enabled", return_value=True),
    ):
        assert private.looked_on()
        with private.many_variants():
            step()
    return found


@worlds("cpu:1")
def test_variants_are_allowed_for_a_call_alone(ranks):
    """Catches options of the compiler that outlive the call they are meant for."""
    ranks.run(options_of_the_compiler)


def options_of_the_compiler(mesh) -> None:
    """Before a call, in it and after one that raised."""

    def options() -> list[object]:
        found = ((importlib.import_module(module), name) for module, name, _ in private._VARIANTS)
        return [getattr(config, name) for config, name in found]

    before, within = options(), []

    def call() -> None:
        with private.many_variants():
            within.extend(options())
            raise KeyError

    with pytest.raises(KeyError):
        call()
    assert within == [value for *_, value in private._VARIANTS]
    assert options() == before != within


@worlds("cpu:2")
def test_torch_may_lack_private_names(ranks):
    """Catches a step that needs more of torch than is public."""
    for with_them, without in ranks.run(without_private_names):
        assert with_them == without
