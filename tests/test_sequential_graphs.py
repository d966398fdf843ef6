"""Draft, then verify, as CUDA graphs: the eager bits over the life of an engine."""

import numpy as np
import pytest
import torch

from dtensor_sample import BatchSharder, GraphedStep, RejectionSampler
from tests.batches import random_batch, random_params, shard_vocab
from tests.drafting import H, Script, sampler_of, state_of
from tests.pool import worlds
from tests.processing import random_processing

SLOTS, K, V, PADDING = 9, 3, 13, 2


class Engine:
    """One state and the two steps of it, as they are or in graphs."""

    def __init__(self, mesh, script: Script, exchange: str, loop: str, graphed: bool) -> None:
        self.mesh, self.state = mesh, state_of(mesh, script, exchange)
        self.sharder, self.verifier = BatchSharder(self.state), RejectionSampler(self.state)
        self.drafter = sampler_of(mesh, script, self.state, loop)
        self.graphs = {}
        if graphed:
            # Requests of an owner for drafts, and rows for verification.
            for name, capacities in (("draft", [1, 3, SLOTS]), ("verify", [4, (K + 1) * SLOTS])):
                self.graphs[name] = GraphedStep(
                    getattr(self, name), self.state, capacities=capacities
                )

    def draft(self, plan, base, hidden, last):
        logits = shard_vocab(plan.select(base), self.mesh)
        return self.drafter(logits, plan, last, plan.select(hidden))

    def verify(self, plan, target, drafts):
        return self.verifier(shard_vocab(plan.select(target), self.mesh), plan, drafts)

    def run(self, name: str, slots, rows, *tensors):
        inputs = [t.to(self.mesh.device_type) for t in tensors]
        if name in self.graphs:
            step = self.graphs[name]
            return step(step.plan(slots, rows), *inputs)
        return getattr(self, name)(self.sharder.plan(slots, rows), *inputs)

    def block(self, slots, base, hidden, last, target) -> list:
        """Draft a block of each request and verify it; all that comes of it."""
        tokens, told = self.run("draft", slots, None, base, hidden, last)
        drafts = tokens.tolist()
        output = self.run("verify", slots, [K + 1] * len(slots), target, tokens.clone())
        at = self.state.positions[slots].tolist()
        return [drafts, told.tolist(), output.token_ids.tolist(), output.num_rejected.tolist(), at]


def life(mesh, exchange: str, loop: str, steps: int, edited: bool) -> int:
    """Compare two engines step by step; how many graphs there were."""
    rng, script = np.random.default_rng(5), Script(40, (SLOTS - 2,), V=V, K=K, padding=PADDING)
    engines = [Engine(mesh, script, exchange, loop, graphed) for graphed in (False, True)]
    live: set[int] = set()

    def logits(rows: int) -> torch.Tensor:
        made = random_batch(int(rng.integers(2**32)), rows, V, padding=PADDING).logits
        return (made / 4).to(torch.bfloat16)

    for _ in range(steps):
        for slot in rng.permutation(SLOTS)[:3].tolist():
            if slot in live and rng.random() < 0.4:
                live.remove(slot)
                for engine in engines:
                    engine.state.remove(slot)
            elif slot not in live:
                live.add(slot)
                params = random_processing(rng, V) if edited else random_params(rng, V, seeded=True)
                for engine in engines:
                    engine.state.add(slot, params, prompt_token_ids=[1, 2, slot])
        # Few, so that owners are empty, or many, so that they are uneven.
        slots = rng.permutation(sorted(live))[: int(rng.integers(SLOTS + 1))].tolist()
        B = len(slots)
        given = (
            logits(B * K).view(B, K, V + PADDING),
            torch.from_numpy(rng.normal(0, 1, (B, K, H))).bfloat16(),
            torch.from_numpy(rng.integers(0, V, B)),
            logits(B * (K + 1)),
        )
        wanted, got = (engine.block(slots, *given) for engine in engines)
        assert got == wanted, slots
    graphs = list(engines[1].graphs.values())
    count = sum(g.num_graphs for g in graphs)
    for g in graphs:
        g.close()
    return count


@worlds("cpu:1", "cpu:4", "cuda:1", "cuda:2")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "edited", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "edited"]
)
@pytest.mark.parametrize(
    ("exchange", "loop"),
    [
        ("batch", "sharded"),
        pytest.param("batch", "replicated", marks=pytest.mark.slow),
        pytest.param("vocab", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_life_in_graphs(ranks, exchange, loop, edited):
    """Catches what a graph has frozen: tokens before, owners, the places of rows in the cache.

    On CPUs the same padded steps run without graphs.
    """
    steps = 200 if ranks.device_type == "cuda" else 8
    results = ranks.run(life, exchange, loop, steps, edited, timeout=280)
    assert results == [results[0]] * ranks.size
    assert (results[0] > 4) == (ranks.device_type == "cuda")
