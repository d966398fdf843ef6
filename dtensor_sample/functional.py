"""The stateless call: logits in, tokens out, in anyone's script."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dtensor_sample import check, ops
from dtensor_sample.choose import fastest, machine_of
from dtensor_sample.cost import Shape
from dtensor_sample.debug import checked
from dtensor_sample.exchange import Exchange, check_exchange, exchange_of
from dtensor_sample.layout import Layout, axis_of, layout_of, row_numbers
from dtensor_sample.logprobs import logprobs
from dtensor_sample.params import (
    BatchedParams,
    Filters,
    RowParams,
    SamplingParams,
    batch_of,
    check_params,
)
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
            wrap plain tensors by `vocab_sharded` or `replicated`. Where another mesh axis shards
            rows, each of its ranks samples its own: [...] below is this rank's part.
        params: for all rows, or one for each, in row order. One with a seed gives it to all rows.
            Within torch.compile SamplingParams are constants of the graph, made outside of it and
            compiled anew if they change; what `SamplingParams.batch` makes is an input of it.
        position: of the token to draw in its own sequence, in [0, 2**63): for all rows or [...]
            int64.
        vocab_size: V without padding: ids from here on are never drawn. Default: the last dim, of
            which `vocab_sharded` has made padding that it was told of -inf.
        axis: name of the mesh dimension to sample over.
        exchange: "batch", "vocab", "replicate" or "auto"; the tokens are the same under each.
        base_seed: in [0, 2**64): row i without a seed draws from stream (base_seed, i); change it
            between calls, or the position. Rows are numbered over all mesh axes of the logits, so
            data-parallel ranks whose logits lie on a mesh of their own draw the same numbers unless
            each gives another base_seed. With BatchedParams it is given to `batch` instead.

    Returns:
        [...] int64 plain tensor, the same on every rank; -1 where a row has no token left (all NaN
        or -inf).

    Raises:
        ValueError: names the argument; before any collective, and on every rank alike if
            arguments are equal on all; otherwise use debug mode.

    Example:
        >>> tokens = sample(logits, SamplingParams(top_p=0.9, seed=1), position=7)  # doctest: +SKIP
    """

    def check_all() -> _Call:
        layout = layout_of(logits, axis=axis, vocab_size=vocab_size)
        name = check_exchange(exchange)
        batched = _batched(params, logits, layout, base_seed)
        if name == "auto":
            name = _fastest(layout, batched.filters)
        position_T = _positions(position, layout.lead, layout.local_Tv.device)
        return _Call(layout, batched, exchange_of(name, layout.axis), position_T)

    call = checked(axis_of(logits, axis), logits.device, check_all, _Call.told)
    layout, batched, chosen, position_T = call
    rows = layout.local_Tv.shape[0]
    ranks, local_Tv, table_T6 = layout.axis.size, layout.local_Tv, batched.table
    chunk = -(-rows // ranks)
    rows_P = [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
    if chosen.name == "batch" and torch.compiler.is_compiling():
        # To a compiler, ranks without rows or with one would be cases of their own, and so would
        # rows that owners share evenly: hence a copy of the shard, which samplers of plans spare.
        rows_P = [chunk] * ranks
        short = chunk * ranks - rows
        local_Tv, table_T6 = (pad(x, (0, 0, 0, short)) for x in (local_Tv, table_T6))
        position_T = pad(position_T, (0, short))
    placed = chosen.place(local_Tv, rows_P, layout.width)
    table_R6, position_R = (chosen.own_rows(x, rows_P) for x in (table_T6, position_T))
    taken = ops.row_params(table_R6, None, position_R, None, None, TARGET, 0)
    *columns, _, uniform_R = taken
    of_rows = RowParams(*columns), uniform_R, batched.filters
    drawn_R5, _ = draw(placed, *of_rows, chosen, layout.vocab_size)
    return chosen.settle(drawn_R5, rows_P)[:rows, 0].view(layout.lead)


def sample_with_logprobs(
    logits: DTensor,
    params: SamplingParams | Sequence[SamplingParams] | BatchedParams,
    *,
    position: int | Sequence[int] | Tensor,
    vocab_size: int | None = None,
    axis: str = "tp",
    exchange: str = "auto",
    base_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw tokens as `sample` does, with `logprobs` of each: what a policy gradient needs.

    The log-probabilities are those of the logits as they are, at temperature 1 and without filters,
    whatever tokens are drawn at, and have the bits that `logprobs(logits, tokens)` has in a
    trainer. For another temperature call `sample`, and then `logprobs` with that.

    Takes what `sample` takes.

    Returns:
        [...] int64 tokens and [...] float32 log-probabilities, plain tensors, the same on every
        rank; -1 and -inf where a row has no token left.

    Raises:
        ValueError: names the argument; before any collective, and on every rank alike if
            arguments are equal on all; otherwise use debug mode.
    """
    tokens = sample(
        logits,
        params,
        position=position,
        vocab_size=vocab_size,
        axis=axis,
        exchange=exchange,
        base_seed=base_seed,
    )
    with torch.no_grad():
        return tokens, logprobs(logits, tokens, vocab_size=vocab_size, axis=axis)


class _Call(NamedTuple):
    """The arguments of a call, checked."""

    layout: Layout
    batched: BatchedParams
    chosen: Exchange
    position_T: Tensor

    def told(self) -> dict[str, object]:
        """What must be the same on every rank of the axis."""
        return {
            "logits": self.layout.told(),
            "params": RowParams.unpack(self.batched.table),
            "filters": self.batched.filters,
            "position": self.position_T,
            "exchange": self.chosen.name,
        }


def _fastest(layout: Layout, filters: Filters) -> str:
    """What "auto" takes for rows that each are a request."""
    rows, P = layout.local_Tv.shape[0], layout.axis.size
    chunk = -(-rows // P)
    return fastest(
        machine_of(layout.local_Tv.device.type),
        Shape(P, chunk, chunk, 0),
        Shape(1, rows, rows, 0),
        layout.vocab_size,
        filters,
        layout.local_Tv.dtype,
        sharded=layout.width is not None,
    )


def _batched(
    params: SamplingParams | Sequence[SamplingParams] | BatchedParams,
    logits: DTensor,
    layout: Layout,
    base_seed: int,
) -> BatchedParams:
    """One packed row of parameters for each local row of logits."""
    rows, device = layout.local_Tv.shape[0], layout.local_Tv.device
    if isinstance(params, BatchedParams):
        if base_seed != 0:
            raise ValueError(
                "base_seed must be given to SamplingParams.batch when params are BatchedParams, "
                f"got {base_seed!r}"
            )
        if params.numbered_from_0 and layout.rows_elsewhere:
            raise ValueError(
                "params must be batched with first_row, the number of this rank's first row, as "
                "another mesh axis shards rows and some have no seed, got first_row=None"
            )
        batched = params
    else:
        base_seed = check.symbol("base_seed", base_seed, 0, (1 << 64) - 1)
        if isinstance(params, SamplingParams):
            return batch_of([params], row_numbers(logits, layout.lead), base_seed)
        listed = check_params(params)
        if len(listed) != rows:
            raise ValueError(f"params must be one for each of {rows} rows, got {len(listed)}")
        batched = batch_of(listed, row_numbers(logits, layout.lead), base_seed)
    if (len(batched.table), batched.table.device) != (rows, device):
        raise ValueError(
            f"params must be one for each of {rows} rows on {device}, got {len(batched.table)} on "
            f"{batched.table.device}"
        )
    return batched


def _positions(
    position: int | Sequence[int] | Tensor, lead: torch.Size, device: torch.device
) -> Tensor:
    """[T] int64 on the device. Values of a device tensor are clamped later, others checked."""
    if isinstance(position, DTensor):
        raise ValueError("position must be a plain tensor or integers, got a DTensor")
    if isinstance(position, Tensor):
        if position.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"position must be int64, got {position.dtype}")
        on_host = position.is_cpu and not torch.compiler.is_compiling()
        if on_host and position.numel() and (low := int(position.min())) < 0:
            raise ValueError(f"position must be >= 0, got {low}")
    elif isinstance(position, int):
        number = check.symbol("position", position, 0, check.INT64_MAX)
        position = torch.full((), number, dtype=torch.int64)
    else:
        try:
            numbers = np.asarray(position)
        except ValueError:  # nested lists of unequal lengths
            numbers = np.asarray("ragged")
        whole = numbers.size == 0 or numbers.dtype.kind in "iu"
        if not whole or ((numbers < 0) | (numbers > check.INT64_MAX)).any():
            raise ValueError(f"position must be integers in [0, 2**63), got {position!r}")
        position = torch.from_numpy(numbers.astype(np.int64))
    if position.ndim and position.shape != lead:
        raise ValueError(
            f"position must be one integer or have shape {list(lead)}, got {list(position.shape)}"
        )
    return position.to(device, torch.int64).expand(lead).flatten()
