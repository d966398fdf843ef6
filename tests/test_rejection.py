"""Verification by enumeration: every draft, every acceptance, every token, each with its chance.

What `verify` does with a coin or a uniform number is a step function of it, so that bisection over
all 2**62 values gives its chances exactly. The law of what is emitted is then a finite sum.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_sample import SamplingParams, ops, rejection
from dtensor_sample.exchange import Axis, BatchExchange, Logits
from dtensor_sample.ops.edits import IN_PROMPT, Edits
from dtensor_sample.params import RowParams, filters_of, pack
from dtensor_sample.random import COIN
from dtensor_sample.weigh import weigh
from tests import oracle
from tests.batches import library_weights

HERE = BatchExchange(Axis("", 1, 0))
METHODS = ("standard", "block")
LAST = 2**62 - 1
"""The largest coin."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small ops gain nothing from more threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Requests:
    """Q requests with K drafts each, to be verified under given coins. J = K + 1."""

    def __init__(
        self,
        target_QJV: np.ndarray,
        draft_QKV: np.ndarray | None,
        token_QK: np.ndarray,
        params: SamplingParams,
    ) -> None:
        Q, J, V = target_QJV.shape
        self.params = RowParams.unpack(torch.tensor([pack(params, 0)] * (Q * J)))
        self.filters, self.size = filters_of([params]), V
        first_id_S = torch.zeros(1, dtype=torch.int64)
        edits = edits_of(params, token_QK, V)
        target = torch.from_numpy(target_QJV).reshape(Q * J, 1, V)
        self.target = Logits(target, first_id_S, edits=edits or ())
        row_QJ = torch.arange(Q * J).view(Q, J)
        row_G = row_QJ[:, :-1].flatten()
        q = None
        if draft_QKV is not None:
            draft_GSV = torch.from_numpy(draft_QKV).reshape(Q * (J - 1), 1, V)
            number_G = torch.arange(Q * (J - 1))
            drafts = Logits(draft_GSV, first_id_S, number_G, edits.at(row_G) if edits else ())
            params_G = RowParams(*(x_R[row_G] for x_R in self.params))
            q = weigh(drafts, params_G, self.filters, HERE, V)
        shape = (Q, J - 1)
        self.drafts = rejection.Drafts(
            row_QJ=row_QJ,
            count_Q=torch.full((Q,), J),
            token_QK=torch.from_numpy(token_QK),
            place_QK=torch.arange(Q * (J - 1)).view(shape),
            row_G=row_G,
            token_G=torch.from_numpy(token_QK).flatten(),
            one_hot_G=torch.from_numpy(token_QK if q is None else token_QK * 0 - 1).flatten(),
            drawn_Q=torch.full((Q,), q is not None),
            q=q,
        )

    def verify(
        self, method: str, coin_QK: np.ndarray, after_Q: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[Q] accepted drafts and [Q] the token after them, given coins and uniform numbers."""

        def injected(seed_R, position_R, offset_R, stream):
            given = coin_QK if stream == COIN else after_Q
            return torch.from_numpy(given.reshape(seed_R.shape))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops.uniform, "_function", injected)
            result = rejection.verify(
                self.target,
                self.drafts,
                self.params,
                torch.zeros(self.params.seed.shape, dtype=torch.int64),
                self.filters,
                HERE,
                self.size,
                method,
            )[0].numpy()
        accepted_Q = result[:, -4] - 1
        return accepted_Q, result[np.arange(len(result)), accepted_Q]


PROMPT, OUTPUT = [0], [1, 1]
"""Of all requests, before their drafts."""


def edits_of(params: SamplingParams, token_QK: np.ndarray, V: int) -> Edits | None:
    """What rows of Q requests with K drafts are asked for: row j sees the drafts before it."""
    if not params.needs.edited:
        return None
    (Q, K), counts = token_QK.shape, np.bincount(OUTPUT, minlength=V)
    counts[PROMPT] |= IN_PROMPT
    drafts = np.repeat(token_QK, K + 1, axis=0)
    drafts[np.arange(K) >= np.tile(np.arange(K + 1), Q)[:, None]] = -1
    rates = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    edits = Edits.none(Q * (K + 1), torch.device("cpu"))
    return edits._replace(
        table_E=torch.zeros_like(edits.table_E),
        rates_E3=torch.tensor(rates).expand(Q * (K + 1), 3),
        drafts_EK=torch.from_numpy(drafts),
        bias_MW=torch.from_numpy(params.bias_of_ids(V))[None],
        counts_MW=torch.from_numpy(counts)[None].int(),
    )


RESOLUTION = 1 << 13
"""Chances are known to within this many numbers of 2**62: 2e-15."""


def shares(passes, shape: tuple[int, ...], probes: int) -> np.ndarray:
    """The share of the 2**62 numbers that passes, for conditions that hold up to some number.

    Args:
        passes: whether each of [probes, *shape] numbers does.
        shape: of the conditions.
        probes: how many numbers to try at once for each.
    """
    low, high = np.zeros(shape, np.int64), np.full(shape, 1 << 62)
    parts = np.arange(1, probes + 1).reshape(-1, *[1] * len(shape))
    while ((high - low) > RESOLUTION).any():
        part = (high - low) // (probes + 1)
        passed = passes(np.minimum(low + parts * part, LAST)).sum(0)
        last = low + part * passed
        high = np.where(passed < probes, last + part, high)
        low = last
    return np.where(passes(np.full((probes, *shape), LAST))[0], 1.0, low / 2.0**62)


def forced(method: str, K: int, count: int) -> list[int]:
    """Coins under which `count` drafts are accepted, unless that has no chance."""
    if method == "standard":
        return [0] * count + [LAST] * (K - count)
    return [0 if i == count - 1 else LAST for i in range(K)]


@dataclass(frozen=True)
class Paths:
    """Q paths of K drafts, each with the logits that it meets."""

    target_QJV: np.ndarray
    draft_QKV: np.ndarray | None
    """None: the drafts were chosen."""
    token_QK: np.ndarray
    params: SamplingParams

    @property
    def probes(self) -> int:
        """How many numbers to try at once: what is quickest."""
        filtered = self.params.top_k > 0 or self.params.top_p < 1
        requests = self.token_QK.size * self.target_QJV.shape[2]
        return max(1, min(31, (200 if filtered else 3000) // requests))

    def repeated(self, times: int) -> Requests:
        return Requests(
            np.tile(self.target_QJV, (times, 1, 1)),
            None if self.draft_QKV is None else np.tile(self.draft_QKV, (times, 1, 1)),
            np.tile(self.token_QK, (times, 1)),
            self.params,
        )

    def accepted(self, method: str) -> np.ndarray:
        """[Q, K + 1] the chance of 0 to K accepted drafts."""
        (Q, K), probes = self.token_QK.shape, self.probes
        requests, shape = self.repeated(probes * K), (probes, K, Q)
        after = np.zeros(shape, np.int64)

        def passes(coin_NKQ: np.ndarray) -> np.ndarray:
            """Whether coins pass while the others let them decide."""
            coins = np.full((*shape, K), 0 if method == "standard" else LAST)
            for i in range(K):
                coins[:, i, :, i] = coin_NKQ[:, i]
            accepted = requests.verify(method, coins, after)[0].reshape(shape)
            return accepted > np.arange(K)[:, None]

        passing = shares(passes, (K, Q), probes)
        return np.array([oracle.count_chances(row, method) for row in passing.T.tolist()])

    def after(self, method: str) -> tuple[np.ndarray, np.ndarray]:
        """[Q, K + 1, V] the law of the token after so many drafts; [Q, K + 1] if that can be."""
        (Q, K), V, probes = self.token_QK.shape, self.target_QJV.shape[2], self.probes
        shape = (probes, K + 1, V - 1, Q)
        requests, coins = self.repeated(math.prod(shape[:3])), np.empty((*shape, K), np.int64)
        for count in range(K + 1):
            coins[:, count] = forced(method, K, count)

        def passes(after: np.ndarray) -> np.ndarray:
            """Whether the token is at most 0, 1, ..., V - 2."""
            token = requests.verify(method, coins, after)[1].reshape(shape)
            return token <= np.arange(V - 1)[:, None]

        running = shares(passes, shape[1:], probes)
        accepted = requests.verify(method, coins, np.zeros(shape, np.int64))[0].reshape(shape)
        law = np.diff(running, axis=1, prepend=0.0, append=1.0).transpose(2, 0, 1)
        return law, (np.arange(K + 1)[:, None] == accepted[0, :, 0]).T


class Model:
    """Logits of a target and a draft after every tuple of at most K ids."""

    def __init__(self, p: dict, q: dict, K: int, params: SamplingParams) -> None:
        self.rows = {"p": p, "q": q}
        self.K, self.params = K, params
        self.size = len(p[()])
        self.exact = {
            name: {context: self._probabilities(row, context) for context, row in rows.items()}
            for name, rows in self.rows.items()
        }
        self.paths = list(itertools.product(range(self.size), repeat=K))

    def _probabilities(self, row: np.ndarray, context: tuple[int, ...]) -> list[F]:
        seen = (self.params, PROMPT, [*OUTPUT, *context])
        return oracle.row_of(
            row,
            self.params,
            vocab_size=self.size,
            largest=float(np.finfo(np.float32).max),
            weights=library_weights,
            edit=lambda values: oracle.process(values, *seen),
        ).probabilities

    def p_of(self, context: tuple[int, ...]) -> list[F]:
        return self.exact["p"][context]

    def q_of(self, context: tuple[int, ...]) -> list[F]:
        return self.exact["q"][context]

    def chance(self, path: tuple[int, ...]) -> float:
        """Of drafting a path."""
        return math.prod(float(self.q_of(path[:i])[x]) for i, x in enumerate(path))

    def along(self, name: str, length: int) -> np.ndarray:
        """[paths, length, V] logits after the first 0, 1, ... ids of every path."""
        rows = [[self.rows[name][path[:i]] for i in range(length)] for path in self.paths]
        return np.array(rows, np.float32)


def paths_of(models: Sequence[Model], *, one_hot: bool = False) -> Paths:
    """All paths of all models."""
    K = models[0].K
    return Paths(
        np.concatenate([model.along("p", K + 1) for model in models]),
        None if one_hot else np.concatenate([model.along("q", K) for model in models]),
        np.array([path for model in models for path in model.paths]),
        models[0].params,
    )


def emitted_laws(
    models: Sequence[Model], method: str, *, one_hot: bool = False
) -> list[tuple[list[dict], Any]]:
    """The library's `oracle.emitted_law` of each model, of one K, V and params.

    One law a model when drafts are drawn, one a path when they are chosen: any must do.
    """
    K = models[0].K
    paths = paths_of(models, one_hot=one_hot)
    chances = paths.accepted(method)
    after, possible = paths.after(method)
    assert (possible | (chances < 1e-12)).all()
    results = []
    for m, model in enumerate(models):
        p_of = {context: [float(x) for x in row] for context, row in model.exact["p"].items()}
        nothing = dict.fromkeys(itertools.product(range(model.size), repeat=K + 1), 0.0)
        laws, mean = [dict(nothing)], 0.0
        for n, path in enumerate(model.paths):
            chance = 1.0
            if one_hot:
                laws.append(dict(nothing))
            else:
                chance = model.chance(path)
            case = m * len(model.paths) + n
            for count in range(K + 1):
                weight = chance * chances[case, count]
                mean += count * weight
                for x, share in enumerate(after[case, count].tolist()):
                    emitted = (*path[:count], x)
                    oracle.add_completions(laws[-1], emitted, weight * share, p_of.__getitem__)
        results.append((laws[one_hot:], mean))
    return results


# --- models


def context_free(p: Sequence[float], q: Sequence[float], K: int) -> Model:
    contexts = [c for i in range(K + 1) for c in itertools.product(range(len(p)), repeat=i)]
    with np.errstate(divide="ignore"):
        log_p, log_q = (np.log(np.array(row, np.float64)).astype(np.float32) for row in (p, q))
    rows = dict.fromkeys(contexts, log_p), dict.fromkeys(contexts, log_q)
    return Model(rows[0], rows[1], K, SamplingParams(seed=0))


def random_model(seed: int, V: int, K: int, params: SamplingParams) -> Model:
    """Drafts that are far, near or equal in parts, with ids that only one of both can give."""
    rng = np.random.default_rng(seed)
    p, q = {}, {}
    for length in range(K + 1):
        for context in itertools.product(range(V), repeat=length):
            p[context] = rng.normal(0, rng.choice([0.5, 2.0]), V).astype(np.float32)
            q[context] = p[context] + rng.choice([0, 0.1, 1, 3]) * rng.normal(0, 1, V)
            q[context] = q[context].astype(np.float32)
            for row in (p, q):
                if rng.random() < 0.15:
                    row[context][rng.integers(V)] = -np.inf
    return Model(p, q, K, params)


THIRDS = ([F(1, 3), F(2, 3)], [F(2, 3), F(1, 3)])
SIXTHS = ([F(1, 6), F(2, 6), F(3, 6)], [F(4, 6), F(1, 6), F(1, 6)])
GOLDEN = [
    # p, q, K, expected number of accepted drafts: standard, block.
    (*THIRDS, 2, F(10, 9), F(11, 9)),
    (*SIXTHS, 2, F(3, 4), F(5, 6)),
    (*SIXTHS, 3, F(7, 8), F(77, 72)),
]
STOP_AT_FIRST_FAILURE = [F(1, 3), F(1, 6), F(7, 36)]
"""Total variation when block verification stops at the first prefix that does not pass."""


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_golden(case, monkeypatch):
    """Catches a rule that is biased or accepts fewer drafts than it should, in exact fractions.

    Token-wise residuals in block verification show up at V = 3 and K = 3 only.
    """
    p, q, K, *means = GOLDEN[case]
    for method, mean in zip(METHODS, means, strict=True):
        plain = (lambda _: p), (lambda _: q)
        law, exact_mean = oracle.emitted_law(*plain, K, len(p), method)
        assert oracle.total_variation(law, oracle.target_law(plain[0], K, len(p))) == 0
        assert exact_mean == mean
        model = context_free(p, q, K)
        [([law], got)] = emitted_laws([model], method)
        wanted = oracle.target_law(model.p_of, K, model.size)
        assert oracle.total_variation(law, wanted) < 1e-12
        assert got == pytest.approx(float(mean), abs=1e-6)
        exact_mean = oracle.emitted_law(model.p_of, model.q_of, K, model.size, method)[1]
        assert got == pytest.approx(float(exact_mean), abs=1e-12)
    first_failure = oracle.count_chances
    monkeypatch.setattr(oracle, "count_chances", lambda c, _: first_failure(c, "standard"))
    law, _ = oracle.emitted_law(*plain, K, len(p), "block")
    wanted = oracle.target_law(plain[0], K, len(p))
    assert oracle.total_variation(law, wanted) == STOP_AT_FIRST_FAILURE[case]


def test_golden_in_context():
    """Catches rows of another place: p and q depend on the token before."""
    p: dict[tuple[int, ...], Any]
    q: dict[tuple[int, ...], Any]
    p = {(): [0.3, 0.3, 0.4], (0,): [0.5, 0.1, 0.4], (1,): [0.5, 0.2, 0.3], (2,): [0.1, 0.7, 0.2]}
    q = {(): [0.5, 0.4, 0.1], (0,): [0.3, 0.6, 0.1], (1,): [0.4, 0.1, 0.5], (2,): [0.2, 0.2, 0.6]}
    # The row after both drafts: anything, but not the same after all.
    p |= {(x, y): np.roll([0.6, 0.3, 0.1], x + y) for x in range(3) for y in range(3)}
    q |= {context: [0.2, 0.3, 0.5] for context in itertools.product(range(3), repeat=2)}
    log_p, log_q = ({c: np.log(r).astype(np.float32) for c, r in rows.items()} for rows in (p, q))
    model = Model(log_p, log_q, 2, SamplingParams(seed=0))
    for method, mean in zip(METHODS, (1.14, 1.26), strict=True):
        [([law], got)] = emitted_laws([model], method)
        wanted = oracle.target_law(model.p_of, 2, 3)
        assert oracle.total_variation(law, wanted) < 1e-12
        assert got == pytest.approx(mean, abs=1e-6)


SHAPES: list[tuple[int, int, int, dict[str, Any]]] = [
    # V, K, models, params
    (3, 2, 6, {}),
    (2, 4, 3, {"temperature": 0.7}),
    (3, 2, 1, {"temperature": 1.7, "top_k": 2, "top_p": 0.95}),
    (3, 3, 2, {"min_p": 0.2}),
    (3, 2, 1, {"repetition_penalty": 1.7, "frequency_penalty": 0.9, "logit_bias": {2: 0.8}}),
    (3, 2, 1, {"presence_penalty": 1.3, "allowed_token_ids": [0, 2], "temperature": 0.8}),
    (4, 2, 1, {"presence_penalty": -1, "logit_bias": {1: -math.inf}, "top_p": 0.8}),
]


@pytest.mark.parametrize(
    "shape", [2, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, 1, 3, 4, 5, 6))]
)
def test_random_models(shape):
    """Catches any bias, and filters, biases or penalties that are not applied to p or to q."""
    V, K, count, params = SHAPES[shape]
    models = [random_model(i, V, K, SamplingParams(seed=0, **params)) for i in range(count)]
    for method in METHODS:
        for model, ([law], _) in zip(models, emitted_laws(models, method), strict=True):
            wanted = oracle.target_law(model.p_of, K, V)
            assert oracle.total_variation(law, wanted) < 1e-12


@pytest.mark.slow
def test_block_accepts_no_fewer():
    """Catches block verification that accepts fewer drafts than standard does."""
    models = [random_model(200 + i, 2, 2, SamplingParams(seed=0)) for i in range(100)]
    weight = np.array([model.chance(path) for model in models for path in model.paths])
    paths = paths_of(models)
    mean = {
        method: ((paths.accepted(method) @ np.arange(3)) * weight).reshape(100, -1).sum(1)
        for method in METHODS
    }
    assert (mean["block"] > mean["standard"] - 1e-12).all()
    assert (mean["block"] > mean["standard"] + 0.01).any()


@pytest.mark.parametrize("method", METHODS)
def test_chosen_drafts(method):
    """Catches a joint ratio with q = 1 missing: whatever was chosen, p is what comes out."""
    models = [random_model(50 + i, 3, 2, SamplingParams(seed=0)) for i in range(6)]
    means = []
    for model, (laws, mean) in zip(models, emitted_laws(models, method, one_hot=True), strict=True):
        wanted = oracle.target_law(model.p_of, 2, 3)
        assert len(laws) == 9
        assert max(oracle.total_variation(law, wanted) for law in laws) < 1e-12
        means.append(mean)
    exact = [
        sum(
            float(model.p_of(())[x] * (1 + model.p_of((x,))[y])) for x, y in model.paths
        )  # x is accepted by its own p, then y
        for model in models
    ]
    assert means == pytest.approx(exact, abs=1e-12)


ENDS: dict[str, tuple[list, list | None, int, list[int]]] = {
    # Logits of p and of q (None: chosen), the draft, accepted drafts for the first and last coin.
    "equal": ([0.3, -1.0, 2.0], [0.3, -1.0, 2.0], 1, [1, 1]),
    "equal, the only id": ([-np.inf, 0.0, -np.inf], [-np.inf, 7.0, -np.inf], 1, [1, 1]),
    "likelier in p": ([2.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0, [1, 1]),
    "likelier in q": ([0.0, 0.0, 0.0], [2.0, 0.0, 0.0], 0, [1, 0]),
    "not in q": ([0.0, 0.0, 0.0], [0.0, -np.inf, 0.0], 1, [1, 1]),
    "not in p": ([0.0, -np.inf, 0.0], [0.0, 0.0, 0.0], 1, [0, 0]),
    "in neither": ([0.0, -np.inf, 0.0], [0.0, -np.inf, 1.0], 1, [0, 0]),
    "chosen, certain": ([0.0, -np.inf, -np.inf], None, 0, [1, 1]),
    "chosen, likely": ([1.0, 0.0, 0.0], None, 0, [1, 0]),
    "chosen, impossible": ([0.0, 0.0, -np.inf], None, 2, [0, 0]),
    "weighs nothing in q": ([0.0, 0.0, 0.0], [0.0, -80.0, 0.0], 1, [1, 1]),
    "weighs nothing in p": ([0.0, -80.0, 0.0], [0.0, 0.0, 0.0], 1, [0, 0]),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_sure_draft_before_an_impossible_one(method):
    """Catches 0 / 0 as a refusal: p = q everywhere, and the second draft cannot be."""
    rows = np.array([[0.0, 0.0, 0.0], [0.0, -np.inf, 0.0], [0.0, 0.0, 0.0]], np.float32)
    requests = Requests(rows[None], rows[None, :2], np.array([[0, 1]]), SamplingParams(seed=0))
    for coin in (0, LAST):
        accepted = requests.verify(method, np.array([[coin, coin]]), np.array([5]))[0].item(0)
        assert accepted == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ENDS)
def test_ends_of_coins(name, method):
    """Catches division by zero and strictness: p = q always passes, p = 0 never does.

    Nor may the token after the drafts be one without residual, at either end of its uniform.
    """
    p, q, draft, wanted = ENDS[name]
    target = np.array([[p, [0.0, 1.0, -np.inf]]], np.float32)
    drafts = None if q is None else np.array([[q]], np.float32)
    requests = Requests(target, drafts, np.array([[draft]]), SamplingParams(seed=0))
    ends = np.array([0, LAST])
    got = [[requests.verify(method, ends[[i]], ends[[j]]) for j in (0, 1)] for i in (0, 1)]
    assert [counts[0][0] for counts, _ in got] == wanted
    for (first, low), (last, high) in got:
        assert first == last
        possible = [0, 1]
        if not first[0]:
            weights = [library_weights(np.array(r, np.float32), 1.0) for r in (p, q or p)]
            p_row, q_row = (row / row.sum() for row in weights)
            q_row = np.eye(3)[draft] if q is None else q_row
            left = np.maximum(p_row - q_row, 0)
            possible = np.flatnonzero(left if left.any() else p_row).tolist()
        assert (low[0], high[0]) == (possible[0], possible[-1])


def test_residuals_are_truncated_differences():
    """Catches residuals in other units, of products in other precision, or truncated once a sum."""
    V, rng = 5000, np.random.default_rng(0)
    p_V = rng.normal(0, 3, V).astype(np.float32)
    q_V = p_V + rng.choice([0, 0, 0.1, 3], V) * rng.normal(0, 1, V).astype(np.float32)
    q_V = q_V.astype(np.float32)
    p_weights, q_weights = (library_weights(x_V, 1.0) for x_V in (p_V, q_V))
    p_total, q_total = int(p_weights.sum()), int(q_weights.sum())
    first_id_S, row = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    scale_R = torch.tensor([math.log2(math.e)])
    for ratio in (ops.ONE, int(0.7 * ops.ONE), 0):
        # In units of 2**-51.
        p_units = p_weights * (ratio / 2**9 / p_total)
        units = np.floor(np.maximum(p_units - q_weights * (2.0**51 / q_total), 0)).astype(int)
        exact = [
            max(F(ratio, ops.ONE) * F(w, p_total) - F(u, q_total), F(0))
            for w, u in zip(p_weights.tolist(), q_weights.tolist(), strict=True)
        ]
        lost = sum(exact) - F(int(units.sum()), 2**51)
        assert 0 <= lost < F(V, 2**51)
        assert (ratio == 0) == (not units.any())

        # The op sums them over parts, and picks by them.
        args: list[Any] = []
        for x_V in (p_V, q_V):
            x_11V = torch.from_numpy(x_V)[None, None]
            peak_R = x_11V.amax((1, 2))
            args.append((x_11V, peak_R, torch.full_like(peak_R, -torch.inf)))
        (p_11V, *of_p), (q_11V, *of_q) = args
        common = (
            *(p_11V, first_id_S, None, (), *of_p, scale_R, row, row + p_total, row + ratio),
            *(q_11V, row, (), *of_q, scale_R, row + q_total, row - 1),
        )
        mass_1C = ops.residual_mass(*common, None, V)[0]
        width = -(-V // (16 * ops.PARTS)) * 16
        padded = np.pad(units, (0, width * ops.PARTS - V)).reshape(ops.PARTS, width)
        assert mass_1C.tolist() == [(padded.sum(1) << 9).tolist()]
        if ratio > 0:
            running = np.cumsum(units << 9)
            for point in (0, int(running[V // 2]) - 1, int(running[V // 2]), int(running[-1]) - 1):
                uniform = -(-(point << 62) // int(running[-1]))  # the least that points there
                left = (mass_1C[None], mass_1C[None], True, row, row)
                token_R = ops.recover(*common, *left, 0, row + uniform, V)
                assert token_R.item() == np.argmax(running > point)
