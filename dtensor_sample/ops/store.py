"""Writing rows into a cache: their logits, and what was found of them."""

from collections.abc import Sequence

from torch import Tensor

from dtensor_sample.ops.define import define


@define("store", mutates=["cache_MW", "kept"])
def store(
    cache_MW: Tensor,
    kept: Sequence[Tensor],
    first_R: Tensor,
    step: int,
    skipped_R: Tensor,
    x_RSv: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> None:
    """Write the first W columns of each row of logits, and its other fields, into rows of a cache.

    Args:
        cache_MW: [M, W], written in place.
        kept: [M] float32 peaks, floors and scales, [M, 1, 1] int64 masses, [M] int64 argmaxes and
            NaN counts, written in place.
        first_R: [R] int64, rows of the cache, distinct with `step` added; -1 writes nothing.
        step: how many rows further each is written.
        skipped_R: [R] bool, rows that write nothing either.
        x_RSv: [R, S, v] logits of the cache's dtype, any strides; S * v >= W.
        peak_R, floor_R, scale_R: [R] float32, see `Weighed`; so are the others.
        mass_RPC: [R, P, C] int64; their sum is kept.
        argmax_R, nans_R: [R] int64.
    """
    written_R = (first_R >= 0) & ~skipped_R
    to = first_R[written_R] + step
    cache_MW[to] = x_RSv.flatten(1)[:, : cache_MW.shape[1]][written_R]
    mass_R11 = mass_RPC.sum((1, 2), keepdim=True)
    fields = (peak_R, floor_R, scale_R, mass_R11, argmax_R, nans_R)
    for kept_M, field_R in zip(kept, fields, strict=True):
        kept_M[to] = field_R[written_R]


@store.register_fake
def _(
    cache_MW: Tensor,
    kept: Sequence[Tensor],
    first_R: Tensor,
    step: int,
    skipped_R: Tensor,
    x_RSv: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> None:
    return None
