"""Plans against their definitions: owners, capacities, and which hidden row stands where."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_sample import BatchSharder, Sampler, SamplingParams, SamplingState, vocab_sharded
from tests.batches import EXCHANGES, OWNERS, shard_vocab
from tests.pool import worlds

SLOTS, SPECULATIVE = 24, 3


def owners_by_definition(policy: str, slots: list[int], rows: list[int], ranks: int) -> list[int]:
    if policy == "slot":
        return [slot % ranks for slot in slots]
    if policy == "position":
        return [i // -(-len(slots) // ranks) for i in range(len(slots))]
    load, owners = [0] * ranks, []
    for count in rows:
        owners.append(min(range(ranks), key=lambda rank: (load[rank], rank)))
        load[owners[-1]] += count
    return owners


def random_step(seed: int) -> tuple[list[int], list[int], list[int]]:
    """Slots, rows of each, and where each request's hidden rows start if they are packed."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SLOTS)[: rng.integers(0, 12)].tolist()
    rows = rng.integers(1, SPECULATIVE + 2, len(slots))
    lengths = rows + rng.integers(0, 4, len(slots))
    return slots, rows.tolist(), [0, *np.cumsum(lengths).tolist()]


def plans(mesh, seeds: list[int]) -> list[dict]:
    """What random plans say, and the hidden rows they select from every form of hidden states."""
    ranks, rank, device = mesh.size(), mesh.get_local_rank(), mesh.device_type
    state = SamplingState(
        mesh,
        vocab_size=5,
        max_num_reqs=SLOTS,
        num_speculative_tokens=SPECULATIVE,
        seed=0,
    )
    for slot in range(SLOTS):
        state.add(slot, SamplingParams())
    results = []
    for seed in seeds:
        slots, rows, starts = random_step(seed)
        exchange, policy = EXCHANGES[seed % 3], OWNERS[seed // 3 % 3]
        plan = BatchSharder(state, owners=policy).plan(
            slots, rows, exchange=exchange, query_start_loc=starts
        )
        hidden = torch.arange(2.0 * starts[-1], device=device).view(-1, 2)
        chunks = [*hidden.chunk(ranks), *[hidden[:0]] * ranks]
        shape, stride = hidden.shape, hidden.stride()
        forms = [
            hidden,
            DTensor.from_local(hidden, mesh, [Replicate()], run_check=False),
            DTensor.from_local(
                chunks[rank], mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            ),
            shard_vocab(hidden, mesh),
        ]
        selected = [plan.select(form) for form in forms]
        assert [type(rows) for rows in selected] == [torch.Tensor, DTensor, DTensor, DTensor]
        plain = [s.full_tensor() if isinstance(s, DTensor) else s for s in selected]
        results.append(
            {
                "owners": list(plan.owners),
                "rows_per_rank": list(plan.rows_per_rank),
                "capacity": plan.capacity,
                "selected": [(rows[:, 0] / 2).int().tolist() for rows in plain],
            }
        )
    return results


def test_random_plans(ranks):
    """Catches a policy that is not the documented one, a loose capacity, a wrong hidden row."""
    seeds = list(range(60))
    for results in ranks.run(plans, seeds):
        for seed, got in zip(seeds, results, strict=True):
            slots, rows, starts = random_step(seed)
            exchange, policy = EXCHANGES[seed % 3], OWNERS[seed // 3 % 3]
            owners = owners_by_definition(policy, slots, rows, ranks.size)
            last_rows = [
                list(range(end - count, end)) for end, count in zip(starts[1:], rows, strict=True)
            ]
            everything = [row for hidden in last_rows for row in hidden]
            owned: list[list[int]] = [[] for _ in range(ranks.size)]
            for owner, hidden in zip(owners, last_rows, strict=True):
                owned[owner] += hidden
            fullest = max(map(len, owned))
            assert got["owners"] == owners
            assert got["rows_per_rank"] == [len(hidden) for hidden in owned]
            if exchange != "batch":
                assert got["selected"] == [everything] * 4
                continue
            assert got["capacity"] == fullest
            for selected in got["selected"]:
                assert set(selected) <= set(everything)  # padding reads valid rows
                blocks = [selected[r * fullest :] for r in range(ranks.size)]
                assert [b[: len(o)] for b, o in zip(blocks, owned, strict=True)] == owned
                assert len(selected) == ranks.size * fullest


def select_either(mesh, exchange: str) -> list[bool]:
    """Whether selecting logits is as good as selecting what they are computed from."""
    P, V = mesh.size(), 13
    lm_head = torch.randn(V, 4, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    width = -(-V // P)
    own = lm_head[mesh.get_local_rank() * width :][:width]
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=8, exchange=exchange, seed=0)
    sharder, sampler, found = BatchSharder(state), Sampler(state), []
    for slot in range(8):
        state.add(slot, SamplingParams(seed=slot))
    for slots in ([3], [5, 1, 0, 2], list(range(8)), []):
        hidden = torch.randn(len(slots), 4, generator=torch.Generator().manual_seed(len(slots)))
        hidden = hidden.to(mesh.device_type)
        plan = sharder.plan(slots, positions=list(range(len(slots))))
        logits = vocab_sharded(hidden @ own.T, mesh, vocab_size=V)
        rows = vocab_sharded(plan.select(hidden) @ own.T, mesh, vocab_size=V)
        picked = plan.select(logits)
        assert isinstance(picked, DTensor)
        assert isinstance(rows, DTensor)
        assert (picked.shape, picked.placements) == (rows.shape, rows.placements)
        tokens = [sampler(x, plan).token_ids for x in (picked, rows)]
        found.append(torch.equal(*tokens))
    return found


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_logits_of_all_rows_can_be_selected(ranks, exchange):
    """Catches tokens that go to other requests, since logits came in batch order."""
    for found in ranks.run(select_either, exchange):
        assert found == [True] * 4


def repeated(mesh) -> None:
    """Plan the same twice, and what differs in one thing each."""
    state = SamplingState(
        mesh, vocab_size=5, max_num_reqs=4, num_speculative_tokens=2, exchange="batch", seed=0
    )
    for slot in range(3):
        state.add(slot, SamplingParams())
    sharder = BatchSharder(state)
    with torch.inference_mode():
        plan = sharder.plan([0, 2], [2, 1])
    assert sharder.plan((0, 2), [2, 1]) is plan
    others = [
        sharder.plan([2, 0], [2, 1]),
        sharder.plan([0, 2], [1, 2]),
        sharder.plan([0, 2]),
        sharder.plan([0, 2], [2, 1], capacity=5),
        sharder.plan([0, 2], [2, 1], exchange="vocab"),
        sharder.plan([0, 2], [2, 1], budget=1),
        sharder.plan([0, 2], [2, 1], query_start_loc=[0, 4, 6]),
        sharder.plan([0, 2], [2, 1], positions=[7, 8]),
    ]
    kinds = {(p.slots, p.num_logits, p.capacity, p.exchange, p.budget, p.num_hidden_rows,
              p.positions is None) for p in [plan, *others]}  # fmt: skip
    assert len(kinds) == len(others) + 1
    wrong: list[Any] = [[False, 2], [0.0, 2], [[0], 2], [0, 0]]  # some are equal to planned ones
    for bad in wrong:
        with pytest.raises(ValueError, match="slots"):
            sharder.plan(bad, [2, 1])
    # Made within inference mode, and used where gradients are wanted.
    hidden = torch.ones(3, 2, device=mesh.device_type, requires_grad=True)
    sharder.plan([0, 2], [2, 1]).select(hidden).sum().backward()
    assert hidden.grad is not None
    state.remove(2)
    state.add(2, SamplingParams())
    assert sharder.plan([0, 2], [2, 1]).requests != plan.requests
    # A bias binds its request to an owner, and every plan to one exchange.
    state.remove(2)
    state.add(2, SamplingParams(logit_bias={1: 1.0}))
    first = sharder.plan([2, 0])
    assert first.owners[0] == sharder.plan([0, 2]).owners[1]
    with pytest.raises(ValueError, match="exchange"):
        sharder.plan([2, 0], exchange="vocab")
    again = sharder.plan([2, 0])
    assert again.owners == first.owners
    assert sharder.plan([2, 0]) is again


def test_repeated_plans(ranks):
    """Catches a remembered plan where the step is another one."""
    ranks.run(repeated)


def bound_owners(mesh) -> list[tuple[int, ...]]:
    """Owners of one step, of a sharder that planned it before some of it was bound, and of others.

    Only the first rank plans more in between, which no step needs.
    """
    state = SamplingState(mesh, vocab_size=5, max_num_reqs=4, exchange="batch", seed=0)
    for slot, bias in ((2, {}), (3, {}), (0, {1: 1.0})):
        state.add(slot, SamplingParams(logit_bias=bias))
    sharder = BatchSharder(state)
    sharder.plan([2, 3, 0])  # binds slot 0 to a rank
    if mesh.get_local_rank() == 0:
        for capacity in range(3, 15):
            sharder.plan([2, 3, 0], capacity=capacity)
    slots: list[Any] = [[2, 3, 0], (2, 3, 0), np.array([2, 3, 0])]
    return [s.plan(each).owners for s in (sharder, BatchSharder(state)) for each in slots]


@worlds("cpu:2")
def test_a_remembered_plan_is_the_one_that_would_be_made(ranks):
    """Catches ranks that part ways since they planned other things before."""
    results = ranks.run(bound_owners)
    assert results == [[results[0][0]] * 6] * ranks.size


def refused_before(mesh) -> list[tuple[int, ...]]:
    """Owners after a step that debug mode refused, as its slots differed between ranks."""
    state = SamplingState(mesh, vocab_size=5, max_num_reqs=2, exchange="batch", seed=0, debug=True)
    for slot in range(2):
        state.add(slot, SamplingParams(logit_bias={1: 1.0}))
    sharder = BatchSharder(state)
    with pytest.raises(ValueError, match="slots"):
        sharder.plan([0, 1] if mesh.get_local_rank() == 0 else [1, 0])
    sharder.plan([1])
    return [s.plan([0, 1]).owners for s in (sharder, BatchSharder(state))]


@worlds("cpu:2")
def test_a_plan_that_was_refused_is_not_remembered(ranks):
    results = ranks.run(refused_before)
    assert results == [[results[0][0]] * 2] * ranks.size
