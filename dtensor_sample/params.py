"""What a request may ask for, validated on the host, and its packed form on the device.

A request's parameters become one row of an int64 table, floats by their bits, so that any number of
requests reach the device in a single copy and one index operation gives each row of logits the
parameters of its own request. What division or logarithm a parameter needs is done here, once, in
float64, and rounded once: no rank and no device computes it again.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_sample import check
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.row_params import unpack
from dtensor_sample.process import Processing
from dtensor_sample.random import derive_seed

CANDIDATES = (64, 256)
"""How many of the largest values ranks may exchange, instead of histograms; powers of two."""
GREEDY_TEMPERATURE = 1e-5
MOST_IDS = (1 << 31) - 1
"""Of a vocabulary."""
_EDITING = tuple(field.name for field in fields(Processing) if field.init)
_TELLING = ("logprobs", "logprob_token_ids", "kept_capacity", "entropy")
"""Fields of params that need a state."""


class Wants(NamedTuple):
    """What is to be told of emitted tokens: host data, replicated, since shapes follow from it."""

    logprobs: bool = False
    """The token's own log-probability and rank: told with whatever else is."""
    top: int = 0
    """How many of the likeliest tokens."""
    given: int = 0
    """How many given ids."""
    kept: int = 0
    """How many kept tokens."""
    entropy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(Processing):
    """What one request asks of the sampler.

    What `Processing` lists changes values first: biases, penalties, bans. Then filters apply in
    this order: temperature, min-p, top-k, then top-p on what top-k left. Each keeps every token
    whose value is at or above one threshold, so tokens tied with the last one kept are all kept. A
    request is greedy (largest value, lowest id on ties) when `temperature < 1e-5`, `top_k == 1` or
    `top_p == 0`.

    Raises:
        ValueError: a value out of range; the message names it and what was expected.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.95, seed=1).top_p
        0.95
    """

    temperature: float = 1.0
    """Finite, >= 0. Below 1e-5 the request is greedy."""
    top_k: int = 0
    """Keep the k largest logits (and their ties). Off when <= 0 or >= the vocabulary size."""
    top_p: float = 1.0
    """In [0, 1]: keep the smallest set of largest logits that holds this much probability."""
    min_p: float = 0.0
    """In [0, 1]: keep tokens with at least this fraction of the largest probability. Off at 0."""
    seed: int | None = None
    """In [0, 2**64). None: a stream of its own, derived from a base seed."""
    logprobs: int | None = None
    """With each emitted token tell its log-probability and rank, and the log-probabilities of this
    many of the likeliest tokens in its place: 0 for its own alone. None: off."""
    logprob_token_ids: tuple[int, ...] = ()
    """With each emitted token tell the log-probabilities of these ids in its place."""
    kept_capacity: int = 0
    """With each emitted token tell what it was drawn from: up to this many kept tokens and their
    log-probabilities. Off at 0."""
    entropy: bool = False
    """With each emitted token tell the entropy of the distribution in its place."""
    _packed: tuple[int, int, int, int, int] = field(init=False, repr=False, compare=False)
    """All but the seed as in `pack`, worked out here: a compiled step could not trace that."""
    wants: Wants = field(init=False, repr=False, compare=False)
    """What to tell of its tokens, in short."""

    def __post_init__(self) -> None:
        """Normalise and validate every field."""
        Processing.__post_init__(self)
        put = object.__setattr__
        put(self, "temperature", check.real("temperature", self.temperature))
        put(self, "top_k", check.integer("top_k", self.top_k))
        put(self, "top_p", check.real("top_p", self.top_p, high=1.0))
        put(self, "min_p", check.real("min_p", self.min_p, high=1.0))
        if self.seed is not None:
            put(self, "seed", check.seed_bits("seed", self.seed))
        if self.logprobs is not None:
            put(self, "logprobs", check.integer("logprobs", self.logprobs, 0, MOST_IDS))
        ids = check.integers("logprob_token_ids", self.logprob_token_ids, None, 0, MOST_IDS)
        put(self, "logprob_token_ids", tuple(ids))
        capacity = check.integer("kept_capacity", self.kept_capacity, 0, MOST_IDS)
        put(self, "kept_capacity", capacity)
        check.instance("entropy", self.entropy, bool)
        more = (self.logprobs or 0, len(self.logprob_token_ids), self.kept_capacity, self.entropy)
        put(self, "wants", Wants(self.logprobs is not None or any(more), *more))
        put(self, "_packed", _pack(self))

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0

    def spawn(self, n: int) -> list["SamplingParams"]:
        """`n` copies whose seeds are distinct streams derived from this one's (None stays None).

        Args:
            n: how many samples of the same request, >= 0.

        Example:
            >>> a, b = SamplingParams(seed=1).spawn(2)
            >>> a.seed != b.seed
            True
        """
        n = check.integer("n", n, low=0)
        if self.seed is None:
            return [self] * n
        return [replace(self, seed=derive_seed(self.seed, i, child=0)) for i in range(n)]

    @staticmethod
    def batch(
        params: Sequence["SamplingParams"],
        device: torch.device | str,
        *,
        base_seed: int = 0,
        first_row: int | None = None,
    ) -> "BatchedParams":
        """The parameters of many rows as device tensors, for `sample` in a loop or a graph.

        Args:
            params: one per row, in batch order.
            device: where the logits are.
            base_seed: in [0, 2**64); row i without a seed draws from the stream of (base_seed, i).
            first_row: in [0, 2**62): i of the first row, the others follow. Under data parallelism
                give each rank its own, such as `dp_rank * len(params)`: rows of the same number
                draw the same random numbers. None: 0, for rows that are all there are.
        """
        listed = check_params(params)
        first = check.integer("first_row", 0 if first_row is None else first_row, 0, (1 << 62) - 1)
        rows_B = torch.arange(first, first + len(listed), device=device)
        batched = batch_of(listed, rows_B, check.seed_bits("base_seed", base_seed))
        unseeded = any(p.seed is None for p in listed)
        return replace(batched, numbered_from_0=unseeded and first_row is None)


def check_params(params: object) -> list[SamplingParams]:
    """A sequence of SamplingParams as a list, naming the first entry that is none."""
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise ValueError(
            f"params must be a sequence of SamplingParams, got {type(params).__name__}"
        )
    return [check.instance(f"params[{i}]", p, SamplingParams) for i, p in enumerate(params)]


class Filters(NamedTuple):
    """What any request of a batch needs: host data, so that skipping the rest takes no sync."""

    top_k: bool
    top_p: bool
    drawn: bool
    """Whether any token is drawn. If all are greedy, nothing is weighed."""
    candidates: int = 0
    """So many of the largest values hold all that filters keep, but for ties; 0: unknown."""
    bounded: bool = False
    """Whether they hold all that any token is drawn from: each request that draws has a filter."""

    @property
    def top_p_alone(self) -> bool:
        """Whether top-p may have to choose from more tokens than a small top-k leaves."""
        return self.top_p and not self.candidates

    def coarse(self, whole: bool) -> "Filters":
        """All filters or none: few variants to compile, two if rows are whole."""
        either = self.top_k or self.top_p
        known = (0, False) if whole else (self.candidates, self.bounded)
        return Filters(either, either, True, *known)


def fixed(filters: Filters) -> Filters:
    """The same, of which a compiler knows every value: candidates are no symbol to it."""
    sizes = [size for size in (0, *CANDIDATES) if size == filters.candidates]
    return filters._replace(candidates=sizes[0])


def filters_of(params: Sequence[SamplingParams]) -> Filters:
    """The filters that at least one of `params` needs (min-p costs nothing and is always on)."""
    drawn = [p for p in params if not p.greedy]
    filtered = [p.top_k for p in drawn if p.top_k > 0 or p.top_p < 1]
    known = len(filtered) > 0 and min(filtered) > 0
    enough = [size for size in CANDIDATES if known and max(filtered) <= size]
    return Filters(
        top_k=any(p.top_k > 0 for p in drawn),
        top_p=any(p.top_p < 1 for p in drawn),
        drawn=len(drawn) > 0,
        candidates=enough[0] if enough else 0,
        bounded=len(enough) > 0 and len(filtered) == len(drawn),
    )


def wants_of(params: Sequence[SamplingParams], vocab_size: int) -> Wants:
    """The most that any of `params` want."""
    wants = [p.wants for p in params if p.wants.logprobs]
    if not wants:
        return Wants()
    _, top, given, kept, entropy = map(max, zip(*wants, strict=True))
    return Wants(True, min(top, vocab_size), given, min(kept, vocab_size), entropy)


class RowParams(NamedTuple):
    """Parameters of R rows, each a tensor [R] on the device; the columns of the packed table."""

    scale: Tensor
    """float32: log2(e) / temperature, the factor from logits to binary exponents."""
    min_p: Tensor
    """float32: temperature * ln(min_p) <= 0, added to the largest logit; -inf when off."""
    top_k: Tensor
    """int64, >= 1; the largest int64 when off."""
    top_p: Tensor
    """int64 in [0, 2**31]: fixed point; 2**31 when off."""
    seed: Tensor
    """int64: the 64 bits of the seed."""
    greedy: Tensor
    """bool."""

    @staticmethod
    def unpack(table: Tensor) -> "RowParams":
        """The columns of a packed table [R, 6], clamped to their ranges."""
        return RowParams(*unpack(table))


@dataclass(frozen=True, eq=False)
class BatchedParams:
    """Sampling parameters of a batch on a device, made by `SamplingParams.batch`."""

    table: Tensor
    """[B, 6] int64, one packed row a request (see `RowParams`)."""
    filters: Filters
    """Which filters any of the requests uses."""
    numbered_from_0: bool = False
    """Whether some have no seed, and rows were numbered as if no other rank had others."""


def refuse_edits(params: Sequence[SamplingParams]) -> None:
    """Raise ValueError if one asks for what is kept of a request from step to step."""
    for i, p in enumerate(params):
        if p.needs.edited:
            raise ValueError(
                f"params[{i}] must have no bias, penalty, bad words or min_tokens, which need a "
                f"SamplingState, got {_first_set(p, _EDITING)}"
            )


def _first_set(params: SamplingParams, names: Sequence[str]) -> str:
    """The first of some fields that is not as it is by default, and its value, if not too long."""
    default = SamplingParams()
    name = next(name for name in names if getattr(params, name) != getattr(default, name))
    return f"{name}={reprlib.repr(getattr(params, name))}"


def batch_of(params: Sequence[SamplingParams], rows_T: Tensor, base_seed: int) -> BatchedParams:
    """Checked parameters on a device, in a graph of any number of rows if they share one.

    Args:
        params: [T], or one for all rows.
        rows_T: [T] int64 on the device, the places of the rows in the batch.
        base_seed: as of `SamplingParams.batch`.
    """
    _refuse_told(params)
    packed = np.array([pack(p, p.seed or 0) for p in params], dtype=np.int64)
    table = torch.from_numpy(packed.reshape(-1, len(RowParams._fields))).to(rows_T.device)
    table_T6 = table.repeat(len(rows_T), 1) if len(params) == 1 else table
    if any(p.seed is None for p in params):
        seeded = torch.tensor([p.seed is not None for p in params], device=rows_T.device)
        column = RowParams._fields.index("seed")
        # A tensor, since generated code has no bits of a base seed that is a symbol.
        base = torch.full_like(rows_T, _signed(base_seed))
        streams_T = derive_seed(base, rows_T, child=1)
        table_T6[:, column] = torch.where(seeded, table_T6[:, column], streams_T)
    return BatchedParams(table_T6, filters_of(params))


def _refuse_told(params: Sequence[SamplingParams]) -> None:
    """Raise ValueError if one asks for what only samplers with a state do."""
    for i, p in enumerate(params):
        if p.wants.logprobs:
            raise ValueError(
                f"params[{i}] must not ask for {', '.join(_TELLING)} without a state, whose "
                f"samplers tell them, got {_first_set(p, _TELLING)}"
            )
    refuse_edits(params)


def pack(params: SamplingParams, seed: int) -> tuple[int, ...]:
    """One row of the table: int64 values, float32 ones by their bits, neutral where greedy."""
    scale, min_p, top_k, top_p, greedy = params._packed
    return scale, min_p, top_k, top_p, _signed(seed), greedy


def _signed(seed: int) -> int:
    """The 64 bits of a seed as those of an int64."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _pack(params: SamplingParams) -> tuple[int, int, int, int, int]:
    greedy = params.greedy
    temperature = 1.0 if greedy else params.temperature
    off = greedy or params.min_p == 0
    return (
        _float32_bits(math.log2(math.e) / temperature),
        _float32_bits(-math.inf if off else temperature * math.log(params.min_p)),
        min(params.top_k, check.INT64_MAX) if params.top_k > 0 and not greedy else check.INT64_MAX,
        TOP_P_ONE if greedy else round(params.top_p * TOP_P_ONE),
        int(greedy),
    )


def _float32_bits(value: float) -> int:
    with np.errstate(over="ignore", under="ignore"):
        return int(np.float32(value).view(np.int32))
