"""Greedy choice, filters and temperatures at their edges, as sets of tokens that are drawn."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import SamplingParams, sample
from tests.batches import DTYPES, EXCHANGES, Batch, one_row, sample_batches, shard_vocab, tokens
from tests.oracle import HIGH, LOW
from tests.pool import FEW_WORLDS, worlds


def winners(mesh, exchange: str) -> list[list[int]]:
    """Greedy tokens of rows whose maximum stands at each id, then at each pair of ids."""
    results = []
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}]
    for size in (8, 10, 13):
        for dtype in DTYPES:
            rows = torch.full((size, size), -1.0, dtype=dtype)
            rows.fill_diagonal_(2.0)
            pairs = torch.triu_indices(size, size, 1)
            ties = rows[pairs[0]].maximum(rows[pairs[1]])
            logits = shard_vocab(torch.cat([rows, ties]), mesh)
            results += [
                sample(logits, SamplingParams(**greedy), position=0, exchange=exchange).tolist()
                for greedy in kinds
            ]
    return results


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_greedy_at_every_id(ranks, exchange):
    """Catches local ids taken for global ones, and ties that do not go to the lowest id."""
    wanted = []
    for size in (8, 10, 13):
        lower = [i for i in range(size) for _ in range(i + 1, size)]
        wanted += [list(range(size)) + lower] * 9
    assert ranks.run(winners, exchange) == [wanted] * ranks.size


def drawn_sets(mesh, cases: list[Batch]) -> list[set[int]]:
    return [set(drawn) for drawn in sample_batches(mesh, cases)]


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


INF = math.inf
POWERS = {"temperature": math.log2(math.e)}  # weights are exact powers of two
SETS: list[tuple[str, list[float], dict[str, Any], set[int]]] = [
    # What it is, a row of logits, parameters, ids that are drawn.
    ("k then p", log(0.1, 0.2, 0.3, 0.4), {"top_k": 2, "top_p": 0.5}, {3}),
    ("p alone", log(0.1, 0.2, 0.3, 0.4), {"top_p": 0.5}, {2, 3}),
    ("p reached exactly", [0.0, -1.0, -2.0, -2.0], {"top_p": 0.75, **POWERS}, {0, 1}),
    ("p just missed", [0.0, -1.0, -2.0, -2.0], {"top_p": 0.75 + 2.0**-31, **POWERS}, {0, 1, 2, 3}),
    ("p in a flat row", [0.0] * 4, {"top_p": 0.5}, {0, 1, 2, 3}),
    ("ties at p", [2.0, 1.0, 1.0, 1.0, -3.0], {"top_p": 0.6}, {0, 1, 2, 3}),
    ("ties at k", [5.0, 5.0, 5.0, 1.0], {"top_k": 2}, {0, 1, 2}),
    ("ties below the first at k", [1.0, 2.0, 1.0, 1.0, 0.0], {"top_k": 2}, {0, 1, 2, 3}),
    ("all tied at k", [0.0] * 13, {"top_k": 3}, set(range(13))),
    ("k over the vocabulary", [0.0, 1.0, 0.5], {"top_k": 7}, {0, 1, 2}),
    ("negative k is off", [0.0, 1.0, 0.5], {"top_k": -1}, {0, 1, 2}),
    ("k over what min-p left", [0.0, 1.0, -9.0, -9.5], {"top_k": 3, "min_p": 0.01}, {0, 1}),
    ("min-p on the edge", [0.0, -1.0, -1.5], {"min_p": math.exp(-1.0)}, {0, 1}),
    ("min-p of 1", [0.0, 2.0, 2.0, 1.9], {"min_p": 1.0}, {1, 2}),
    ("min-p of warm rows", [0.0, -1.5, -2.5], {"min_p": math.exp(-1), "temperature": 2}, {0, 1}),
    ("min-p then p", log(0.4, 0.3, 0.2, 0.1), {"min_p": 0.6, "top_p": 0.55}, {0}),
    ("signed zeros at k", [-0.0, 0.0, -0.0, -1.0], {"top_k": 2}, {0, 1, 2}),
    ("a mask under k", [-INF, 0.0, -INF, -1.0], {"top_k": 3}, {1, 3}),
    ("one id is left", [-INF, -INF, -7.0], {"temperature": 50, "top_p": 0.1, "top_k": 2}, {2}),
    ("infinity is finite", [0.0, INF, 0.0, INF], {}, {1, 3}),
    ("NaN is nothing", [math.nan, 0.0, math.nan, 0.0], {}, {1, 3}),
]


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_sets(ranks, dtype):
    """Catches a cut tie, filters in the wrong order, an edge on the wrong side, a bad value."""
    cases = [
        one_row(row, 200, SamplingParams(seed=3, **params), dtype=dtype)
        for _, row, params, _ in SETS
    ]
    for got in ranks.run(drawn_sets, cases):
        assert {name: s for (name, *_), s in zip(SETS, got, strict=True)} == {
            name: wanted for name, _, _, wanted in SETS
        }


@worlds(*FEW_WORLDS)
def test_ties_at_any_batch_size(ranks):
    """Catches two code paths with two tie rules, chosen by the size of the batch."""
    whole = one_row([5.0, 5.0, 5.0, 1.0], 40, SamplingParams(top_k=2, top_p=0.3, seed=9))
    wanted = tokens(whole)
    assert set(wanted) == {0, 1, 2}
    pieces = [whole.take(range(start, start + size)) for size in (1, 7, 8, 9) for start in (0, 20)]
    for got in ranks.run(sample_batches, pieces):
        assert got == [wanted[start : start + size] for size in (1, 7, 8, 9) for start in (0, 20)]


COLD = (0.0, 1e-12, 1e-7, 1e-6, 9.9e-6, 1e-5, 1.1e-5, 1e-4, 1e-3)


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cold_rows(ranks, dtype):
    """Catches an overflow at small temperatures: always a largest value, at any scale."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, (16, 37))
    values[:, 20] = values[:, 30] = (
        values.max(1) + 0.1
    )  # far enough for every dtype and temperature
    batches = [
        Batch(
            logits=torch.from_numpy(np.clip(values * scale, -6e4, 6e4)).to(dtype),
            vocab_size=37,
            params=[SamplingParams(temperature=t, seed=i) for i in range(16)],
            positions=[0] * 16,
        )
        for scale in (1, 30, 1e4)
        for t in COLD
    ]
    for got in ranks.run(sample_batches, batches):
        for batch, drawn in zip(batches, got, strict=True):
            assert set(drawn) == ({20} if batch.params[0].greedy else {20, 30}), batch.params[0]


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_top_p_keeps_the_maximum(ranks, dtype):
    """Catches a nucleus that is empty: its first token stays however small top_p is."""
    cases = [
        one_row(row, 32, SamplingParams(top_p=p, seed=1), dtype=dtype)
        for p in (0.0, 1e-12, 1e-8, 1e-3)
        for row in (log(0.25, 0.75), [0.0] * 5 + [0.5], [-INF, -4.0])
    ]
    for got in ranks.run(sample_batches, cases):
        assert [set(drawn) for drawn in got] == [{1}, {5}, {1}] * 4


@worlds(*FEW_WORLDS)
def test_greedy_rows_beside_random_ones(ranks):
    """Catches a greedy row that is scaled by its temperature, or masked values times zero."""
    row = [20.0, -INF, 3.0, 19.0]
    params = [SamplingParams(temperature=t, seed=5) for t in (0, 1.0, 1e-9, 30.0)]
    batch = Batch(
        logits=torch.tensor(row).expand(4, -1), vocab_size=4, params=params, positions=[0, 1, 2, 3]
    )
    alone = [batch.take([i]) for i in range(4)]
    wanted = tokens(batch)
    assert wanted[0] == wanted[2] == 0
    for got in ranks.run(sample_batches, [batch, *alone]):
        assert got == [wanted, *[[token] for token in wanted]]


LARGE = 200_000


def first_and_last_ids(mesh) -> list[list[int]]:
    """Draws at the ends of an ascending Gaussian row and a flat one, under filters that are off."""
    rows = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).sort().values
    logits = shard_vocab(torch.stack([rows, rows, torch.zeros(LARGE), torch.zeros(LARGE)]), mesh)
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 1.0, "top_k": LARGE},
        {"top_p": 1 - 2.0**-33},
        {"top_k": LARGE - 1},
    ]
    return [
        sample(logits, SamplingParams(seed=0, **f), position=[LOW, HIGH] * 2).tolist()
        for f in filters
    ]


@worlds("cpu:2")
def test_top_p_of_one_keeps_everything(ranks):
    """Catches rounded cumulative sums that reach 1 too early and cut the tail of a wide row."""
    everything = [0, LARGE - 1] * 2
    for got in ranks.run(first_and_last_ids):
        assert got == [everything] * 3 + [[1, LARGE - 1, 0, LARGE - 1]]
