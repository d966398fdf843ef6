"""Counter-based random numbers: a function of (seed, position, stream, offset) and nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the
64-bit seed and counted by the rest. There is no generator state to share, restore or keep in step:
a request draws the same numbers on any rank, in any row, in any batch. The arithmetic is integer,
so eager and traced code agree; the same function serves Python ints on the host.
"""

from typing import TypeVar

from torch import Tensor

TARGET, DRAFT, COIN, RECOVERY, CHILD = range(5)
"""Streams: target and bonus tokens, draft tokens, acceptance coins, recovered tokens, seeds."""

WORD = (1 << 32) - 1
"""Mask of the 32 bits of a word."""
_ROUNDS = 10
Int = TypeVar("Int", int, Tensor)


def philox(key: tuple[Int, Int], counter: tuple[Int, Int, Int, Int]) -> tuple[Int, Int, Int, Int]:
    """Four 32-bit words of Philox4x32-10; every argument and result lies in [0, 2**32)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 products wrap; their 64 bits are right
        c0, c1, c2, c3 = (
            (p1 >> 32 & WORD) ^ c1 ^ k0,
            p1 & WORD,
            (p0 >> 32 & WORD) ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def scaled(uniform_62: Tensor, total: Tensor) -> Tensor:
    """floor(uniform_62 * total / 2**62), for int64 in [0, 2**62) and [0, 2**62]."""
    bits, mask = 31, (1 << 31) - 1
    u_high, u_low = uniform_62 >> bits, uniform_62 & mask
    t_high, t_low = total >> bits, total & mask
    cross = u_high * t_low + u_low * t_high + (u_low * t_low >> bits)
    return u_high * t_high + (cross >> bits)


def derive_seed(seed: int | Int, index: Int, *, child: int) -> Int:
    """The 64-bit seed of stream `index` under `seed`; `child` 0: spawned samples, 1: unseeded."""
    low_high = seed & WORD, seed >> 32 & WORD
    zero = index & 0  # an int or a tensor, as the index is
    key = (zero | low_high[0], zero | low_high[1])
    low, high, _, _ = philox(key, (index & WORD, index >> 32 & WORD, zero | child, zero | CHILD))
    return low | high << 32
