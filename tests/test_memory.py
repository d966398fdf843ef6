"""What a step takes on a GPU: no copy of the logits, nothing that grows, one process group."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    logprobs,
    vocab_sharded,
)
from tests.pool import worlds

V, K, REQUESTS = 129_280, 7, 128
ROWS = REQUESTS * (K + 1)
BYTES_A_ROW = 1 << 14
"""Integers of a row: a histogram of 256 for each filter is the most of them."""
FIXED_BYTES = 4 << 20
TOLD_BYTES = 32 << 20
SOME_ROWS_BYTES = 160 << 20
"""Float64 numbers of as many rows as gradients are computed of at once."""


def random_logits(mesh, rows: int) -> DTensor:
    """Vocabulary shards in bfloat16, made in place."""
    width = V // mesh.size()
    local = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda").normal_(std=3)
    return vocab_sharded(local, mesh, vocab_size=V)


def taken(run) -> int:
    """Bytes that `run` allocates beyond what there is, at most, once it has run before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks(mesh, exchange: str) -> dict[str, int]:
    """Bytes taken by each kind of step of requests with all filters."""
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=1e-3)
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=ROWS, exchange=exchange, seed=0)
    speculative = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=REQUESTS,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=0,
    )
    for made in (state, speculative):
        for slot in range(made.max_num_reqs):
            made.add(slot, params)
    logits, few = random_logits(mesh, ROWS), random_logits(mesh, REQUESTS)
    sampler, plan = Sampler(state), BatchSharder(state).plan(range(ROWS))
    found = {"plain": taken(partial(sampler, logits, plan))}
    asking = SamplingState(mesh, vocab_size=V, max_num_reqs=ROWS, exchange=exchange, seed=0)
    for slot in range(ROWS):
        asking.add(slot, replace(params, logprobs=20, kept_capacity=50, entropy=True))
    plan = BatchSharder(asking).plan(range(ROWS))
    found["told"] = taken(partial(Sampler(asking), logits, plan))
    sharder, drafter = BatchSharder(speculative), DraftSampler(speculative)
    draft_plan = sharder.plan(range(REQUESTS))

    def draft() -> torch.Tensor:
        return torch.stack([drafter(few, draft_plan, step=k) for k in range(K)], 1)

    found["drafted"] = taken(draft)
    drafts = draft()
    plan = sharder.plan(range(REQUESTS), [K + 1] * REQUESTS)
    for method in ("standard", "block"):
        verifier = RejectionSampler(speculative, method=method)
        verifier(logits, plan, drafts)
        draft()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        verifier(logits, plan, drafts)
        torch.cuda.synchronize()
        found[method] = torch.cuda.max_memory_allocated() - before
        draft()
    assert speculative.drafts.bytes == REQUESTS // mesh.size() * K * V * 2
    return found


@worlds("cuda:1", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_a_step_takes_its_receive_buffer_and_little_more(ranks, exchange):
    """Catches a float copy of the logits, a transposed one, a mask, or a sort."""
    for found in ranks.run(peaks, exchange, timeout=100):
        for name, peak in found.items():
            rows = REQUESTS if name == "drafted" else ROWS
            if name == "told":  # one number for each block of 128 logits, and some at a time
                peak -= 2 * BYTES_A_ROW * rows + TOLD_BYTES
            received = rows // ranks.size * V * 2 if exchange == "batch" and ranks.size > 1 else 0
            assert peak <= received + BYTES_A_ROW * rows + FIXED_BYTES, (name, peak, received)


def trained(mesh) -> tuple[int, int]:
    """Bytes taken by log-probabilities, and by their gradients."""
    logits = random_logits(mesh, ROWS)
    logits.requires_grad_()
    ids = torch.zeros(ROWS, dtype=torch.int64, device="cuda")

    def backward() -> None:
        logprobs(logits, ids).sum().backward()
        logits.grad = None

    with torch.no_grad():
        forward = taken(partial(logprobs, logits, ids))
    return forward, taken(backward)


@worlds("cuda:1", "cuda:2")
def test_training_takes_the_gradient_and_little_more(ranks):
    """Catches a float copy of the logits or of their softmax."""
    for forward, backward in ranks.run(trained, timeout=100):
        little = BYTES_A_ROW * ROWS + FIXED_BYTES
        assert forward <= little
        assert backward <= ROWS * V // ranks.size * 2 + little + SOME_ROWS_BYTES


def growth(mesh, exchange: str) -> tuple[int, int, int]:
    """Bytes that 1000 steps add to the allocator's, used and reserved, and process groups."""
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=8, exchange=exchange, seed=0)
    for slot in range(8):
        state.add(slot, SamplingParams(top_k=20, seed=slot))
    sharder, sampler, logits = BatchSharder(state), Sampler(state), random_logits(mesh, 8)
    groups = len(dist.distributed_c10d._world.pg_map)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            sampler(logits, sharder.plan(range(8)))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before, after = steps(20), steps(1000)
    made = len(dist.distributed_c10d._world.pg_map) - groups
    return after[0] - before[0], after[1] - before[1], made


@worlds("cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab", "replicate"])
def test_nothing_grows(ranks, exchange):
    """Catches memory that steps leave behind, and a communicator besides the mesh's."""
    assert ranks.run(growth, exchange, timeout=100) == [(0, 0, 0)] * 2
