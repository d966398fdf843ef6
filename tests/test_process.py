"""Biases, penalties, bans and grammars: every step of an engine as the oracle has it."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    TokenBitmask,
    replicated,
)
from dtensor_sample.ops.edits import Edits
from dtensor_sample.process import RowContext, process
from tests.batches import DTYPES, EXCHANGES, shard_vocab
from tests.pool import FEW_WORLDS, worlds
from tests.processing import Script, play
from tests.test_collectives import KINDS, functional_collectives

INF = math.inf


def check(ranks, script: Script, exchange: str) -> None:
    """Compare all ranks' outputs, and what they keep between them, with the answers."""
    wanted = [what[2].answer for name, what in script.events if name == "step"]
    results: list[list[dict[str, Any]]] = ranks.run(play, script, exchange)
    for i, answer in enumerate(wanted):
        for got in results:
            same = {name: got[i][name] for name in answer if name != "counts"}
            assert same == {name: answer[name] for name in same}, (i, exchange)
        for slot, counts in answer["counts"].items():
            kept = [got[i]["counts"][slot] for got in results if slot in got[i]["counts"]]
            assert kept
            assert len(kept) == (1 if exchange == "batch" else ranks.size)
            for places in zip(counts, *kept, strict=True):
                assert set(places) <= {places[0], None}
                assert places[0] in places[1:]


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines(ranks, exchange, dtype):
    """Catches an edit in the wrong order, of another request, or of a text that is out of date."""
    script = Script(DTYPES.index(dtype), 37, dtype=dtype, padding=2).play(14)
    check(ranks, script, exchange)


@pytest.mark.slow
@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_engines_with_drafts(ranks, exchange, method):
    """Catches drafts that do not count, count twice, or still count when they were refused."""
    dtype = DTYPES[EXCHANGES.index(exchange)]
    seed = 20 + 3 * (method == "block") + EXCHANGES.index(exchange)
    script = Script(seed, 11, K=3, dtype=dtype, padding=2, method=method).play(20)
    check(ranks, script, exchange)


@pytest.mark.slow
@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_engines_that_admit_drafts(ranks, exchange):
    """Catches edits, masks or counts of rows as they would lie if all drafts were admitted."""
    seed = 40 + EXCHANGES.index(exchange)
    script = Script(seed, 11, K=3, padding=2, budget=True).play(10)
    check(ranks, script, exchange)


# --- greedy texts with and without drafts

TEXT, TEXTS_V, TEXTS_K = 20, 19, 3
REPETITIVE: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"frequency_penalty": -0.4, "logit_bias": {3: 2.0, 5: -INF}},
    {"bad_words_ids": [[15, 9], [2, 13], [11], [13, 6, 3]], "repetition_penalty": 0.8},
    {"min_tokens": 9, "stop_token_ids": [i for i in range(19) if i not in (2, 13)]},
    {},
]


def texts(mesh, exchange: str, kind: str, plain: list[list[int]] | None) -> list[list[int]]:
    """Greedy texts of all of `REPETITIVE`; drafts are right, wrong, random, or there are none."""
    rng, device, B = np.random.default_rng(1), mesh.device_type, len(REPETITIVE)
    K = 0 if kind == "none" else TEXTS_K
    state = SamplingState(
        mesh,
        vocab_size=TEXTS_V,
        max_num_reqs=B,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=0,
    )
    for slot, asked in enumerate(REPETITIVE):
        state.add(slot, SamplingParams(temperature=0, **asked), prompt_token_ids=[slot, 4])
    # The next token follows from the last one, much as in a text: it would repeat itself.
    table = torch.randn(TEXTS_V, TEXTS_V, generator=torch.Generator().manual_seed(2))
    found: list[list[int]] = [[] for _ in range(B)]
    sharder = BatchSharder(state)
    while min(map(len, found)) < TEXT:
        drafts: list[list[int]] = [[] for _ in range(B)]
        for i, own in enumerate(found if K else []):
            if plain is not None and kind != "random":
                right = plain[i][len(own) : len(own) + K]
                drafts[i] = [(x + (kind == "wrong")) % TEXTS_V for x in right]
            else:
                drafts[i] = rng.integers(0, TEXTS_V, rng.integers(K + 1)).tolist()
        plan = sharder.plan(range(B), [1 + len(own) for own in drafts])
        last = [
            x for own, more in zip(found, drafts, strict=True) for x in [(own or [4])[-1], *more]
        ]
        logits = shard_vocab(plan.select(table[last].to(device)), mesh)
        if K:
            output = RejectionSampler(state)(logits, plan, drafts)
        else:
            output = Sampler(state)(logits, plan)
        for own, new in zip(found, output.token_ids.tolist(), strict=True):
            own += [x for x in new if x >= 0]
    return [own[:TEXT] for own in found]


@worlds("cpu:1", "cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_greedy_texts_with_drafts(ranks, exchange):
    """Catches penalties that see another text while drafts are verified: all texts are the same."""
    plain = ranks.run(texts, exchange, "none", None)[0]
    assert len({tuple(own) for own in plain}) == len(plain)  # what is asked for matters
    for kind in ("right", "wrong", "random"):
        assert ranks.run(texts, exchange, kind, plain) == [plain] * ranks.size, kind


def refused(mesh, exchange: str, method: str, asked: dict[str, Any]) -> int:
    """How many drafts are refused that were drawn from the very logits that judge them."""
    B, K, V = 60, 3, 7
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=B, num_speculative_tokens=K, exchange=exchange, seed=4
    )
    for slot in range(B):
        params = SamplingParams(top_p=0.95, **asked)
        state.add(slot, params, prompt_token_ids=[slot % V, 1], output_token_ids=[2])
    sharder, drafter = BatchSharder(state), DraftSampler(state)
    rows = torch.randn(B, K + 1, V, generator=torch.Generator().manual_seed(6))
    rows = rows.to(mesh.device_type)
    plan = sharder.plan(range(B))
    drafts = [drafter(shard_vocab(plan.select(rows[:, k]), mesh), plan, step=k) for k in range(K)]
    plan = sharder.plan(range(B), [K + 1] * B)
    logits = shard_vocab(plan.select(rows.flatten(0, 1)), mesh)
    output = RejectionSampler(state, method=method)(logits, plan, torch.stack(drafts, 1))
    return int(output.num_rejected.sum())


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize(("exchange", "method"), [("batch", "block"), ("vocab", "standard")])
def test_drafts_of_the_target_itself_are_accepted(ranks, exchange, method):
    """Catches a q that is processed otherwise than when it was drawn from: p = q accepts all."""
    for asked in (
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 5.0, "presence_penalty": -1.0},
        {"bad_words_ids": [[a, b % 7] for a in range(7) for b in range(a, a + 3)]},
        {"min_tokens": 3, "stop_token_ids": [0, 1, 2]},
        {"logit_bias": {3: 2.0, 4: -INF}, "frequency_penalty": 1.0},
    ):
        assert ranks.run(refused, exchange, method, asked) == [0] * ranks.size, asked


# --- what is never drawn


def emitted(mesh, asked: dict[str, Any], rows: int, K: int, exchange: str) -> list[int]:
    """How often each id is emitted by steps whose drafts are all id 1."""
    V, device = 5, mesh.device_type
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=rows, num_speculative_tokens=K, exchange=exchange, seed=1
    )
    for slot in range(rows):
        state.add(slot, SamplingParams(**asked))
    plan = BatchSharder(state).plan(range(rows), [K + 1] * rows)
    full = torch.tensor([0.0, 1.0, 2.5, 0.5, 2.0], device=device).expand(rows * (K + 1), V)
    verifier = RejectionSampler(state, method="standard" if rows % 2 else "block")
    output = verifier(shard_vocab(plan.select(full), mesh), plan, [[1] * K] * rows)
    counts = output.token_ids.flatten()
    return torch.bincount(counts[counts >= 0], minlength=V).tolist()


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_what_is_ruled_out_is_never_accepted(ranks, exchange):
    """Catches a filter or bias that only the last row of a block gets: drafts are id 1."""
    for asked in (
        {"min_p": 0.3},
        {"logit_bias": {1: -100.0}},
        {"logit_bias": {1: -INF}},
        {"allowed_token_ids": [0, 2, 3, 4]},
        {"bad_words_ids": [[1]]},
        {"min_tokens": 5, "stop_token_ids": [1]},
        {"presence_penalty": 100.0, "logit_bias": {1: -10.0}},
    ):
        for rows in (2500, 2501):
            counts = ranks.run(emitted, asked, rows, 3, exchange)[0]
            assert counts[1] == 0, asked
            assert counts[2] > 0
            assert sum(counts) >= rows
    drawn = ranks.run(emitted, {"presence_penalty": 0.4}, 2500, 3, exchange)[0]
    assert drawn[1] > 0


# --- grammars


def masked_tokens(
    mesh, rows: list[list[int]], words: int, asked: list[dict[str, Any]], exchange: str
) -> tuple[list[int], list[bool]]:
    """Tokens of equal rows of 70 logits; of each row the ids whose bits are set."""
    B, V = len(rows), 70
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=B, exchange=exchange, seed=2)
    for slot, own in enumerate(asked):
        state.add(slot, SamplingParams(**own))
    bits = np.zeros((B, words * 32), bool)
    for row, ids in enumerate(rows):
        bits[row, ids] = True
    words_BX = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    plan = BatchSharder(state).plan(range(B))
    full = torch.linspace(-1, 1, V, device=mesh.device_type).expand(B, V)
    logits = shard_vocab(plan.select(full), mesh)
    chosen = [bool(ids) or own != {} for ids, own in zip(rows, asked, strict=True)]
    flags: Any = np.array(chosen)
    mask = TokenBitmask(bitmask=words_BX[torch.tensor(chosen)], requests=flags)
    output = Sampler(state)(logits, plan, mask=mask)
    return output.token_ids[:, 0].tolist(), output.failed.tolist()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_masks(ranks, exchange):
    """Catches bit 31, a mask of other rows or words, and an empty row that spoils others."""
    T: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    rows: list[list[int]] = [[31], [0], [63], [], [69], [32], [64, 69, 90], [95, 70], [], [5]]
    asked: list[dict[str, Any]] = [
        *[T, T | {"top_p": 1e-9}, T | {"temperature": 50.0}, T, T | {"temperature": 0.0}],
        *[T | {"top_k": 3}, T | {"temperature": 0.0}, T, {}, {"min_p": 1.0}],
    ]
    for got, failed in ranks.run(masked_tokens, rows, 3, asked, exchange):
        # Row 3 allows nothing; row 7 only what does not exist; row 8 is not masked.
        assert got[:8] == [31, 0, 63, -1, 69, 32, 69, -1]
        assert 0 <= got[8] < 70
        assert got[9] == 5
        assert failed == [row in (3, 7) for row in range(10)]
    # Narrower: ids beyond its bits are not allowed. Wider: bits beyond the vocabulary say nothing.
    for words, allowed, wanted in (
        (1, [31], 31),
        (1, [0], 0),
        (2, [33, 63], 63),
        (9, [68, 280], 68),
    ):
        greedy = {"temperature": 0.0}
        for got, failed in ranks.run(masked_tokens, [allowed], words, [greedy], exchange):
            assert (got, failed) == ([wanted], [False])


def one_path(mesh, exchange: str, steps: int) -> list[list[int]]:
    """Texts of which a grammar allows one path, with random drafts, beside one that is free."""
    B, K, V, rng = 4, 3, 40, np.random.default_rng(3)
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=B, num_speculative_tokens=K, exchange=exchange, seed=3
    )
    for slot in range(B):
        state.add(slot, SamplingParams(temperature=2.0))
    sharder, found = BatchSharder(state), [[] for _ in range(B)]  # type: ignore[var-annotated]
    for _ in range(steps):
        drafts, acceptable, words = [], [], []
        for slot, own in enumerate(found):
            path = [(slot + 7 * (len(own) + j)) % V for j in range(K + 1)]
            k = int(rng.integers(K + 1))
            drafts.append([x if rng.random() < 0.7 else int(rng.integers(V)) for x in path[:k]])
            legal = 0
            while legal < k and drafts[-1][legal] == path[legal]:
                legal += 1
            acceptable.append(legal)
            if slot:
                bits = np.zeros((k + 1, 64), bool)
                bits[np.arange(k + 1), path[: k + 1]] = True
                bits[legal + 1 :] = rng.random(64) < 0.5  # nothing that a grammar answers for
                words.append(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
        acceptable[0] = K
        mask = TokenBitmask(
            bitmask=torch.from_numpy(np.concatenate(words)),
            requests=[False, True, True, True],
            num_acceptable=acceptable,
        )
        plan = sharder.plan(range(B), [1 + len(own) for own in drafts])
        generator = torch.Generator().manual_seed(len(found[0]))
        rows = torch.randn(plan.num_hidden_rows, V, generator=generator)
        logits = shard_vocab(plan.select(rows.to(mesh.device_type)), mesh)
        output = RejectionSampler(state)(logits, plan, drafts, mask=mask)
        for own, new in zip(found, output.token_ids.tolist(), strict=True):
            own += [x for x in new if x >= 0]
    return found


@worlds("cpu:1", "cpu:4", "cuda:2")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_grammar_with_one_path(ranks, exchange):
    """Catches one mask for all rows of a block, and drafts after the last acceptable one."""
    results = ranks.run(one_path, exchange, 12)
    assert results == [results[0]] * ranks.size
    for slot, text in enumerate(results[0]):
        assert len(text) >= 12 + (slot > 0)
        path = [(slot + 7 * t) % 40 for t in range(len(text))]
        assert (text == path) == (slot > 0)


def at_given_positions(mesh, exchange: str) -> tuple[list[int], int]:
    """Tokens of steps whose positions are given, and the state's own position after them."""
    state = SamplingState(mesh, vocab_size=4, max_num_reqs=1, exchange=exchange, seed=0)
    params = SamplingParams(temperature=0, presence_penalty=1.5, min_tokens=3, stop_token_ids=[3])
    state.add(0, params)
    rows, tokens = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=mesh.device_type), []
    for _ in range(4):
        plan = BatchSharder(state).plan([0], positions=[7])
        logits = shard_vocab(plan.select(rows), mesh)
        tokens += Sampler(state)(logits, plan).token_ids[0].tolist()
    return tokens, int(state.positions[0])


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_counts_advance_though_positions_are_given(ranks, exchange):
    """Catches counts that stay where positions do, against what `plan` says."""
    for found in ranks.run(at_given_positions, exchange):
        assert found == ([2, 1, 2, 3], 0)


# --- what others ask for


def after_others(mesh, exchange: str, others: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Texts of two requests while others come and go; how many ids their rows may ban, and could.

    And how many kinds of plans there were of the two.
    """
    V, K, device = 37, 2, mesh.device_type
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=6, num_speculative_tokens=K, exchange=exchange, seed=0
    )
    words = [*[[a, b] for a in range(V) for b in range(a % 2, V, 2)][:60], [3, 4, 5], [9]]
    state.add(0, SamplingParams(min_tokens=5, stop_token_ids=[1, 2], seed=1), prompt_token_ids=[1])
    state.add(1, SamplingParams(bad_words_ids=words, seed=2), prompt_token_ids=[2])
    sharder, generator, widths, kinds = BatchSharder(state), torch.Generator(), set(), set()
    texts: list[list[int]] = [[], []]
    for step, coming in enumerate(others):
        for slot, asked in enumerate(coming, 2):
            state.add(slot, SamplingParams(**asked), prompt_token_ids=[slot])
        generator.manual_seed(step)
        rows = torch.randn(2 * (K + 1), V, generator=generator).to(device)
        drafts = torch.randint(0, V, (2, K), generator=generator).tolist()
        sampler = RejectionSampler(state)
        if coming:  # a step of theirs
            plan = sharder.plan(range(2, 2 + len(coming)))
            logits = shard_vocab(plan.select(rows[: len(coming)]), mesh)
            sampler(logits, plan, [[] for _ in coming])
        plan = sharder.plan([0, 1], [K + 1] * 2)
        kinds.add(plan.structure)
        logits = shard_vocab(plan.select(rows), mesh)
        placed = plan.place(logits, state, most_rows=K + 1)
        widths.add(Edits(*process(placed, plan, V).edits).banned_EB.shape[1])
        output = sampler(logits, plan, drafts)
        for text, new in zip(texts, output.token_ids.tolist(), strict=True):
            text += [x for x in new if x >= 0]
        for slot in range(2, 2 + len(coming)):
            state.remove(slot)
    kept = state.slot_edits
    room = kept._stops_SE.shape[1] + kept._words_SWL.shape[1]
    return {"texts": texts, "widths": widths, "room": room, "kinds": len(kinds)}


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_others_ask_for_takes_no_work(ranks, exchange):
    """Catches rows that may ban as many ids as those of any request ever could, and cut off words.

    And kinds of plans, each a graph of its own, that follow from requests of no part in them.
    """
    rng = np.random.default_rng(0)
    long = {"bad_words_ids": [rng.integers(0, 37, n % 64 + 1).tolist() for n in range(1000)]}
    stops = {"min_tokens": 9, "stop_token_ids": list(range(30))}
    short = {"bad_words_ids": [[1, 2]]}
    others: list[list[dict[str, Any]]] = [[], [stops], [], [short, long], [long], [], [short], []]
    alone = ranks.run(after_others, exchange, [[]] * len(others))
    for wanted, got in zip(alone, ranks.run(after_others, exchange, others), strict=True):
        assert (wanted["widths"], wanted["room"], wanted["kinds"]) == ({4 + 64}, 4 + 64, 1)
        assert got == wanted | {"room": 64 + 1024}


def in_turn(mesh, exchange: str, banned: list[int]) -> list[list[int]]:
    """Greedy tokens of requests in slot 0 whose words ban the likeliest ids, beside one in slot 1.

    So many ids each; the first of `banned` is of the one that stays.
    """
    state = SamplingState(mesh, vocab_size=30, max_num_reqs=2, exchange=exchange, seed=0)
    full, found = torch.linspace(1, 0, 30, device=mesh.device_type).expand(2, 30), []
    for i, count in enumerate(banned):
        first = [1] if i else range(30)  # after whatever the one that stays has emitted
        words = [*([a, b] for a in first for b in range(count)[::-1]), [2] * (count + 2)]
        params = SamplingParams(temperature=0, bad_words_ids=words)
        state.add(int(i == 0), params, prompt_token_ids=[1])
        if i:
            plan = BatchSharder(state).plan([0, 1])
            logits = shard_vocab(plan.select(full), mesh)
            found.append(Sampler(state)(logits, plan).token_ids[:, 0].tolist())
            state.remove(0)
    return found


@worlds("cpu:1", "cpu:2", "cuda:2")
@pytest.mark.parametrize("exchange", ["batch", "vocab"])
def test_no_words_are_left_in_a_slot(ranks, exchange):
    """Catches words of the request before in the slot, beside one that needs as much room."""
    banned = [20, 3, 20, 1, 0, 5, 20, 17, 4, 2, 0, 0, 20, 1, 20]
    wanted = [[count, banned[0]] for count in banned[1:]]
    assert ranks.run(in_turn, exchange, banned) == [wanted] * ranks.size


# --- where it lies


def kept(mesh, exchange: str) -> dict[str, Any]:
    """Bytes, and owners of a request with counts while others come and go."""
    V, slots = 101, 6
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=slots, num_speculative_tokens=2, exchange=exchange, seed=0
    )
    sharder, drafter = BatchSharder(state), DraftSampler(state)
    found: dict[str, Any] = {"bytes": [state.slot_edits.bytes], "owners": []}
    full = torch.zeros(slots, V, device=mesh.device_type)

    def logits(plan):
        return shard_vocab(plan.select(full[: plan.num_hidden_rows]), mesh)

    for slot in range(slots):
        state.add(slot, SamplingParams(presence_penalty=1.0 if slot < 2 else 0.0))
    # The last slots' drafts are kept before the first ones have an owner at all.
    drafter(logits(plan := sharder.plan([5, 4, 3])), plan, step=0)
    for order in ([0, 1], [1, 0, 2], [5, 3, 1, 0], [4, 2, 0, 1, 3, 5]):
        plan = sharder.plan(order)
        owner = dict(zip(plan.slots, plan.owners, strict=True))
        found["owners"].append((owner[0], owner[1]))
        drafter(logits(plan), plan, step=0)  # there is room for everyone's drafts
    found["bytes"].append(state.slot_edits.bytes)
    state.remove(3)
    state.add(3, SamplingParams(logit_bias={1: 1.0}))
    plan = sharder.plan([3, 0])
    Sampler(state)(logits(plan), plan)
    found["bytes"].append(state.slot_edits.bytes)
    return found


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_wide_state_is_shared_out(ranks, exchange):
    """Catches counts on all ranks, memory before it is needed, and a request that leaves them."""
    P = ranks.size
    once = {"batch": -(-6 // P) * 101 * 4, "vocab": 6 * -(-101 // P) * 4}.get(exchange, 6 * 101 * 4)
    results = ranks.run(kept, exchange)
    for found in results:
        assert found["bytes"] == [0, once, 2 * once]
        assert found["owners"] == results[0]["owners"]
        if exchange == "batch":
            assert len(set(found["owners"])) == 1


def costs(mesh) -> list[tuple[Any, ...]]:
    """(promised, traced) collectives under `vocab` of steps that change values, and that do not."""
    found = []
    for asked in ({}, {"min_tokens": 2, "stop_token_ids": [1]}, {"frequency_penalty": 1.0}):
        state = SamplingState(mesh, vocab_size=23, max_num_reqs=4, exchange="vocab", seed=0)
        for slot in range(4):
            state.add(slot, SamplingParams(top_p=0.9, **asked))
        plan = BatchSharder(state).plan(range(4))
        rows = torch.randn(4, 23).bfloat16().to(mesh.device_type)
        logits = shard_vocab(plan.select(rows), mesh)
        with functional_collectives() as calls:
            Sampler(state)(logits, plan)
        kinds = tuple(KINDS[name] for name, *_ in calls)
        found.append((plan.cost(torch.bfloat16).collectives, kinds))
    return found


@worlds("cpu:2", "cuda:2")
def test_collectives_are_as_promised(ranks):
    """Catches thresholds of edited values that are searched in a 16-bit float's digits."""
    for results in ranks.run(costs):
        for promised, traced in results:
            assert promised == traced
        assert len(results[0][0]) == len(results[1][0]) < len(results[2][0])


# --- custom processors


class AddBias:
    """Does what `logit_bias` does, to every request."""

    def __init__(self, biases: dict[int, float], *, per_token: bool) -> None:
        self.biases, self.per_token = biases, per_token

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        for i, bias in self.biases.items():
            if 0 <= i - rows.first_id < values.shape[1]:
                values[:, i - rows.first_id] += bias
        return values


class NotTwice:
    """Bans the draft before, and shows what a processor is told."""

    per_token = True

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        shown = torch.cat([rows.slots[:, None], rows.positions[:, None], rows.drafts], 1)
        self.told += shown.tolist()
        for k in range(rows.drafts.shape[1]):
            column = rows.drafts[:, k] - rows.first_id
            here = (rows.drafts[:, k] >= 0) & (column >= 0) & (column < values.shape[1])
            at = column.clamp(0, values.shape[1] - 1)[:, None]
            banned = torch.where(here[:, None], -INF, values.gather(1, at))
            values = values.scatter(1, at, banned)
        return values


def custom_steps(mesh, exchange: str, processors: list[Any], asked: dict[str, Any]) -> list[Any]:
    """Tokens of a plain and of a speculative step, with drafts that were drawn."""
    B, K, V = 6, 2, 29
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=B,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=8,
        processors=processors,
    )
    for slot in range(B):
        state.add(slot, SamplingParams(top_p=0.9, **asked), position=slot)
    sharder, drafter, found = BatchSharder(state), DraftSampler(state), []
    rows = torch.randn(B * (K + 1), V, generator=torch.Generator().manual_seed(5))
    rows[4, 3], rows[5] = torch.nan, -INF
    rows = rows.bfloat16().to(mesh.device_type)
    plan = sharder.plan(range(B))
    output = Sampler(state)(shard_vocab(plan.select(rows[:B]), mesh), plan)
    found += [output.token_ids.tolist(), output.num_nans.tolist(), output.failed.tolist()]
    plan = sharder.plan(range(B))
    drafts = [
        drafter(shard_vocab(plan.select(rows[B * k : B * k + B]), mesh), plan, step=k)
        for k in range(K)
    ]
    plan = sharder.plan(range(B), [K + 1] * B)
    logits = shard_vocab(plan.select(rows), mesh)
    output = RejectionSampler(state)(logits, plan, torch.stack(drafts, 1))
    told = [sorted(p.told) for p in processors if isinstance(p, NotTwice)]
    return [*found, output.token_ids.tolist(), output.num_nans.tolist(), told]


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_custom_processors(ranks, exchange):
    """Catches a processor that misses drafts, bans that it undoes, and NaN that it hides."""
    biases = {1: 2.0, 7: -3.0, 28: 1.5}
    wanted = ranks.run(custom_steps, exchange, [], {"logit_bias": biases})
    custom = [AddBias(biases, per_token=True)]
    assert ranks.run(custom_steps, exchange, custom, {}) == wanted
    assert sum(wanted[0][1]) == 1
    undone = [AddBias({2: INF, 3: 1e30}, per_token=True)]
    banned = ranks.run(custom_steps, exchange, undone, {"logit_bias": {2: -INF}})[0]
    assert 2 not in np.array(banned[0])
    # Two NaN were not probable, whatever was added.
    assert banned[0][4][0] != 3
    results = ranks.run(custom_steps, exchange, [NotTwice()], {})
    for tokens in np.array(results[0][3]).tolist():
        drafts = [x for x in tokens if x >= 0]
        assert len(set(drafts)) == len(drafts)
    told = {tuple(row) for result in results for row in result[5][0] if len(row) == 4}
    assert {(0, 1, -1, -1), (5, 6, -1, -1)} <= told
    assert any(row[0] == 0 and row[1] == 2 and row[2] >= 0 and row[3] == -1 for row in told)
    assert any(row[0] == 3 and row[1] == 6 and min(row[2:]) >= 0 for row in told)


class Same:
    """Changes nothing."""

    per_token = True

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        return values


def mixed_steps(mesh, method: str, processors: list[Any]) -> list[Any]:
    """Tokens of steps in which some drafts were drawn and some are one-hot."""
    B, K, V = 40, 2, 5
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=B,
        num_speculative_tokens=K,
        seed=3,
        processors=processors,
    )
    for slot in range(B):
        state.add(slot, SamplingParams())
    sharder, drafter = BatchSharder(state), DraftSampler(state)
    verifier, drawn, found = RejectionSampler(state, method=method), list(range(0, B, 2)), []
    rows = torch.randn(B * (K + 1), V, generator=torch.Generator().manual_seed(5))
    rows = rows.to(mesh.device_type)
    for _ in range(3):
        drafts = torch.zeros(B, K, dtype=torch.int64, device=mesh.device_type)
        for step in range(K):
            plan = sharder.plan(drawn)
            logits = shard_vocab(plan.select(rows[step * B :][: len(drawn)]), mesh)
            drafts[::2, step] = drafter(logits, plan, step=step)
        plan = sharder.plan(range(B), [K + 1] * B)
        found.append(
            verifier(shard_vocab(plan.select(rows), mesh), plan, drafts).token_ids.tolist()
        )
    return found


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("method", ["standard", "block"])
def test_processors_beside_drafts_of_both_kinds(ranks, method):
    """Catches one-hot drafts that are no longer known as such once a processor has been at q."""
    plain, processed = (ranks.run(mixed_steps, method, given) for given in ([], [Same()]))
    assert plain == processed


def columns_seen(mesh, exchange: str, padding: int, sharded: bool) -> tuple[list[Any], list[int]]:
    """First id and width of what a processor gets, and tokens if it raises the last column."""
    V, seen = 103, []

    class RaiseLast:
        per_token = True

        def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
            seen.append((rows.first_id, values.shape[1]))
            values[:, -1:] += 100.0
            return values

    state = SamplingState(mesh, vocab_size=V, exchange=exchange, seed=0, processors=[RaiseLast()])
    for slot in range(2):
        state.add(slot, SamplingParams(temperature=0))
    plan = BatchSharder(state).plan([0, 1])
    full = torch.zeros(plan.num_rows, V + padding, device=mesh.device_type)
    full[:, 0] = 1.0
    logits = shard_vocab(full, mesh) if sharded else replicated(full, mesh)
    return seen, Sampler(state)(logits, plan).token_ids[:, 0].tolist()


@worlds(*FEW_WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_custom_processors_get_no_padding(ranks, exchange):
    """Catches columns beyond the vocabulary, which would sway a softmax or a rank of values."""
    P = ranks.size
    for padding, sharded in ((0, True), (0, False), (9, False), (5 * P - 3, True)):
        width = -(-(103 + padding) // P)
        last = [max(width * rank, min(103, width * (rank + 1))) for rank in range(P)]
        for rank, (seen, tokens) in enumerate(ranks.run(columns_seen, exchange, padding, sharded)):
            if exchange == "vocab":
                assert seen == [(width * rank, last[rank] - width * rank)]
                assert tokens == [last[0] - 1] * 2
            else:
                assert seen == [(0, 103)]
                assert tokens == [102] * 2


class Thirds:
    """Bans a third of the ids of each row, by what it is told of its columns."""

    per_token = True

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        ids = rows.first_id + torch.arange(values.shape[1], device=values.device)
        return values.masked_fill((ids + rows.slots[:, None]) % 3 == 0, -INF)


WIDTHS_V, WIDE_SLOT = 100, 3
NARROW: list[dict[str, Any]] = [
    {},
    {"min_tokens": 4, "stop_token_ids": list(range(40, 80))},
    {"bad_words_ids": [[a, b] for a in range(100) for b in range(a % 2, 100, 20)]},
]


def padded_otherwise(mesh, custom: bool, widths: list[int]) -> list[str]:
    """Compare the steps of one state, whose logits are padded anew each time, with those of others.

    Each of the others has a state of its own. Returns what was refused, in order.
    """
    device, biased = mesh.device_type, {"logit_bias": {7: 2.0, 55: 30.0, 99: -INF}}
    words_of, generator = np.random.default_rng(1), torch.Generator().manual_seed(4)
    output: list[list[int]] = [[] for _ in range(WIDE_SLOT + 1)]

    def new() -> SamplingState:
        state = SamplingState(
            mesh,
            vocab_size=WIDTHS_V,
            exchange="vocab",
            seed=0,
            processors=[Thirds()] if custom else [],
        )
        for slot, asked in enumerate([*NARROW, biased]):
            params = SamplingParams(seed=slot, **asked)
            state.add(slot, params, prompt_token_ids=[slot], output_token_ids=output[slot])
        return state

    def step(state, slots, full, mask) -> list[int]:
        logits = shard_vocab(full[slots].to(device), mesh)
        output = Sampler(state)(logits, BatchSharder(state).plan(slots), mask=mask)
        return output.token_ids[:, 0].tolist()

    state, said, bound = new(), [], 0
    for i, width in enumerate(widths):
        wide = i >= 4 and i % 2 == 0
        slots = [0, 1, 2, WIDE_SLOT] if wide else [2, 0, 1]
        full = torch.randn(WIDE_SLOT + 1, width, generator=generator)
        words = words_of.integers(-(2**31), 2**31, (len(slots), 4)).astype(np.int32)
        mask = TokenBitmask(bitmask=torch.from_numpy(words)) if i % 3 else None
        bound = width if wide and not bound else bound
        if wide and -(-width // mesh.size()) != -(-bound // mesh.size()):
            with pytest.raises(ValueError, match="columns a rank with padding") as refused:
                step(state, slots, full, mask)
            said.append(str(refused.value))
            continue
        got, wanted = (step(each, slots, full, mask) for each in (state, new()))
        assert got == wanted, (i, width)
        for slot, token in zip(slots, got, strict=True):
            output[slot].append(token)
    return said


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:2")
@pytest.mark.parametrize("custom", [False, True])
def test_padding_that_changes_between_steps(ranks, custom):
    """Catches columns of an earlier step, of another width: masks and processors read other ids."""
    widths = [128, 100, 112, 160, 128, 100, 160, 101, 128, 160, 100, 100]
    P = ranks.size
    for said in ranks.run(padded_otherwise, custom, widths):
        assert len(said) == 2
        for text, width in zip(said, (160, 100), strict=True):
            assert f"logits must have {128 // P} columns a rank with padding, as biases" in text
            assert text.endswith(f"got {width // P}")


class Doubles:
    """Returns what no processor may."""

    per_token = True

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        return values.double()


def wrong_without_columns(mesh) -> str:
    """What each rank says of a wrong processor, those that hold nothing but padding too."""
    state = SamplingState(mesh, vocab_size=3, exchange="vocab", seed=0, processors=[Doubles()])
    state.add(0, SamplingParams())
    plan = BatchSharder(state).plan([0])
    with pytest.raises(ValueError, match="must return plain float32") as refused:
        Sampler(state)(shard_vocab(torch.zeros(1, 3), mesh), plan)
    return str(refused.value)


@worlds("cpu:4")
def test_ranks_without_columns_ask_processors_too(ranks):
    """Catches a rank that waits for the others, which have refused."""
    assert len(ranks.run(wrong_without_columns)) == 4


class Moody:
    """Writes to all that it is given, and raises once for a slot, on the ranks that sample it."""

    per_token = True

    def __init__(self, slot: int, error: Exception) -> None:
        self.slot, self.error, self.raised = slot, error, False

    def __call__(self, values: torch.Tensor, rows: RowContext) -> torch.Tensor:
        if (rows.slots == self.slot).any() and not self.raised:
            self.raised = True
            raise self.error
        for x in rows[:-1]:
            assert isinstance(x, torch.Tensor)
            x.zero_()
        return values


def steps_of_moods(mesh, exchange: str, error: Exception) -> tuple[str, list[list[int]]]:
    """What each rank says of a processor that raises, and tokens of later steps, moody and not."""
    moody, found = Moody(1, error), []
    states = [
        SamplingState(
            mesh,
            vocab_size=9,
            max_num_reqs=4,
            exchange=exchange,
            processors=own,
            seed=0,
            debug=True,
        )
        for own in ([moody], [])
    ]
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    for state in states:
        for slot in range(4):
            state.add(slot, SamplingParams(seed=slot))

    def step(state: SamplingState) -> list[int]:
        plan = BatchSharder(state).plan(range(4))
        tokens = Sampler(state)(shard_vocab(plan.select(logits), mesh), plan).token_ids
        return tokens[:, 0].tolist()

    with pytest.raises(ValueError, match=r"rank 1|not in the mood") as refused:
        step(states[0])
    for _ in range(2):
        found += [step(state) for state in states]
    return str(refused.value), found


@worlds("cpu:2", "cpu:4")
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_ranks_hear_of_a_processor_that_raised(ranks, exchange, kind):
    """Catches ranks that wait for the one whose processor raised, and plans that it wrote to."""
    results = ranks.run(steps_of_moods, exchange, kind("not in the mood"))
    assert f"a processor raised {kind.__name__}" in results[1][0]
    for _, (first, plain, second, again) in results:
        assert (first, second) == (plain, again)


def refused_under_vocab(mesh) -> list[str]:
    said, needs_rows = [], AddBias({}, per_token=False)
    for exchange in ("vocab", "auto"):
        try:
            state = SamplingState(
                mesh, vocab_size=9, exchange=exchange, seed=0, processors=[needs_rows]
            )
            state.add(0, SamplingParams())
            BatchSharder(state).plan([0], exchange="vocab")
        except ValueError as refused:
            said.append(str(refused))
    for wrong in (lambda values, rows: values[:, :2], lambda values, rows: values.double(), print):
        state = SamplingState(mesh, vocab_size=9, seed=0, processors=[wrong])  # type: ignore[list-item]
        state.add(0, SamplingParams())
        plan = BatchSharder(state).plan([0])
        full = torch.zeros(1, 9, device=mesh.device_type)
        try:
            Sampler(state)(shard_vocab(plan.select(full), mesh), plan)
        except ValueError as refused:
            said.append(str(refused))
    state = SamplingState(mesh, vocab_size=9, seed=0, processors=[needs_rows])
    try:
        state.add(0, SamplingParams(logprobs=1))
    except ValueError as refused:
        said.append(str(refused))
    try:
        SamplingState(mesh, vocab_size=9, seed=0, processors=[3])  # type: ignore[list-item]
    except ValueError as refused:
        said.append(str(refused))
    return said


@worlds("cpu:2")
def test_custom_processors_that_are_refused(ranks):
    for said in ranks.run(refused_under_vocab):
        assert len(said) == 7
        assert all("per_token" in text for text in said[:2])
        assert all("must return plain float32 of shape" in text for text in said[2:5]), said
        assert 'logprobs_mode must be a "processed" one' in said[5]
        assert "processors[0] must be callable, got 3" in said[6]
