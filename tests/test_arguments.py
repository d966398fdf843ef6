"""Wrong arguments are refused, on every rank alike, before any rank has spoken to another.

The message says which argument, what it was and what was expected, and the next step works.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    TokenBitmask,
    logprobs,
    replicated,
    sample,
    vocab_sharded,
)
from tests.batches import shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.test_collectives import CollectiveTrace


class Bench:
    """Good arguments of everything, for a case to spoil one of them."""

    def __init__(self, mesh) -> None:
        self.mesh = mesh
        self.no_mesh, self.no_tensor = None, [1.0]
        self.full = torch.eye(3, 10, device=mesh.device_type)
        self.ids = torch.zeros(3, dtype=torch.int64, device=mesh.device_type)
        self.logits = shard_vocab(self.full, mesh)
        self.params = SamplingParams(temperature=0)
        self.state = SamplingState(mesh, vocab_size=10, max_num_reqs=8, seed=0)
        for slot in range(3):
            self.state.add(slot, self.params)
        self.sharder = BatchSharder(self.state)
        self.nothing, self.text, self.raw = None, "no", b"1"
        other = SamplingState(mesh, vocab_size=10, max_num_reqs=8, seed=0)
        for slot in range(3):
            other.add(slot, self.params)
        self.other = BatchSharder(other)
        self.state.add(3, self.params)
        self.stale = self.sharder.plan([3], exchange="vocab")
        self.state.remove(3)
        self.sampler = Sampler(self.state)

    def sample(self, logits=None, params=None, position=0, **kwargs):
        logits = self.logits if logits is None else logits
        params = self.params if params is None else params
        return sample(logits, params, position=position, **kwargs)

    def plan(self, slots=(0, 1, 2), *args, **kwargs):
        return self.sharder.plan(slots, *args, **kwargs)

    def mask(self, requests: Any, device: Any = None) -> None:
        """Check a grammar's mask of one row."""
        bitmask = torch.ones(1, 1, dtype=torch.int32, device=device or self.full.device)
        TokenBitmask(bitmask=bitmask, requests=requests).check(self.plan())

    def step(self) -> list[int]:
        plan = self.plan()
        logits = shard_vocab(plan.select(self.full), self.mesh)
        return self.sampler(logits, plan).token_ids[:, 0].tolist()


P: Any = SamplingParams
INF, NAN = float("inf"), float("nan")
CASES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    # Each: what is called, and what its message must hold (argument, value, what was expected).
    "temperature below 0": (lambda b: P(temperature=-1), ("temperature", "-1", "0")),
    "temperature infinite": (lambda b: P(temperature=INF), ("temperature", "inf", "finite")),
    "temperature NaN": (lambda b: P(temperature=NAN), ("temperature", "nan", "finite")),
    "temperature text": (lambda b: P(temperature="hot"), ("temperature", "hot", "number")),
    "temperature complex": (
        lambda b: P(temperature=np.complex64(1)),
        ("temperature", "complex64", "number"),
    ),
    "temperature None": (lambda b: P(temperature=None), ("temperature", "None", "number")),
    "top_k fraction": (lambda b: P(top_k=1.5), ("top_k", "1.5", "integer")),
    "top_k bool": (lambda b: P(top_k=True), ("top_k", "True", "integer")),
    "top_p above 1": (lambda b: P(top_p=1.01), ("top_p", "1.01", "[0, 1]")),
    "top_p below 0": (lambda b: P(top_p=-0.1), ("top_p", "-0.1", "[0, 1]")),
    "top_p NaN": (lambda b: P(top_p=NAN), ("top_p", "nan", "[0, 1]")),
    "min_p above 1": (lambda b: P(min_p=2), ("min_p", "2", "[0, 1]")),
    "min_p below 0": (lambda b: P(min_p=-1e-9), ("min_p", "-1e-09", "[0, 1]")),
    "seed below 0": (lambda b: P(seed=-1), ("seed", "-1", "2**64")),
    "seed of 65 bits": (lambda b: P(seed=2**64), ("seed", str(2**64), "2**64")),
    "seed fraction": (lambda b: P(seed=0.5), ("seed", "0.5", "integer")),
    "spawn below 0": (lambda b: P().spawn(-1), ("n ", "-1", ">= 0")),
    "batch of other things": (
        lambda b: P.batch([1], "cpu"),
        ("params[0]", "int", "SamplingParams"),
    ),
    "logprobs below 0": (lambda b: P(logprobs=-1), ("logprobs", "-1", "[0, 2**31)")),
    "logprobs bool": (lambda b: P(logprobs=True), ("logprobs", "True", "integer")),
    "logprob_token_ids below 0": (
        lambda b: P(logprob_token_ids=[3, -1]),
        ("logprob_token_ids[1]", "-1", "[0, 2**31)"),
    ),
    "logprob_token_ids one": (
        lambda b: P(logprob_token_ids=3),
        ("logprob_token_ids", "3", "sequence"),
    ),
    "kept_capacity below 0": (lambda b: P(kept_capacity=-2), ("kept_capacity", "-2", "[0, 2**31)")),
    "entropy number": (lambda b: P(entropy=1), ("entropy", "int", "bool")),
    "sample tells nothing": (
        lambda b: b.sample(params=P(logprobs=0)),
        ("params[0]", "got logprobs=0", "without a state"),
    ),
    "logprobs at temperature 0": (
        lambda b: logprobs(b.logits, b.ids, temperature=0),
        ("temperature", "0", ">= 1e-05"),
    ),
    "batch tells nothing": (
        lambda b: P.batch([P(entropy=True)], "cpu"),
        ("params[0]", "got entropy=True", "without a state"),
    ),
    "batch edits nothing": (
        lambda b: P.batch([P(), P(allowed_token_ids=range(99))], "cpu"),
        ("params[1]", "got allowed_token_ids=(0, 1, 2, 3, 4, 5, ...)"),
    ),
    "plain logits": (lambda b: b.sample(b.full), ("logits", "Tensor", "vocab_sharded")),
    "integer logits": (lambda b: b.sample(b.logits.long()), ("logits", "int64", "float")),
    "double logits": (lambda b: b.sample(b.logits.double()), ("logits", "float64", "float32")),
    "logits sharded over rows": (
        lambda b: b.sample(shard_vocab(b.full, b.mesh, dim=0)),
        ("logits", "Shard(dim=0)", "Shard(-1)"),
    ),
    "too few params": (lambda b: b.sample(params=[b.params] * 2), ("params", "2", "3 rows")),
    "params of another kind": (
        lambda b: b.sample(params={"a": 1}),
        ("params", "dict", "SamplingParams"),
    ),
    "one of params wrong": (
        lambda b: b.sample(params=[b.params, None, b.params]),
        ("params[1]", "None"),
    ),
    "position below 0": (lambda b: b.sample(position=-1), ("position", "-1", "[0, 2**63)")),
    "position a DTensor": (
        lambda b: b.sample(position=shard_vocab(torch.zeros(3, 4).long(), b.mesh)),
        ("position", "plain", "DTensor"),
    ),
    "plan: positions a DTensor": (
        lambda b: b.plan(positions=b.logits),
        ("positions", "plain", "DTensor"),
    ),
    "mask: requests no list": (
        lambda b: b.mask(3),
        ("requests", "sequence of bools", "int"),
    ),
    "mask on another device": (
        lambda b: b.mask([True, False, False], "meta"),
        ("bitmask", "meta", "host"),
    ),
    "mask: requests no bools": (lambda b: b.mask([1, 0, 0]), ("requests[0]", "bool", "1")),
    "mask: requests too few": (lambda b: b.mask([True]), ("requests", "3 entries", "1")),
    "position fraction": (lambda b: b.sample(position=0.5), ("position", "0.5", "integer")),
    "position text": (lambda b: b.sample(position="x"), ("position", "x", "integer")),
    "position of 65 bits": (lambda b: b.sample(position=2**64), ("position", str(2**64))),
    "positions too few": (lambda b: b.sample(position=[1, 2]), ("position", "[2]", "[3]")),
    "vocab_size too large": (lambda b: b.sample(vocab_size=11), ("vocab_size", "11", "10")),
    "vocab_size zero": (lambda b: b.sample(vocab_size=0), ("vocab_size", "0", "1")),
    "axis unknown": (lambda b: b.sample(axis="dp"), ("axis", "'dp'", "'tp'")),
    "exchange unknown": (lambda b: b.sample(exchange="ring"), ("exchange", "'ring'", "'batch'")),
    "base_seed below 0": (lambda b: b.sample(base_seed=-2), ("base_seed", "-2", "2**64")),
    "vocab_sharded: no tensor": (
        lambda b: vocab_sharded(b.no_tensor, b.mesh, vocab_size=1),
        ("local", "list", "tensor"),
    ),
    "vocab_sharded: a DTensor": (
        lambda b: vocab_sharded(b.logits, b.mesh, vocab_size=10),
        ("local", "DTensor", "plain"),
    ),
    "vocab_sharded: too narrow": (
        lambda b: vocab_sharded(b.full[:, :1], b.mesh, vocab_size=50),
        ("local", "1", "50"),
    ),
    "vocab_sharded: vocab_size": (
        lambda b: vocab_sharded(b.full, b.mesh, vocab_size=-4),
        ("vocab_size", "-4", "1"),
    ),
    "vocab_sharded: axis": (
        lambda b: vocab_sharded(b.full, b.mesh, vocab_size=10, axis="x"),
        ("axis", "'x'", "'tp'"),
    ),
    "replicated: a DTensor": (
        lambda b: replicated(b.logits, b.mesh),
        ("logits", "DTensor", "plain"),
    ),
    "replicated: axis": (lambda b: replicated(b.full, b.mesh, axis="x"), ("axis", "'x'", "'tp'")),
    "state: mesh": (
        lambda b: SamplingState(b.no_mesh, vocab_size=3),
        ("mesh", "NoneType", "DeviceMesh"),
    ),
    "state: vocab_size": (lambda b: SamplingState(b.mesh, vocab_size=0), ("vocab_size", "0", "1")),
    "state: max_num_reqs": (
        lambda b: SamplingState(b.mesh, vocab_size=3, max_num_reqs=0),
        ("max_num_reqs", "0", "[1, 2**31)"),
    ),
    "state: exchange": (
        lambda b: SamplingState(b.mesh, vocab_size=3, exchange=""),
        ("exchange", "''", "'batch'"),
    ),
    "state: logprobs_mode": (
        lambda b: SamplingState(b.mesh, vocab_size=3, logprobs_mode="raw"),
        ("logprobs_mode", "'raw'", "'raw_logprobs'"),
    ),
    "state: seed": (
        lambda b: SamplingState(b.mesh, vocab_size=3, seed=-1),
        ("seed", "-1", "2**64"),
    ),
    "state: debug": (
        lambda b: SamplingState(b.mesh, vocab_size=3, debug=b.text),
        ("debug", "str", "bool"),
    ),
    "state: one processor": (
        lambda b: SamplingState(b.mesh, vocab_size=3, processors=b.step),
        ("processors", "method", "sequence"),
    ),
    "state: no processors": (
        lambda b: SamplingState(b.mesh, vocab_size=3, processors=b.nothing),
        ("processors", "NoneType", "sequence"),
    ),
    "state: speculation": (
        lambda b: SamplingState(b.mesh, vocab_size=3, num_speculative_tokens=-1),
        ("num_speculative_tokens", "-1", "[0, 2**31)"),
    ),
    "add: slot too large": (lambda b: b.state.add(8, b.params), ("slot", "8", "[0, 7]")),
    "add: slot below 0": (lambda b: b.state.add(-1, b.params), ("slot", "-1", "[0, 7]")),
    "add: slot in use": (lambda b: b.state.add(0, b.params), ("slot", "0", "in use")),
    "add: params": (lambda b: b.state.add(3, {"top_k": 1}), ("params", "dict", "SamplingParams")),
    "add: position": (
        lambda b: b.state.add(3, b.params, position=-1),
        ("position", "-1", "[0, 2**62)"),
    ),
    "add: position of 65 bits": (
        lambda b: b.state.add(3, b.params, position=2**64),
        ("position", str(2**64)),
    ),
    "add: prompt": (
        lambda b: b.state.add(3, b.params, prompt_token_ids=[1, 10]),
        ("prompt_token_ids", "10", "[0, 9]"),
    ),
    "add: prompt of text": (
        lambda b: b.state.add(3, b.params, prompt_token_ids="hello"),
        ("prompt_token_ids", "hello"),
    ),
    "remove: empty slot": (lambda b: b.state.remove(5), ("slot", "5", "no request")),
    "remove: slot unknown": (lambda b: b.state.remove(9), ("slot", "9", "[0, 7]")),
    "sharder: owners": (lambda b: BatchSharder(b.state, owners="x"), ("owners", "'x'", "'slot'")),
    "plan: slot empty": (lambda b: b.plan([0, 4]), ("slot", "4", "no request")),
    "plan: slot unknown": (lambda b: b.plan([0, 8]), ("slot", "8", "[0, 7]")),
    "plan: slot twice": (lambda b: b.plan([1, 1]), ("slots", "1", "distinct")),
    "plan: slots no list": (lambda b: b.plan(3), ("slots", "3", "sequence")),
    "plan: slot fraction": (lambda b: b.plan([0.5]), ("slots[0]", "0.5", "integer")),
    "plan: num_logits too few": (lambda b: b.plan([0, 1], [1]), ("num_logits", "1", "2")),
    "plan: num_logits zero": (lambda b: b.plan([0, 1], [1, 0]), ("num_logits[1]", "0", "1")),
    "plan: num_logits over K": (lambda b: b.plan([0, 1], [1, 2]), ("num_logits[1]", "2", "[1, 1]")),
    "plan: capacity": (
        lambda b: b.plan(capacity=0, exchange="batch"),
        ("capacity", "0", "in ["),
    ),
    "plan: capacity without owners": (
        lambda b: b.plan(capacity=9, exchange="vocab"),
        ("capacity", "9", "batch"),
    ),
    "plan: exchange": (lambda b: b.plan(exchange="x"), ("exchange", "'x'", "'vocab'")),
    "plan: query_start_loc too few": (
        lambda b: b.plan([0], query_start_loc=[0]),
        ("query_start_loc", "1", "2"),
    ),
    "plan: query_start_loc falls": (
        lambda b: b.plan([0, 1], query_start_loc=[0, 3, 3]),
        ("query_start_loc", "3 to 3", "at least 1"),
    ),
    "plan: positions too few": (lambda b: b.plan([0, 1], positions=[1]), ("positions", "1", "2")),
    "plan: positions below 0": (
        lambda b: b.plan([0], positions=[-3]),
        ("positions[0]", "-3", "[0, "),
    ),
    "sampler: plain logits": (
        lambda b: b.sampler(b.full, b.plan(exchange="vocab")),
        ("logits", "Tensor", "DTensor"),
    ),
    "sampler: too few rows": (
        lambda b: b.sampler(shard_vocab(b.full[:2], b.mesh), b.plan(exchange="vocab")),
        ("logits", "2", "3"),
    ),
    "sampler: too narrow": (
        lambda b: b.sampler(shard_vocab(b.full[:, :9], b.mesh), b.plan(exchange="vocab")),
        ("logits", "9", "10"),
    ),
    "sampler: another state's plan": (
        lambda b: b.sampler(b.logits, b.other.plan([0, 1, 2])),
        ("plan", "state"),
    ),
    "sampler: no state": (lambda b: Sampler(b.nothing), ("state", "None", "SamplingState")),
    "sampler: no plan": (lambda b: b.sampler(b.logits, b.nothing), ("plan", "None", "ShardPlan")),
    "sampler: compile": (lambda b: Sampler(b.state, compile=b.text), ("compile", "str", "bool")),
    "sampler: stale plan": (lambda b: b.sampler(b.logits, b.stale), ("slot 3",)),
    "sharder: no state": (lambda b: BatchSharder(b.nothing), ("state", "None", "SamplingState")),
    "plan: capacity of 40 bits": (
        lambda b: b.plan(capacity=2**40, exchange="batch"),
        ("capacity", str(2**40), "in ["),
    ),
    "plan: query_start_loc of 70 bits": (
        lambda b: b.plan([0], query_start_loc=[0, 2**70]),
        ("query_start_loc[1]", str(2**70)),
    ),
    "plan: no hidden rows": (lambda b: b.plan().select(b.nothing), ("hidden", "None", "Tensor")),
    "plan: hidden rows elsewhere": (
        lambda b: b.plan().select(torch.zeros(3, 4, device="meta")),
        ("hidden", "lie on", "meta"),
    ),
    "plan: too few hidden rows": (
        lambda b: b.plan().select(b.full[:1]),
        ("hidden", "[1, 10]", "N = 3"),
    ),
    "plan: hidden rows of whole prompts": (
        lambda b: b.plan([0, 1]).select(b.full),
        ("hidden", "[3, 10]", "N = 2", "query_start_loc"),
    ),
    "plan: hidden rows of too short prompts": (
        lambda b: b.plan([0, 1], query_start_loc=[0, 3, 4]).select(b.full),
        ("hidden", "[3, 10]", "N >= 4"),
    ),
    "plan: dtype of explain": (lambda b: b.plan().explain(torch.float64), ("dtype", "float64")),
    "add: logprob_token_ids": (
        lambda b: b.state.add(3, P(logprob_token_ids=(1, 10))),
        ("logprob_token_ids[1]", "10", "[0, 9]"),
    ),
    "add: nested prompt": (
        lambda b: b.state.add(3, b.params, prompt_token_ids=[[1], [1, 2]]),
        ("prompt_token_ids[0]", "[1]"),
    ),
    "vocab_sharded: no mesh": (
        lambda b: vocab_sharded(b.full, b.nothing, vocab_size=10),
        ("mesh", "None", "DeviceMesh"),
    ),
    "batch of nothing": (lambda b: P.batch(b.nothing, "cpu"), ("params", "None", "sequence")),
    "batch of a generator": (
        lambda b: P.batch((b.params for _ in range(3)), "cpu"),
        ("params", "generator", "sequence"),
    ),
    "temperature bytes": (lambda b: P(temperature=b.raw), ("temperature", "b'1'", "number")),
    "position complex": (
        lambda b: b.sample(position=torch.zeros(3, dtype=torch.complex64)),
        ("position", "complex64", "int64"),
    ),
    "params on another row count": (
        lambda b: b.sample(params=P.batch([b.params] * 2, b.full.device)),
        ("params", "2", "3 rows"),
    ),
    "logits of another shape than they say": (
        lambda b: b.sample(
            DTensor.from_local(
                b.full[:, :1], b.mesh, [Shard(1)], shape=torch.Size((3, 40)), stride=(40, 1)
            )
        ),
        ("logits", "[3, 1]", "[3, 40]"),
    ),
}


def outcome(call: Callable[..., object], *args: object) -> str:
    try:
        return f"returned {call(*args)}"
    except Exception as error:  # whatever it was, the test shall see it
        return f"{type(error).__name__}: {error}"


def refusals(mesh) -> dict[str, tuple[str, list, str]]:
    """For each case: what it came to, collectives until then, and what a good step then does.

    Ranks build a state together: they learn in one collective whether any was refused.
    """
    results, bench = {}, Bench(mesh)
    for name, (spoiled, _) in CASES.items():
        with CollectiveTrace() as trace:
            raised = outcome(spoiled, bench)
        results[name] = (raised, trace.calls, outcome(bench.step))
    return results


@worlds(*FEW_WORLDS)
def test_refusals(ranks):
    """Catches silent acceptance, another exception, a vague message, a rank that goes on alone."""
    wrong = []
    for rank, results in enumerate(ranks.run(refusals)):
        for name, (_, parts) in CASES.items():
            raised, calls, next_step = results[name]
            told = name.startswith("state: ") and name != "state: mesh" and ranks.size > 1
            few = [call for call, *_ in calls] == ["all_gather_into_tensor"] * told
            if not few or not all(part in raised for part in ("ValueError: ", *parts)):
                wrong.append(f"rank {rank}, {name}: {raised} after {calls}")
            if next_step != "returned [0, 1, 2]":
                wrong.append(f"rank {rank}, {name}, next step: {next_step}")
    assert not wrong, "\n".join(wrong)
