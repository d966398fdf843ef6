"""What forms logits may come in, and what they mean on the sampling axis.

A local vocabulary shard and a full replica look alike as plain tensors, so a plain tensor is
refused: the caller says which it is by `vocab_sharded` or `replicated`. A refusal comes before any
collective and is the same on every rank, except where a local tensor has a wrong shape: a rank
knows only its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import pad

from dtensor_sample import check
from dtensor_sample.exchange import Axis

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layout:
    """Logits taken apart: rows by columns on this rank, and where the columns lie."""

    local_Tv: Tensor
    """[T, v]: this rank's vocabulary shard, or [T, V]: its replica."""
    width: int | None
    """Columns of every vocabulary shard but shorter last ones; None for a replica."""
    lead: torch.Size
    """The shape of the rows: local_Tv was [*lead, v]."""
    axis: Axis
    """The sampling axis."""
    vocab_size: int
    """V: ids from here on do not exist."""
    rows_elsewhere: bool
    """Whether another mesh axis shards rows: its other ranks sample others."""

    def told(self) -> dict[str, object]:
        """What is the same on every rank of the axis."""
        return {
            "rows": self.lead,
            "width": self.width,
            "vocab_size": self.vocab_size,
            "dtype": self.local_Tv.dtype,
        }


def check_dtype(dtype: object) -> torch.dtype:
    """`dtype` if logits may have it."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def axis_of(logits: object, axis: str | None) -> Axis:
    """The sampling axis of logits, if they are a DTensor: all that ranks need to speak."""
    logits = _dtensor(logits)
    return Axis.of(logits.device_mesh, axis_index(logits.device_mesh, axis))


def layout_of(logits: object, *, axis: str | None, vocab_size: int | None) -> Layout:
    """Check logits and take them apart.

    Args:
        logits: DTensor [..., V], float32, bfloat16 or float16; on the sampling axis Shard(-1) or
            Replicate(), on other mesh axes Replicate() or sharded over rows.
        axis: name of the sampling axis; None on a mesh of one dimension.
        vocab_size: V without padding; None takes the whole last dim.
    """
    logits = _dtensor(logits)
    if logits.dtype not in DTYPES:
        raise ValueError(f"logits must have a dtype of {DTYPES}, got {logits.dtype}")
    if logits.ndim == 0:
        raise ValueError("logits must have shape [..., vocab_size], got a scalar")
    last = logits.ndim - 1
    padded = logits.shape[last]
    vocab_size = check.vocabulary(padded if vocab_size is None else vocab_size)
    if vocab_size > padded:
        raise ValueError(
            f"vocab_size must be <= the last dim of logits, {padded}, got {vocab_size}"
        )
    mesh, mesh_dim = logits.device_mesh, axis_index(logits.device_mesh, axis)
    for dim, placement in enumerate(logits.placements):
        on_vocab = isinstance(placement, Shard) and placement.dim in (last, -1)
        on_rows = isinstance(placement, Shard) and not on_vocab
        accepted = on_vocab if dim == mesh_dim else on_rows
        if not (accepted or isinstance(placement, Replicate)):
            where = "the sampling axis" if dim == mesh_dim else f"mesh dim {dim}"
            expected = "Shard(-1)" if dim == mesh_dim else "a shard of rows"
            raise ValueError(
                f"logits must be {expected} or Replicate() on {where}, got {logits.placements}"
            )
    local = logits.to_local()
    place = Axis.of(mesh, mesh_dim)
    sharded = isinstance(logits.placements[mesh_dim], Shard)
    width = -(-padded // place.size) if sharded else None
    lead, columns = local.shape[:-1], local.shape[-1]
    own = padded if width is None else max(0, min(width, padded - place.rank * width))
    others = [
        placement
        for dim, placement in enumerate(logits.placements)
        if dim != mesh_dim and mesh.size(dim) > 1
    ]
    rows_elsewhere = not all(placement.is_replicate() for placement in others)
    shape = [*(lead if rows_elsewhere else logits.shape[:-1]), own]
    if list(local.shape) != shape:
        raise ValueError(
            f"logits must hold {shape} on rank {place.rank} to be {list(logits.shape)} in all, got "
            f"{list(local.shape)}: give DTensor.from_local its shape, or use vocab_sharded"
        )
    local_Tv = local.reshape(math.prod(lead), columns)
    return Layout(local_Tv, width, lead, place, vocab_size, rows_elsewhere)


def row_numbers(logits: DTensor, lead: torch.Size) -> Tensor:
    """[T] int64 on the device: the places of this rank's rows among those of all mesh axes.

    Args:
        logits: as `layout_of` takes them.
        lead: the shape of this rank's rows.
    """
    if lead == logits.shape[:-1]:
        return torch.arange(math.prod(lead), device=logits.device)
    _, offset = compute_local_shape_and_global_offset(
        logits.shape, logits.device_mesh, logits.placements
    )
    number = torch.zeros((), dtype=torch.int64, device=logits.device)
    for rows, every, first in zip(lead, logits.shape, offset, strict=False):
        here = torch.arange(first, first + rows, device=logits.device)
        number = number[..., None] * every + here
    return number.flatten()


def _dtensor(logits: object) -> DTensor:
    if not isinstance(logits, DTensor):
        raise ValueError(
            f"logits must be a DTensor, got {type(logits).__name__}: a plain tensor could be a "
            "vocabulary shard or a full replica; wrap it with vocab_sharded(...) or replicated(...)"
        )
    return logits


def axis_index(mesh: DeviceMesh, axis: str | None) -> int:
    """The mesh dimension called `axis`; a mesh of one unnamed dimension needs no name."""
    check.instance("mesh", mesh, DeviceMesh)
    names = mesh.mesh_dim_names
    if mesh.ndim == 1 and (axis is None or names is None):
        return 0
    if names is None or axis not in names:
        raise ValueError(f"axis must name a mesh dimension, one of {names}, got {axis!r}")
    return names.index(axis)


def vocab_sharded(
    local: Tensor,
    mesh: DeviceMesh,
    *,
    vocab_size: int,
    axis: str = "tp",
    row_axis: str | None = None,
) -> DTensor:
    """Wrap this rank's plain vocabulary shard as a DTensor, without communication.

    Args:
        local: [..., v], plain, of a dtype that logits may have (float32, bfloat16, float16; others
            are refused where they are sampled). Shards follow `torch.chunk`: v = ceil(V / P) on
            every rank but shorter last ones, which may also come padded to it. v larger than that
            on all ranks means that the whole vocabulary was padded to P * v.
        mesh: holds `axis`.
        vocab_size: V, without padding: ids from here on get -inf, so that they are never drawn. A
            rank with padding of a vocabulary that was padded to P * v copies its shard for that;
            to spare it, let `vocab_size` be P * v here, and V where logits are sampled.
        axis: name of the mesh dimension that shards the vocabulary.
        row_axis: name of the mesh dimension over which ranks hold other rows (data parallelism), as
            many on each, so that rows without a seed have numbers, and random streams, of their
            own. None: every rank has these.

    Returns:
        DTensor [..., V] (or [..., P * v]) of the dtype of `local`, Shard(-1) on `axis`, Shard(0) on
        `row_axis` and of so many times the rows, Replicate() elsewhere.

    Raises:
        ValueError: no plain tensor, a vocab_size out of its range, an axis that the mesh lacks; or
            a width that neither layout has: on the ranks that have it alone, since each knows only
            its own, while others go on to wait in the next collective.
    """
    vocab_size = check.vocabulary(vocab_size)
    dim, local = axis_index(mesh, axis), _plain("local", local)
    ranks, rank, width = mesh.size(dim), mesh.get_local_rank(dim), local.shape[-1]
    chunk = -(-vocab_size // ranks)
    own = max(0, min(chunk, vocab_size - rank * chunk))
    if width not in (own, chunk) and width < chunk:
        raise ValueError(
            f"local must have {own} columns, or {chunk} or more with padding, for vocab_size "
            f"{vocab_size} on rank {rank} of {ranks}, got {width}"
        )
    total = vocab_size
    if width > chunk:
        total, own = width * ranks, max(0, min(width, vocab_size - rank * width))
        if own < width and local.dtype in DTYPES:
            local = pad(local[..., :own], (0, width - own), value=-math.inf)
    elif width > own:
        local = local[..., :own]
    return _wrap(local, mesh, dim, Shard(local.ndim - 1), total, row_axis)


def replicated(
    logits: Tensor, mesh: DeviceMesh, *, axis: str = "tp", row_axis: str | None = None
) -> DTensor:
    """Wrap a full plain replica as a DTensor, without communication.

    Args:
        logits: [..., V], plain, the same on every rank of `axis`, of a dtype that logits may have
            (float32, bfloat16, float16; others are refused where they are sampled). Replicas that
            differ in their last bits are harmless: for each row one rank decides.
        mesh: holds `axis`.
        axis: name of the mesh dimension over which rows are to be sampled.
        row_axis: as of `vocab_sharded`.

    Returns:
        DTensor [..., V] of the dtype of `logits`, Shard(0) on `row_axis` and of so many times the
        rows, Replicate() elsewhere.

    Raises:
        ValueError: no plain tensor, or an axis that the mesh lacks. A width or shape of its own on
            one rank is noticed in debug mode only.
    """
    local = _plain("logits", logits)
    return _wrap(local, mesh, axis_index(mesh, axis), Replicate(), local.shape[-1], row_axis)


def _plain(name: str, tensor: object) -> Tensor:
    if isinstance(tensor, DTensor) or not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a plain tensor, got {type(tensor).__name__}")
    if tensor.ndim == 0:
        raise ValueError(f"{name} must have shape [..., columns], got a scalar")
    return tensor


def _wrap(
    local: Tensor,
    mesh: DeviceMesh,
    dim: int,
    placement: Placement,
    total: int,
    row_axis: str | None,
) -> DTensor:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[dim] = placement
    lead = list(local.shape[:-1])
    if row_axis is not None:
        names = mesh.mesh_dim_names or ()
        if row_axis not in names or names.index(row_axis) == dim or not lead:
            raise ValueError(
                "row_axis must name a mesh dimension other than axis, that shards the rows of "
                f"[rows, ..., columns], got {row_axis!r} of {names} for {list(local.shape)}"
            )
        row_dim = names.index(row_axis)
        placements[row_dim] = Shard(0)
        lead[0] *= mesh.size(row_dim)
    shape = torch.Size((*lead, total))
    # Shape and stride are given, since guessing them goes wrong on uneven shards.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
