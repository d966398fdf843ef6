"""What the library must answer: one process, one row at a time, as plain as the definitions.

Nothing here imports `dtensor_sample`. Integers are Python's or numpy int64 (a row's weights add up
to at most 2^62), comparisons are of float32 values. The weights of a row may be given, so that a
draw can be compared token for token; `float64_weights` computes them independently.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math
from dataclasses import dataclass

import numpy as np

TARGET, DRAFT, COIN, RECOVERY, SPAWN = range(5)
"""Random streams."""

LOW, HIGH = 1928571472, 2589576016
"""Positions at which the target uniform of seed 0 is below 7e-10, and above 1 - 4e-11."""

_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds of Philox on four 32-bit words of counter under two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _first_64_bits(seed: int, position: int, offset: int, stream: int) -> int:
    counter = (position & _WORD, position >> 32 & _WORD, offset, stream)
    low, high, _, _ = philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))
    return low | high << 32


def uniform(seed: int, position: int, *, stream: int = TARGET, offset: int = 0) -> int:
    """A uniform integer in [0, 2^62)."""
    return _first_64_bits(seed, position, offset, stream) >> 2


def spawned_seed(seed: int, j: int) -> int:
    """The seed of the j-th of several samples of one seeded request."""
    return _first_64_bits(seed, j, 0, SPAWN)


def unseeded_seed(base_seed: int, j: int) -> int:
    """The seed of the j-th unseeded request (or of row j in a stateless call)."""
    return _first_64_bits(base_seed, j, 1, SPAWN)


def weight_bits(vocab_size: int) -> int:
    """S: the largest weight of a row is 2^S."""
    return 62 - (vocab_size - 1).bit_length()


def clean(logits: np.ndarray, vocab_size: int, largest: float) -> tuple[np.ndarray, int]:
    """A row as float32 without padding, NaN or +inf (now `largest`), and how many NaNs it had."""
    values = logits[:vocab_size].astype(np.float32)
    nans = np.isnan(values)
    values[nans] = -np.inf
    return np.minimum(values, np.float32(largest)), int(nans.sum())


def scaled(values: np.ndarray, temperature: float) -> np.ndarray:
    """Y = (x - max x) * log2(e) / T with the roundings of float32: the weight of x is 2^(S + y)."""
    factor = np.float32(math.log2(math.e) / temperature)
    with np.errstate(over="ignore"):
        return (values - values.max()) * factor


def float64_weights(values: np.ndarray, temperature: float) -> np.ndarray:
    """Weights 2^(S + y), rounded to integers, of the float32 exponents y."""
    y = scaled(values, temperature).astype(np.float64)
    return np.floor(np.exp2(y + weight_bits(len(values))) + 0.5).astype(np.int64)


def is_greedy(params) -> bool:
    return params.temperature < 1e-5 or params.top_k == 1 or params.top_p == 0


def threshold(values: np.ndarray, weights: np.ndarray, params) -> float:
    """The smallest value that min-p, top-k and top-p (in this order) keep; -inf if all are off."""
    least = np.float32(-np.inf)
    if params.min_p > 0:
        least = values.max() + np.float32(params.temperature * math.log(params.min_p))
    if 0 < params.top_k < len(values):
        least = max(least, np.sort(values)[-params.top_k])
    share = round(params.top_p * 2**31)
    if share < 2**31:
        descending = np.argsort(-values, kind="stable")
        descending = descending[(values[descending] >= least) & (values[descending] > -np.inf)]
        mass = np.cumsum(weights[descending])
        target = max(1, -(-share * int(mass[-1]) >> 31))
        least = max(least, values[descending[np.searchsorted(mass, target)]])
    return float(least)


def kept(values: np.ndarray, weights: np.ndarray, params) -> np.ndarray:
    """Which ids may be drawn: those at or over the threshold; -inf never is."""
    return (values >= np.float32(threshold(values, weights, params))) & (values > -np.inf)


def draw(weights: np.ndarray, u: int) -> int:
    """The lowest id whose running sum of weights exceeds u / 2^62 of the total."""
    running = np.cumsum(weights)
    return int(np.searchsorted(running, u * int(running[-1]) >> 62, side="right"))


@dataclass(frozen=True)
class Answer:
    """What is known about one row."""

    token: int
    """The sampled id, or -1."""
    num_nans: int
    failed: bool
    """True when no token is left."""


def sample(
    logits,
    params,
    *,
    seed: int,
    position: int,
    vocab_size: int,
    largest: float,
    weights=float64_weights,
):
    """The Answer for one row of logits; `weights(values, temperature)` is what to draw from."""
    values, num_nans = clean(logits, vocab_size, largest)
    if values.max() == -np.inf:
        return Answer(-1, num_nans, True)
    if is_greedy(params):
        return Answer(int(values.argmax()), num_nans, False)
    integers = weights(values, params.temperature)
    token = draw(np.where(kept(values, integers, params), integers, 0), uniform(seed, position))
    return Answer(token, num_nans, False)
