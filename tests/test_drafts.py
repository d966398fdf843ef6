"""Steps with drafts give the oracle's tokens, wherever rows, drafts and caches lie."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.batches import EXCHANGES, OWNERS, Layout
from tests.speculation import Speculation, expected, random_speculation, speculative_step

METHODS = ("standard", "block")
DTYPES = (
    # Target, draft.
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
)
STEPS = [
    # Requests, V, K, padding
    (17, 13, 3, 3),
    (11, 3, 4, 0),
    (7, 111, 2, 1),
    (1, 2, 1, 2),
    (3, 50, 6, 0),
    (0, 7, 2, 0),
]


@lru_cache
def steps() -> list[Speculation]:
    """Steps of every size and pair of dtypes."""
    return [
        random_speculation(10 * i + j, size, V, K, padding=padding, dtype=target, draft_dtype=draft)
        for i, (target, draft) in enumerate(DTYPES)
        for j, (size, V, K, padding) in enumerate(STEPS)
    ]


@lru_cache
def answers(method: str) -> list[dict[str, list]]:
    return [expected(step, method) for step in steps()]


def run_steps(mesh, steps, layouts, method) -> list[dict[str, list]]:
    return [
        speculative_step(mesh, step, layout, method)
        for step, layout in zip(steps, layouts, strict=True)
    ]


def test_steps_are_worth_testing():
    """Catches random steps that never accept, reject, fail or end early."""
    outcomes = [
        (len(request.chosen) < request.k, request.k, sampled, failed)
        for step, wanted in zip(steps(), answers("block"), strict=True)
        for request, sampled, failed in zip(
            step.requests, wanted["num_sampled"], wanted["failed"], strict=True
        )
    ]
    for drawn in (False, True):
        kinds = [(k, sampled, failed) for d, k, sampled, failed in outcomes if d == drawn]
        print(
            len(kinds),
            sum(sampled == k + 1 and k > 0 for k, sampled, _ in kinds),
            sum(1 < sampled < k + 1 for k, sampled, _ in kinds),
            sum(sampled <= 1 and k > 0 for k, sampled, _ in kinds),
            sum(failed and sampled > 0 for k, sampled, failed in kinds),
        )
        assert sum(sampled == k + 1 and k > 0 for k, sampled, _ in kinds) > 5
        assert sum(1 < sampled < k + 1 for k, sampled, _ in kinds) > 3
        assert sum(sampled <= 1 and k > 0 for k, sampled, _ in kinds) > 5
        assert sum(failed and sampled > 0 for k, sampled, failed in kinds) > 0


@pytest.mark.parametrize("exchange", EXCHANGES[:3])
@pytest.mark.parametrize("method", METHODS)
def test_random_steps(ranks, method, exchange):
    """Catches a wrong row, coin, residual or count in some exchange, dtype, size or mixture."""
    rng = np.random.default_rng(0)
    layouts = [
        Layout(
            exchange=exchange,
            owners=OWNERS[i % 3],
            spare=i % 2 if exchange == "batch" else 0,
            slots=(rng.permutation(len(step) + 3)[: len(step)]).tolist(),
        )
        for i, step in enumerate(steps())
    ]
    for results in ranks.run(run_steps, steps(), layouts, method):
        assert results == answers(method)
