"""Writing logits into a cache, row by row."""

from torch import Tensor

from dtensor_sample.ops.define import define


@define("store", mutates=["cache_MW"])
def store(cache_MW: Tensor, rows_R: Tensor, x_RSv: Tensor) -> None:
    """Write the first W columns of each row of logits into a row of a cache.

    Args:
        cache_MW: [M, W], written in place.
        rows_R: [R] int64, distinct rows of the cache; -1 writes nothing.
        x_RSv: [R, S, v] logits of the cache's dtype, any strides; S * v >= W.
    """
    written_R = rows_R >= 0
    flat_RW = x_RSv.flatten(1)[:, : cache_MW.shape[1]]
    cache_MW[rows_R[written_R]] = flat_RW[written_R]


@store.register_fake
def _(cache_MW: Tensor, rows_R: Tensor, x_RSv: Tensor) -> None:
    return None
