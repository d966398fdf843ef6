"""What a type checker knows of the public names: checked by `make quality`, never run."""

from typing import assert_type

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dtensor_sample as ds
from dtensor_sample.output import TokenLogprobs
from dtensor_sample.params import BatchedParams


def step(mesh: DeviceMesh, local: Tensor, hidden: Tensor, head: DTensor) -> None:
    params = ds.SamplingParams(temperature=0.7, seed=1)
    assert_type(params.spawn(2), list[ds.SamplingParams])
    assert_type(ds.SamplingParams.batch([params], "cpu"), BatchedParams)
    logits = ds.vocab_sharded(local, mesh, vocab_size=32)
    assert_type(logits, DTensor)
    assert_type(ds.sample(logits, params, position=0), Tensor)
    drawn = ds.sample_with_logprobs(logits, params, position=0)
    assert_type(drawn, tuple[Tensor, Tensor])
    assert_type(ds.logprobs(logits, drawn[0]), Tensor)
    state = ds.SamplingState(mesh, vocab_size=32, num_speculative_tokens=2)
    plan = ds.BatchSharder(state).plan([0], exchange="vocab")
    assert_type(plan, ds.ShardPlan)
    output = ds.Sampler(state)(head, plan)
    assert_type(output, ds.SamplerOutput)
    assert_type(output.token_ids, Tensor)
    assert_type(output.logprobs, TokenLogprobs | None)
    assert_type(plan.select(hidden), Tensor)
    assert_type(plan.owners, tuple[int, ...])
    step = ds.GraphedStep(lambda plan, rows: rows, state, capacities=[4])
    assert_type(step.plan([0]), ds.ShardPlan)
    drafter: ds.Drafter = ds.NgramDrafter(max_n=2)
    assert_type(drafter.propose([0], [[1]], [2]), tuple[list[list[int]], list[bool]])
    assert_type(ds.DraftSampler(state)(head, plan, step=0), Tensor)
    assert_type(ds.RejectionSampler(state)(head, plan, [[1, 2]]), ds.SamplerOutput)
    ds.sample(logits, params)  # type: ignore[call-arg]
