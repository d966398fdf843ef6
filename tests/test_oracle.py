"""The oracle itself: if it were wrong, every comparison with it would prove nothing."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from tests import oracle

HALF = 0xFFFFFFFF


def params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return SimpleNamespace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((HALF,) * 4, (HALF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    """Random123's vectors for philox4x32-10: catches a wrong constant, round count, word order."""
    assert oracle.philox4x32(counter, key) == answer


def test_uniforms_use_all_words():
    """Catches a dropped word: every bit of seed and position, the stream and the offset matter."""
    first = oracle.uniform(0, 0)
    others = {oracle.uniform(1 << bit, 0) for bit in range(64)} | {
        oracle.uniform(0, 1 << bit) for bit in range(63)
    }
    others |= {oracle.uniform(0, 0, stream=stream) for stream in range(1, 5)}
    others |= {oracle.uniform(0, 0, offset=offset) for offset in range(1, 9)}
    assert len(others) == 64 + 63 + 4 + 8
    assert first not in others
    assert all(0 <= u < 2**62 for u in others)


def test_extreme_uniforms():
    """The positions that tests of the ends of a row rely on."""
    assert 6e-10 < oracle.uniform(0, oracle.LOW) / 2**62 < 7e-10
    assert 3e-11 < 1 - oracle.uniform(0, oracle.HIGH) / 2**62 < 4e-11


def kept_by_definition(values, weights, p) -> list[bool]:
    """The kept set, token by token, with fractions: what `oracle.threshold` says in one number."""
    alive = [v > -np.inf for v in values]
    if p.min_p > 0:
        edge = np.float32(max(values) + np.float32(p.temperature * np.log(p.min_p)))
        alive = [a and v >= edge for a, v in zip(alive, values, strict=True)]
    if 0 < p.top_k < len(values):
        alive = [
            a and sum(w > v for w in values) < p.top_k for a, v in zip(alive, values, strict=True)
        ]
    share = Fraction(round(p.top_p * 2**31), 2**31)
    if share < 1:
        total = sum(int(w) for w, a in zip(weights, alive, strict=True) if a)
        over = [
            sum(int(w) for w, a, x in zip(weights, alive, values, strict=True) if a and x > v)
            for v in values
        ]
        alive = [a and (o == 0 or o < share * total) for a, o in zip(alive, over, strict=True)]
    return alive


def test_kept_set_by_definition():
    """Catches a threshold that is off by one token, a cut tie, or a filter in the wrong order."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = rng.choice(
            [-np.inf, -3.0, -1.0, 0.0, -0.0, 0.5, 2.0], size=rng.integers(1, 9)
        ).astype(np.float32)
        values[rng.integers(len(values))] = 1.0
        p = params(
            temperature=float(rng.choice([0.5, 1.0, 2.0])),
            top_k=int(rng.integers(0, 10)),
            top_p=float(rng.choice([1e-12, 0.2, 0.5, 0.8, 0.999, 1.0])),
            min_p=float(rng.choice([0.0, 0.05, 0.5, 1.0])),
        )
        weights = oracle.float64_weights(values, p.temperature)
        assert oracle.kept(values, weights, p).tolist() == kept_by_definition(values, weights, p), (
            values,
            p,
        )


@pytest.mark.parametrize("size", [1, 2, 3, 111, 1003])
def test_weights_fit(size):
    """Catches a weight scale that overflows 2^62 on a flat row, or wastes more than a bit."""
    weights = oracle.float64_weights(np.zeros(size, np.float32), 1.0)
    assert 2**61 < sum(map(int, weights)) <= 2**62
    assert set(weights.tolist()) == {2 ** oracle.weight_bits(size)}


def test_draw_covers_each_weight_exactly():
    """Catches an off-by-one at either end: each id gets its weight's share of the uniforms."""
    weights = np.array([0, 3, 0, 250, 2, 1, 0])
    drawn = [oracle.draw(weights, k << 54) for k in range(256)]
    assert [drawn.count(i) for i in range(7)] == weights.tolist()
    assert oracle.draw(weights, 0) == 1
    assert oracle.draw(weights, 2**62 - 1) == 5


def test_rows_without_tokens_and_bad_values():
    """Catches NaN that wins a maximum, +inf that empties a row, and padding that is counted."""
    nan, inf = np.nan, np.inf

    def answer(row, **kwargs):
        row = np.array(row, np.float32)
        return oracle.sample(
            row, params(**kwargs), seed=1, position=2, vocab_size=3, largest=65504.0
        )

    assert answer([nan, nan, nan, 1.0]) == oracle.Answer(-1, 3, True)
    assert answer([-inf, -inf, -inf, nan]) == oracle.Answer(-1, 0, True)
    assert answer([nan, -5.0, -inf, 9.0]) == oracle.Answer(1, 1, False)
    assert answer([0.0, inf, 65504.0, inf], temperature=0.0) == oracle.Answer(1, 0, False)
    assert answer([0.0, 65504.0, inf, inf], temperature=0.0) == oracle.Answer(1, 0, False)
