"""Frequencies of millions of draws against exact probabilities, with fixed seeds."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from dtensor_sample import SamplingParams, ops, sample
from dtensor_sample import random as streams
from tests.batches import EXCHANGES, library_weights, shard_vocab
from tests.oracle import HIGH, LOW
from tests.pool import worlds

ROW = (1.25, -0.5, 0.0, 2.125, -3.0, 0.75, -30.0, 1.1875, -6.0)  # exact in every dtype


def draws(mesh, row, params: SamplingParams, positions: torch.Tensor, **kwargs) -> torch.Tensor:
    """One token a position, all from the same row of logits."""
    logits = torch.tensor(row, dtype=torch.bfloat16).expand(len(positions), -1)
    return sample(shard_vocab(logits, mesh), params, position=positions, **kwargs)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test; ids without probability must not have been drawn at all."""
    counts, probabilities = np.asarray(counts), np.asarray(probabilities)
    likely = probabilities > 0
    assert counts[~likely].sum() == 0
    expected = probabilities[likely] / probabilities.sum() * counts.sum()
    common = expected >= 5  # the others share one cell
    counts = np.append(counts[likely][common], counts[likely][~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return scipy.stats.chisquare(counts, expected).pvalue


def softmax(row, temperature: float = 1.0) -> np.ndarray:
    exponent = np.array(row, np.float64) / temperature
    weights = np.exp(exponent - exponent.max())
    return weights / weights.sum()


def only(ids: set[int], temperature: float = 1.0) -> np.ndarray:
    return np.array([p if i in ids else 0 for i, p in enumerate(softmax(ROW, temperature))])


CASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "plain": ({}, softmax(ROW)),
    "temperature applied once": ({"temperature": 2.0}, softmax(ROW, 2.0)),
    "top-k renormalised": ({"top_k": 3}, only({0, 3, 7})),
    "top-p renormalised": ({"top_p": 0.8, "temperature": 0.5}, only({0, 3}, 0.5)),
    "min-p renormalised": ({"min_p": 0.1}, only({0, 2, 3, 5, 7})),
    "all of them": (
        {"temperature": 2.0, "min_p": 0.12, "top_k": 6, "top_p": 0.9},
        only({0, 2, 3, 5, 7}, 2.0),
    ),
}


@worlds("cpu:2")
@pytest.mark.parametrize("times", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_frequencies(ranks, case, times):
    """Catches a temperature applied twice, weights not renormalised, a biased uniform."""
    params, probabilities = CASES[case]
    count = 1 << (15 if {"top_k", "top_p"} & params.keys() else 18)
    total = np.zeros(len(ROW), np.int64)
    for start in range(0, count * times, count):
        positions = torch.arange(count) + start + (list(CASES).index(case) << 32)
        drawn, other = ranks.run(draws, ROW, SamplingParams(seed=12, **params), positions)
        assert torch.equal(drawn, other)
        total += drawn.bincount(minlength=len(ROW)).numpy()
    assert p_value(total, probabilities) > 1e-4


@worlds("cpu:2")
def test_streams_are_independent(ranks):
    """Catches correlated draws: next positions, next seeds, and requests without a seed."""
    row = ROW[:4]
    joint = np.outer(softmax(row), softmax(row)).ravel()
    positions = torch.arange(1 << 14)
    same = torch.zeros_like(positions)
    by_position = ranks.run(draws, row, SamplingParams(seed=2**40), positions)[0]
    by_row = ranks.run(draws, row, SamplingParams(), same, base_seed=3)[0]
    by_base = ranks.run(draws, row, SamplingParams(), same, base_seed=4)[0]
    for first, second in [
        (by_position[:-1:2], by_position[1::2]),
        (by_row[:-1:2], by_row[1::2]),
        (by_row, by_base),
    ]:
        assert p_value((4 * first + second).bincount(minlength=16), joint) > 1e-4


def spawned_draws(mesh, count: int) -> torch.Tensor:
    params = SamplingParams(seed=77).spawn(count)
    logits = torch.tensor(ROW).expand(count, -1)
    return sample(shard_vocab(logits, mesh), params, position=0)


def test_spawned_streams():
    """Catches samples of one request that repeat each other, or the request itself."""
    parents = [SamplingParams(seed=seed) for seed in (0, 1, 77, 2**64 - 1)]
    seeds = [child.seed for parent in parents for child in parent.spawn(500)]
    assert len({*seeds, *(parent.seed for parent in parents)}) == 2004
    assert parents[0].spawn(3) == parents[0].spawn(500)[:3]
    assert SamplingParams(top_k=3).spawn(2) == [SamplingParams(top_k=3)] * 2
    grandchildren = [c.seed for child in parents[0].spawn(20) for c in child.spawn(20)]
    assert len(set(grandchildren) | set(seeds)) == 2400


@worlds("cpu:2")
def test_spawned_frequencies(ranks):
    """Catches spawned streams that are no better than one: their first tokens follow the row."""
    drawn = ranks.run(spawned_draws, 20_000)[0]
    assert p_value(drawn.bincount(minlength=len(ROW)), softmax(ROW)) > 1e-4


def test_rate_of_rare_tokens():
    """Catches uniforms or weights too coarse for a tail: 262143 ids of probability 1e-8 or 1e-9.

    The row is drawn from 400,000 times with the library's weights and uniforms.
    """
    size, count = 1 << 18, 400_000
    positions = torch.arange(count)
    zero = torch.zeros_like(positions)
    uniforms = ops.uniform(zero + 5, positions, zero, streams.TARGET)
    for gap in (18.0, 20.5):
        values = np.full(size, -gap, np.float32)
        values[size // 2] = 0
        running = np.cumsum(library_weights(values, 1.0))
        points = streams.scaled(uniforms, torch.tensor(int(running[-1])))
        drawn = np.searchsorted(running, points.numpy(), side="right")
        tail = drawn[drawn != size // 2]
        mean = count * (size - 1) * math.exp(-gap) / (1 + (size - 1) * math.exp(-gap))
        low, high = scipy.stats.poisson.interval(1 - 1e-6, mean)
        assert low <= len(tail) <= high, (gap, len(tail), mean)
        assert len(set(tail)) > 0.98 * len(tail)  # not the same few of them
        assert scipy.stats.kstest(tail / size, "uniform").pvalue > 1e-4


RARE = [
    # Two logits, position, id drawn. At a gap g the rarer has probability exp(-g).
    ([-20.5, 0.0], LOW, 0),
    ([-21.0, 0.0], LOW, 0),
    ([-21.3, 0.0], LOW, 1),
    ([0.0, -23.5], HIGH, 1),
    ([0.0, -24.0], HIGH, 1),
    ([0.0, -24.2], HIGH, 0),
]


def rare_draws(mesh, exchange: str) -> list[int]:
    rows, positions, _ = zip(*RARE, strict=True)
    logits = shard_vocab(torch.tensor(rows), mesh)
    return sample(logits, SamplingParams(seed=0), position=positions, exchange=exchange).tolist()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_events_of_probability_1e_9(ranks, exchange):
    """Catches a cut tail: at the right positions ids of probability 1e-9 and 1e-10 are drawn."""
    assert ranks.run(rare_draws, exchange) == [[wanted for *_, wanted in RARE]] * ranks.size
