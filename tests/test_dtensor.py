"""What this library relies on in DTensor, what it must not rely on, and its own rules for DTensors.

Upstream faults are kept as canaries: such a test accepts the known wrong answer and the right one,
and records which it saw, so that it passes with and without the fault.
"""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_sample import ops, vocab_sharded
from tests.batches import shard_vocab
from tests.pool import FEW_WORLDS, worlds


def global_shapes(mesh, sizes: list[int]) -> tuple[list[tuple], list[tuple], list[bool]]:
    """Global shapes by the library, by DTensor's guess, and whether the values are right."""
    ours, guessed, right = [], [], []
    for size in sizes:
        full = torch.arange(4.0 * size, device=mesh.device_type).view(4, size)
        local = shard_vocab(full, mesh).to_local()
        wrapped = vocab_sharded(local, mesh, vocab_size=size)
        ours.append(tuple(wrapped.shape))
        right.append(torch.equal(wrapped.full_tensor(), full))
        guessed.append(tuple(DTensor.from_local(local, mesh, [Shard(1)], run_check=False).shape))
    return ours, guessed, right


def test_global_shapes_of_uneven_shards(ranks, record_property):
    """Catches a global shape that is guessed from one shard: ranks would disagree on it."""
    sizes = [1, 3, 10, 13, 151]
    results = ranks.run(global_shapes, sizes)
    for ours, _, right in results:
        assert ours == [(4, size) for size in sizes]
        assert all(right)
    # The canary: DTensor takes every shard for as wide as the rank's own.
    for rank, (_, guesses, _) in enumerate(results):
        chunks = [-(-size // ranks.size) for size in sizes]
        own = [
            max(0, min(chunk, size - rank * chunk))
            for chunk, size in zip(chunks, sizes, strict=True)
        ]
        guessed = [(4, width * ranks.size) for width in own]
        right = [(4, size) for size in sizes]
        record_property("upstream_is_right", guesses == right)
        assert guesses in (guessed, right)


SCANS = {"cumsum": torch.cumsum, "cumprod": torch.cumprod, "logcumsumexp": torch.logcumsumexp}


def scan(mesh, name: str, dim: int) -> list[float] | None:
    """The scan of a sharded row; None where this torch does not scan DTensors."""
    full = torch.arange(1.0, 9.0, device=mesh.device_type)[None]
    try:
        scanned = SCANS[name](shard_vocab(full, mesh), dim)
    except NotImplementedError:
        return None
    assert isinstance(scanned, DTensor)
    return scanned.full_tensor()[0].tolist()


@worlds("cpu:4")
@pytest.mark.parametrize("name", SCANS)
def test_canary_scans_over_a_sharded_dim(ranks, name, record_property):
    """Torch 2.13 scans each shard alone for dim=-1; hence no scan here runs on a DTensor."""
    full = torch.arange(1.0, 9.0)
    whole = SCANS[name](full, 0)
    by_shard = torch.cat([SCANS[name](part, 0) for part in full.chunk(ranks.size)])
    found = [ranks.run(scan, name, dim)[0] for dim in (1, -1)]
    if None in found:
        record_property("upstream_is_right", "refused")
        assert found == [None, None]
        return
    positive, negative = map(torch.tensor, found)
    torch.testing.assert_close(positive, whole)
    fixed = torch.allclose(negative, whole)
    record_property("upstream_is_right", fixed)
    assert fixed or torch.allclose(negative, by_shard)


def ops_on_dtensors(mesh, dtype: torch.dtype) -> list[str]:
    """Names of (op, placement) whose result on DTensors differs from that on plain tensors."""
    ranks, device = mesh.size(), mesh.device_type
    rows, width = 2 * ranks, 5
    vocab_size = ranks * width - 2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, ranks, width, generator=generator).to(dtype).to(device)
    x[0, 0, 2], x[1] = torch.nan, -torch.inf
    first = torch.arange(ranks, device=device) * width
    peaks = ops.peak(x, first, None, (), vocab_size)
    peak, *_ = ops.join_peaks(peaks, torch.full((rows,), -torch.inf, device=device))
    floor = peak - torch.rand(rows, generator=generator).to(device) * 3
    scale = torch.full((rows,), 1.7, device=device)
    mass = ops.mass(x, first, None, (), peak, floor, scale, vocab_size)
    uniform = torch.full((rows,), 1 << 61, device=device)
    prefix = torch.zeros(rows, dtype=torch.int64, device=device)
    row = (x, first, None, (), peak, floor, scale)
    told = (prefix, prefix, prefix > 0)
    arguments: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "peak": (ops.peak, (x, first, None, (), vocab_size)),
        "mass": (ops.mass, (*row, vocab_size)),
        "pick": (ops.pick, (*row, mass, 0, None, uniform, vocab_size)),
        "draw": (ops.draw, (*row, mass, 0, uniform, *told, vocab_size)),
        "histogram": (
            ops.histogram,
            (*row, prefix, vocab_size, 0, True),
        ),
        "count": (
            ops.histogram,
            (*row, prefix, vocab_size, 0, False),
        ),
    }

    def spread(value, layout: str):
        if not isinstance(value, torch.Tensor):
            return value
        by_segment = value is first or value is x
        placement: Placement = Replicate()
        if layout == "rows" and value is not first:
            placement = Shard(0)
        if layout == "segments" and by_segment:
            placement = Shard(0 if value is first else 1)
        plain = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        return plain.redistribute(placements=[placement])

    wrong = []
    for name, (op, args) in arguments.items():
        wanted = op(*args)
        for layout in ("rows", "segments", "replicas"):
            spread_args = [spread(arg, layout) for arg in args]
            if name in ("pick", "draw") and layout == "segments":
                spread_args[8] = mesh.get_local_rank()  # which segment is the first one here
            got = op(*spread_args).full_tensor()
            if not torch.equal(got, wanted):
                wrong.append(f"{name} by {layout}")
    return wrong


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_on_dtensors(ranks, dtype):
    """Catches a sharding rule that says sum for maximum, or takes local segments for the whole."""
    assert ranks.run(ops_on_dtensors, dtype) == [[]] * ranks.size
