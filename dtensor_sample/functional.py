"""The stateless call: logits in, tokens out, in anyone's script."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_sample import ops
from dtensor_sample.debug import agree, debug_by_default
from dtensor_sample.exchange import check_exchange, exchange_of
from dtensor_sample.layout import Layout, layout_of
from dtensor_sample.params import BatchedParams, RowParams, SamplingParams
from dtensor_sample.random import TARGET
from dtensor_sample.sampler import draw


@torch.no_grad()
def sample(
    logits: DTensor,
    params: SamplingParams | Sequence[SamplingParams] | BatchedParams,
    *,
    position: int | Sequence[int] | Tensor,
    vocab_size: int | None = None,
    axis: str = "tp",
    exchange: str = "auto",
    base_seed: int = 0,
) -> Tensor:
    """Draw one token from each row of logits; each row is a request of its own.

    Row i of T is sampled by rank i // ceil(T / P), the rank that holds it as `Shard(0)`. A draw
    depends on the row's logits, its parameters, its seed and its position, and on nothing else:
    rows that share all four get the same token (`SamplingParams.spawn` gives samples of one prompt
    streams of their own). Every rank of the axis must call this with equal arguments.

    Args:
        logits: DTensor [..., V] (float32, bfloat16, float16), on the axis Shard(-1) or Replicate();
            wrap plain tensors by `vocab_sharded` or `replicated`. Other mesh axes keep their rows.
        params: for all rows, or one for each, in row order.
        position: of the token to draw in its own sequence, >= 0: for all rows or [...].
        vocab_size: V without padding: ids from here on are never drawn. Default: the last dim.
        axis: name of the mesh dimension to sample over.
        exchange: "batch", "vocab", "replicate" or "auto"; the tokens are the same under each.
        base_seed: in [0, 2**64): row i without a seed draws from the stream of (base_seed, i);
            change it between calls, or the position. With BatchedParams it is given to `batch`
            instead.

    Returns:
        [...] int64 plain tensor, the same on every rank; -1 where a row has no token left (all NaN
        or -inf).

    Raises:
        ValueError: names the argument; on every rank alike, before any collective.

    Example:
        >>> tokens = sample(logits, SamplingParams(top_p=0.9, seed=1), position=7)  # doctest: +SKIP
    """
    layout: Layout | None = None
    error = None
    try:
        layout = layout_of(logits, axis=axis, vocab_size=vocab_size)
        chosen = exchange_of(check_exchange(exchange), layout.axis)
        rows, device = layout.local_Tv.shape[0], layout.local_Tv.device
        batched = _batched(params, rows, device, base_seed)
        position_T = _positions(position, layout.lead, device)
    except ValueError as refused:
        error = refused
    if debug_by_default() and layout is not None:
        given = position_T if error is None else None
        agree(
            layout.axis,
            layout.local_Tv.device,
            error,
            params=params,
            position=given,
            exchange=exchange,
            vocab_size=vocab_size,
            base_seed=base_seed,
            shape=logits.shape,
        )
    if error is not None:
        raise error
    assert layout is not None

    ranks = layout.axis.size
    chunk = -(-rows // ranks)
    rows_P = [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
    placed = chosen.place(layout.local_Tv, rows_P, layout.width)
    row_params = RowParams.unpack(chosen.own_rows(batched.table, rows_P))
    position_R = chosen.own_rows(position_T, rows_P)
    uniform_R = ops.uniform(row_params.seed, position_R, torch.zeros_like(position_R), TARGET)
    drawn_RW = draw(placed, row_params, uniform_R, batched.filters, chosen, layout.vocab_size)
    return chosen.settle(drawn_RW, rows_P)[:rows, 0].view(layout.lead)


def _batched(
    params: SamplingParams | Sequence[SamplingParams] | BatchedParams,
    rows: int,
    device: torch.device,
    base_seed: int,
) -> BatchedParams:
    if isinstance(params, BatchedParams):
        if base_seed != 0:
            raise ValueError(
                "base_seed must be given to SamplingParams.batch when params are BatchedParams, "
                f"got {base_seed!r}"
            )
        batched = params
    elif isinstance(params, SamplingParams):
        batched = SamplingParams.batch([params] * rows, device, base_seed=base_seed)
    elif isinstance(params, Sequence):
        batched = SamplingParams.batch(params, device, base_seed=base_seed)
    else:
        raise ValueError(
            "params must be SamplingParams, a sequence of them or BatchedParams, "
            f"got {type(params).__name__}"
        )
    if batched.table.shape[0] != rows:
        raise ValueError(
            f"params must be one for each of {rows} rows, got {batched.table.shape[0]}"
        )
    return batched


def _positions(
    position: int | Sequence[int] | Tensor, lead: torch.Size, device: torch.device
) -> Tensor:
    """[T] int64 on the device. Values of a device tensor are clamped later, others checked."""
    if not isinstance(position, Tensor):
        try:
            position = torch.as_tensor(position)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"position must be integers, got {position!r}") from None
    if (position.dtype.is_floating_point or position.dtype == torch.bool) and position.numel():
        raise ValueError(f"position must be integers, got {position.dtype}")
    if position.ndim and position.shape != lead:
        raise ValueError(
            f"position must be one integer or have shape {list(lead)}, got {list(position.shape)}"
        )
    if position.device.type == "cpu" and (position < 0).any():
        raise ValueError(f"position must be >= 0, got {int(position.min())}")
    return position.to(device, torch.int64).expand(lead).reshape(-1)
