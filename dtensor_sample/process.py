"""What a request may ask of the values of its tokens, before they are filtered and drawn.

A processor has three parts, all in this file: a field of `Processing`, which `SamplingParams`
extends; what a slot keeps of it on the device, in `SlotEdits`; and what that makes of a row, in
`SlotEdits.edits`. A row's edits are a bias, counts with three penalties, a few banned ids and a
packed mask (see `ops.edits`): the ops apply them where they read a logit.

Most of it is a few numbers a slot, which every rank holds. Biases and counts are as wide as the
vocabulary, and lie where the logits do: under `batch` those of a request on its owner, where it
then stays, `[ceil(slots / P), V]`; under `vocab` each rank's columns of all, `[slots, v]`: 1/P of
the bytes either way. They are allocated when the first request needs them. What was emitted is
counted on the device, so no step waits for it; drafts count in the rows after them, and nowhere
else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dtensor_sample import check, ops
from dtensor_sample.exchange import Axis, Logits
from dtensor_sample.ops.edits import IN_PROMPT, Edits

if TYPE_CHECKING:
    from dtensor_sample.plan import ShardPlan

MOST_WORDS, LONGEST_WORD, MOST_STOPS = 1024, 64, 64
"""Bad words of more than one token, tokens of one, and stop ids that a request may have."""
_LARGEST = float(np.finfo(np.float32).max)
_LAST_ID = (1 << 31) - 1


class Needs(NamedTuple):
    """What a request, or any of a batch, asks for: host data."""

    edited: bool = False
    """Whether the value of any logit may change."""
    biased: bool = False
    """Whether a bias is kept for every id; bad words of one token are biases of -inf."""
    counted: bool = False
    """Whether every id is counted."""
    stops: int = 0
    """Room for the stop ids of one that has `min_tokens`, see `_room`; 0 if nothing is edited."""
    words: int = 0
    """Room for its bad words of more than one token."""
    length: int = 1
    """Room for the longest of them; 1 if there are none."""

    @property
    def wide(self) -> bool:
        """Whether something as wide as the vocabulary is kept."""
        return self.biased or self.counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Processing:
    """What a request asks of the values of its tokens. Needs a `SamplingState`.

    A value is processed in this order, in float32: `logit_bias` is added and ids that are not
    allowed become -inf; penalties; bad words; stop ids before `min_tokens`; the grammar's mask (see
    `TokenBitmask`). Then follow temperature and filters. A row of a draft token sees prompt, output
    and the drafts before it. A NaN logit stays without probability whatever is added to it, and
    +inf counts as the largest finite value; results beyond float32 are its largest finite ones.
    """

    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Added to the logits of ids: finite, or -inf to ban one. Kept as sorted pairs."""
    allowed_token_ids: Sequence[int] | None = None
    """The only ids that may be drawn, at least one; None: all."""
    repetition_penalty: float = 1.0
    """In [0.01, 100] (Keskar et al., "CTRL", 2019): a value above 0 of an id that is in the prompt
    or the output is divided by it, any other multiplied. Off at 1."""
    presence_penalty: float = 0.0
    """In [-100, 100]: subtracted from the value of an id that is in the output."""
    frequency_penalty: float = 0.0
    """In [-100, 100]: subtracted as often as the id is in the output."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Sequences of ids that may not occur: the last of one is banned where prompt and output end
    with those before it."""
    min_tokens: int = 0
    """So many tokens come before any of `stop_token_ids` may."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end a text. Only `min_tokens` uses them here: to stop is up to the caller."""
    needs: Needs = field(init=False, repr=False, compare=False)
    """What of this takes work, in short."""

    def __post_init__(self) -> None:
        """Normalise and validate every field."""
        put = object.__setattr__
        put(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids must have at least one id or be None, got []")
            put(self, "allowed_token_ids", ids)
        for name, low, high in (
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            put(self, name, check.real(name, getattr(self, name), low, high))
        put(self, "bad_words_ids", _words(self.bad_words_ids))
        put(self, "min_tokens", check.integer("min_tokens", self.min_tokens, 0, check.INT64_MAX))
        stops = _ids("stop_token_ids", self.stop_token_ids)
        if len(stops) > MOST_STOPS:
            raise ValueError(f"stop_token_ids must be at most {MOST_STOPS} ids, got {len(stops)}")
        if self.min_tokens and not stops:
            raise ValueError(
                f"stop_token_ids must be given with min_tokens = {self.min_tokens}, got none"
            )
        put(self, "stop_token_ids", stops)
        lengths = [len(word) for word in self.bad_words_ids if len(word) > 1]
        single = len(lengths) < len(self.bad_words_ids)
        biased = bool(self.logit_bias) or self.allowed_token_ids is not None or single
        rates = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        counted = rates != (1, 0, 0)
        edited = biased or counted or bool(self.bad_words_ids) or self.min_tokens > 0
        needs = Needs(
            edited,
            biased,
            counted,
            stops=_room(len(stops) if self.min_tokens else 0) if edited else 0,
            words=_room(len(lengths)) if lengths else 0,
            length=_room(max(lengths)) if lengths else 1,
        )
        put(self, "needs", needs)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError if an id is none of the vocabulary's."""
        named: dict[str, Sequence[int]] = {
            "logit_bias": [id_ for id_, _ in self.biases],
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_ids": [id_ for word in self.bad_words_ids for id_ in word],
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            if ids and (largest := max(ids)) >= vocab_size:
                raise ValueError(f"{name} must be ids in [0, {vocab_size - 1}], got {largest}")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def bias_of_ids(self, vocab_size: int) -> np.ndarray:
        """[V] float32: what is added to each id's logit."""
        bias_V = np.zeros(vocab_size, np.float32)
        if self.allowed_token_ids is not None:
            bias_V[:] = -np.inf
            bias_V[list(self.allowed_token_ids)] = 0
        for id_, bias in self.biases:
            bias_V[id_] += np.float32(bias)
        bias_V[[word[0] for word in self.bad_words_ids if len(word) == 1]] = -np.inf
        return bias_V


def needs_of(params: Sequence[Processing], processors: Sequence[Processor]) -> Needs:
    """What some requests ask for; custom processors may do anything."""
    distinct = {p.needs for p in params} | {Needs(edited=bool(processors))}
    return Needs._make(max(each) for each in zip(*distinct, strict=True))


def _room(count: int) -> int:
    """Room for so many, a power of 4: tables of few widths, and so few graphs and compilations.

    At least 4, as the compiler would treat none and one as cases of their own.
    """
    return 1 << 2 * max(1, -(-(count - 1).bit_length() // 2))


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Sequence):
        raise ValueError(f"logit_bias must map ids to numbers, got {given!r}")
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"logit_bias must map ids to numbers, got {pair!r}")
        id_ = check.integer("an id of logit_bias", pair[0], 0, _LAST_ID)
        if id_ in biases:
            raise ValueError(f"logit_bias must have each id once, got {id_} more than once")
        banned = isinstance(pair[1], float | np.floating) and pair[1] == -math.inf
        name = f"logit_bias[{id_}]"
        biases[id_] = -math.inf if banned else check.real(name, pair[1], -_LARGEST, _LARGEST)
    return tuple(sorted(biases.items()))


def _ids(name: str, given: object) -> tuple[int, ...]:
    return tuple(check.integers(name, given, None, 0, _LAST_ID))


def _words(given: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ValueError(f"bad_words_ids must be sequences of ids, got {given!r}")
    words = tuple(_ids(f"bad_words_ids[{i}]", word) for i, word in enumerate(given))
    for i, word in enumerate(words):
        if not 1 <= len(word) <= LONGEST_WORD:
            raise ValueError(
                f"bad_words_ids[{i}] must have 1 to {LONGEST_WORD} ids, got {len(word)}"
            )
    if (count := sum(len(word) > 1 for word in words)) > MOST_WORDS:
        raise ValueError(
            f"bad_words_ids must have at most {MOST_WORDS} words of more than one id, got {count}"
        )
    return words


class Mask(NamedTuple):
    """What a grammar allows in R rows, of which G are masked."""

    words_GX: Tensor
    """int32, packed bits."""
    row_R: Tensor
    """int64: the masked row that each row is; -1: every id is allowed."""
    first_id_1: Tensor
    """int64: the id of the first bit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBitmask:
    """Which tokens a grammar allows in the rows of some requests of a step.

    In the layout of xgrammar and llguidance: bit i % 32 of the int32 word i // 32 allows id i. Bits
    beyond the vocabulary mean nothing, and ids beyond the bits are not allowed. A row that allows
    nothing has failed: its token is -1.

    Within a `GraphedStep` all tensors lie on the device and all requests are masked: those that are
    free by rows of ones, -1.
    """

    bitmask: Tensor
    """[rows, words] int32, plain, on the host or the device, the same on every rank: a row for each
    row of logits of the requests that are masked, in batch order. From the host only those rows and
    words reach a device that it reads. In a plan with a budget a request has as many rows here as
    `num_logits` says, whatever is admitted; K + 1 if all are masked and it lies on the device."""
    requests: Sequence[bool] | None = None
    """[B] which requests of the batch those are; None: all."""
    num_acceptable: Sequence[int] | Tensor | None = None
    """[B], or int64 on the device: how many of each request's drafts may be accepted: those after
    them are not judged, as if the request had fewer. None: the mask alone decides."""

    def check(self, plan: ShardPlan) -> None:
        """Raise ValueError unless this fits the rows of a plan."""
        mask, B = check.instance("bitmask", self.bitmask, Tensor), len(plan.slots)
        if isinstance(mask, DTensor) or mask.dtype != torch.int32 or mask.ndim != 2:
            raise ValueError(
                "bitmask must be a plain int32 tensor of shape [rows, words], got "
                f"{type(mask).__name__} of {mask.dtype} and shape {list(mask.shape)}"
            )
        if mask.device.type not in ("cpu", plan.state.device.type):
            raise ValueError(
                f"bitmask must be on the host or on {plan.state.device}, got {mask.device}"
            )
        chosen = self._chosen(plan)
        lanes = len(plan.batch_slots)
        rows = sum(n for n, flag in zip(plan.num_logits, chosen, strict=True) if flag)
        padded = lanes if self._in_place(plan) else rows  # what a graph reads
        if self._in_place(plan) and plan.budget is not None:
            rows = padded = lanes * (plan.state.num_speculative_tokens + 1)
        if mask.shape[0] not in (rows, padded) or mask.shape[1] == 0:
            raise ValueError(
                f"bitmask must have shape [{rows}, words], one row for each row of logits of the "
                f"masked requests, got {list(mask.shape)}"
            )
        count = self.num_acceptable
        if isinstance(count, Tensor) and not isinstance(count, DTensor) and not count.is_cpu:
            if count.dtype != torch.int64 or count.shape != plan.batch_slots.shape:
                raise ValueError(
                    f"num_acceptable must be int64 of shape [{B}], got {count.dtype} of shape "
                    f"{list(count.shape)}"
                )
        elif count is not None:
            most = plan.state.num_speculative_tokens
            check.integers("num_acceptable", count, B, 0, most)

    def acceptable(self, drafts_BK: Tensor) -> Tensor:
        """Draft tokens, -1 from the first on that may not be accepted."""
        if self.num_acceptable is None:
            return drafts_BK
        count_B = torch.as_tensor(self.num_acceptable).to(drafts_BK.device, non_blocking=True)
        step_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
        return torch.where(step_K < count_B[:, None], drafts_BK, -1)

    def local(self, plan: ShardPlan, ids: range) -> Mask:
        """The rows, and the words, that this rank reads: those of `ids`."""
        device, words = plan.state.device, self.bitmask.shape[1]
        begin = min(ids.start // 32, words - 1)
        words_GX = self.bitmask[:, begin : -(-ids.stop // 32)]
        first_id_1 = torch.full((1,), begin * 32, device=device)
        if self._in_place(plan):
            return Mask(words_GX, plan.row_numbers, first_id_1)
        picked: list[int] = []
        begin_of: list[int] = []
        start = 0
        for own, n, chosen in zip(plan.local, plan.num_logits, self._chosen(plan), strict=True):
            begin_of.append(len(picked) if own and chosen else -1)
            if own and chosen:
                picked += range(start, start + n)
            start += n * chosen
        index_G, begin_B = (torch.tensor(given, dtype=torch.int64) for given in (picked, begin_of))
        words_GX = words_GX.index_select(0, index_G.to(words_GX.device, non_blocking=True))
        begin_R = begin_B.to(device, non_blocking=True)[plan.row_requests]
        row_R = torch.where(begin_R < 0, -1, begin_R + plan.row_offsets)
        return Mask(words_GX.to(device, non_blocking=True), row_R, first_id_1)

    def _in_place(self, plan: ShardPlan) -> bool:
        """Whether rows are read where they are, and found without the host."""
        return self.requests is None and self.bitmask.device == plan.state.device

    def _chosen(self, plan: ShardPlan) -> list[bool]:
        if self.requests is None:
            return [True] * len(plan.slots)
        return check.bools("requests", self.requests, len(plan.slots))


class RowContext(NamedTuple):
    """What a custom processor is told about the R rows whose values it gets."""

    slots: Tensor
    """[R] int64: each row's request. Rows that only fill up a capacity repeat another's."""
    positions: Tensor
    """[R] int64: of the token that the row decides, in its own sequence."""
    drafts: Tensor
    """[R, K] int64: the draft tokens before it, then -1."""
    first_id: int
    """The id of the first column; 0 unless the vocabulary is sharded."""

    def copied(self) -> RowContext:
        """The same in tensors of its own, which may be written to."""
        slots, positions, drafts, first_id = self
        return RowContext(slots.clone(), positions.clone(), drafts.clone(), first_id)


class Processor(Protocol):
    """Changes values in a way of its own, after all built-in processors.

    Under `vocab` it is given a part of each row only. A processor that needs no more sets the
    attribute `per_token` to True; others are refused there.

    Example:
        >>> def no_odd_ids(values, rows):
        ...     values[:, 1 - rows.first_id % 2 :: 2] = float("-inf")
        ...     return values
        >>> no_odd_ids.per_token = True
        >>> state = SamplingState(  # doctest: +SKIP
        ...     mesh["tp"], vocab_size=8, processors=[no_odd_ids]
        ... )
    """

    def __call__(self, values: Tensor, rows: RowContext, /) -> Tensor:
        """New values of the rows on this rank, also where there are none.

        Args:
            values: [R, W] float32, processed so far, a copy that may be written to; of the W ids
                from `rows.first_id` on. W is V, and under `vocab` the number of the vocabulary's
                ids on this rank, maybe none: columns of padding are left out.
            rows: which they are.

        Returns:
            [R, W] float32. NaN stands for -inf, and what came as -inf stays so.
        """
        ...


def per_token(processor: object) -> bool:
    """Whether a custom processor works on any part of a row."""
    return bool(getattr(processor, "per_token", False))


def process(
    rows: Logits,
    plan: ShardPlan,
    width: int,
    *,
    drafts_BK: Tensor | None = None,
    own_drafts_RK: Tensor | None = None,
    count_R: Tensor | None = None,
    mask: TokenBitmask | None = None,
    index_G: Tensor | None = None,
) -> Logits:
    """Rows with what their requests, a grammar and custom processors ask of their values.

    Args:
        rows: as they were placed.
        plan: whose local rows they are, R of them.
        width: of the whole logits, padding of the vocabulary included.
        drafts_BK: [B, K] int64 draft tokens of the batch; None: there are none.
        own_drafts_RK: [R, K] int64, instead of them the drafts of each row's request.
        count_R: [R] int64, how many of its request's drafts come before each row.
        mask: of a grammar, checked.
        index_G: [G] int64, the local row beside which each row lies; None: they are all R in order.
    """
    state = plan.state
    if not plan.needs.edited and mask is None:
        return rows
    if own_drafts_RK is None and drafts_BK is not None:
        own_drafts_RK = drafts_BK[plan.row_requests]
    if own_drafts_RK is None or count_R is None:
        count_R = torch.zeros_like(plan.row_slots)
        own_drafts_RK = plan.row_slots[:, None].expand(-1, 0)
    before_RK = torch.arange(own_drafts_RK.shape[1], device=state.device) < count_R[:, None]
    drafts_RK = torch.where(before_RK, own_drafts_RK, -1)
    ids = plan.exchange.ids(width, state.vocab_size)
    words = None if mask is None else mask.local(plan, ids)
    edits = state.slot_edits.edits(plan, drafts_RK, count_R, words)
    rows = rows._replace(edits=edits if index_G is None else edits.at(index_G))
    if not state.processors:
        return rows
    _, position_R, _ = plan.row_params()
    position_R = position_R - plan.row_offsets + count_R
    of_row = (plan.row_slots, position_R, drafts_RK)
    slots, positions, drafts = of_row if index_G is None else (x[index_G] for x in of_row)
    told = RowContext(slots, positions, drafts, ids.start)
    every_RW = ops.copy(*rows, state.vocab_size).flatten(1)  # with columns of padding at the end
    width = max(0, min(every_RW.shape[1], state.vocab_size - ids.start))
    found_RW, error = every_RW[:, :width], None
    try:
        found_RW = _customized(found_RW, state.processors, told)
    except Exception as raised:  # of whatever kind: it is the caller's code
        if not state.debug:
            raise
        error = ValueError(f"a processor raised {type(raised).__name__}: {raised}")
        error.__cause__ = raised
    state.agree(error)
    every_RW[:, :width] = found_RW
    return _replaced(rows, every_RW)


def _customized(value_RW: Tensor, processors: Sequence[Processor], told: RowContext) -> Tensor:
    """Values that custom processors have changed."""
    banned_RW = value_RW == -torch.inf
    for processor in processors:
        own = told.copied()
        found_RW = processor(value_RW.clone(), own)
        got = getattr(found_RW, "shape", None), getattr(found_RW, "dtype", None)
        if got != (value_RW.shape, torch.float32) or isinstance(found_RW, DTensor):
            raise ValueError(
                f"processor {processor!r} must return plain float32 of shape "
                f"{list(value_RW.shape)}, got {type(found_RW).__name__} {got[1]} of shape {got[0]}"
            )
        value_RW = found_RW.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return value_RW.masked_fill(banned_RW, -torch.inf)


def _replaced(logits: Logits, every_RW: Tensor) -> Logits:
    """The same rows with other values, float32 copies."""
    # NaN logits stay what they are, to be counted.
    nan_RSv = logits.x_NSv if logits.rows_R is None else logits.x_NSv[logits.rows_R.clamp(min=0)]
    every_RW.masked_fill_(nan_RSv.isnan().flatten(1), torch.nan)
    rows_R = None if logits.rows_R is None else torch.arange(len(every_RW), device=every_RW.device)
    return Logits(every_RW[:, None], logits.first_id_S[:1], rows_R)


@dataclass(slots=True)
class _Kept:
    params: Processing
    prompt: Sequence[int]
    output: Sequence[int]
    """Emitted before the request was admitted, if it is resumed."""
    owner: int | None = None
    """The rank that has its wide rows; None before its first plan, or if it needs none."""
    row: int = -1
    """Which rows of the owner's."""


class SlotEdits:
    """Processors' state of up to `num_slots` requests.

    Args:
        axis: the ranks that share it.
        device: where it lies.
        num_slots: slots of the state.
        K: num_speculative_tokens.
        vocab_size: V.
    """

    def __init__(
        self, axis: Axis, device: torch.device, *, num_slots: int, K: int, vocab_size: int
    ) -> None:
        self.axis, self.device, self.num_slots = axis, device, num_slots
        self.vocab_size = vocab_size
        self.exchange: str | None = None
        """Under which exchange wide rows are kept, from the first one on."""
        self.columns: int | None = None
        """Columns of wide rows under `vocab`: those, padding included, that a shard of logits had
        in the first step with biases or counts. None before it."""
        self.bias_MW = torch.empty((0, 0), dtype=torch.float32, device=device)
        """[rows, W] float32: W = V, or `columns` under `vocab`; empty until one is needed."""
        self.counts_MW = torch.empty((0, 0), dtype=torch.int32, device=device)
        """[rows, W] int32, see `Edits`."""
        self._kept: dict[int, _Kept] = {}
        self._stale: set[int] = set()
        """Slots of which the device does not know yet what became of them."""
        self._free: list[list[int]] = []
        self.version = 0
        """How often anything has moved on the device: what a CUDA graph has read is there no more
        once this is another number."""
        # By slot, and one more for padding, on the device: wide row here, three rates as float32
        # bits, min_tokens, emitted tokens.
        self._numbers_S6 = self._filled(6)
        self._numbers_S6[:] = torch.tensor([-1, *_bits(1, 0, 0), 0, 0])
        self._stops_SE = self._filled(0)
        self._words_SWL = self._filled(0, 1)
        self._tail_ST = self._filled(0)
        self._drafts_SK = self._filled(K)

    @property
    def bytes(self) -> int:
        """Bytes of biases and counts that this rank has allocated."""
        return self.bias_MW.nbytes + self.counts_MW.nbytes

    # --- host: who keeps what

    def admit(
        self, slot: int, params: Processing, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Take on a request whose ids are checked."""
        if params.needs.edited:
            self._kept[slot] = _Kept(params, tuple(prompt), tuple(output))
            self._stale.add(slot)

    def remove(self, slot: int) -> None:
        """Forget a request."""
        if (kept := self._kept.pop(slot, None)) is not None:
            self._stale.add(slot)
            if kept.owner is not None:
                self._free[kept.owner].append(kept.row)

    def owners(self) -> dict[int, int]:
        """The rank that must sample each slot that it keeps wide rows of, if one must."""
        if self.exchange != "batch":
            return {}
        return {slot: kept.owner for slot, kept in self._kept.items() if kept.owner is not None}

    def check_exchange(self, slots: Sequence[int], exchange: str | None) -> None:
        """Raise ValueError if wide rows of `slots` would be needed under another exchange."""
        if exchange == self.exchange or self.exchange is None:
            return
        for slot in slots:
            if slot in self._kept and self._kept[slot].params.needs.wide:
                raise ValueError(
                    f'exchange must be "{self.exchange}", under which biases and counts are kept, '
                    f'got "{exchange}" for slot {slot}'
                )

    def check_columns(self, plan: ShardPlan, columns: int) -> None:
        """Raise ValueError for logits whose columns are not those that wide rows are kept in."""
        if plan.exchange.name != "vocab" or self.columns in (None, columns):
            return
        if plan.needs.wide:
            raise ValueError(
                f"logits must have {self.columns} columns a rank with padding, as biases and "
                f'counts that are kept under "vocab", got {columns}'
            )

    def digest(self, slots: Sequence[int]) -> object:
        """What must be the same on every rank about `slots`."""
        kept = {slot: self._kept.get(slot) for slot in slots}
        return {
            f"slot {slot}": own
            and {"prompt": own.prompt, "output": own.output, "owner": own.owner, "row": own.row}
            for slot, own in kept.items()
        }

    # --- what the device knows

    def settle(self, plan: ShardPlan) -> None:
        """Bind the requests of a plan to their owners, and bring the device up to date."""
        for slot, owner in zip(plan.slots, plan.owners, strict=True) if self._kept else ():
            kept = self._kept.get(slot)
            if kept is not None and kept.params.needs.wide and kept.owner is None:
                self._bind(kept, owner, plan.exchange.name)
        self._upload()

    def learn(self, plan: ShardPlan, columns: int) -> None:
        """Bring the device up to date once it is known how the logits of wide rows lie."""
        if plan.exchange.name == "vocab" and plan.needs.wide and self.columns is None:
            self.columns = columns
            self._upload()

    def emit(self, plan: ShardPlan, tokens_BJ: Tensor, num_sampled_B: Tensor) -> None:
        """Count what each request of a plan emitted: [B, J] ids, -1 after the last."""
        if not plan.needs.edited:
            return
        slots_B = plan.batch_slots
        self._numbers_S6[:, 5].index_add_(0, slots_B, num_sampled_B)
        *_, tail_ST = self._narrowed(plan.needs)
        if length := tail_ST.shape[1]:
            text_BX = torch.cat([tail_ST[slots_B], tokens_BJ], 1)
            place_BT = num_sampled_B[:, None] + torch.arange(length, device=self.device)
            tail_ST.index_copy_(0, slots_B, text_BX.gather(1, place_BT))
        if self.counts_MW.numel():
            row_B1 = self._numbers_S6[slots_B, 0][:, None]
            width = self.counts_MW.shape[1]
            column_BJ = tokens_BJ - self._first_id()
            here_BJ = (tokens_BJ >= 0) & (row_B1 >= 0) & (column_BJ >= 0) & (column_BJ < width)
            at_BJ = torch.where(here_BJ, row_B1 * width + column_BJ, 0)
            self.counts_MW.view(-1).index_add_(0, at_BJ.flatten(), here_BJ.flatten().int())

    def remember(self, plan: ShardPlan, token_B: Tensor, step: int) -> None:
        """Keep draft token `step` of each request, for the drafts after it."""
        if plan.needs.edited:
            self._drafts_SK[:, step].index_copy_(0, plan.batch_slots, token_B)

    def drafted(self, plan: ShardPlan) -> Tensor:
        """[B, K] the draft tokens that were kept of a plan's requests."""
        return self._drafts_SK[plan.batch_slots]

    # --- what a row asks for

    def edits(
        self, plan: ShardPlan, drafts_RK: Tensor, count_R: Tensor, mask: Mask | None
    ) -> Edits:
        """The edits of a plan's local rows.

        Args:
            plan: whose rows.
            drafts_RK: [R, K] int64 draft tokens before each row, then -1.
            count_R: [R] int64 how many those are.
            mask: what a grammar allows, if it masks anything.
        """
        slots_R = plan.row_slots
        edits = Edits.none(len(slots_R), self.device)
        if mask is not None:
            words_GX, mask_E, mask_id_1 = mask
            edits = edits._replace(mask_GX=words_GX, mask_E=mask_E, mask_id_1=mask_id_1)
        if not plan.needs.edited:
            return edits
        row_R, *rates, min_tokens_R, emitted_R = self._numbers_S6[slots_R].unbind(1)
        stops_SE, words_SWL, tail_ST = self._narrowed(plan.needs)
        stopped_R1 = (emitted_R + count_R < min_tokens_R)[:, None]
        stops_RE = torch.where(stopped_R1, stops_SE[slots_R], -1)
        text_RX = torch.cat([tail_ST[slots_R], drafts_RK], 1)
        banned_RB = torch.cat([stops_RE, _bad(words_SWL[slots_R], text_RX, count_R)], 1)
        return edits._replace(
            table_E=row_R,
            rates_E3=torch.stack(rates, 1).to(torch.int32).view(torch.float32),
            drafts_EK=drafts_RK,
            banned_EB=banned_RB,
            bias_MW=self.bias_MW if plan.needs.biased else self.bias_MW[:0],
            counts_MW=self.counts_MW if plan.needs.counted else self.counts_MW[:0],
        )

    def _narrowed(self, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
        """Stop ids, bad words and ends of texts of all slots, as far as some requests need them.

        What another needs, or needed once, takes memory and no work.
        """
        first = self._words_SWL.shape[2] - needs.length  # words are aligned at their ends
        words_SWL = self._words_SWL[:, : needs.words, first:]
        return self._stops_SE[:, : needs.stops], words_SWL, self._tail_ST[:, first:]

    # --- uploading

    def _bind(self, kept: _Kept, owner: int, exchange: str) -> None:
        holders = self.axis.size if exchange == "batch" else 1
        if self.exchange is None:
            rows = -(-self.num_slots // holders)
            self.exchange, self._free = exchange, [list(range(rows))[::-1] for _ in range(holders)]
        kept.owner = owner if exchange == "batch" else 0
        kept.row = self._free[kept.owner].pop()

    def _upload(self) -> None:
        """Tell the device of what was admitted and removed, but for requests not yet planned."""
        ready, width = [], self._width()
        for slot in sorted(self._stale):
            kept = self._kept.get(slot)
            if kept is None or not kept.params.needs.wide or (kept.owner is not None and width):
                ready.append(slot)
        if not ready:
            return
        self._stale -= set(ready)
        known = {slot: self._kept[slot] for slot in ready if slot in self._kept}
        needs = needs_of([kept.params for kept in known.values()], ())
        self._grow(needs)
        rows = [self._narrow(slot, known.get(slot), needs) for slot in ready]
        staged = self._to_device(np.array(rows, dtype=np.int64))
        narrow = (self._numbers_S6, *self._narrowed(needs))
        sizes = [1, *(x[0].numel() for x in narrow)]
        slots, *columns = staged.split(sizes, 1)
        for x in (self._stops_SE, self._words_SWL):  # also what these requests do not need of them
            x.index_fill_(0, slots[:, 0], -1)
        for x, own in zip(narrow, columns, strict=True):
            x.index_copy_(0, slots[:, 0], own.reshape(len(ready), *x.shape[1:]))
        if width:
            self._upload_wide(list(known.values()), width)

    def _upload_wide(self, requests: list[_Kept], width: int) -> None:
        """Fill wide rows of requests: those on this rank, though all ranks allocate alike."""
        holders = self.axis.size if self.exchange == "batch" else 1
        shape, first = (-(-self.num_slots // holders), width), self._first_id()
        with torch.inference_mode(False):  # written by steps inside and outside of it
            if not self.bias_MW.numel() and any(kept.params.needs.biased for kept in requests):
                self.bias_MW, self.version = self.bias_MW.new_zeros(shape), self.version + 1
            if not self.counts_MW.numel() and any(kept.params.needs.counted for kept in requests):
                self.counts_MW, self.version = self.counts_MW.new_zeros(shape), self.version + 1
        mine = [kept for kept in requests if self._row_here(kept) >= 0]
        rows = self._to_device(np.array([kept.row for kept in mine], dtype=np.int64))
        if self.bias_MW.numel():
            self.bias_MW.index_fill_(0, rows, 0.0)
            for kept in mine:
                if kept.params.needs.biased:
                    bias_W = kept.params.bias_of_ids(self.vocab_size)[first : first + width]
                    self.bias_MW[kept.row, : len(bias_W)].copy_(self._to_device(bias_W))
        if self.counts_MW.numel():
            self.counts_MW.index_fill_(0, rows, 0)
            for kept in mine:
                if kept.params.needs.counted:
                    at, count = _counts(kept, first, width)
                    self.counts_MW[kept.row].index_copy_(
                        0, self._to_device(at), self._to_device(count)
                    )

    def _narrow(self, slot: int, kept: _Kept | None, needs: Needs) -> list[int]:
        """What a slot has on every rank: the slot, and columns as of tables of such a width."""
        E, W, L, T = needs.stops, needs.words, needs.length, needs.length - 1
        if kept is None:
            return [slot, -1, *_bits(1, 0, 0), 0, 0, *[-1] * (E + W * L + T)]
        params = kept.params
        rates = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        stops = list(params.stop_token_ids)[:E]
        words = [word for word in params.bad_words_ids if len(word) > 1]
        padded = [[-1] * (L - len(word)) + list(word) for word in words]
        padded += [[-1] * L] * (W - len(words))
        tail = [*[-1] * T, *kept.prompt[-T:], *kept.output[-T:]][-T:] if T else []
        return [
            slot,
            self._row_here(kept),
            *_bits(*rates),
            params.min_tokens,
            len(kept.output),
            *stops,
            *[-1] * (E - len(stops)),
            *(id_ for word in padded for id_ in word),
            *tail,
        ]

    def _row_here(self, kept: _Kept) -> int:
        """The row of a request's wide state, -1 if it has none on this rank."""
        here = self.exchange != "batch" or kept.owner == self.axis.rank
        return kept.row if here else -1

    def _grow(self, needs: Needs) -> None:
        """Room for the stop ids and bad words of new requests."""
        E, (W, L) = self._stops_SE.shape[1], self._words_SWL.shape[1:]
        E2, W2, L2 = max(E, needs.stops), max(W, needs.words), max(L, needs.length)
        with torch.inference_mode(False):
            self.version += (E2, W2, L2) != (E, W, L)
            if E2 > E:
                self._stops_SE = pad(self._stops_SE, (0, E2 - E), value=-1)
            if (W2, L2) != (W, L):
                # Words end where the text before a row does.
                self._words_SWL = pad(self._words_SWL, (L2 - L, 0, 0, W2 - W), value=-1)
                self._tail_ST = pad(self._tail_ST, (L2 - L, 0), value=-1)

    def _width(self) -> int:
        """W: columns of wide rows here; 0 while it is not known."""
        return (self.columns or 0) if self.exchange == "vocab" else self.vocab_size

    def _first_id(self) -> int:
        """The id of the first column of wide rows here."""
        return self.axis.rank * (self.columns or 0) if self.exchange == "vocab" else 0

    def _filled(self, *columns: int) -> Tensor:
        with torch.inference_mode(False):  # updated in place, by steps inside and outside of it
            return torch.full((self.num_slots + 1, *columns), -1, device=self.device)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _bits(*values: float) -> list[int]:
    """Float32 numbers by their bits."""
    bits: list[int] = np.array(values, dtype=np.float32).view(np.int32).tolist()
    return bits


def _bad(words_RWL: Tensor, text_RX: Tensor, count_R: Tensor) -> Tensor:
    """[R, W] last ids of the bad words that the text before a row begins; -1 elsewhere.

    Args:
        words_RWL: [R, W, L], -1 before the first id of a shorter word, and where there is none.
        text_RX: [R, L - 1 + K] the end of the text, then drafts.
        count_R: [R] how many of those come before the row.
    """
    place_RT = count_R[:, None] + torch.arange(words_RWL.shape[2] - 1, device=count_R.device)
    before_RT = text_RX.gather(1, place_RT)
    begins_RWT = (words_RWL[..., :-1] == before_RT[:, None]) | (words_RWL[..., :-1] < 0)
    return torch.where(begins_RWT.all(2), words_RWL[..., -1], -1)


def _counts(kept: _Kept, first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and counts of the ids that a request has seen, of those from `first` on."""
    count = np.zeros(width, np.int32)
    prompt, output = (
        np.array([id_ - first for id_ in ids if first <= id_ < first + width], dtype=np.int64)
        for ids in (kept.prompt, kept.output)
    )
    np.add.at(count, output, 1)
    count[prompt] |= IN_PROMPT
    (at,) = np.nonzero(count)
    return at, count[at]
