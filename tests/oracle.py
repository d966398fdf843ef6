"""What the library must answer: one process, one row at a time, as plain as the definitions.

Nothing here imports `dtensor_sample`. Integers are Python's or numpy int64 (a row's weights add up
to at most 2^62), comparisons are of float32 values. The weights of a row may be given, so that a
draw can be compared token for token; `float64_weights` computes them independently.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Verification
of drafts: "standard" is Leviathan et al., "Fast inference from transformers via speculative
decoding", 2023; "block" is Sun et al., "Block verification accelerates speculative decoding",
arXiv 2403.10444. Its arithmetic works on Fractions and floats alike.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

TARGET, DRAFT, COIN, RECOVERY, SPAWN = range(5)
"""Random streams."""

LOW, HIGH = 1928571472, 2589576016
"""Positions at which the target uniform of seed 0 is below 7e-10, and above 1 - 4e-11."""

_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds of Philox on four 32-bit words of counter under two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _first_64_bits(seed: int, position: int, offset: int, stream: int) -> int:
    counter = (position & _WORD, position >> 32 & _WORD, offset, stream)
    low, high, _, _ = philox4x32(counter, (seed & _WORD, seed >> 32 & _WORD))
    return low | high << 32


def uniform(seed: int, position: int, *, stream: int = TARGET, offset: int = 0) -> int:
    """A uniform integer in [0, 2^62)."""
    return _first_64_bits(seed, position, offset, stream) >> 2


def spawned_seed(seed: int, j: int) -> int:
    """The seed of the j-th of several samples of one seeded request."""
    return _first_64_bits(seed, j, 0, SPAWN)


def unseeded_seed(base_seed: int, j: int) -> int:
    """The seed of the j-th unseeded request (or of row j in a stateless call)."""
    return _first_64_bits(base_seed, j, 1, SPAWN)


def weight_bits(vocab_size: int) -> int:
    """S: the largest weight of a row is 2^S."""
    return 62 - (vocab_size - 1).bit_length()


def clean(logits: np.ndarray, vocab_size: int, largest: float) -> tuple[np.ndarray, int]:
    """A row as float32 without padding, NaN or +inf (now `largest`), and how many NaNs it had."""
    values = logits[:vocab_size].astype(np.float32)
    nans = np.isnan(values)
    values[nans] = -np.inf
    return np.minimum(values, np.float32(largest)), int(nans.sum())


def process(
    values: np.ndarray, params, prompt: Sequence[int], output: Sequence[int], legal=None
) -> np.ndarray:
    """Float32 values after what a request asks of them; every operation rounds once.

    Args:
        values: from `clean`.
        params: the request's.
        prompt: its prompt.
        output: what it has emitted, and drafts before the row.
        legal: which ids a grammar allows; None: all.
    """
    values, size, text = values.copy(), len(values), [*prompt, *output]
    never = values == -np.inf
    count = np.bincount(np.array(output, np.int64), minlength=size).astype(np.float32)
    with np.errstate(over="ignore"):
        if params.allowed_token_ids is not None:
            never[[i for i in range(size) if i not in params.allowed_token_ids]] = True
        for i, bias in params.logit_bias:
            never[i] |= bias == -np.inf
            values[i] += np.float32(bias)
        for i in sorted(set(text)):
            penalty = np.float32(params.repetition_penalty)
            values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
        values -= count * np.float32(params.frequency_penalty)
        values[count > 0] -= np.float32(params.presence_penalty)
    for *begin, last in params.bad_words_ids:
        never[last] |= text[len(text) - len(begin) :] == begin and len(text) >= len(begin)
    if len(output) < params.min_tokens:
        never[list(params.stop_token_ids)] = True
    if legal is not None:
        never |= ~legal
    largest = np.finfo(np.float32).max
    return np.where(never, np.float32(-np.inf), np.clip(values, -largest, largest) + 0)


def unchanged(values: np.ndarray) -> np.ndarray:
    """What a request that asks for nothing makes of its values."""
    return values


def scaled(values: np.ndarray, temperature: float) -> np.ndarray:
    """Y = (x - max x) * log2(e) / T: the weight of x is 2^(S + y).

    Float32 rounds the difference, which stays finite, and the factor; their product is exact.
    """
    factor = np.float32(math.log2(math.e) / temperature)
    with np.errstate(over="ignore"):
        below = np.maximum(values - values.max(), -np.finfo(np.float32).max)
    return below.astype(np.float64) * factor.astype(np.float64)


def float64_weights(values: np.ndarray, temperature: float) -> np.ndarray:
    """Weights 2^(S + y), rounded to integers."""
    y = scaled(values, temperature)
    return np.floor(np.exp2(y + weight_bits(len(values))) + 0.5).astype(np.int64)


def is_greedy(params) -> bool:
    return params.temperature < 1e-5 or params.top_k == 1 or params.top_p == 0


def threshold(values: np.ndarray, weights: np.ndarray, params) -> float:
    """The smallest value that min-p, top-k and top-p (in this order) keep; -inf if all are off."""
    least = np.float32(-np.inf)
    if params.min_p > 0:
        least = values.max() + np.float32(params.temperature * math.log(params.min_p))
    if 0 < params.top_k < len(values):
        least = max(least, np.sort(values)[-params.top_k])
    share = round(params.top_p * 2**31)
    if share < 2**31:
        descending = np.argsort(-values, kind="stable")
        descending = descending[(values[descending] >= least) & (values[descending] > -np.inf)]
        mass = np.cumsum(weights[descending])
        target = max(1, -(-share * int(mass[-1]) >> 31))
        least = max(least, values[descending[np.searchsorted(mass, target)]])
    return float(least)


def kept(values: np.ndarray, weights: np.ndarray, params) -> np.ndarray:
    """Which ids may be drawn: those at or over the threshold; -inf never is."""
    return (values >= np.float32(threshold(values, weights, params))) & (values > -np.inf)


def draw(weights: np.ndarray, u: int) -> int:
    """The lowest id whose running sum of weights exceeds u / 2^62 of the total."""
    running = np.cumsum(weights)
    return int(np.searchsorted(running, u * int(running[-1]) >> 62, side="right"))


@dataclass(frozen=True)
class Answer:
    """What is known about one row."""

    token: int
    """The sampled id, or -1."""
    num_nans: int
    failed: bool
    """True when no token is left."""


def sample(
    logits,
    params,
    *,
    seed: int,
    position: int,
    vocab_size: int,
    largest: float,
    weights=float64_weights,
):
    """The Answer for one row of logits; `weights(values, temperature)` is what to draw from."""
    values, num_nans = clean(logits, vocab_size, largest)
    if values.max() == -np.inf:
        return Answer(-1, num_nans, True)
    if is_greedy(params):
        return Answer(int(values.argmax()), num_nans, False)
    integers = weights(values, params.temperature)
    token = draw(np.where(kept(values, integers, params), integers, 0), uniform(seed, position))
    return Answer(token, num_nans, False)


# --- what is told of a token


@dataclass(frozen=True)
class Told:
    """What is told of one emitted token."""

    token: float
    """Its log-probability, or whatever the mode has in its place."""
    rank: int
    top: list[tuple[int, float]]
    """Ids and values of the likeliest, those without probability left out."""
    given: list[float]
    kept: list[tuple[int, float]]
    """All tokens that it could have been, the likeliest first, with their log-probabilities."""
    entropy: float


def log_softmax(values: np.ndarray) -> np.ndarray:
    below = values - values.max()
    return below - np.log(np.exp(below).sum())


def tell(
    logits, token: int, params, *, mode: str, vocab_size: int, largest: float, weights
) -> Told:
    """What is told of `token`, emitted in the row `logits`, by definition in float64.

    `mode` is "raw" or "processed", then "_logprobs" or "_logits".
    """
    values, _ = clean(logits, vocab_size, largest)
    allowed = np.arange(vocab_size) == values.argmax()
    temperature = 1.0
    if not is_greedy(params):
        temperature = params.temperature
        allowed = kept(values, weights(values, temperature), params)
    with np.errstate(invalid="ignore"):
        raw = values.astype(np.float64)
        processed = np.where(allowed, raw / temperature, -np.inf)
        basis = raw if mode.startswith("raw") else processed
        top = float(np.finfo(np.float32).max)
        finite = np.where(basis > -np.inf, basis.clip(-top, top), -np.inf)
        found = {"logprobs": log_softmax(basis), "logits": finite}[mode.partition("_")[2]]
        left = log_softmax(processed)
        chances = np.exp(log_softmax(basis))
        entropy = -np.sum(np.where(chances > 0, chances * log_softmax(basis), 0))

    def ranked(shown: np.ndarray) -> list[tuple[int, float]]:
        order = np.argsort(-values, kind="stable")
        return [(int(i), float(shown[i])) for i in order if shown[i] > -np.inf]

    return Told(
        token=float(found[token]),
        rank=1 + int((basis > basis[token]).sum()),
        top=ranked(found)[: params.logprobs or 0],
        given=[float(found[i]) for i in params.logprob_token_ids],
        kept=ranked(left),
        entropy=float(entropy),
    )


# --- which drafts are verified


def admitted(
    confidences: Sequence[Sequence[float]],
    drafts: Sequence[Sequence[int]],
    limits: Sequence[int],
    budget: int,
    size: int,
) -> list[int]:
    """How many drafts of each request are verified: the `budget` ones that most likely survive.

    Survival is counted in units of 2^-31, products rounded down; ties go to the earlier place in a
    block, then to the earlier request. `size` is V: a block ends at what is no id.
    """
    found = []
    for b, (chances, ids, limit) in enumerate(zip(confidences, drafts, limits, strict=True)):
        left = 2**31
        for i, (c, x) in enumerate(zip(chances, ids, strict=True)):
            if i >= limit or not 0 <= x < size:
                break
            c = 0.0 if math.isnan(c) else min(max(c, 0.0), 1.0)
            left = left * int(Fraction(c) * 2**31) >> 31
            found.append((-left, i, b))
    counts = [0] * len(drafts)
    for _, _, b in sorted(found)[:budget]:
        counts[b] += 1
    return counts


# --- drafting left to right


def factors(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 rows as integers in [-127, 127], and the float32 scale of each row."""
    scale = np.abs(rows).max(1) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.nan_to_num(np.rint(rows / scale[:, None]), nan=0.0)
    return whole.clip(-127, 127).astype(np.int64), scale


def markov(base: np.ndarray, before: int, w1: np.ndarray, w2: np.ndarray, candidates: int):
    """Float32 logits of a draft position after the token `before`.

    Args:
        base: [D] float32, the position's own logits; the `candidates` largest and those tied with
            the last stay, all of them if it is 0.
        before: an id of the target.
        w1: [V, r] float32.
        w2: [r, D] float32.
        candidates: 0, or how many.
    """
    (left, left_scale), (right, right_scale) = factors(w1), factors(w2.T)
    product = (right @ left[before]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        values = base + product * left_scale[before] * right_scale
    if 0 < candidates < len(base):
        comparable = np.where(np.isnan(base), -np.inf, base)
        least = np.sort(comparable)[-candidates]
        values = np.where(comparable < least, np.float32(-np.inf), values)
    return values


def confidence(hidden: np.ndarray, embedding: np.ndarray, weight: np.ndarray, bias: float) -> float:
    """The logistic function of weight . [hidden; embedding] + bias."""
    both = np.concatenate([hidden, embedding]).astype(np.float64)
    with np.errstate(over="ignore"):
        return float(1 / (1 + np.exp(-(weight.astype(np.float64) @ both + bias))))


# --- verification of drafts


def joint_ratios(p, q, drafts: Sequence[int], method: str) -> list:
    """What multiplies p at each place, and at last after all drafts: 1 unless in "block"."""
    ratios: list[Any] = [1]
    for p_row, q_row, x in zip(p, q, drafts, strict=False):
        if method == "standard":
            ratios.append(1)
        elif q_row[x] == 0:
            ratios.append(int(p_row[x] * ratios[-1] > 0))
        else:
            ratios.append(min(1, ratios[-1] * p_row[x] / q_row[x]))
    return ratios


def residual(p_row, q_row, ratio=1) -> list:
    """What the target has and the draft has not: max(ratio * p - q, 0) of each id."""
    return [max(ratio * a - b, 0) for a, b in zip(p_row, q_row, strict=True)]


def pass_chances(p, q, drafts: Sequence[int], method: str) -> list:
    """Of each draft ("standard") or of each prefix of drafts ("block"), the chance to pass.

    Args:
        p: rows of probabilities: p[i] judges draft i.
        q: rows of probabilities: q[i] is what draft i was drawn from.
        drafts: K ids.
        method: "standard" or "block".
    """
    if method == "standard":
        return [
            min(1, a[x] / b[x]) if b[x] else int(a[x] > 0)
            for a, b, x in zip(p, q, drafts, strict=False)
        ]
    K, ratios = len(drafts), joint_ratios(p, q, drafts, method)
    chances = []
    for i in range(1, K):
        left = sum(residual(p[i], q[i], ratios[i]))
        whole = left + 1 - ratios[i]
        chances.append(left / whole if whole else 1)
    return chances + ratios[K:] if K else []


def count_chances(passing: Sequence, method: str) -> list:
    """The chance that exactly 0, 1, ..., K drafts are accepted.

    "standard" stops at the first draft that does not pass; "block" takes the longest prefix that
    passes, whatever its shorter ones do.
    """
    K = len(passing)
    if method == "standard":
        return [math.prod(passing[:i]) * (1 - (*passing, 0)[i]) for i in range(K + 1)]
    failing = [1 - chance for chance in passing]
    return [(1, *passing)[i] * math.prod(failing[i:]) for i in range(K + 1)]


def emitted_law(p_of, q_of, K: int, size: int, method: str) -> tuple[dict, Any]:
    """The law of K + 1 tokens of which verification emits the first, and of accepted drafts.

    Args:
        p_of: the row of probabilities after a tuple of ids.
        q_of: the same of the draft.
        K: drafts.
        size: V.
        method: "standard" or "block".

    Returns:
        The probability of every tuple of K + 1 ids, when what was not emitted follows p; and the
        expected number of accepted drafts.
    """
    law: dict[tuple[int, ...], Any] = dict.fromkeys(itertools.product(range(size), repeat=K + 1), 0)
    mean: Any = 0
    for drafts in itertools.product(range(size), repeat=K):
        if chance := draft_chance(q_of, drafts):
            mean += chance * add_emitted(law, p_of, q_of, drafts, chance, size, method)
    return law, mean


def draft_chance(q_of, drafts: Sequence[int]):
    """The chance that these are drafted."""
    return math.prod(q_of(drafts[:i])[x] for i, x in enumerate(drafts))


def add_emitted(law: dict, p_of, q_of, drafts: Sequence[int], chance, size: int, method: str):
    """Add what is emitted once these drafts, and no more, are verified; how many are accepted."""
    K, mean = len(drafts), 0
    p, q = ([of(drafts[:i]) for i in range(K + 1)] for of in (p_of, q_of))
    ratios = joint_ratios(p, q, drafts, method)
    counts = count_chances(pass_chances(p, q, drafts, method), method)
    for i, count_chance in enumerate(counts):
        if not count_chance:
            continue
        mean += count_chance * i
        left = p[K] if i == K else residual(p[i], q[i], ratios[i])
        for x in range(size):
            weight = chance * count_chance * left[x] / sum(left)
            add_completions(law, (*drafts[:i], x), weight, p_of)
    return mean


def add_completions(law: dict, emitted: tuple[int, ...], weight, p_of) -> None:
    """Add the weight of some emitted ids to all tuples that begin with them, by p."""
    if emitted in law:
        law[emitted] += weight
    elif weight:
        for x, chance in enumerate(p_of(emitted)):
            add_completions(law, (*emitted, x), weight * chance, p_of)


def target_law(p_of, K: int, size: int) -> dict:
    """The probability of every tuple of K + 1 ids under p."""
    law: dict[tuple[int, ...], Any] = dict.fromkeys(itertools.product(range(size), repeat=K + 1), 0)
    add_completions(law, (), 1, p_of)
    return law


def total_variation(first: dict, second: dict):
    return sum(abs(first[key] - second[key]) for key in first) / 2


@dataclass(frozen=True)
class Row:
    """The distribution of one row of logits under its request's parameters."""

    weights: np.ndarray
    """Integers, 0 where not kept."""
    argmax: int
    """-1 where no token is left."""
    num_nans: int

    @property
    def probabilities(self) -> list[Fraction]:
        total = int(self.weights.sum())
        return [Fraction(int(weight), total or 1) for weight in self.weights]


def row_of(
    logits, params, *, vocab_size: int, largest: float, weights=float64_weights, edit=unchanged
) -> Row:
    values, num_nans = clean(logits, vocab_size, largest)
    values = edit(values)
    if values.max() == -np.inf:
        return Row(np.zeros(vocab_size, np.int64), -1, num_nans)
    greedy = is_greedy(params)
    integers = weights(values, 1.0 if greedy else params.temperature)
    if not greedy:
        integers = np.where(kept(values, integers, params), integers, 0)
    return Row(integers, int(values.argmax()), num_nans)


def draft(row: Row, params, *, seed: int, position: int, step: int) -> int:
    """Draft token `step` of the block that begins at `position`; -1 where no token is left."""
    if row.argmax < 0 or is_greedy(params):
        return row.argmax
    return draw(row.weights, uniform(seed, position, stream=DRAFT, offset=step))


@dataclass(frozen=True)
class Verified:
    """What one request emits."""

    tokens: list[int]
    """Accepted drafts and the token after them; without that one where it failed."""
    num_rejected: int
    num_nans: int
    failed: bool


def verify(
    rows: Sequence[Row],
    drafts: Sequence[int],
    draft_rows: Sequence[Row | None],
    params,
    *,
    seed: int,
    position: int,
    method: str,
) -> Verified:
    """Verify k drafts against k + 1 rows.

    Args:
        rows: k + 1 rows of the target.
        drafts: k ids; the first that is none ends the block.
        draft_rows: what each was drawn from; None where it was chosen.
        params: the request's.
        seed: the request's.
        position: of the block's first token.
        method: "standard" or "block".
    """
    size = len(rows[0].weights)
    p, q = [], []
    for row, x, draft_row in zip(rows, drafts, draft_rows, strict=False):
        drawn_from_nothing = draft_row is not None and draft_row.argmax < 0
        if is_greedy(params):  # asks for no q
            draft_row, drawn_from_nothing = None, False
        if not 0 <= x < size or row.argmax < 0 or drawn_from_nothing:
            break
        p.append(row.probabilities)
        one_hot = [Fraction(int(token == x)) for token in range(size)]
        q.append(one_hot if draft_row is None else draft_row.probabilities)
    usable = list(drafts[: len(p)])
    if is_greedy(params):
        passed = [x == row.argmax for x, row in zip(usable, rows, strict=False)]
    else:
        coins = [uniform(seed, position, stream=COIN, offset=i) for i in range(len(usable))]
        chances = pass_chances(p, q, usable, method)
        passed = [coin < chance * 2**62 for coin, chance in zip(coins, chances, strict=True)]
    if method == "block" and not is_greedy(params):
        accepted = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
    else:
        accepted = (*passed, False).index(False)

    row, token = rows[accepted], -1
    if row.argmax >= 0 and is_greedy(params):
        token = row.argmax
    elif row.argmax >= 0 and accepted == len(usable):
        token = draw(row.weights, uniform(seed, position + accepted))
    elif row.argmax >= 0:
        ratio = joint_ratios(p, q, usable, method)[accepted]
        left = residual(p[accepted], q[accepted], ratio)
        left = left if sum(left) else p[accepted]
        point = Fraction(uniform(seed, position + accepted, stream=RECOVERY), 2**62) * sum(left)
        running = itertools.accumulate(left)
        token = next(x for x, reached in enumerate(running) if reached > point)
    return Verified(
        tokens=usable[:accepted] + [token] * (row.argmax >= 0),
        num_rejected=len(rows) - 1 - accepted,
        num_nans=sum(r.num_nans for r in rows),
        failed=row.argmax < 0,
    )
