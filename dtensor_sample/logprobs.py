"""Log-probabilities of given tokens: the same bits in rollout and in training.

ln p(x) = (x - peak) - ln(mass): the difference to the row's largest logit, and the sum of the row's
weights, which are integers. Integers add up to the same sum over any shards, so one function serves
a sampler on vocabulary shards and a trainer on whole rows with no mismatch between them. No logit
moves: ranks exchange a few integers a row.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from dtensor_sample import check, ops
from dtensor_sample.check import INT64_MAX
from dtensor_sample.debug import checked
from dtensor_sample.exchange import Axis, Exchange, Logits, exchange_of
from dtensor_sample.layout import Layout, axis_index, axis_of, layout_of, replicated
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.values import count_rows, values
from dtensor_sample.params import GREEDY_TEMPERATURE, Filters, RowParams
from dtensor_sample.weigh import Weighed, weigh

_CHUNK = 1 << 22
"""Logits whose gradients are computed at once."""


def logprobs(
    logits: DTensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    axis: str = "tp",
) -> Tensor:
    """Natural logarithm of softmax(logits / temperature) at given ids, without filters.

    Differentiable with respect to the logits. Every rank of the axis must call this, with the same
    ids.

    Args:
        logits: DTensor [..., V] (float32, bfloat16, float16), on the axis Shard(-1) or Replicate(),
            as `sample` takes them, or Shard(0): each rank holds some of the rows. A NaN counts as
            -inf, and +inf as the largest finite value.
        ids: [...] int64 plain tensor, or [..., n] for n tokens of each row; on the logits' device.
        temperature: finite, >= 1e-5.
        vocab_size: V without padding: ids from here on have no probability, and add none. Default:
            the last dim.
        axis: name of the mesh dimension that shards the vocabulary.

    Returns:
        float32 plain tensor of the shape of `ids`, the same on every rank, and the same bits for
        every number of ranks and each placement; at temperature 1 they are also those of `Sampler`
        and `RejectionSampler` in the mode "raw_logprobs". -inf where an id has no probability (a
        masked token, or no id of the vocabulary: -1). Within 1e-6 of exact arithmetic, relative to
        the larger of 1 and the result.

    Raises:
        ValueError: names the argument; before any collective, and on every rank alike if
            arguments are equal on all; otherwise use debug mode.

    Example:
        >>> largest = logits.full_tensor().argmax(-1)  # doctest: +SKIP
        >>> bool((logprobs(logits, largest) <= 0).all())  # doctest: +SKIP
        True
    """

    def check_all() -> _Call:
        shards, lead, placed = _row_shards(logits, axis), None, logits
        if shards is not None:  # each rank holds some rows, and all of these
            lead = logits.shape[:-1]
            placed = replicated(logits.to_local(), logits.device_mesh, axis=axis)
        layout = layout_of(placed, axis=axis, vocab_size=vocab_size)
        lead = layout.lead if lead is None else lead
        ids_TN = _ids(ids, lead, layout.local_Tv.device)
        T = check.real("temperature", temperature, GREEDY_TEMPERATURE)
        return _Call(layout, shards, lead, ids_TN, T)

    call = checked(axis_of(logits, axis), logits.device, check_all, _Call.told)
    layout, shards, ids_TN = call.layout, call.shards, call.ids_TN
    # Where the vocabulary is not sharded there is nothing to exchange.
    where = exchange_of("replicate" if layout.width is None else "vocab", layout.axis)
    own_TN = ids_TN if shards is None else shards.own(ids_TN)
    found: Tensor = _LogProbs.apply(  # type: ignore[no-untyped-call]
        layout.local_Tv, own_TN, where, layout.width, layout.vocab_size, call.temperature
    )
    if shards is not None:
        found = _Gathered.apply(found, shards)  # type: ignore[no-untyped-call]
    return found.view(ids.shape)


def _ids(ids: Tensor, lead: torch.Size, device: torch.device) -> Tensor:
    """[T, n] ids; ValueError for anything else."""
    if not isinstance(ids, Tensor) or isinstance(ids, DTensor):
        raise ValueError(f"ids must be a plain tensor, got {type(ids).__name__}")
    if ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64, got {ids.dtype}")
    if ids.shape[: len(lead)] != lead or ids.ndim > len(lead) + 1:
        raise ValueError(
            f"ids must have shape {list(lead)}, or one dim more, got {list(ids.shape)}"
        )
    if ids.device != device:
        raise ValueError(f"ids must be on {device}, got {ids.device}")
    return ids.reshape(lead.numel(), ids.shape[len(lead) :].numel())


class _Call(NamedTuple):
    """The arguments of a call, checked."""

    layout: Layout
    shards: "_RowShards | None"
    lead: torch.Size
    """Of all ranks' rows."""
    ids_TN: Tensor
    temperature: float

    def told(self) -> dict[str, object]:
        """What must be the same on every rank of the axis."""
        return {
            "logits": self.layout.told() | {"rows": self.lead},
            "ids": self.ids_TN,
            "temperature": self.temperature,
        }


class _RowShards(NamedTuple):
    """Logits of which each rank holds some rows, as `torch.chunk` cuts the first dim."""

    axis: Axis
    rows: int
    """Of all ranks."""
    chunk: int
    """Rows of a rank, but for those that have fewer."""

    def own(self, every_TN: Tensor) -> Tensor:
        """This rank's rows of all."""
        return every_TN[self.axis.rank * self.chunk :][: self.chunk]

    def every(self, own_RN: Tensor) -> Tensor:
        """The inverse of `own`."""
        padded = pad(own_RN, (0, 0, 0, self.chunk - own_RN.shape[0]))
        return self.axis.all_gather(padded).flatten(0, 1)[: self.rows]


def _row_shards(logits: DTensor, axis: str) -> _RowShards | None:
    """How the axis shards the rows of logits; None if it does not."""
    if logits.ndim < 2:
        return None
    dim = axis_index(logits.device_mesh, axis)
    others = [p for i, p in enumerate(logits.placements) if i != dim]
    if logits.placements[dim] != Shard(0) or not all(p.is_replicate() for p in others):
        return None
    place, inner = Axis.of(logits.device_mesh, dim), logits.shape[1:-1].numel()
    chunk = -(-logits.shape[0] // place.size) * inner
    shards = _RowShards(place, logits.shape[0] * inner, chunk)
    held = logits.to_local().shape[:-1].numel()
    own = max(0, min(chunk, shards.rows - place.rank * chunk))
    if held != own:
        raise ValueError(
            f"logits must hold {own} rows on rank {place.rank} to be {list(logits.shape)} in all, "
            f"got {held}"
        )
    return shards


class _Gathered(torch.autograd.Function):
    """Results of each rank's rows to every rank, whose gradients are all the same."""

    @staticmethod
    def forward(ctx: Any, own_RN: Tensor, shards: _RowShards) -> Tensor:
        ctx.shards = shards
        return shards.every(own_RN)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.own(grad_TN), None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local_Tv: Tensor,
        ids_TN: Tensor,
        where: Exchange,
        width: int | None,
        V: int,
        temperature: float,
    ) -> Tensor:
        rows = local_Tv.shape[0]
        placed = where.place(local_Tv.detach(), [rows] * where.axis.size, width)
        row = weigh_raw(placed, where, V, temperature)
        share = (row.peak_R, row.scale_R, row.total_R)
        ctx.save_for_backward(local_Tv, ids_TN, placed.first_id_S, *share)  # one segment
        ctx.vocab_size, ctx.temperature = V, temperature
        found_TN: Tensor = ops.log_probability(row.read(ids_TN, where, V), *share, V)
        return found_TN

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of ln p(id), times T: 1 at the id, less p everywhere; in chunks of rows."""
        local_Tv, ids_TN, first_id_1, *share = ctx.saved_tensors
        columns, result_Tv = local_Tv.shape[1], torch.empty_like(local_Tv)
        if columns == 0:  # V < P: this rank has none
            return result_Tv, None, None, None, None, None
        column_TN = ids_TN - first_id_1
        known_TN = (ids_TN >= 0) & (ids_TN < ctx.vocab_size)
        grad_TN = grad_TN.masked_fill(~known_TN, 0) / ctx.temperature
        own_TN = grad_TN.masked_fill((column_TN < 0) | (column_TN >= columns), 0)
        step = max(_CHUNK // columns, 1)
        for begin in range(0, len(local_Tv), step):
            part = slice(begin, begin + step)
            x_Tv = values(local_Tv[part, None], first_id_1, None, (), ctx.vocab_size)[:, 0]
            found_Tv = ops.log_probability(x_Tv, *(s[part] for s in share), ctx.vocab_size).exp()
            found_Tv *= -grad_TN[part].sum(1, keepdim=True)
            found_Tv.scatter_add_(1, column_TN[part].clamp(0, columns - 1), own_TN[part])
            result_Tv[part] = found_Tv.masked_fill(x_Tv == -torch.inf, 0)
        return result_Tv, None, None, None, None, None


def weigh_raw(
    logits: Logits, where: Exchange, vocab_size: int, temperature: float = 1.0
) -> Weighed:
    """The distributions of rows as the model gave them, without filters."""
    x_NSv, first_id_S, rows_R = logits[:3]
    rows, device = count_rows(x_NSv, rows_R), x_NSv.device
    zeros_R = torch.zeros(rows, dtype=torch.int64, device=device)
    scale_R = torch.full((rows,), math.log2(math.e) / temperature, device=device)
    off_R = torch.full((rows,), -torch.inf, device=device)
    neutral = (zeros_R + INT64_MAX, zeros_R + TOP_P_ONE, zeros_R, zeros_R > 0)
    params = RowParams(scale_R, off_R, *neutral)
    as_given = Logits(x_NSv, first_id_S, rows_R)
    return weigh(as_given, params, Filters(False, False, drawn=True), where, vocab_size)
