"""Blocks drafted left to right, of which the likeliest drafts are verified: the whole step.

Confidences come from the drafter's head, and decide on the device which drafts are verified.
"""

from collections.abc import Sequence
from functools import lru_cache

import pytest

from tests import oracle
from tests.batches import EXCHANGES
from tests.drafting import Script, play, play_graphed
from tests.pool import worlds
from tests.test_sequential import compare

K = 3
SIZES = (5, 0, 1, 9, 2, 7, 4, 9, 1, 3, 6, 8)


@lru_cache
def script_of(method: str, sizes: Sequence[int] = SIZES, edited: bool = False) -> Script:
    seed = {"block": 61, "standard": 62}[method]
    return Script(seed, sizes, K=K, padding=2, budgets=True, method=method, edited=edited)


@pytest.mark.parametrize("method", ["block", "standard"])
def test_scripts_are_worth_testing(method):
    """Catches budgets that admit all drafts or none, and that no confidence decides about."""
    script = script_of(method)
    answers, steps = script.answers, [step for name, step in script.events if name == "step"]
    counts = [answer["counts"] for answer in answers]
    assert {0, 1, 2, 3} == {n for own in counts for n in own}
    assert sum(len(set(own)) > 2 for own in counts) > 2
    rejected = [n for answer in answers for n in answer["num_rejected"]]
    accepted = [n - 1 for answer in answers for n in answer["num_sampled"]]
    assert max(accepted) > 1
    assert max(rejected) > 1
    # Of drafts that are all as likely, others would be admitted.
    others = [
        oracle.admitted(
            [[1.0] * K] * len(step.slots),
            answer["drafts"],
            [n - 1 for n in step.rows],
            step.budget,
            script.V,
        )
        for step, answer in zip(steps, answers, strict=True)
    ]
    assert sum(own != other for own, other in zip(counts, others, strict=True)) > 2


WAYS = [
    ("batch", "block"),
    *(pytest.param(name, "standard", marks=pytest.mark.slow) for name in EXCHANGES),
    *(pytest.param(name, "block", marks=pytest.mark.slow) for name in ("vocab", "replicate")),
]
WORLDS = ("cpu:1", "cpu:2", "cpu:4", "cuda:1", "cuda:2")


@worlds(*WORLDS)
@pytest.mark.parametrize(("exchange", "method"), WAYS)
def test_steps(ranks, exchange, method):
    """Catches a draft, confidence, count or row that is another request's, and kept rows too."""
    script = script_of(method)
    compare(ranks.run(play, script, exchange, "auto", poison=True), script)


@worlds(*WORLDS)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("exchange", "method"), WAYS)
def test_steps_in_graphs(ranks, exchange, method):
    """Catches a budget, limit, token before or confidence that a graph has frozen, and padding.

    On CPUs the same padded function runs without graphs.
    """
    on_gpus = ranks.device_type == "cuda"
    script = script_of(method, SIZES * 5 if on_gpus else SIZES)
    capacities = [2, 6, (K + 1) * script.slots]
    results = ranks.run(play_graphed, script, exchange, capacities, timeout=280)
    compare([steps for steps, _ in results], script)
    assert (results[0][1] > 3) == on_gpus
