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
from tests.test_admission import Source, joint_distance
from tests.test_distribution import p_value

V, K, STEPS = 3, 2, 3
# After no id, and after each: the target. The drafter has base logits for each place, and a bias.
P = [[0.3, 0.3, 0.4], [0.5, 0.1, 0.4], [0.5, 0.2, 0.3], [0.1, 0.7, 0.2]]
BASE = [[0.4, 1.1, -0.2], [0.9, -0.3, 0.1]]
W1 = [[1.0, 0.5], [-2.0, 0.3], [0.2, -1.7]]
W2 = [[0.7, -1.3, 0.4], [1.1, 0.2, -0.9]]
# How likely each place is to be accepted is told by its hidden state and the token before.
HIDDEN, WEIGHT = [[0.9], [-0.3]], [1.0, 1.2, -0.8]


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


class Drafted(Source):
    """A request whose drafts follow `last`, and the confidences of the head for them."""

    def __init__(self, last: int) -> None:
        texts = [ids for k in range(K + 1) for ids in itertools.product(range(V), repeat=k)]
        rows = {ids: P[1 + (last, *ids)[-1]] for ids in texts}
        self.p = {ids: [Fraction(round(10 * x), 10) for x in row] for ids, row in rows.items()}
        self.q = self.p | {  # after the last draft no other is drawn
            ids: rows_after(last, ids, SamplingParams(), 0) for ids in texts if len(ids) < K
        }
        self.confidence = {
            ids: oracle.confidence(
                np.array(HIDDEN[min(len(ids), K - 1)], np.float32),
                np.array(W1[(last, *ids)[-1]], np.float32),
                np.array(WEIGHT, np.float32),
                0.0,
            )
            for ids in texts
        }


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("budget", [2, 3])
def test_joint_law_by_enumeration(method, budget):
    """What two requests emit together, of which the likeliest drafts are verified, follows p.

    Catches confidences of a head that is told of the draft itself: these are off.
    """
    step = ([Drafted(1), Drafted(2)], V, K, budget, method)
    distance, counts = joint_distance(*step, Source.confidences)
    assert distance < 1e-14
    assert len(counts) > 1  # who is admitted depends on what was drawn
    assert joint_distance(*step, Source.late)[0] > 0.003


def sequences(
    mesh, requests: int, method: str, exchange: str, candidates: int, budget: int | None = None
) -> torch.Tensor:
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
    w1, w2 = (torch.tensor(x, device=device) for x in (W1, W2))
    head = MarkovHead(w1, w2, confidence=torch.tensor(WEIGHT))
    hidden = torch.tensor(HIDDEN, device=device).expand(requests, K, 1)
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
        logits = shard_vocab(plan.select(base), mesh)
        drafts, confidences = drafter(logits, plan, last, plan.select(hidden))
        plan = sharder.plan(slots, [K + 1] * requests, budget=budget)
        contexts = torch.cat([context[:, None], 1 + drafts], 1)
        if budget is not None:
            assert confidences is not None
            plan = plan.admit(plan.best_first(confidences, drafts))
            contexts = contexts[plan.hidden_requests, plan.hidden_offsets]
        target = shard_vocab(plan.select(log_p[contexts.flatten()]), mesh)
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
    ("method", "exchange", "candidates", "budget"),
    [
        ("block", "batch", 0, None),
        ("standard", "batch", 2, None),
        ("block", "vocab", 2, None),
        ("block", "batch", 0, 3000),
        pytest.param("standard", "vocab", 0, 3000, marks=pytest.mark.slow),
    ],
)
def test_law_of_sequences(ranks, method, exchange, candidates, budget):
    """Catches drafts that are verified by rows which they were not drawn from.

    Or, with a budget, by other drafts than those that its confidences are of.
    """
    drawn = ranks.run(sequences, 4000, method, exchange, candidates, budget, timeout=110)[0]
    cells = np.ravel_multi_index(tuple(drawn.T.numpy()), (V,) * STEPS)
    counts = np.bincount(cells, minlength=V**STEPS)
    assert p_value(counts, law().ravel()) > 1e-4


def test_the_bias_matters():
    """Catches a head that is too weak for the tests above to see."""
    rows = [rows_after(last, (), SamplingParams(), 0) for last in range(V)]
    for one, other in itertools.combinations(rows, 2):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2 > 0.2
