"""Frequencies of what drafted steps emit, over consecutive steps, against the exact law of p."""

from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    ops,
)
from dtensor_sample.random import COIN, DRAFT, RECOVERY, TARGET
from tests.batches import shard_vocab
from tests.pool import worlds
from tests.speculation import emitted
from tests.test_distribution import p_value

STEPS = 4

IN_CONTEXT = (
    # After no id, and after each: the target and the draft.
    [[0.3, 0.3, 0.4], [0.5, 0.1, 0.4], [0.5, 0.2, 0.3], [0.1, 0.7, 0.2]],
    [[0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.4, 0.1, 0.5], [0.2, 0.2, 0.6]],
)
FAR_APART = ([[0.10, 0.45, 0.45]] * 4, [[0.6, 0.3, 0.1]] * 4)
MODELS = {"in context": IN_CONTEXT, "far apart": FAR_APART}


class Engine:
    """Many unseeded requests of one model: ids follow the id before by p, and are drafted by q."""

    def __init__(self, mesh, model: Any, requests: int, K: int, method: str, seed: int) -> None:
        self.mesh, self.K = mesh, K
        self.log_p, self.log_q = (torch.tensor(rows).log().to(mesh.device_type) for rows in model)
        self.state = SamplingState(
            mesh, vocab_size=3, max_num_reqs=requests, num_speculative_tokens=K, seed=seed
        )
        for slot in range(requests):
            self.state.add(slot, SamplingParams())
        self.sharder, self.slots = BatchSharder(self.state), range(requests)
        self.draft_plan = self.sharder.plan(self.slots)
        self.plan: ShardPlan | None = None
        """Made once, after the first drafts: all later ones are kept in the same places."""
        self.drafter = DraftSampler(self.state)
        self.verifier = RejectionSampler(self.state, method=method)
        self.context = torch.zeros(requests, dtype=torch.int64, device=mesh.device_type)
        """[B]: 0 at first, then 1 + the last id."""

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K + 1] emitted ids and [B] how many, after drafts that each follow the one before."""
        contexts = [self.context]
        for step in range(self.K):
            rows = shard_vocab(self.draft_plan.select(self.log_q[contexts[-1]]), self.mesh)
            contexts.append(1 + self.drafter(rows, self.draft_plan, step=step))
        if self.plan is None:
            self.plan = self.sharder.plan(self.slots, [self.K + 1] * len(self.slots))
        selected = self.plan.select(self.log_p[torch.stack(contexts, 1)].flatten(0, 1))
        drafts = torch.stack(contexts[1:], 1) - 1
        output = self.verifier(shard_vocab(selected, self.mesh), self.plan, drafts)
        last = output.token_ids.gather(1, output.num_sampled[:, None] - 1)[:, 0]
        self.context = 1 + last
        return output.token_ids, output.num_sampled


def sequences(mesh, *args: Any) -> tuple[torch.Tensor, float]:
    """[B, STEPS] the first ids that each request emits in so many steps; and ids per step."""
    return emitted(Engine(mesh, *args), STEPS)


def law(rows: Any) -> np.ndarray:
    """[3, 3, ...] the probability of the first ids."""
    table = np.array(rows)
    probability = table[0]
    for _ in range(STEPS - 1):
        probability = probability[..., None] * table[1:]
    return probability


def check(ranks, model: str, method: str, requests: int, K: int, seed: int) -> float:
    drawn, mean = ranks.run(sequences, MODELS[model], requests, K, method, seed, timeout=110)[0]
    cells = np.ravel_multi_index(tuple(drawn.T.numpy()), (3,) * STEPS)
    counts = np.bincount(cells, minlength=3**STEPS)
    assert p_value(counts, law(MODELS[model][0]).ravel()) > 1e-4
    return mean


@worlds("cpu:1")
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("model", MODELS)
def test_law_of_sequences(ranks, model, method):
    """Catches a uniform that serves two steps, or draft and recovery: each step alone is exact.

    A refused draft is drafted anew in the next step.
    """
    mean = check(ranks, model, method, requests=4_000, K=2, seed=6)
    assert 1.2 < mean < 2.6


@worlds("cpu:1", "cuda:1")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("model", MODELS)
def test_law_of_many_sequences(ranks, model, method):
    """Catches a smaller bias of the same kinds, and of longer blocks."""
    check(ranks, model, method, requests=100_000, K=3, seed=7)


def first_ids(mesh, requests: int, method: str, greedy: bool) -> list[int]:
    """How often each id comes first, after one draft each that was chosen or drawn."""
    model = ([[0.3, 0.5, 0.2]] * 4, [[0.5, 0.3, 0.2]] * 4)
    engine = Engine(mesh, model, requests, 1, method, 11)
    engine.drafter = DraftSampler(engine.state, greedy=greedy)
    tokens, _ = engine.step()
    return tokens[:, 0].bincount(minlength=3).tolist()


@worlds("cpu:2", "cuda:1")
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("greedy", [False, True])
def test_q_is_what_was_drawn_from(ranks, method, greedy):
    """Catches a q = softmax of logits whose largest was taken: ids come out as (.6, .4, 0)."""
    counts = ranks.run(first_ids, 6_000, method, greedy)[0]
    assert p_value(np.array(counts), np.array([0.3, 0.5, 0.2])) > 1e-4


def counters(mesh, method: str) -> list[tuple[int, ...]]:
    """(stream, seed, position, offset) of every uniform number in some steps."""
    used: list[tuple[int, ...]] = []
    uniform = ops.uniform._function

    def recorded(seed_R, position_R, offset_R, stream):
        used.extend(
            (stream, *numbers)
            for numbers in torch.stack([seed_R, position_R, offset_R], 1).tolist()
        )
        return uniform(seed_R, position_R, offset_R, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.uniform, "_function", recorded)
        engine = Engine(mesh, IN_CONTEXT, 30, 3, method, 0)
        for _ in range(6):
            engine.step()
    return used


@worlds("cpu:1")
@pytest.mark.parametrize("method", ["standard", "block"])
def test_no_number_serves_twice(ranks, method):
    """Catches coins or drafts keyed by absolute position, and streams that are shared."""
    used = ranks.run(counters, method)[0]
    assert {stream for stream, *_ in used} == {COIN, DRAFT, RECOVERY, TARGET}
    assert len(set(used)) == len(used)
