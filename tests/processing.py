"""Engines whose requests ask for biases, penalties, bans and grammars, and what steps must give.

A script is a list of events that all ranks play, and beside it the oracle's answers. What the
oracle knows of a request is its parameters, its prompt and its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplerOutput,
    SamplingParams,
    SamplingState,
    TokenBitmask,
)
from tests import oracle
from tests.batches import OWNERS, library_weights, random_batch, random_params, shard_vocab

OUTPUTS = ("token_ids", "num_sampled", "num_rejected", "num_nans", "failed")


def random_processing(rng: np.random.Generator, V: int, *, greedy: bool = False) -> SamplingParams:
    """Any mixture of what a request may ask for; a third asks for nothing."""
    asked: dict[str, Any] = {}

    def ids(most: int) -> list[int]:
        return rng.choice(V, int(rng.integers(1, most + 1)), replace=False).tolist()

    def sometimes() -> bool:
        return bool(rng.random() < 0.4)

    if rng.random() < 0.7:
        if sometimes():
            biases = rng.choice([-np.inf, -100.0, -0.3, 1.0, 2.5, 3e38], V).tolist()
            asked["logit_bias"] = {i: biases[i] for i in ids(V // 2)}
        if sometimes():
            asked["allowed_token_ids"] = ids(V)
        if sometimes():
            asked["repetition_penalty"] = float(rng.choice([0.01, 0.7, 1.3, 2.0]))
        if sometimes():
            asked["presence_penalty"] = float(rng.choice([-1.5, 0.4, 100.0]))
        if sometimes():
            asked["frequency_penalty"] = float(rng.choice([-0.7, 0.3, 1.1]))
        if sometimes():
            words = [rng.integers(0, V, rng.choice([1, 2, 2, 2, 3, 6])).tolist() for _ in range(9)]
            asked["bad_words_ids"] = words[: rng.integers(1, 10)]
        if sometimes():
            asked |= {"min_tokens": int(rng.integers(1, 6)), "stop_token_ids": ids(V // 2)}
    params = random_params(rng, V, seeded=True)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    shape = {name: getattr(params, name) for name in names}
    return SamplingParams(**shape | ({"temperature": 0.0} if greedy else {}), **asked)


@dataclass
class Live:
    """What an engine knows of a request."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]

    @property
    def where(self) -> dict[str, int]:
        assert self.params.seed is not None
        position = len(self.prompt) + len(self.output)
        return {"seed": self.params.seed, "position": position}

    def row(self, logits: torch.Tensor, V: int, drafts: Sequence[int], legal=None) -> oracle.Row:
        """The distribution of a row of logits after some drafts."""
        return oracle.row_of(
            logits.float().numpy(),
            self.params,
            vocab_size=V,
            largest=torch.finfo(logits.dtype).max,
            weights=library_weights,
            edit=lambda values: oracle.process(
                values, self.params, self.prompt, [*self.output, *drafts], legal
            ),
        )

    def counts(self, V: int) -> list[int]:
        """What must be kept of it."""
        count = np.bincount(np.array(self.output, np.int64), minlength=V)
        count[self.prompt] |= 1 << 30
        return count.tolist()


@dataclass
class Asked:
    """What a step does with one request."""

    slot: int
    target: torch.Tensor
    """[k + 1, W]."""
    draft: torch.Tensor | None
    """[k, W] what its drafts are drawn from; None: they are chosen."""
    drafts: list[int]
    legal: np.ndarray | None = None
    """[k + 1, V] bool: what a grammar allows; None: there is no grammar."""
    acceptable: int = 0
    """How many drafts may be accepted."""
    count: int = 0
    """How many drafts are admitted."""


@dataclass
class Step:
    """What all ranks do, and what must come of it."""

    requests: list[Asked]
    words: int
    """Words of a row of a grammar's mask."""
    limited: bool
    """Whether counts of acceptable drafts are given."""
    answer: dict[str, Any] = field(default_factory=dict)


def packed(legal: np.ndarray, words: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, V] bool as [rows, words] int32; bits beyond V are random."""
    rows, V = legal.shape
    bits = rng.random((rows, words * 32)) < 0.5
    width = min(V, words * 32)
    bits[:, :width] = legal[:, :width]
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


class Script:
    """Random events of an engine."""

    def __init__(
        self,
        seed: int,
        V: int,
        *,
        slots: int = 9,
        K: int = 0,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
        method: str = "block",
        grammar: bool = True,
        greedy: bool = False,
        budget: bool = False,
    ) -> None:
        self.budget = budget
        self.rng, self.V, self.K, self.slots = np.random.default_rng(seed), V, K, slots
        self.dtype, self.padding, self.method = dtype, padding, method
        self.grammar, self.greedy = grammar, greedy
        self.live: dict[int, Live] = {}
        self.events: list[tuple[str, Any]] = []
        for _ in range(5):
            self.add()

    def play(self, steps: int) -> "Script":
        for _ in range(steps):
            if self.rng.random() < 0.3 and len(self.live) > 2:
                slot = int(self.rng.choice(list(self.live)))
                del self.live[slot]
                self.events.append(("remove", slot))
            if self.rng.random() < 0.6:
                self.add()
            self.step()
        return self

    def add(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self.live]
        if free:
            slot, rng = int(self.rng.choice(free)), self.rng
            prompt = rng.integers(0, self.V, rng.integers(0, 7)).tolist()
            output = rng.integers(0, self.V, rng.choice([0, 0, 3])).tolist()
            live = Live(random_processing(rng, self.V, greedy=self.greedy), prompt, output)
            self.live[slot] = live
            self.events.append(("add", (slot, live.params, prompt, list(output))))

    def logits(self, rows: int) -> torch.Tensor:
        seed = int(self.rng.integers(2**32))
        args = (seed, rows, self.V)
        logits = random_batch(*args, dtype=self.dtype, padding=self.padding).logits
        return (logits / 4).to(self.dtype) if self.rng.random() < 0.8 else logits

    def step(self) -> None:
        rng, V = self.rng, self.V
        chosen = rng.permutation(list(self.live))[: rng.integers(len(self.live) + 1)].tolist()
        words = int(rng.choice([-(-V // 32), -(-V // 32), 1, V // 32 + 3]))
        requests, rows = [], {}
        for slot in chosen:
            live, k = self.live[slot], int(rng.integers(self.K + 1))
            target = self.logits(k + 1)
            asked = Asked(slot, target, None, [], acceptable=k, count=k)
            if self.budget:
                asked.count = int(rng.integers(k + 1))
            if self.grammar and rng.random() < 0.5:
                asked.legal = rng.random((k + 1, V)) < rng.choice([0.1, 0.6, 0.95])
                if rng.random() < 0.2:
                    asked.legal[rng.integers(k + 1)] = False
                asked.legal[:, words * 32 :] = False
            legal = asked.legal if asked.legal is not None else [None] * (k + 1)
            if rng.random() < 0.6:
                asked.acceptable = int(rng.integers(k + 1))
            draft_rows: list[oracle.Row | None] = [None] * k
            if rng.random() < 0.5:
                noise = rng.choice([0, 0.3, 2]) * torch.from_numpy(rng.normal(0, 1, (k, 1)))
                asked.draft = (target[:k].float() + noise).to(self.dtype)
                for j in range(k):
                    draft_rows[j] = row = live.row(asked.draft[j], V, asked.drafts)
                    asked.drafts.append(oracle.draft(row, live.params, step=j, **live.where))
                    if asked.drafts[-1] < 0:
                        break
                asked.drafts += [-1] * (k - len(asked.drafts))
            else:
                for j in range(k):
                    row = live.row(target[j], V, asked.drafts, legal[j])
                    any_id = int(rng.integers(V))
                    likely = row.argmax if row.argmax >= 0 else any_id
                    asked.drafts.append(int(rng.choice([likely, likely, likely, any_id])))
                    if rng.random() < 0.05:
                        asked.drafts[-1] = int(rng.choice([-1, V, 2**40]))
                        asked.drafts += [any_id] * (k - len(asked.drafts))
                        break
            requests.append(asked)
            rows[slot] = draft_rows
        limited = bool(rng.random() < 0.5)
        step = Step(requests, words, limited)
        verified = [self.verified(asked, rows[asked.slot], limited) for asked in requests]
        J = self.K + 1
        step.answer = {
            "drafts": [asked.drafts for asked in requests],
            "token_ids": [a.tokens + [-1] * (J - len(a.tokens)) for a in verified],
            "num_sampled": [len(a.tokens) for a in verified],
            "num_rejected": [a.num_rejected for a in verified],
            "num_nans": [a.num_nans for a in verified],
            "failed": [a.failed for a in verified],
        }
        for asked, answer in zip(requests, verified, strict=True):
            self.live[asked.slot].output += answer.tokens
        step.answer["counts"] = {
            asked.slot: self.live[asked.slot].counts(V)
            for asked in requests
            if self.live[asked.slot].params.needs.counted
        }
        self.events.append(("step", (str(rng.choice(OWNERS)), int(rng.integers(2**32)), step)))

    def verified(
        self, asked: Asked, draft_rows: list[oracle.Row | None], limited: bool
    ) -> oracle.Verified:
        live, k = self.live[asked.slot], len(asked.drafts)
        legal = asked.legal if asked.legal is not None else [None] * (k + 1)
        drafts = list(asked.drafts)
        if limited:
            drafts[asked.acceptable :] = [-1] * (k - asked.acceptable)
        text = [x if 0 <= x < self.V else 0 for x in asked.drafts]  # no row after one is read
        rows = [live.row(x, self.V, text[:j], legal[j]) for j, x in enumerate(asked.target)]
        return oracle.verify(
            rows[: asked.count + 1],
            drafts[: asked.count],
            draft_rows[: asked.count],
            live.params,
            method=self.method,
            **live.where,
        )


def play(mesh, script: Script, exchange: str) -> list[dict[str, Any]]:
    """The events of a script on one rank; each step's outputs, and the counts kept here."""
    device = mesh.device_type
    state = SamplingState(
        mesh,
        vocab_size=script.V,
        max_num_reqs=script.slots,
        num_speculative_tokens=script.K,
        exchange=exchange,
        seed=0,
    )
    results = []
    for name, what in script.events:
        if name == "add":
            slot, params, prompt, output = what
            state.add(slot, params, prompt_token_ids=prompt, output_token_ids=output)
        elif name == "remove":
            state.remove(what)
        else:
            owners, seed, step = what
            results.append(run_step(mesh, state, script, owners, seed, step, device))
    return results


def run_step(mesh, state, script: Script, owners: str, seed: int, step: Step, device: str) -> dict:
    sharder, K = BatchSharder(state, owners=owners), state.num_speculative_tokens
    drafts = {asked.slot: list(asked.drafts) for asked in step.requests}
    for j in range(K):
        drawing = {
            a.slot: a.draft[j] for a in step.requests if a.draft is not None and j < len(a.draft)
        }
        drawing = {slot: x for slot, x in drawing.items() if -1 not in drafts[slot][:j]}
        if not drawing:
            break
        plan = sharder.plan(list(drawing))
        rows = torch.stack(list(drawing.values())).to(device)
        drawn = DraftSampler(state)(shard_vocab(plan.select(rows), mesh), plan, step=j).tolist()
        for slot, token in zip(drawing, drawn, strict=True):
            drafts[slot][j] = token
    slots = [asked.slot for asked in step.requests]
    budget = sum(a.count for a in step.requests) + seed % 3 if script.budget else None
    plan = sharder.plan(slots, [len(asked.target) for asked in step.requests], budget=budget)
    width = script.V + script.padding
    rows = torch.cat(
        [torch.empty(0, width, dtype=script.dtype), *[a.target for a in step.requests]]
    )
    rows = rows.to(device)
    if budget is not None:
        counts = torch.tensor([a.count for a in step.requests], dtype=torch.int64)
        plan = plan.admit(counts.to(device))
        first = np.cumsum([0, *[len(asked.target) for asked in step.requests]])
        rows = rows[torch.tensor(first).to(device)[plan.hidden_requests] + plan.hidden_offsets]
    logits = shard_vocab(plan.select(rows), mesh)
    masked = [asked.legal is not None for asked in step.requests]
    legal = [asked.legal for asked in step.requests if asked.legal is not None]
    mask = None
    if any(masked) or step.limited:
        rng = np.random.default_rng(seed)
        allowed = np.concatenate([np.empty((0, script.V), bool), *legal])
        if budget is not None and all(masked) and (device == "cpu" or seed % 2):  # in place
            legal = [np.pad(own, ((0, K + 1 - len(own)), (0, 0))) for own in legal]
            allowed = np.concatenate([allowed[:0], *legal])
        bits = torch.from_numpy(packed(allowed, step.words, rng))
        mask = TokenBitmask(
            bitmask=bits.to(device) if seed % 2 else bits,
            requests=None if all(masked) else masked,
            num_acceptable=[a.acceptable for a in step.requests] if step.limited else None,
        )
    output: SamplerOutput
    if K == 0:
        output = Sampler(state)(logits, plan, mask=mask)
    else:
        submitted = [drafts[slot] for slot in slots]
        output = RejectionSampler(state, method=script.method)(logits, plan, submitted, mask=mask)
    result: dict[str, Any] = {name: getattr(output, name).tolist() for name in OUTPUTS}
    result["drafts"] = [drafts[slot] for slot in slots]
    result["counts"] = counts_here(state, slots, script.V)
    return result


def counts_here(state: SamplingState, slots: Sequence[int], V: int) -> dict[int, list[int | None]]:
    """What this rank keeps of the counts of requests; None where an id is another rank's."""
    kept = state.slot_edits
    found: dict[int, list[int | None]] = {}
    for slot in slots:
        row = int(kept._numbers_S6[slot, 0])
        if row >= 0 and state.request(slot).params.needs.counted:
            first = kept._first_id()
            here = kept.counts_MW[row].tolist()
            found[slot] = [
                here[i - first] if first <= i < first + len(here) else None for i in range(V)
            ]
    return found
