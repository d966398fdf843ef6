"""Compiled steps: the eager tokens, and few compilations."""

import numpy as np
from torch._dynamo.utils import counters

from dtensor_sample import BatchSharder, Sampler, SamplingState
from tests.batches import Batch, random_batch, shard_vocab, tokens
from tests.pool import worlds


def compiled_steps(
    mesh, batch: Batch, exchange: str, orders: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Tokens of compiled steps over parts of a batch, and how many graphs were compiled."""
    state = SamplingState(
        mesh, vocab_size=batch.vocab_size, max_num_reqs=len(batch), seed=batch.base_seed
    )
    for slot, params in enumerate(batch.params):
        state.add(slot, params)
    sharder, sampler = BatchSharder(state), Sampler(state, compile=True)
    before = counters["stats"]["unique_graphs"]
    drawn = []
    for order in orders:
        positions = [batch.positions[i] for i in order]
        plan = sharder.plan(order, exchange=exchange, positions=positions)
        hidden = batch.logits[order].to(mesh.device_type)
        output = sampler(shard_vocab(plan.select(hidden), mesh), plan)
        drawn.append(output.token_ids[:, 0].tolist())
    return drawn, counters["stats"]["unique_graphs"] - before


@worlds("cpu:2", "cuda:2")
def test_compiled_steps(ranks):
    """Catches traced arithmetic that rounds otherwise, and a compilation for each size or feature.

    Owners often hold no row or one, which the compiler would each treat as a case of its own; and
    all exchanges of a process share the compiler's limit on variants of one function.
    """
    batch = random_batch(31, 64, 1003, seeded=True)
    every = tokens(batch)
    rng = np.random.default_rng(0)
    sizes = [7, 0, 1, 2, 3, 64, *rng.integers(0, 65, 94)]
    orders = [rng.permutation(64)[:size].tolist() for size in sizes]
    for exchange, some in (("batch", orders), ("vocab", orders[:6]), ("replicate", orders[:6])):
        wanted = [[every[i] for i in order] for order in some]
        results = ranks.run(compiled_steps, batch, exchange, some, timeout=100)
        assert all(drawn == wanted for drawn, _ in results), exchange
        compiled = [count for _, count in results]
        assert compiled == [compiled[0]] * ranks.size
        assert compiled[0] <= 4, exchange
