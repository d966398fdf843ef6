"""Debug mode: what one rank got wrong is told to all of them, and nothing else is."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    logprobs,
    replicated,
    sample,
)
from tests.batches import shard_vocab
from tests.pool import worlds

V, ROWS = 10, 300


class Engine:
    """A state in debug mode with three requests, and what its steps need."""

    def __init__(self, mesh, **kwargs: Any) -> None:
        self.mesh, self.rank = mesh, mesh.get_local_rank()
        self.odd = int(self.rank == 1)
        self.full = torch.eye(3, V, device=mesh.device_type)
        self.logits = shard_vocab(self.full, mesh)
        self.ids = torch.zeros(3, dtype=torch.int64, device=mesh.device_type)
        self.many = replicated(torch.zeros(ROWS, V, device=mesh.device_type), mesh)
        options: dict[str, Any] = {
            "vocab_size": V,
            "max_num_reqs": 8,
            "num_speculative_tokens": 1,
            "seed": 0,
        }
        self.state = SamplingState(mesh, debug=True, **options | kwargs)
        for slot in range(3):
            self.state.add(slot, SamplingParams(seed=slot))
        self.sharder = BatchSharder(self.state)

    def step(self, **kwargs) -> None:
        plan = self.sharder.plan([0, 1, 2], exchange="vocab", **kwargs)
        Sampler(self.state)(shard_vocab(plan.select(self.full), self.mesh), plan)

    def torn(self, dim: int) -> DTensor:
        """Logits sharded over a dim, of which one rank holds more than its share."""
        shard = shard_vocab(self.full, self.mesh, dim=dim)
        local = shard.to_local()
        if self.odd:
            local = torch.cat([local, local], dim)
        return DTensor.from_local(
            local,
            self.mesh,
            shard.placements,
            run_check=False,
            shape=shard.shape,
            stride=shard.stride(),
        )

    def params(self, odd_seed: int):
        seeds = [odd_seed if row == ROWS // 2 else row for row in range(ROWS)]
        return SamplingParams.batch([SamplingParams(seed=seed) for seed in seeds], self.full.device)

    def admit(self, position: int, prompt: Sequence[int] = (), **asked: Any) -> None:
        params = SamplingParams(seed=0, **asked)
        self.state.add(5, params, position=position, prompt_token_ids=prompt)
        try:
            self.sharder.plan([5])
        finally:
            self.state.remove(5)

    def verify(self, draft: int, method: str = "block", plan: Any = None) -> None:
        own = self.sharder.plan([0], exchange="vocab")
        logits = shard_vocab(own.select(self.full[:1]), self.mesh)
        plan = own if plan is None else plan
        RejectionSampler(self.state, method=method)(logits, plan, torch.tensor([[draft]]))

    def admit_drafts(self, count: int) -> None:
        plan = self.sharder.plan([0], [2], exchange="vocab", budget=1)
        plan = plan.admit(torch.tensor([count], device=self.full.device))
        logits = shard_vocab(plan.select(self.full[:2]), self.mesh)
        RejectionSampler(self.state)(logits, plan, [[1]])

    def another_plan(self, *choices: dict[str, Any]) -> None:
        """All make two plans that need equally many rows; one rank uses the other one."""
        plan = [self.sharder.plan([0, 1], exchange="vocab", **kwargs) for kwargs in choices][
            self.odd
        ]
        logits = shard_vocab(self.full, self.mesh)
        RejectionSampler(self.state)(logits, plan, torch.zeros(2, 1, dtype=torch.int64))

    def another_call(self) -> None:
        plan = self.sharder.plan([0], exchange="vocab")
        logits = shard_vocab(plan.select(self.full[:1]), self.mesh)
        if self.odd:
            Sampler(self.state)(logits, plan)
        else:
            RejectionSampler(self.state)(logits, plan, [[]])


DIFFERING: dict[str, tuple[Callable[[Any], object], str]] = {
    "slots": (
        lambda e: e.sharder.plan([e.odd]),
        "rank 0 has slots[0] = 0, rank 1 has slots[0] = 1",
    ),
    "more slots": (
        lambda e: e.sharder.plan([0, 1][: 1 + e.odd]),
        "rank 0 has len(slots) = 1, rank 1 has len(slots) = 2",
    ),
    "slots refused on one rank": (lambda e: e.sharder.plan([7 * e.odd]), ""),
    "exchange": (
        lambda e: e.sharder.plan([0, 1, 2], exchange=("batch", "vocab")[e.odd]),
        "rank 0 has exchange = 'batch', rank 1 has exchange = 'vocab'",
    ),
    "budget": (lambda e: e.sharder.plan([0], budget=e.odd), "budget"),
    "admitted drafts": (lambda e: e.admit_drafts(e.odd), "admitted"),
    "positions": (lambda e: e.sharder.plan([0], positions=[e.odd]), "positions"),
    "a request's position": (
        lambda e: e.admit(e.odd),
        "rank 0 has requests[slot 5][position] = 0, rank 1 has requests[slot 5][position] = 1",
    ),
    "one of many params of a request": (
        lambda e: e.admit(0, allowed_token_ids=range(9), bad_words_ids=[[1, 2]], min_p=e.odd / 2),
        "rank 0 has requests[slot 5][params][min_p] = 0.0, rank 1 has requests[slot 5][params]",
    ),
    "a prompt": (
        lambda e: e.admit(0, prompt=[1, 2, 3 + e.odd], presence_penalty=1.0),
        "rank 0 has requests' edits[slot 5][prompt][2] = 3, rank 1 has requests' edits",
    ),
    "logits dtype": (
        lambda e: sample((e.logits, e.logits.bfloat16())[e.odd], SamplingParams(), position=0),
        "rank 0 has logits[dtype] = torch.float32, rank 1 has logits[dtype] = torch.bfloat16",
    ),
    "logits refused on one rank": (
        lambda e: sample((e.logits, e.logits.double())[e.odd], SamplingParams(), position=0),
        "",
    ),
    "logits of another shape": (
        lambda e: sample((e.logits, e.logits[:2])[e.odd], SamplingParams(), position=0),
        "rank 0 has logits[rows][0] = 3, rank 1 has logits[rows][0] = 2",
    ),
    "a wrong shard": (lambda e: sample(e.torn(1), SamplingParams(), position=0), ""),
    "vocab_size refused on one rank": (
        lambda e: sample(e.logits, SamplingParams(), position=0, vocab_size=V + e.odd),
        "",
    ),
    "logprobs of logits refused on one rank": (
        lambda e: logprobs((e.logits, e.logits.double())[e.odd], e.ids),
        "",
    ),
    "logprobs of a wrong shard": (lambda e: logprobs(e.torn(1), e.ids), ""),
    "logprobs of a wrong shard of rows": (lambda e: logprobs(e.torn(0), e.ids), ""),
    "logprobs of another dtype": (
        lambda e: logprobs((e.logits, e.logits.bfloat16())[e.odd], e.ids),
        "rank 0 has logits[dtype] = torch.float32, rank 1 has logits[dtype] = torch.bfloat16",
    ),
    "logprobs at another temperature": (
        lambda e: logprobs(e.logits, e.ids, temperature=1 + e.odd),
        "rank 0 has temperature = 1.0, rank 1 has temperature = 2.0",
    ),
    "one seed of many": (
        lambda e: sample(e.many, e.params(e.odd), position=0),
        "rank 0 has params[seed][values][150] = 0, rank 1 has params[seed][values][150] = 1",
    ),
    "position": (lambda e: sample(e.logits, SamplingParams(), position=e.odd), "position"),
    "position refused on one rank": (
        lambda e: sample(e.logits, SamplingParams(), position=-e.odd),
        "",
    ),
    "drafts": (lambda e: e.verify(e.odd), "draft"),
    "method": (lambda e: e.verify(0, ("block", "standard")[e.odd]), "method"),
    "another plan": (
        lambda e: e.another_plan({"num_logits": [1, 2]}, {"num_logits": [2, 1]}),
        "rank 0 has plan[num_logits][0] = 1, rank 1 has plan[num_logits][0] = 2",
    ),
    "another plan's positions": (
        lambda e: e.another_plan(
            *({"num_logits": [1, 2], "positions": [p, p]} for p in (5, 7)),
        ),
        "positions",
    ),
    "no plan": (lambda e: e.verify(0, plan=[None, 7][e.odd]), ""),
    "another call": (lambda e: e.another_call(), "the same call"),
}

EQUAL: dict[str, Callable[[Any], object]] = {
    "list and tuple": lambda e: e.sharder.plan([[0, 1], (0, 1)][e.odd]),
    "int and numpy": lambda e: e.sharder.plan([0, [1, np.int64(1)][e.odd]]),
    "one position for all": lambda e: sample(e.logits, SamplingParams(), position=3),
    "strided positions": lambda e: sample(
        e.logits, SamplingParams(), position=torch.arange(6)[::2].to(e.full.device)
    ),
    "base_seed": lambda e: sample(
        e.logits, SamplingParams(), position=0, base_seed=[1, np.int64(1)][e.odd]
    ),
    "no rows": lambda e: sample(e.logits[:0], SamplingParams(), position=0),
    "a step": lambda e: e.step(),
}


def outcomes(mesh) -> dict[str, str]:
    """What each case ends in, each followed by a good step."""
    os.environ["DTENSOR_SAMPLE_DEBUG"] = "1"
    try:
        engine, ended = Engine(mesh), {}
        cases = {name: call for name, (call, _) in DIFFERING.items()} | EQUAL
        for name, call in cases.items():
            try:
                call(engine)
                ended[name] = "passed"
            except ValueError as error:
                ended[name] = str(error)
            engine.step()
        try:
            Engine(mesh, max_num_reqs=8 + engine.odd)
        except ValueError as error:
            ended["state"] = str(error)
        return ended
    finally:
        del os.environ["DTENSOR_SAMPLE_DEBUG"]


def refused_states(mesh) -> list[str]:
    """What each rank is told of arguments that one rank is refused for, without debug mode."""
    odd, said = mesh.get_local_rank() == 1, []
    wrong: tuple[dict[str, Any], ...] = (
        {"vocab_size": 0},
        {"max_num_reqs": 0},
        {"exchange": "ring"},
        {"seed": -1},
        {"processors": 3},
    )
    for arguments in wrong:
        try:
            SamplingState(mesh, **{"vocab_size": V} | (arguments if odd else {}))
        except ValueError as refused:
            said.append(str(refused))
    return said


@worlds("cpu:4", "cuda:2")
def test_a_state_that_one_rank_is_refused(ranks):
    """Catches a rank that raises alone, and leaves the others waiting for it."""
    for rank, said in enumerate(ranks.run(refused_states)):
        names = ("vocab_size", "max_num_reqs", "exchange", "seed", "processors")
        told = [f"arguments were refused on rank 1 of {ranks.size}"] * len(names)
        assert len(said) == len(names)
        for text, part in zip(said, names if rank == 1 else told, strict=True):
            assert part in text


@worlds("cpu:4", "cuda:2")
def test_what_differs_is_named_on_every_rank(ranks):
    """Catches a mistake of one rank that leaves the others waiting, and false alarms."""
    for rank, ended in enumerate(ranks.run(outcomes)):
        for name, (_, argument) in DIFFERING.items():
            assert argument in ended[name], (rank, name, ended[name])
            assert ended[name] != "passed", (rank, name)
            if rank != 1:  # rank 1 may see its own error instead
                assert "rank 1" in ended[name], (rank, name, ended[name])
        assert [name for name in EQUAL if ended[name] != "passed"] == []
        assert "max_num_reqs" in ended["state"]


def tokens_of_rows(mesh) -> list[list[int]]:
    """Tokens of unseeded rows over two axes, and over the sampling axis alone."""
    del mesh
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = torch.zeros(2, V)
    split = shard_vocab(half, grid["tp"]).to_local()
    logits = DTensor.from_local(
        split, grid, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((4, V)), stride=(V, 1)
    )
    mine = sample(logits, SamplingParams(), position=0)
    whole = sample(replicated(torch.zeros(4, V), grid["tp"]), SamplingParams(), position=0)
    return [mine.tolist(), whole.tolist()]


@worlds("cpu:4")
def test_unseeded_rows_of_another_axis_have_their_own_streams(ranks):
    """Catches rows numbered from 0 on every data-parallel rank: they would draw the same noise."""
    for rank, (mine, whole) in enumerate(ranks.run(tokens_of_rows)):
        dp = rank // 2
        assert mine == whole[2 * dp : 2 * dp + 2]
