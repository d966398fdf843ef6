"""Batches with more logits than 32 bits can count."""

import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplingParams,
    SamplingState,
    vocab_sharded,
)
from tests.pool import worlds

V, K = 151936, 7
TABLE = 61
"""Different rows of logits."""


def verified(
    mesh, exchange: str, method: str, first: int, last: int
) -> tuple[list[list[int]], int]:
    """Tokens of the last three requests, K drafts each; and how many drafts of all are accepted."""
    tp, device, count = mesh["tp"], mesh.device_type, last - first
    generator = torch.Generator(device).manual_seed(5)
    table_NV = torch.randn(TABLE, V, generator=generator, device=device).mul_(3).bfloat16()
    draft_NV = torch.randn(TABLE, V, generator=generator, device=device).bfloat16() + table_NV
    width, rank = -(-V // mesh.size()), mesh.get_local_rank()
    own = slice(rank * width, (rank + 1) * width)
    state = SamplingState(
        tp, vocab_size=V, max_num_reqs=count, num_speculative_tokens=K, exchange=exchange
    )
    for slot in range(count):
        seed = first + slot
        filtered = SamplingParams(seed=seed, top_k=50, top_p=0.95)
        state.add(slot, filtered if seed % 2 else SamplingParams(seed=seed), position=3)
    sharder, slots = BatchSharder(state), list(range(count))

    def logits(table_NV, plan, number_T):
        """Row by number, in the plan's order."""
        selected_T = plan.select(number_T[:, None])[:, 0] % TABLE
        return vocab_sharded(table_NV[selected_T, own], tp, vocab_size=V)

    request_B = torch.arange(first, last, device=device)
    drafter, steps = DraftSampler(state), []
    for step in range(K):
        plan = sharder.plan(slots)
        steps.append(drafter(logits(draft_NV, plan, request_B * 11 + step), plan, step=step))
    plan = sharder.plan(slots, [K + 1] * count)
    row_T = (request_B[:, None] * 11 + torch.arange(K + 1, device=device)).flatten()
    output = RejectionSampler(state, method=method)(
        logits(table_NV, plan, row_T), plan, torch.stack(steps, 1)
    )
    accepted = int((output.num_sampled - 1).sum())
    return output.token_ids[-3:].tolist(), accepted


@worlds("cuda:1", "cuda:2")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_verification_beyond_2_31_logits(ranks, exchange):
    """Catches 32-bit offsets into logits or kept drafts: the last requests as if alone."""
    last = 2100 * ranks.size
    assert 2100 * K * V > 2**31
    for method in ("standard", "block"):
        far = ranks.run(verified, exchange, method, 0, last, timeout=200)
        near = ranks.run(verified, exchange, method, last - 3, last)
        assert [tokens for tokens, _ in far] == [tokens for tokens, _ in near]
        assert all(accepted > last for _, accepted in far)
