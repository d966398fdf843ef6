"""Integer weights and uniforms of the library against float64 and Python integers."""

import math

import numpy as np
import pytest
import torch

from dtensor_sample import ops
from dtensor_sample import random as streams
from dtensor_sample.ops import values as ops_values
from tests import oracle
from tests.batches import library_weights

EXPONENT_STEP = 2.0**-26
"""What rounding its fraction does to an exponent: a weight is off by up to this times ln 2."""
POLYNOMIAL = 1.6e-7
"""Relative error of its 2**f."""


def exact(exponents: np.ndarray, size: int) -> np.ndarray:
    return np.exp2(exponents + oracle.weight_bits(size))


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 0.7, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("size", [2, 1003, 151936])
def test_weights_against_float64(size, temperature):
    """Catches a bad polynomial coefficient, a wrong shift, a cut tail and a lost rounding."""
    values = np.random.default_rng(size).uniform(-45 * temperature, 0, size).astype(np.float32)
    values[-1] = 0
    got = library_weights(values, temperature)
    rounded = oracle.scaled(values, temperature)
    wanted = exact(rounded, size)
    bound = POLYNOMIAL + EXPONENT_STEP * math.log(2)
    assert np.all(np.abs(got - wanted) <= bound * wanted + 1)
    assert np.all(
        np.abs(oracle.float64_weights(values, temperature) - wanted) <= 0.5 + 1e-15 * wanted
    )
    assert got[-1] == 1 << oracle.weight_bits(size)
    # Against real numbers: float32 rounds the difference and the factor.
    true = values.astype(np.float64) * math.log2(math.e) / temperature
    bound = bound + 3 * 2.0**-24 * math.log(2) * np.abs(true)
    assert np.all(np.abs(got - exact(true, size)) <= bound * exact(true, size) + 1)


def test_weights_are_monotone_and_bounded():
    """Catches a seam between powers of two: a token would outweigh one with a larger logit."""
    steps = np.concatenate([-np.arange(0, 3, 2.0**-12), -np.arange(3, 60, 2.0**-6)])
    edges = np.array([np.nextafter(np.float32(-n), np.float32(0)) for n in range(1, 60)])
    values = np.sort(np.concatenate([steps, edges]).astype(np.float32))
    weights = library_weights(values, math.log2(math.e))
    assert np.all(np.diff(weights) >= 0)
    assert weights[0] >= 0
    assert weights[-1] == 1 << oracle.weight_bits(len(values))


def test_values_beyond_the_peak():
    """Catches weights above the largest, where drafts are not those that penalties were told of."""
    x = torch.tensor([[[1.0, 3.0, 300.0]]])
    peak, floor, scale = torch.tensor([2.0]), torch.tensor([-torch.inf]), torch.tensor([1.0])
    weights = ops_values.weights(x, peak, floor, scale, 3)[0, 0].tolist()
    assert weights == [1 << 59, 1 << 60, 1 << 60]


def test_mass_of_a_rare_tail():
    """Catches weights too coarse for rare tokens: 262143 of probability 1e-9 weigh their due."""
    size = 1 << 18
    for gap in (18.0, 20.5, 25.0):
        values = np.full(size, -gap, np.float32)
        values[77] = 0
        weights = library_weights(values, 1.0)
        tail = (int(weights.sum()) - int(weights[77])) / int(weights[77])
        half_a_unit = 0.5 / (math.exp(-gap) * 2 ** oracle.weight_bits(size))
        assert tail == pytest.approx((size - 1) * math.exp(-gap), rel=1e-6 + half_a_unit)


def test_fused_multiply_add():
    """Catches a sum that is rounded twice: halfway after the first, and then the wrong way."""
    cases = [
        # 2**-24 and a little more beside 1; a little less beside a number that ends in 1; neither.
        (641 * 2.0**-28, 6700417 * 2.0**-28, 1.0, 1 + 2.0**-23),
        ((1 + 2.0**-23) * 2.0**-12, (1 - 2.0**-23) * 2.0**-12, 1 + 2.0**-23, 1 + 2.0**-23),
        (0.5, 0.25, 1.0, 1.125),
    ]
    for a, b, c, wanted in cases:
        for others in ((), (0.5, -0.25)):  # the same beside numbers that need no care
            x, y = (torch.tensor([one, *others], dtype=torch.float64) for one in (a, b))
            assert ops_values._fused_multiply_add(x, y, c)[0] == wanted


def test_weights_in_blocks(monkeypatch):
    """Catches a block of tokens weighed by another row's numbers, or not at all."""
    value_RSv = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0)) * 3
    of_rows = (value_RSv.amax((1, 2)), torch.linspace(-4, 0, 5), torch.linspace(1, 3, 5), 33)
    whole = ops_values.weights(value_RSv, *of_rows)
    for at_once in (1, 7, 40, 80):
        monkeypatch.setattr(ops_values, "_AT_ONCE", at_once)
        assert torch.equal(ops_values.weights(value_RSv, *of_rows), whole)


SEEDS = (0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**62)


def test_uniforms():
    """Catches dropped or swapped words and signed shifts: the bits of Python ints, all distinct."""
    seen: list[int] = []
    for stream in range(5):
        grid = [(s, p, o) for s in SEEDS for p in POSITIONS for o in (0, 1, 7, 2**32 - 1)]
        wanted = [oracle.uniform(s, p, stream=stream, offset=o) for s, p, o in grid]
        seeds, positions, offsets = zip(*grid, strict=True)
        columns = np.array(seeds, np.uint64).view(np.int64), np.array(positions), np.array(offsets)
        got = ops.uniform(*map(torch.from_numpy, columns), stream).tolist()
        assert got == wanted
        seen += got
    assert len(set(seen)) == len(seen) == 5 * len(grid)


def test_scaled_uniforms():
    """Catches an overflow or a lost carry in the 124-bit product, at both ends of the range too."""
    rng = np.random.default_rng(0)
    edges = [0, 1, 2**31 - 1, 2**31, 2**61, 2**62 - 1]
    us = edges + [int(u) for u in rng.integers(2**62, size=200)]
    totals = [1, 2, 2**31, 2**62 - 1, 2**62] + [int(m) for m in rng.integers(1, 2**62, size=50)]
    pairs = [(u, m) for u in us for m in totals]
    u, m = torch.tensor(pairs).unbind(1)
    assert streams.scaled(u, m).tolist() == [u * m >> 62 for u, m in pairs]


def test_derived_seeds():
    """Catches spawned and unseeded streams that coincide, or lose the high half of a seed."""
    for child, derive in enumerate((oracle.spawned_seed, oracle.unseeded_seed)):
        for seed in SEEDS:
            got = [streams.derive_seed(seed, j, child=child) for j in (0, 1, 5, 2**33)]
            assert got == [derive(seed, j) for j in (0, 1, 5, 2**33)]


# --- what drafting left to right computes


@pytest.mark.parametrize("F", [1, 7, 1024])
def test_products_of_factors_are_exact(F):
    """Catches sums that float32 rounds: the largest there are, in one order and its reverse."""
    left_VF = torch.full((3, F), 127.0) * torch.tensor([1, -1, 1])[:, None]
    left_VF[2] = torch.randint(-127, 128, (F,)).float()
    right_DF = torch.randint(-127, 128, (50, F)).float()
    right_DF[0] = 127
    one_V, one_D, before_Q = torch.ones(3), torch.ones(50), torch.arange(3)
    base_QSv = torch.zeros(3, 1, 50)
    found = [
        ops.markov(base_QSv, None, before_Q, left, one_V, right, one_D, None, 50)
        for left, right in ((left_VF, right_DF), (left_VF.flip(1).char(), right_DF.flip(1).char()))
    ]
    exact = left_VF.long() @ right_DF.long().T
    assert torch.equal(found[0].long(), exact)
    assert torch.equal(found[1].long(), exact)
    assert exact.abs().max() == F * 127**2


def test_quantized_factors():
    """Catches a scale of the wrong rows, and rows of zeros that become NaN."""
    x_NF = torch.randn(40, 9) * torch.logspace(-6, 6, 40)[:, None]
    x_NF[3] = 0
    factor_NF, scale_N = ops.quantized(x_NF)
    assert factor_NF.dtype == torch.int8
    assert factor_NF.long().abs().amax(1).tolist() == [127 * (i != 3) for i in range(40)]
    error_NF = (factor_NF * scale_N[:, None] - x_NF).abs()
    assert (error_NF <= scale_N[:, None] * 0.50001).all()


def test_confidences():
    """Catches sums that depend on their order, and results out of range."""
    hidden_RH, weight_H = torch.randn(200, 77) * 3, torch.randn(77)
    offset_R = ops.units(torch.randn(200).double() * 9)
    found_R = ops.confidence(hidden_RH, weight_H, offset_R)
    order = torch.randperm(77)
    assert torch.equal(ops.confidence(hidden_RH[:, order], weight_H[order], offset_R), found_R)
    assert torch.equal(ops.confidence(hidden_RH[7:8], weight_H, offset_R[7:8]), found_R[7:8])
    exact_R = torch.sigmoid(hidden_RH.double() @ weight_H.double() + offset_R.double() / 2**28)
    assert (found_R - exact_R).abs().max() < 3e-7
    extreme_RH = torch.tensor([[torch.inf], [-torch.inf], [torch.nan], [3e38], [0.0]])
    told_R = ops.confidence(extreme_RH, torch.ones(1), torch.zeros(5, dtype=torch.int64))
    assert told_R.tolist() == [1.0, pytest.approx(0, abs=1e-15), 0.5, 1.0, 0.5]
