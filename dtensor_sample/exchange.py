"""How vocabulary-sharded logits meet the sampler. The only module that communicates.

    batch       vocabulary shards -> batch shards: one all-to-all; each owner holds its rows whole
    vocab       the logits stay; all ranks hold all rows, and exchange a few integers a row
    replicate   one all-gather; every rank holds everything

All three present logits as `[R, S, v]`: R rows, the vocabulary in S segments of v columns, segment
s beginning at id `first_id[s]`. Under `batch` and `replicate` the S = P segments are the receive
buffer of the collective read in place, through strides; under `vocab` S = 1 is the rank's own
shard. What sampling then needs across segments that live elsewhere goes through `segments`, `total`
and `settle`; all but the last are the identity unless the vocabulary is sharded.

Rejected, measured on 2 x H200 (torch 2.11, 2026-11-30; CUDA graphs, 129280 ids in bfloat16, us for
512 / 2048 rows):

- Uneven splits instead of padding to the fullest owner: 183 / 499 against 187 / 497 with equal
  owners, which balanced plans have but for a few rows. They take 161 against 183 where one owner
  has 300 of 512 rows, but every distribution of rows would be a graph of its own.
- Writing into peers' receive buffers over symmetric memory: 161 / 472 against 174 / 502, of which
  two barriers take 47: too little for a private interface, and barriers that spin if a rank dies.
- An all-to-all for each chunk of rows, which travels while lm_head (hidden size 4096) computes the
  next: 533 / 1859 in two chunks and 787 / 1817 in four, against 525 / 1926 in one.

Collectives are the functional ones, called by group name: they trace, and gloo runs what nccl runs.
An axis of size 1 runs none, and neither does a step without rows: whether it has any is the same on
every rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from dtensor_sample import check
from dtensor_sample.ops.edits import Edits
from dtensor_sample.profile import profiled

EXCHANGES = ("batch", "vocab", "replicate")
"""The names of the exchanges; "auto" picks one of them."""
WHOLE = ("batch", "replicate")
"""Those under which a rank has all columns of the rows that it samples."""


class Logits(NamedTuple):
    """Logits as the ops read them."""

    x_NSv: Tensor
    """[N, S, v], any strides."""
    first_id_S: Tensor
    """[S] int64: the vocabulary id of each segment's first column."""
    rows_R: Tensor | None = None
    """[R] int64: the rows to read, -1 for a row without tokens; None: all N in order."""
    edits: tuple[Tensor, ...] = ()
    """What changes the values of the R rows where they are read: an `Edits`, or nothing."""

    @property
    def value_dtype(self) -> torch.dtype:
        """What holds every value exactly."""
        rounded = bool(self.edits) and Edits(*self.edits).rounded
        return torch.float32 if rounded else self.x_NSv.dtype


@dataclass(frozen=True)
class Axis:
    """One mesh dimension: its process group, its size P and this rank's place on it."""

    group: str
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh, dim: int = 0) -> "Axis":
        """The axis of dimension `dim` of a mesh."""
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # a rank that the mesh has not is refused before
        return Axis(mesh.get_group(dim).group_name, mesh.size(dim), coordinate[dim])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[P, *tensor.shape]: the tensor of every rank, which has the same shape on all."""
        if self.size == 1 or tensor.shape[0] == 0:
            return tensor.expand(self.size, *tensor.shape)
        out = torch.ops._c10d_functional.all_gather_into_tensor(
            tensor.contiguous(), self.size, self.group
        )
        return _wait(out).view(self.size, *tensor.shape)

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """The elementwise sum or maximum over ranks."""
        if self.size == 1 or tensor.shape[0] == 0:
            return tensor
        return _wait(torch.ops._c10d_functional.all_reduce(tensor.contiguous(), op, self.group))

    def all_to_all(self, tensor: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """Rows by destination -> rows by source; `send` and `receive` are rows per rank."""
        if self.size == 1 or tensor.shape[0] == 0:
            return tensor
        return _wait(
            torch.ops._c10d_functional.all_to_all_single(
                tensor.contiguous(), receive, send, self.group
            )
        )


def _wait(tensor: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


@dataclass(frozen=True)
class Exchange(ABC):
    """One of the three exchanges over an axis; a constant to the compiler."""

    axis: Axis
    name: ClassVar[str]

    @property
    def whole(self) -> bool:
        """Whether this rank has all columns of the rows that it samples."""
        return True

    @property
    def first_segment(self) -> int:
        """Which of all segments is the first one here."""
        return 0

    def ids(self, width: int, vocab_size: int) -> range:
        """The ids of the columns here of logits `width` wide with padding, which may be among them.

        The first one and how many there are: host data, whatever a short last shard leaves out.
        """
        return range(vocab_size)

    @abstractmethod
    def place(self, local_Tv: Tensor, rows_P: list[int], width: int | None) -> Logits:
        """This rank's view of all logits.

        Args:
            local_Tv: [T, v]: this rank's vocabulary shard, or [T, V]: its replica, of all rows.
            rows_P: rows of each owner; owners' rows lie one after another.
            width: columns of every vocabulary shard but shorter last ones, or None for a replica.
        """

    def own_rows(self, every: Tensor, rows_P: list[int]) -> Tensor:
        """[T, ...] of all rows -> [R, ...] of the rows here."""
        return every

    def segments(self, mine: Tensor) -> Tensor:
        """[R, S, ...] of this rank -> [R, all segments, ...] in vocabulary order."""
        return mine

    def total(self, partial: Tensor) -> Tensor:
        """Sums over this rank's segments -> sums over all segments."""
        return partial

    def totals(self, *partial: Tensor) -> tuple[Tensor, ...]:
        """The same of several of one shape."""
        return partial

    def found(self, token_R: Tensor) -> Tensor:
        """[R] tokens of the rows here, -1 where another rank may know of one -> the same, known."""
        return token_R

    @abstractmethod
    def settle(self, result_RW: Tensor, rows_P: list[int]) -> Tensor:
        """Results of the rows here -> those of all rows, the same bits on every rank.

        Whatever a rank computed, what leaves is one rank's decision (or, where the vocabulary is
        sharded, their common maximum): replicas whose inputs differ in a last bit cannot part ways.
        """


class BatchExchange(Exchange):
    """Each owner holds its own rows and the whole vocabulary."""

    name = "batch"

    @profiled("exchange")
    def place(self, local_Tv: Tensor, rows_P: list[int], width: int | None) -> Logits:
        if width is None:
            return _whole(self.own_rows(local_Tv, rows_P))
        mine = rows_P[self.axis.rank]
        received = self.axis.all_to_all(_padded(local_Tv, width), [mine] * self.axis.size, rows_P)
        return _segmented(received.view(self.axis.size, mine, width))

    def own_rows(self, every: Tensor, rows_P: list[int]) -> Tensor:
        first = sum(rows_P[: self.axis.rank])
        return every[first : first + rows_P[self.axis.rank]]

    @profiled("gather")
    def settle(self, result_RW: Tensor, rows_P: list[int]) -> Tensor:
        missing = max(rows_P) - result_RW.shape[0]
        if missing > 0:
            result_RW = pad(result_RW, (0, 0, 0, missing))
        return self.axis.all_gather(result_RW).flatten(0, 1)


class VocabExchange(Exchange):
    """Every rank holds all rows and its own part of the vocabulary."""

    name = "vocab"

    @property
    def whole(self) -> bool:
        return self.axis.size == 1

    @property
    def first_segment(self) -> int:
        return self.axis.rank

    def ids(self, width: int, vocab_size: int) -> range:
        columns = -(-width // self.axis.size)
        return range(self.axis.rank * columns, (self.axis.rank + 1) * columns)

    @profiled("exchange")
    def place(self, local_Tv: Tensor, rows_P: list[int], width: int | None) -> Logits:
        if width is None:
            width = -(-local_Tv.shape[1] // self.axis.size)
            local_Tv = local_Tv[:, self.axis.rank * width : (self.axis.rank + 1) * width]
        if local_Tv.shape[1] == 0:
            local_Tv = _padded(local_Tv, 1)
        first_id_S = torch.full((1,), self.axis.rank * width, device=local_Tv.device)
        return Logits(local_Tv[:, None], first_id_S)

    def segments(self, mine: Tensor) -> Tensor:
        return self.axis.all_gather(mine[:, 0]).movedim(0, 1)

    def total(self, partial: Tensor) -> Tensor:
        return self.axis.all_reduce(partial, "sum")

    def totals(self, *partial: Tensor) -> tuple[Tensor, ...]:
        return self.total(torch.stack(partial)).unbind()

    def found(self, token_R: Tensor) -> Tensor:
        return self.axis.all_reduce(token_R, "max")

    @profiled("gather")
    def settle(self, result_RW: Tensor, rows_P: list[int]) -> Tensor:
        return self.axis.all_reduce(result_RW, "max")


class ReplicateExchange(Exchange):
    """Every rank holds everything and does all of the work; the first rank's result counts."""

    name = "replicate"

    @profiled("exchange")
    def place(self, local_Tv: Tensor, rows_P: list[int], width: int | None) -> Logits:
        if width is None:
            return _whole(local_Tv)
        return _segmented(self.axis.all_gather(_padded(local_Tv, width)))

    @profiled("gather")
    def settle(self, result_RW: Tensor, rows_P: list[int]) -> Tensor:
        return self.axis.all_gather(result_RW)[0]


def _padded(local_Tv: Tensor, width: int) -> Tensor:
    """Columns up to `width`, the added ones beyond the vocabulary: a copy only of short shards."""
    return pad(local_Tv, (0, width - local_Tv.shape[1])) if local_Tv.shape[1] < width else local_Tv


def _segmented(by_rank_PRv: Tensor) -> Logits:
    ranks, _, width = by_rank_PRv.shape
    first_id_S = torch.arange(0, ranks * width, width, device=by_rank_PRv.device)
    return Logits(by_rank_PRv.transpose(0, 1), first_id_S)


def _whole(x_RV: Tensor) -> Logits:
    return Logits(x_RV[:, None], torch.zeros(1, dtype=torch.int64, device=x_RV.device))


HERE = ReplicateExchange(Axis("", 1, 0))
"""Of rows that are whole where they are: exchanges nothing."""

_BY_NAME = {kind.name: kind for kind in (BatchExchange, VocabExchange, ReplicateExchange)}


def exchange_of(name: str, axis: Axis) -> Exchange:
    """The exchange called `name`, one of EXCHANGES: what "auto" takes is up to `choose`."""
    return _BY_NAME[name](axis)


def check_exchange(name: object) -> str:
    """`name` if it is an exchange or "auto"; ValueError otherwise."""
    return check.one_of("exchange", name, (*EXCHANGES, "auto"))
