"""The library gives the oracle's tokens: any rows, parameters, dtypes, shards and exchanges."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    ops,
    replicated,
    sample,
    vocab_sharded,
)
from dtensor_sample.exchange import Axis, exchange_of
from dtensor_sample.params import RowParams, filters_of
from dtensor_sample.weigh import weigh
from tests import oracle
from tests.batches import (
    DTYPES,
    EXCHANGES,
    OWNERS,
    Batch,
    Layout,
    answers,
    engine_step,
    expected_step,
    random_batch,
    sample_batches,
    shard_vocab,
    tokens,
)

SIZES = (1, 2, 3, 7, 13, 111, 1003)


@lru_cache
def grid(dtype: torch.dtype) -> tuple[list[Batch], list[list[int]]]:
    """Batches over every vocabulary size, with and without padding, and their tokens."""
    batches = [
        random_batch(100 * size + rows, rows, size, dtype=dtype, padding=(size + rows) % 4)
        for i, size in enumerate(SIZES)
        for rows in (i % 2, (2, 3, 5, 9)[i % 4], 24)
    ]
    return batches, [tokens(batch) for batch in batches]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stateless_grid(ranks, dtype, exchange):
    """Catches a wrong id offset, threshold or uniform in some dtype, width, size or exchange."""
    batches, wanted = grid(dtype)
    assert ranks.run(sample_batches, batches, exchange) == [wanted] * ranks.size


def with_few_candidates(batch: Batch, seed: int, bounded: bool) -> Batch:
    """The batch with a top-k of at most 64 for every request that has a filter, or for all."""
    rng = np.random.default_rng(seed)
    params = [
        replace(p, top_k=int(rng.integers(2, 65)))
        if bounded or rng.random() < 0.8
        else replace(p, top_k=0, top_p=1.0)
        for p in batch.params
    ]
    return replace(batch, params=params)


def with_many_ties(dtype: torch.dtype, bounded: bool) -> Batch:
    """One token and 903 tied ones, of which lists have no room for most, and 99 others.

    The first one has 0.31 of the probability of the 904, but more than half of what is listed.
    """
    params = [
        SamplingParams(top_k=k, top_p=p, seed=7) for k in (2, 63, 64) for p in (0.3, 0.5, 1.0)
    ]
    params += [SamplingParams(temperature=0), *[SamplingParams()] * (not bounded)]
    logits = torch.zeros(len(params), 1003, dtype=dtype)
    logits[:, :99], logits[:, 700] = -1, 6
    positions = list(range(len(params)))
    return Batch(logits=logits, vocab_size=1003, params=params, positions=positions)


@lru_cache
def few(dtype: torch.dtype, bounded: bool) -> tuple[list[Batch], list[list[int]]]:
    batches = [with_many_ties(dtype, bounded)]
    for size in SIZES:
        batch = random_batch(size, 40, size, dtype=dtype, padding=size % 3)
        batches.append(with_few_candidates(batch, size, bounded))
    return batches, [tokens(batch) for batch in batches]


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_candidates(ranks, dtype, bounded):
    """Catches a threshold that forgets ties, or tokens of a shard, where ranks exchange lists."""
    batches, wanted = few(dtype, bounded)
    assert {filters_of(batch.params)[3:] for batch in batches} == {(64, bounded)}
    assert all(any(p.greedy for p in batch.params) for batch in batches)
    assert ranks.run(sample_batches, batches, "vocab") == [wanted] * ranks.size


def weighed(mesh, batch: Batch) -> list[bool]:
    """Whether what is found of rows that are drawn is the same where they are sharded and whole."""
    local_Tv = shard_vocab(batch.logits.to(mesh.device_type), mesh).to_local()
    axis, rows, width = Axis.of(mesh), len(batch), -(-batch.logits.shape[1] // mesh.size())
    packed = SamplingParams.batch(batch.params, mesh.device_type)
    params = RowParams.unpack(packed.table)
    found = []
    for name in ("vocab", "replicate"):
        where = exchange_of(name, axis)
        logits = where.place(local_Tv, [rows] * axis.size, width)
        row = weigh(logits, params, packed.filters, where, batch.vocab_size)
        mass_RPC = row.mass_RPC.masked_fill(params.greedy[:, None, None], 0)
        kept_R = where.total(ops.tally(*row.args, row.peak_R, batch.vocab_size, False))[:, 1]
        found.append((row.peak_R, kept_R, mass_RPC, row.argmax_R, row.nans_R))
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_candidates_weigh_the_same(ranks, dtype, bounded):
    """Catches masses of lists that lack tied tokens, or lie in another part of a shard."""
    for batch in few(dtype, bounded)[0]:
        assert ranks.run(weighed, batch) == [[True] * 5] * ranks.size


@pytest.mark.parametrize(
    ("params", "candidates", "bounded"),
    [
        ([{"top_k": 50}], 64, True),
        ([{"top_k": 65, "top_p": 0.5}], 256, True),
        ([{"top_k": 257}], 0, False),
        ([{"top_k": 50}, {"top_p": 0.5}], 0, False),
        ([{"top_k": 50}, {"top_p": 0.5, "temperature": 0.0}], 64, True),
        ([{"top_k": 50}, {"min_p": 0.5}, {"top_p": 0.5, "temperature": 0.0}], 64, False),
        ([{}], 0, False),
        ([{"temperature": 0.0}], 0, False),
        ([], 0, False),
    ],
)
def test_when_few_candidates_are_enough(params, candidates, bounded):
    filters = filters_of([SamplingParams(**p) for p in params])
    assert (filters.candidates, filters.bounded) == (candidates, bounded)


@settings(max_examples=40, phases=[Phase.generate])  # numbers of a seed cannot shrink
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 9),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(0, 3),
    exchange=st.sampled_from((*EXCHANGES, "auto")),
    owners=st.sampled_from(OWNERS),
    spare=st.integers(0, 2),
)
def test_engine_properties(ranks, seed, rows, size, dtype, padding, exchange, owners, spare):
    """Catches wrong bookkeeping of an engine's step: ids, counts, NaNs, failures of mixed rows."""
    batch = random_batch(seed, rows, size, dtype=dtype, padding=padding)
    layout = Layout(exchange=exchange, owners=owners, spare=spare if exchange == "batch" else 0)
    assert ranks.run(engine_step, batch, layout) == [expected_step(batch)] * ranks.size


def test_few_draws_depend_on_rounding():
    """Catches weights whose errors are more than noise: float64 weights give the same tokens."""
    batch = random_batch(5, 3000, 211)
    differing = sum(
        a != b
        for a, b in zip(answers(batch), answers(batch, weights=oracle.float64_weights), strict=True)
    )
    assert differing <= 3


def same_in_every_form(mesh, batch: Batch) -> list[list[int]]:
    """One batch through every form that logits, params and positions may take."""
    full = batch.logits.to(mesh.device_type)
    sharded = shard_vocab(full, mesh)
    positions = torch.tensor(batch.positions, device=mesh.device_type)
    packed = SamplingParams.batch(batch.params, mesh.device_type, base_seed=batch.base_seed)
    cube = shard_vocab(full.view(2, -1, full.shape[-1]), mesh)
    plain = vocab_sharded(sharded.to_local(), mesh, vocab_size=batch.vocab_size)
    common: dict = {"base_seed": batch.base_seed, "vocab_size": batch.vocab_size}
    results = [
        sample(sharded, batch.params, position=positions, **common),
        sample(sharded, tuple(batch.params), position=batch.positions, **common),
        sample(sharded, packed, position=positions),
        sample(plain, batch.params, position=positions, **common),
        sample(cube, batch.params, position=positions.view(2, -1), **common).flatten(),
        *(
            sample(
                replicated(full, mesh),
                batch.params,
                position=positions,
                exchange=exchange,
                **common,
            )
            for exchange in EXCHANGES
        ),
    ]
    return [result.tolist() for result in results]


@pytest.mark.parametrize("size", [3, 10, 111])
def test_forms_of_arguments(ranks, size):
    """Catches a form read differently: shard or replica, list or tensor, [B] or [2, B/2]."""
    batch = random_batch(size, 6, size)
    for results in ranks.run(same_in_every_form, batch):
        assert results == [tokens(batch)] * len(results)


def padded_shards(mesh, vocab_size: int, width: int, rows: int) -> list[list[int]]:
    """Real logits of -5 and a weight matrix padded with zeros: what each rank's lm_head returns."""
    full = torch.zeros(rows, width, device=mesh.device_type)
    full[:, :vocab_size] = -5
    local = shard_vocab(full, mesh).to_local()
    positions = list(range(rows))
    return [
        sample(
            logits,
            SamplingParams(temperature=t, top_k=k, seed=1),
            position=positions,
            vocab_size=vocab_size,
        ).tolist()
        for logits in (shard_vocab(full, mesh), vocab_sharded(local, mesh, vocab_size=vocab_size))
        for t, k in ((1.0, 0), (0.0, 0), (1.0, vocab_size + 1))
    ]


def test_padded_vocabulary(ranks):
    """Catches padding that is sampled: ten real logits of -5, two padded ones of 0 above them."""
    batch = Batch(
        logits=torch.full((64, 10), -5.0),
        vocab_size=10,
        params=[SamplingParams(seed=1)] * 64,
        positions=list(range(64)),
    )
    drawn = tokens(batch)
    assert set(drawn) == set(range(10))
    for results in ranks.run(padded_shards, 10, 12, 64):
        assert results == [drawn, [0] * 64, drawn] * 2


def steps_of_one_state(mesh, batches: list[Batch]) -> list[list[list[int]]]:
    """Requests that stay: consecutive steps whose positions only the state advances."""
    first = batches[0]
    state = SamplingState(
        mesh, vocab_size=first.vocab_size, max_num_reqs=2 * len(first), seed=first.base_seed
    )
    for i, (params, position) in enumerate(zip(first.params, first.positions, strict=True)):
        state.add(2 * i, params, position=position)
    sharder, sampler = BatchSharder(state), Sampler(state)
    results = []
    for batch in batches:
        plan = sharder.plan([2 * i for i in range(len(batch))])
        logits = shard_vocab(plan.select(batch.logits.to(mesh.device_type)), mesh)
        results.append(sampler(logits, plan).token_ids[:, 0].tolist())
    results.append(state.positions[::2].tolist())
    return results


def test_positions_advance_by_what_was_emitted(ranks):
    """Catches a position that stands still (the same uniform twice), or moves on a failed row."""
    batches = [random_batch(7, 7, 111)]
    wanted = []
    rng = np.random.default_rng(7)
    for _ in range(4):
        step = answers(batches[-1], admitted=True)
        wanted.append([a.token for a in step])
        positions = [t + (not a.failed) for t, a in zip(batches[-1].positions, step, strict=True)]
        logits = batches[-1].logits[torch.from_numpy(rng.permutation(7))]
        batches.append(
            Batch(
                logits=logits,
                vocab_size=111,
                params=batches[0].params,
                positions=positions,
                base_seed=batches[0].base_seed,
            )
        )
    wanted.append(batches.pop().positions)
    assert any(-1 in step for step in wanted[:-1])
    assert ranks.run(steps_of_one_state, batches) == [wanted] * ranks.size
