"""What ranks say to each other: the same on all of them, no more than promised, joined by each."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._ops import OpOverloadPacket
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    replicated,
    sample,
)
from tests.batches import EXCHANGES, OWNERS, Batch, random_params, shard_vocab, tokens
from tests.pool import FEW_WORLDS, worlds

SLOTS = 16


class CollectiveTrace(TorchDispatchMode):
    """Records each collective: its name, and shapes, dtypes, splits and group as text."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as ops on local tensors
        _record(self.calls, func._schema.name, args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def functional_collectives() -> Iterator[list[tuple[str, ...]]]:
    """The same of functional collectives only, without the cost of looking at every op."""
    calls: list[tuple[str, ...]] = []
    original = OpOverloadPacket.__call__

    def call(packet, /, *args, **kwargs):
        _record(calls, packet._qualified_op_name, args)
        return original(packet, *args, **kwargs)

    with mock.patch.object(OpOverloadPacket, "__call__", call):
        yield calls


def _record(calls: list[tuple[str, ...]], op: str, args: Sequence[object]) -> None:
    space, name = op.split("::")
    if "c10d" in space and name != "wait_tensor":
        calls.append((name, *map(_shown, args)))


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, int | str) else type(value).__name__


KINDS = {
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
}
"""Ops of the functional collectives, by the names that plans use."""


def random_steps(mesh, steps: int) -> list[tuple]:
    """(exchange, batch size, asked, promised, traced) of random steps with mixed features."""
    rng = np.random.default_rng(8)
    device = mesh.device_type
    state = SamplingState(mesh, vocab_size=13, max_num_reqs=SLOTS, seed=1)
    for slot in range(SLOTS):
        state.add(slot, random_params(rng, 13))
    asks: list[dict[str, Any]] = [{"logprobs": 2}, {"kept_capacity": 3}, {"entropy": True}]
    sharders, sampler = [BatchSharder(state, owners=owners) for owners in OWNERS], Sampler(state)
    results = []
    for _ in range(steps):
        slot = int(rng.integers(SLOTS))
        state.remove(slot)
        params = random_params(rng, 13)
        if rng.random() < 0.7 and params.top_p < 1:  # often few candidates are enough for all
            params = replace(params, top_k=3)
        if rng.random() < 0.2:
            params = replace(params, **asks[rng.integers(3)])
        state.add(slot, params, position=int(rng.integers(100)))
        count = int(rng.choice([0, 1, 2, 3, 5, 8, 13]))
        chosen = rng.permutation(SLOTS)[:count]
        if rng.random() < 0.2:  # all of one owner
            chosen = chosen // mesh.size() * mesh.size()
        slots = list(dict.fromkeys(chosen.tolist()))
        exchange = str(rng.choice(EXCHANGES))
        logits = torch.from_numpy(rng.normal(0, 3, (len(slots), 13))).bfloat16().to(device)
        with functional_collectives() as planning:
            plan = sharders[int(rng.integers(len(OWNERS)))].plan(slots, exchange=exchange)
            hidden = plan.select(logits)
        assert not planning
        sharded = shard_vocab(hidden, mesh)
        with functional_collectives() as calls:
            sampler(sharded, plan)
        promised = plan.cost(logits.dtype).collectives
        results.append((plan.exchange.name, len(slots), plan.wants.logprobs, promised, calls))
    return results


@worlds(*FEW_WORLDS)
def test_traces_of_random_steps(ranks):
    """Catches a collective that depends on what one rank holds, and one more than promised."""
    first, *others = ranks.run(random_steps, 60)
    assert all(other == first for other in others)
    for exchange, count, asked, promised, calls in first:
        kinds = tuple(KINDS[name] for name, *_ in calls)
        assert kinds == promised
        if ranks.size == 1 or count == 0:
            assert kinds == ()
        elif exchange == "vocab":
            assert "all_to_all" not in kinds
            assert all("float" not in argument for call in calls for argument in call)
        else:
            logits_by = "all_to_all" if exchange == "batch" else "all_gather"
            assert kinds == (logits_by, *["all_gather"] * (1 + asked))
            assert calls[0][1].startswith("torch.bfloat16")
            assert calls[1][1].startswith("torch.int64")
            assert calls[-1][1].startswith("torch.int32" if asked else "torch.int64")
    groups = {call[-1] for *_, calls in first for call in calls}
    assert len(groups) <= 1
    assert ranks.size == 1 or len({(exchange, asked) for exchange, _, asked, *_ in first}) == 6


def all_collectives(mesh, rows: int, exchange: str) -> list[list[tuple[str, ...]]]:
    """Of a stateless call and of an engine's step, issued in whatever way."""
    state = SamplingState(mesh, vocab_size=10, max_num_reqs=rows, seed=0)
    for slot in range(rows):
        state.add(slot, SamplingParams(top_k=3))
    plan = BatchSharder(state).plan(range(rows), exchange=exchange)
    hidden = torch.zeros(rows, 10, dtype=torch.float16, device=mesh.device_type)
    logits, step_logits = shard_vocab(hidden, mesh), shard_vocab(plan.select(hidden), mesh)
    with CollectiveTrace() as stateless:
        sample(logits, SamplingParams(top_k=3), position=0, exchange=exchange)
    with CollectiveTrace() as step:
        Sampler(state)(step_logits, plan)
    return [[call[:2] for call in trace.calls] for trace in (stateless, step)]


@worlds("cpu:1", "cpu:4")
def test_all_collectives(ranks):
    """Catches logits sent in another dtype, unpacked outputs, and talk on an axis of size 1."""
    for exchange in EXCHANGES:
        first, *others = ranks.run(all_collectives, 6, exchange)
        assert all(other == first for other in others)
        if ranks.size == 1:
            assert first == [[], []]
        elif exchange == "batch":
            assert first == [
                [
                    ("all_to_all_single", f"torch.float16[{rows}, 3]"),
                    ("all_gather_into_tensor", "torch.int64[2, 5]"),
                ]
                for rows in (6, 8)  # a step's owners are padded to equal numbers of rows
            ]
        elif exchange == "vocab":  # lists of 64 values, and results
            lists = ("all_gather_into_tensor", "torch.int64[6, 50]")
            assert first == [[lists, ("all_reduce", "torch.int64[6, 5]")]] * 2


def take_part_with_nothing(mesh) -> tuple[list[int], float]:
    """Steps in which most ranks, or all, own nothing; then a sum that all must still agree on."""
    ranks, device = mesh.size(), mesh.device_type
    state = SamplingState(mesh, vocab_size=5, max_num_reqs=3 * ranks, seed=0)
    for slot in range(3 * ranks):
        state.add(slot, SamplingParams(temperature=0))
    sharder, sampler = BatchSharder(state, owners="slot"), Sampler(state)
    emitted = []
    rows = torch.eye(3, 5, device=device)
    for step in range(100):
        slots = [ranks * k for k in range(step % 4)]
        plan = sharder.plan(slots, exchange=EXCHANGES[step % 3])
        output = sampler(shard_vocab(plan.select(rows[: len(slots)]), mesh), plan)
        emitted += output.token_ids[:, 0].tolist()
    checksum = torch.tensor(sum(emitted) + mesh.get_local_rank(), device=device)
    dist.all_reduce(checksum, group=mesh.get_group())
    return emitted, checksum.item()


@worlds(*FEW_WORLDS)
def test_ranks_with_nothing_take_part(ranks):
    """Catches a rank that owns no row and skips a collective: later ones would pair wrongly."""
    wanted = [i for step in range(100) for i in range(step % 4)]
    checksum = ranks.size * sum(wanted) + sum(range(ranks.size))
    assert ranks.run(take_part_with_nothing) == [(wanted, checksum)] * ranks.size


# --- what differs between ranks must not show


def poisoned(mesh, batch: Batch) -> tuple[list[list[int]], bool]:
    """Draws between which every rank's default generators are set to something else."""
    rank, cuda = mesh.get_local_rank(), mesh.device_type == "cuda"
    logits = shard_vocab(batch.logits, mesh)
    drawn, untouched = [], True
    for round_ in range(3):
        torch.manual_seed(1000 * round_ + rank)
        torch.rand(rank)
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]
        for exchange in EXCHANGES:
            result = sample(logits, batch.params, position=batch.positions, exchange=exchange)
            drawn.append(result.tolist())
        after = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]
        untouched &= all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    return drawn, untouched


@worlds(*FEW_WORLDS)
def test_default_generators_play_no_part(ranks):
    """Catches draws from a global generator, seeded differently on each rank, or consuming it."""
    batch = Batch(
        logits=torch.zeros(50, 13),
        vocab_size=13,
        params=[SamplingParams()] * 50,
        positions=list(range(50)),
    )
    for drawn, untouched in ranks.run(poisoned, batch):
        assert untouched
        assert drawn == [tokens(batch)] * len(drawn)


def unseeded_state(mesh) -> list[list[int]]:
    """Draws of unseeded requests of one state that chose its own base seed, in several layouts."""
    torch.manual_seed(mesh.get_local_rank())
    state = SamplingState(mesh, vocab_size=1000, max_num_reqs=20)
    for slot in range(20):
        state.add(slot, SamplingParams())
    flat = torch.zeros(20, 1000, device=mesh.device_type)
    results = []
    for exchange in EXCHANGES:
        for owners in OWNERS:
            sharder = BatchSharder(state, owners=owners)
            plan = sharder.plan(range(20), exchange=exchange, positions=[0] * 20)
            output = Sampler(state)(shard_vocab(plan.select(flat), mesh), plan)
            results.append(output.token_ids[:, 0].tolist())
    return results


@worlds(*FEW_WORLDS)
def test_unseeded_requests(ranks):
    """Catches a base seed of each rank's own, one seed for all requests, one that never changes."""
    first, second = ranks.run(unseeded_state), ranks.run(unseeded_state)
    for results in (first, second):
        drawn = results[0][0]
        assert results == [[drawn] * len(results[0])] * ranks.size
        assert len(set(drawn)) > 15
    assert first != second


def noisy(mesh, seed: int) -> list[list[int]]:
    """Draws from replicas and parameters that differ a little on each rank."""
    rank, device = mesh.get_local_rank(), mesh.device_type
    generator = torch.Generator().manual_seed(seed)
    # Flat within the noise: greedy ids, thresholds and draws all hang on the last bits.
    full = torch.ones(40, 50)
    full += 1e-6 * torch.randn(50, generator=torch.Generator().manual_seed(seed * 10 + rank))
    row_params = [
        SamplingParams(temperature=t + 1e-3 * rank, top_k=k, top_p=p, min_p=m, seed=i)
        for i, (t, k, p, m) in enumerate(
            [(0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.5, 0, 0.5, 0.999)] * 10
        )
    ]
    positions = torch.randint(1000, (40,), generator=generator)
    logits = replicated(full.to(device), mesh)
    return [
        sample(logits, row_params, position=positions, exchange=exchange).tolist()
        for exchange in EXCHANGES
    ]


@worlds("cpu:4", "cuda:2")
def test_noise_between_ranks_does_not_show(ranks):
    """Catches ranks that each decide for themselves on inputs that are equal only nearly."""
    for seed in range(3):
        first, *others = ranks.run(noisy, seed)
        assert all(other == first for other in others)
        assert all(0 <= token < 50 for drawn in first for token in drawn)


def inputs_after(mesh, exchange: str) -> bool:
    """Whether logits, hidden rows, positions and parameters are as they were before a step."""
    device = mesh.device_type
    full = torch.randn(7, 13, generator=torch.Generator().manual_seed(1))
    full[0, 0], full[1, 1], full[2] = torch.nan, torch.inf, -torch.inf
    full[3, 2] = -0.0
    hidden, positions = full.to(device), torch.arange(7, device=device) + 5
    params = SamplingParams.batch([SamplingParams(top_k=3, top_p=0.5, min_p=0.1)] * 7, device)
    logits = shard_vocab(hidden, mesh)
    inputs = [
        hidden,
        positions,
        params.table,
        logits.to_local(),
        replicated(hidden, mesh).to_local(),
    ]
    before = [x.clone().view(torch.uint8) for x in inputs]
    sample(logits, params, position=positions, exchange=exchange)
    sample(replicated(hidden, mesh), params, position=positions, exchange=exchange)
    state = SamplingState(mesh, vocab_size=13, max_num_reqs=7, seed=0)
    for slot in range(7):
        state.add(slot, SamplingParams(top_k=3, top_p=0.5, min_p=0.1))
    plan = BatchSharder(state).plan(range(7), exchange=exchange, positions=positions)
    Sampler(state)(shard_vocab(plan.select(hidden), mesh), plan)
    return all(torch.equal(x.view(torch.uint8), b) for x, b in zip(inputs, before, strict=True))


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_inputs_are_not_modified(ranks, exchange):
    """Catches a mask, a temperature or a cleaned NaN written into the caller's tensors."""
    assert all(ranks.run(inputs_after, exchange))
