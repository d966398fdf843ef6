"""Counter-based random integers, see `dtensor_sample.random`."""

import triton
import triton.language as tl


@triton.jit
def counted(seed, position, offset, stream):
    """The upper 62 of the first 64 bits of Philox4x32-10: int64, as all arguments of one shape."""
    position = tl.maximum(position, 0)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = (position >> 32).to(tl.uint32)
    c2 = offset.to(tl.uint32)
    c3 = stream.to(tl.uint32)
    for _ in tl.static_range(10):
        m0 = tl.zeros_like(c0) + 0xD2511F53
        m1 = tl.zeros_like(c0) + 0xCD9E8D57
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return ((c0.to(tl.uint64) | c1.to(tl.uint64) << 32) >> 2).to(tl.int64)
