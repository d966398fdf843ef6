"""Tokens do not depend on how a step is laid out: the reference for all is the oracle."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    logprobs,
    replicated,
    sample,
    vocab_sharded,
)
from dtensor_sample.layout import layout_of, row_numbers
from tests.batches import (
    DTYPES,
    EXCHANGES,
    OWNERS,
    Batch,
    Layout,
    engine_step,
    expected_step,
    random_batch,
    shard_vocab,
    tokens,
)
from tests.pool import FEW_WORLDS, worlds

MANY = 29


@lru_cache
def many(dtype: torch.dtype) -> Batch:
    return random_batch(11, MANY, 111, dtype=dtype, seeded=True)


def layouts(seed: int) -> list[Layout]:
    """Random layouts: sparse slots, part of the batch in any order, every policy and exchange."""
    rng = np.random.default_rng(seed)
    made = [Layout(order=order) for order in ([], [3], range(MANY), range(MANY)[::-1])]
    for i in range(18):
        exchange = EXCHANGES[i % len(EXCHANGES)]
        count = int(rng.choice([1, 2, 5, 7, 8, 9, MANY]))
        made.append(
            Layout(
                exchange=exchange,
                owners=OWNERS[i // 3 % len(OWNERS)],
                slots=rng.choice(2 * MANY, MANY, replace=False).tolist(),
                order=rng.choice(MANY, count, replace=False).tolist(),
                spare=int(rng.integers(3)) if exchange == "batch" else 0,
            )
        )
    return made


def engine_steps(mesh, batch: Batch, many_layouts: list[Layout]) -> list[dict[str, list]]:
    return [engine_step(mesh, batch, layout) for layout in many_layouts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_changes_nothing(ranks, dtype):
    """Catches results that depend on owner, slot, order, neighbours, capacity or exchange."""
    batch, chosen = many(dtype), layouts(DTYPES.index(dtype))
    wanted = [expected_step(batch, layout.order) for layout in chosen]
    for got in ranks.run(engine_steps, batch, chosen):
        for layout, a, b in zip(chosen, got, wanted, strict=True):
            assert a == b, layout


def test_padding_changes_nothing(ranks):
    """Catches padded ids that are ranked or normalised over: the same rows, wider and wider."""
    batch = many(torch.float32)
    wanted = expected_step(batch)
    for padding in (1, 2, 37):
        extra = torch.full((MANY, padding), torch.finfo(torch.float32).max)
        wider = replace(batch, logits=torch.cat([batch.logits, extra], 1))
        for exchange in EXCHANGES:
            got = ranks.run(engine_step, wider, Layout(exchange=exchange))
            assert got == [wanted] * ranks.size, (padding, exchange)


def unique_params(count: int) -> list[SamplingParams]:
    """Parameters that no two requests share, none of them greedy."""
    return [
        SamplingParams(
            temperature=0.5 + 0.1 * i,
            top_k=2 + i,
            top_p=1 - 0.03 * i,
            min_p=0.001 * i,
            seed=1000 + i,
        )
        for i in range(count)
    ]


def test_parameters_reach_their_request(ranks):
    """Catches parameters in another order than rows: all sizes 1..3P+1, holes in slots."""
    for count in range(1, 3 * ranks.size + 2):
        rng = np.random.default_rng(count)
        batch = Batch(
            logits=torch.from_numpy(rng.normal(0, 1, (count, 257))).float(),
            vocab_size=257,
            params=unique_params(count),
            positions=[0] * count,
        )
        wanted = expected_step(batch)
        if count > 4:
            assert wanted != expected_step(
                replace(batch, params=batch.params[1:] + batch.params[:1])
            )
        slots = (rng.permutation(2 * count)[:count] + 3).tolist()
        got = ranks.run(engine_step, batch, Layout(owners=OWNERS[count % 3], slots=slots))
        assert got == [wanted] * ranks.size, count


def owned_counts(mesh, vectors: list[list[int]]) -> list[list[int]]:
    """Greedy tokens when rank r owns `vector[r]` requests; row i has its maximum at id i."""
    ranks, rows = mesh.size(), 2 * mesh.size()
    state = SamplingState(mesh, vocab_size=rows + 1, max_num_reqs=rows, seed=0)
    for slot in range(rows):
        state.add(slot, SamplingParams(temperature=0))
    sharder, sampler = BatchSharder(state, owners="slot"), Sampler(state)
    coded = torch.eye(rows, rows + 1, device=mesh.device_type)
    results = []
    for vector in vectors:
        slots = [r + ranks * k for r, count in enumerate(vector) for k in range(count)]
        slots = np.random.default_rng(vector).permutation(slots).astype(int).tolist()
        plan = sharder.plan(slots, exchange="batch")
        assert list(plan.rows_per_rank) == vector
        assert plan.capacity == max(vector)
        logits = shard_vocab(plan.select(coded[: len(slots)]), mesh)
        exchanged = sampler.exchange(logits, plan)
        results.append(sampler.gather(sampler.draw(exchanged, plan), plan).token_ids[:, 0].tolist())
    return results


def test_every_count_of_owned_rows(ranks):
    """Catches rows lost, doubled or swapped when owners hold unequal numbers of them, or none."""
    counts = 3 if ranks.size <= 4 else 2
    vectors = [list(v) for v in np.ndindex(*(counts,) * ranks.size)]
    wanted = [list(range(sum(v))) for v in vectors]
    assert ranks.run(owned_counts, vectors) == [wanted] * ranks.size


def strided(mesh, batch: Batch) -> list[list[int]]:
    """The same values as a slice of wider rows, transposed storage, and behind a storage offset."""
    full = batch.logits.to(mesh.device_type)
    rows, width = full.shape
    wide = torch.full((rows, width + 5), torch.nan, device=full.device, dtype=full.dtype)
    wide[:, 2:-3] = full
    every_other = torch.full((2 * rows, width), torch.nan, device=full.device, dtype=full.dtype)
    every_other[1::2] = full
    forms = [wide[:, 2:-3], full.t().contiguous().t(), every_other[1::2]]
    results = []
    for form in forms:
        local = shard_vocab(form, mesh)
        for logits in (local, replicated(form, mesh)):
            for exchange in EXCHANGES:
                drawn = sample(logits, batch.params, position=batch.positions, exchange=exchange)
                results.append(drawn.tolist())
    return results


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(ranks, dtype):
    """Catches a kernel that takes rows for contiguous."""
    batch = random_batch(3, 7, 111, dtype=dtype, seeded=True)
    for results in ranks.run(strided, batch):
        assert results == [tokens(batch)] * len(results)


def repeated(mesh, batch: Batch, times: int) -> list[list[int]]:
    logits = shard_vocab(batch.logits, mesh)
    drawn = [
        sample(logits, batch.params, position=batch.positions, exchange=EXCHANGES[i % 3])
        for i in range(times)
    ]
    return [tokens.tolist() for tokens in drawn]


@worlds(*FEW_WORLDS)
def test_repeated_calls(ranks):
    """Catches sums whose last bits depend on the order in which threads reach them."""
    batch = random_batch(17, 8, 1003, seeded=True)
    for results in ranks.run(repeated, batch, 20):
        assert results == [tokens(batch)] * 20


def on_two_axes(mesh, batches: list[Batch]) -> tuple[list[list[int]], dict[str, list]]:
    """Each row of a ("dp", "tp") mesh samples its own batch, of its own size."""
    square = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    batch = batches[square["dp"].get_local_rank()]
    on_axis = shard_vocab(batch.logits, square["tp"])
    rows, width = sum(map(len, batches)), batch.vocab_size
    both = DTensor.from_local(
        on_axis.to_local(),
        square,
        [Shard(0), Shard(1)],
        run_check=False,
        shape=torch.Size((rows, width)),
        stride=(width, 1),
    )
    stateless = [
        sample(logits, batch.params, position=batch.positions).tolist()
        for logits in (on_axis, both, vocab_sharded(on_axis.to_local(), square, vocab_size=width))
    ]
    return stateless, engine_step(square["tp"], batch, Layout())


@worlds("cpu:4")
def test_mesh_of_two_axes(ranks):
    """Catches collectives on the wrong group, or a wait for rows that another group has."""
    batches = [random_batch(21, 7, 13, seeded=True), random_batch(22, 6, 13, seeded=True)]
    wanted = [([tokens(batch)] * 3, expected_step(batch)) for batch in batches]
    assert ranks.run(on_two_axes, batches) == [wanted[dp] for dp in (0, 0, 1, 1)]


class OpNames(TorchDispatchMode):
    """Records the name of each op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as ops on local tensors
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def taken_apart(mesh) -> tuple[list[str], list[str], list[list[int]]]:
    """Ops that take logits apart, those that number their rows, and the numbers."""
    square = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    full, dp = torch.randn(5, 4, 6, device=mesh.device_type), square["dp"].get_local_rank()
    cases = [shard_vocab(full, square["tp"])]
    for dim in (0, 1):
        local = cases[0].to_local().chunk(2, dim)[dp].contiguous()
        placements = [Shard(dim), Shard(2)]
        kwargs: dict = {"run_check": False, "shape": full.shape, "stride": full.stride()}
        cases.append(DTensor.from_local(local, square, placements, **kwargs))
    with OpNames() as apart:
        layouts = [layout_of(logits, axis="tp", vocab_size=None) for logits in cases]
    with OpNames() as numbering:
        numbers = [
            row_numbers(logits, layout.lead) for logits, layout in zip(cases, layouts, strict=True)
        ]
    return apart.names, numbering.names, [number.tolist() for number in numbers]


@worlds("cpu:4")
def test_taking_logits_apart_launches_nothing(ranks):
    """Catches kernels and copies in each step for row numbers that only `sample` asks for.

    A copy from the host that waits could not be captured, either.
    """
    number = torch.arange(20).view(5, 4)
    for rank, (apart, numbering, numbers) in enumerate(ranks.run(taken_apart)):
        assert set(apart) <= {"aten::view", "aten::_unsafe_view"}
        assert not {"aten::copy_", "aten::_to_copy", "aten::lift_fresh"} & set(numbering)
        chunks = [number, *(number.chunk(2, dim)[rank // 2] for dim in (0, 1))]
        assert numbers == [chunk.flatten().tolist() for chunk in chunks]


ROWS_EACH, WIDTH = 3, 50


def unseeded_rows(mesh) -> tuple[list[list[int]], list[str]]:
    """Tokens of unseeded rows of two data-parallel ranks, in each form; and what is refused."""
    torch._dynamo.reset()
    square = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    dp, device = square["dp"].get_local_rank(), mesh.device_type
    full = torch.zeros(ROWS_EACH, WIDTH, device=device)
    local = shard_vocab(full, square["tp"]).to_local()
    one, many = SamplingParams(), [SamplingParams()] * ROWS_EACH
    first_row = dp * ROWS_EACH
    placed = SamplingParams.batch(many, device, first_row=first_row)
    position = torch.tensor(5, device=device)

    def step(local: torch.Tensor, params) -> torch.Tensor:
        logits = vocab_sharded(local, square, vocab_size=WIDTH, row_axis="dp")
        return sample(logits, params, position=position)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    drawn = [run(local, params) for run in (step, compiled) for params in (one, many, placed)]
    alone = vocab_sharded(local, square["tp"], vocab_size=WIDTH)
    drawn.append(sample(alone, placed, position=position))
    drawn.append(sample(replicated(full, square, row_axis="dp"), one, position=position))

    refused = []
    for call in (
        lambda: step(local, SamplingParams.batch(many, device)),
        lambda: SamplingParams.batch(many, device, first_row=-1),
        lambda: vocab_sharded(local, square, vocab_size=WIDTH, row_axis="tp"),
        lambda: vocab_sharded(local, square, vocab_size=WIDTH, row_axis="pp"),
        lambda: replicated(full[0], square, row_axis="dp"),
    ):
        try:
            call()
        except ValueError as error:
            refused.append(str(error))
    seeded = [SamplingParams(seed=i) for i in range(ROWS_EACH)]
    assert (
        step(local, SamplingParams.batch(seeded, device)).tolist() == step(local, seeded).tolist()
    )
    return [tokens.tolist() for tokens in drawn], refused


def rows_of_one_replica(mesh) -> list[list[int]]:
    """Tokens of packed unseeded rows on a mesh with a data-parallel axis of one rank, or none."""
    flat = init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    full = torch.zeros(ROWS_EACH, WIDTH, device=mesh.device_type)
    params = SamplingParams.batch([SamplingParams()] * ROWS_EACH, mesh.device_type)
    local = shard_vocab(full, mesh).to_local()
    placed = (
        vocab_sharded(local, flat, vocab_size=WIDTH, row_axis="dp"),
        vocab_sharded(local, flat["tp"], vocab_size=WIDTH),
    )
    return [sample(logits, params, position=1).tolist() for logits in placed]


@worlds("cpu:4")
def test_unseeded_rows_of_one_replica(ranks):
    """Catches a refusal of rows that no other rank has, on a mesh that could have others."""
    for placed, alone in ranks.run(rows_of_one_replica):
        assert placed == alone


@worlds("cpu:4")
def test_unseeded_rows_of_data_parallel_ranks(ranks):
    """Catches ranks that number their rows from 0 each: all would draw the same samples."""
    together = [SamplingParams()] * 2 * ROWS_EACH
    whole = ranks.run(drawn_together, together)[0]
    for rank, (drawn, refused) in enumerate(ranks.run(unseeded_rows)):
        wanted = whole[:ROWS_EACH] if rank < 2 else whole[ROWS_EACH:]
        assert drawn == [wanted] * 8
        names = ["params", "first_row", "row_axis", "row_axis", "row_axis"]
        assert [message.split()[0] for message in refused] == names
    assert whole[:ROWS_EACH] != whole[ROWS_EACH:]


def drawn_together(mesh, params: list[SamplingParams]) -> list[int]:
    logits = replicated(torch.zeros(len(params), WIDTH, device=mesh.device_type), mesh)
    return sample(logits, params, position=5).tolist()


def padded_shards(mesh, width: int, vocab_size: int) -> list:
    """Tokens, log-probabilities and gradients from shards of a vocabulary padded to P * width."""
    torch._dynamo.reset()
    device, rank = mesh.device_type, mesh.get_local_rank()
    wide = torch.full((9, width * mesh.size()), 1e4)
    wide[:, :vocab_size] = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(2))
    own = slice(rank * width, (rank + 1) * width)
    local = wide[:, own].to(device, copy=True).requires_grad_()
    params = SamplingParams(top_p=0.99)

    def step(local: torch.Tensor, exchange: str) -> torch.Tensor:
        logits = vocab_sharded(local, mesh, vocab_size=vocab_size)
        return sample(logits, params, position=1, exchange=exchange)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits = shard_vocab(wide[:, :vocab_size], mesh)
    drawn = sample(logits, params, position=1)
    found: list = [(drawn.tolist(), logprobs(logits, drawn).tolist(), [])]
    for run, exchange in [(compiled, "batch"), *((step, exchange) for exchange in EXCHANGES)]:
        drawn = run(local, exchange)
        told = logprobs(vocab_sharded(local, mesh, vocab_size=vocab_size), drawn)
        (grad,) = torch.autograd.grad(told.sum(), local)
        found.append((drawn.tolist(), told.tolist(), grad.cpu()[wide[:, own] == 1e4].tolist()))
    assert torch.equal(local.detach().cpu(), wide[:, own])  # the caller's shard is as it was
    return found


@worlds("cpu:4", "cuda:2")
@pytest.mark.parametrize("width", [26, 32, 120])
def test_padding_that_vocab_sharded_was_told_of(ranks, width):
    """Catches padded ids that are drawn, as `sample` sees no more than the padded vocabulary."""
    vocab_size = 100 if ranks.size == 4 else width * 2 - 3
    for rank, (wanted, *found) in enumerate(ranks.run(padded_shards, width, vocab_size)):
        padding = max(0, min(width, (rank + 1) * width - vocab_size))
        assert wanted[0] != [-1] * 9
        for drawn, told, gradient in found:
            assert (drawn, told) == wanted[:2]
            assert gradient == [0.0] * padding * 9
