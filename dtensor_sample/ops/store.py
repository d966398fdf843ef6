"""Writing logits into a cache, row by row."""

from torch import Tensor

from dtensor_sample.ops.define import define


@define("store", mutates=["cache_MW"])
def store(cache_MW: Tensor, first_R: Tensor, step: int, skipped_R: Tensor, x_RSv: Tensor) -> None:
    """Write the first W columns of each row of logits into a row of a cache.

    Args:
        cache_MW: [M, W], written in place.
        first_R: [R] int64, rows of the cache, distinct with `step` added; -1 writes nothing.
        step: how many rows further each is written.
        skipped_R: [R] bool, rows that write nothing either.
        x_RSv: [R, S, v] logits of the cache's dtype, any strides; S * v >= W.
    """
    written_R = (first_R >= 0) & ~skipped_R
    flat_RW = x_RSv.flatten(1)[:, : cache_MW.shape[1]]
    cache_MW[first_R[written_R] + step] = flat_RW[written_R]


@store.register_fake
def _(cache_MW: Tensor, first_R: Tensor, step: int, skipped_R: Tensor, x_RSv: Tensor) -> None:
    return None
