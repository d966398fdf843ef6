"""Where rows and columns go: the exchanges against DTensor's own redistribution, on eight ranks.

`LocalTensorMode` computes what every rank of a fake group would hold, in one process.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_sample.exchange import Axis, BatchExchange, ReplicateExchange, VocabExchange

P = 8


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=P, store=FakeStore())
    with LocalTensorMode(P):
        yield init_device_mesh("cpu", (P,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def axis_of(mesh: DeviceMesh) -> Axis:
    """The axis; with equal splits only `vocab` asks which rank it is on, so 0 stands for all."""
    return replace(Axis.of(mesh), rank=0)


def by_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    assert isinstance(tensor, LocalTensor)
    return [tensor._local_tensors[rank] for rank in range(P)]


@pytest.mark.parametrize("rows", [P, 3 * P])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_is_shard_of_rows(mesh: DeviceMesh, rows: int, dtype: torch.dtype) -> None:
    """Catches blocks of the receive buffer read in another order than the vocabulary's."""
    logits = distribute_tensor(torch.randn(rows, 5 * P).to(dtype), mesh, [Shard(1)])
    placed = BatchExchange(axis_of(mesh)).place(logits.to_local(), [rows // P] * P, 5)
    wanted = logits.redistribute(placements=[Shard(0)]).to_local()
    assert placed.first_id_S.tolist() == list(range(0, 5 * P, 5))
    for x_NSv, want in zip(by_rank(placed.x_NSv), by_rank(wanted), strict=True):
        assert torch.equal(x_NSv.flatten(1), want)


def test_replicate_is_replicate(mesh: DeviceMesh) -> None:
    """Catches an all-gather whose parts are not put side by side."""
    logits = distribute_tensor(torch.randn(3, 5 * P), mesh, [Shard(1)])
    placed = ReplicateExchange(axis_of(mesh)).place(logits.to_local(), [3] * P, 5)
    wanted = logits.redistribute(placements=[Replicate()]).to_local()
    for x_NSv, want in zip(by_rank(placed.x_NSv), by_rank(wanted), strict=True):
        assert torch.equal(x_NSv.flatten(1), want)


def test_vocab_moves_nothing(mesh: DeviceMesh) -> None:
    """Catches a copy or a collective where the shard is to be read in place."""
    shard = distribute_tensor(torch.randn(3, 5 * P), mesh, [Shard(1)]).to_local()
    placed = VocabExchange(axis_of(mesh)).place(shard, [3] * P, 5)
    for x_NSv, own in zip(by_rank(placed.x_NSv), by_rank(shard), strict=True):
        assert x_NSv.data_ptr() == own.data_ptr()
        assert torch.equal(x_NSv[:, 0], own)


def test_results_settle_owner_after_owner(mesh: DeviceMesh) -> None:
    """Catches results gathered in another order than ranks', under each exchange."""
    result = LocalTensor({rank: torch.full((2, 3), rank) for rank in range(P)})
    ranks = torch.arange(P).repeat_interleave(2)[:, None].expand(-1, 3)
    settled: dict[type[BatchExchange | VocabExchange | ReplicateExchange], torch.Tensor] = {
        BatchExchange: ranks,
        VocabExchange: torch.full((2, 3), P - 1),
        ReplicateExchange: torch.zeros(2, 3, dtype=torch.int64),
    }
    for kind, wanted in settled.items():
        for rank, got in enumerate(by_rank(kind(axis_of(mesh)).settle(result, [2] * P))):
            assert torch.equal(got, wanted), (kind.name, rank)
