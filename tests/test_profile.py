"""The named ranges that a profiler shows."""

import torch
from torch.profiler import ProfilerActivity, profile

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    sample,
)
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
