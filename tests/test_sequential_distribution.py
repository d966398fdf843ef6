"""Blocks drafted left to right and verified: the target's law, exactly and by frequencies."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    SamplingParams,
    SamplingState,
)
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler
from tests import oracle
from tests.batches import library_weights, shard_vocab
from tests.pool import worlds
from tests.test_distribution import p_value

V, K, STEPS = 3, 2, 3
# After no id, and after each: the target. The drafter has base logits for each place, and a bias.
P = [[0.3, 0.3, 0.4], [0.5, 0.1, 0.4], [0.5, 0.2, 0.3], [0.1, 0.7, 0.2]]
BASE = [[0.4, 1.1, -0.2], [0.9, -0.3, 0.1]]
W1 = [[1.0, 0.5], [-2.0, 0.3], [0.2, -1.7]]
W2 = [[0.7, -1.3, 0.4], [1.1, 0.2, -0.9]]


def rows_after(last: int, drafts: tuple[int, ...], params, candidates: int) -> list[Fraction]:
    """What the next draft is drawn from, if `last` was said and then these were drafted."""
    base = torch.tensor(BASE[len(drafts)]).bfloat16().float().numpy()
    w1, w2 = np.array(W1, np.float32), np.array(W2, np.float32)
    values = oracle.markov(base, (last, *drafts)[-1], w1, w2, candidates)
    stored = torch.from_numpy(values).bfloat16().float().numpy()
    largest = torch.finfo(torch.bfloat16).max
    row = oracle.row_of(stored, params, vocab_size=V, largest=largest, weights=library_weights)
    return row.probabilities


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("params", "candidates"),
    [(SamplingParams(), 0), (SamplingParams(temperature=0.6, top_p=0.8), 0), (SamplingParams(), 2)],
    ids=["all", "filtered", "candidates"],
)
def test_law_by_enumeration(method, params, candidates):
    """All drafts and decisions in fractions: what is emitted follows p without error.

    Catches rules of drafting that break it, such as candidates that q does not leave out. That the
    library follows these rules, token for token, is for `tests/test_sequential.py`.
    """
    p = [[Fraction(round(10 * x), 10) for x in row] for row in P]
    for last in range(V):

        def p_of(ids, last=last):
            return p[1 + (last, *ids)[-1]]

        def q_of(ids, last=last):
            # After the last draft no other is drawn.
            return rows_after(last, ids, params, candidates) if len(ids) < K else p[0]

        law, mean = oracle.emitted_law(p_of, q_of, K, V, method)
        assert law == oracle.target_law(p_of, K, V)
        assert mean > 0.1


def sequences(mesh, requests: int, method: str, exchange: str, candidates: int) -> torch.Tensor:
    """[B, STEPS] the first ids that each request emits."""
    device = mesh.device_type
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=requests,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=3,
    )
    for slot in range(requests):
        state.add(slot, SamplingParams())
    head = MarkovHead(torch.tensor(W1, device=device), torch.tensor(W2, device=device))
    drafter = SequentialDraftSampler(state, head, candidates=candidates)
    verifier, sharder = RejectionSampler(state, method=method), BatchSharder(state)
    log_p = torch.tensor(P).log().to(device)
    base = torch.tensor(BASE).bfloat16().to(device).expand(requests, K, V)
    ids = torch.full((requests, STEPS * (K + 1) + K + 1), -1)
    length, place = torch.zeros(requests, 1, dtype=torch.int64), torch.arange(K + 1)
    slots, context = range(requests), torch.zeros(requests, dtype=torch.int64, device=device)
    for _ in range(STEPS):
        plan = sharder.plan(slots)
        last = (context - 1).clamp(min=0)
        drafts = drafter(shard_vocab(plan.select(base), mesh), plan, last).token_ids
        plan = sharder.plan(slots, [K + 1] * requests)
        contexts = torch.cat([context[:, None], 1 + drafts], 1)
        target = shard_vocab(plan.select(log_p[contexts].flatten(0, 1)), mesh)
        output = verifier(target, plan, drafts)
        ids.scatter_(1, length + place, output.token_ids.cpu())  # what is too much is overwritten
        length += output.num_sampled[:, None].cpu()
        context = 1 + output.token_ids.gather(1, output.num_sampled[:, None] - 1)[:, 0]
    return ids[:, :STEPS]


def law() -> np.ndarray:
    """[3, 3, ...] the probability of the first ids."""
    table: Any = np.array(P)
    probability = table[0]
    for _ in range(STEPS - 1):
        probability = probability[..., None] * table[1:]
    return probability


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize(
    ("method", "exchange", "candidates"),
    [("block", "batch", 0), ("standard", "batch", 2), ("block", "vocab", 2)],
)
def test_law_of_sequences(ranks, method, exchange, candidates):
    """Catches drafts that are verified by rows which they were not drawn from."""
    drawn = ranks.run(sequences, 4000, method, exchange, candidates, timeout=110)[0]
    cells = np.ravel_multi_index(tuple(drawn.T.numpy()), (V,) * STEPS)
    counts = np.bincount(cells, minlength=V**STEPS)
    assert p_value(counts, law().ravel()) > 1e-4


def test_the_bias_matters():
    """Catches a head that is too weak for the tests above to see."""
    rows = [rows_after(last, (), SamplingParams(), 0) for last in range(V)]
    for one, other in itertools.combinations(rows, 2):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2 > 0.2
