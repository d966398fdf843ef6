"""Kernels against their twins, bit for bit: on a GPU, or on a CPU in Triton's interpreter.

As a script it runs small cases in the interpreter and prints what differs. The interpreter must be
chosen before Triton is imported, hence a process of its own: see test_kernels.py.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample import ops, weigh
from dtensor_sample.ops.define import Op
from dtensor_sample.ops.edits import Edits
from dtensor_sample.ops.kernels import launcher
from dtensor_sample.ops.peak import pack_value

FILTERS = ((False, False), (True, False), (False, True), (True, True))
TOP_K_OFF, TOP_P_OFF = 1 << 62, 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of S segments of v columns, V of S * v ids of the vocabulary."""

    kinds: tuple[str, ...]
    """What kind of row each is: see `row`."""
    S: int
    v: int
    V: int
    dtype: torch.dtype
    layout: str = "plain"
    """plain, buffer ([S, N, v] seen as [N, S, v]), wide (rows padded) or strided (columns)."""
    chosen: tuple[int, ...] | None = None
    """Rows to read; -1 for a row without tokens."""
    edited: str = ""
    """What changes values: any of bias, counts, bans, mask; in all rows but the second."""

    def logits(self, device: str) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """x_NSv, first_id_S, rows_R, vocab_size."""
        generator = torch.Generator().manual_seed(len(self.kinds) * self.v)
        flat = torch.stack([row(kind, self.S * self.v, generator) for kind in self.kinds])
        x_NSv = flat.to(self.dtype).unflatten(1, (self.S, self.v)).to(device)
        match self.layout:
            case "buffer":
                x_NSv = x_NSv.transpose(0, 1).contiguous().transpose(0, 1)
            case "wide":
                x_NSv = torch.nn.functional.pad(x_NSv, (0, 16))[:, :, : self.v]
            case "strided":
                x_NSv = x_NSv.movedim(2, 0).contiguous().movedim(0, 2)
        first_id_S = torch.arange(self.S, device=device) * self.v
        rows_R = (
            None
            if self.chosen is None
            else torch.tensor(self.chosen, dtype=torch.int64, device=device)
        )
        return x_NSv, first_id_S, rows_R, self.V

    def edits(self, device: str, rows: int, K: int = 2) -> tuple[Tensor, ...]:
        """What `edited` says, of some rows."""
        if not self.edited:
            return ()
        generator = torch.Generator().manual_seed(7)
        M, W, words = rows + 1, self.V, (self.V - 9) // 32

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        # The first of a vocabulary's ids are in every text, since rows peak anywhere.
        counts_MW = integers(0, 3, M, W) * (integers(0, 3, M, W) == 0)
        counts_MW |= (integers(0, 3, M, W) == 0).long() << 30
        bias_MW = torch.randn(M, W, generator=generator) * 3
        bias_MW[integers(0, 9, M, W) == 0] = -torch.inf
        bias_MW[:, ::97] = 3e38
        rates_R3 = torch.rand(rows, 3, generator=generator) * 2 + 0.1
        mask_GX = integers(-(1 << 31), 1 << 31, M, words).int()
        nothing = torch.empty(0, 0)
        edits = Edits(
            row_R=torch.arange(rows).masked_fill(torch.arange(rows) == 1, -1),
            table_E=torch.randperm(M, generator=generator)[:rows],
            rates_E3=rates_R3,
            drafts_EK=integers(-1, W, rows, K),
            banned_EB=integers(-1, W, rows, 3)
            if "bans" in self.edited
            else integers(0, 1, rows, 0),
            mask_E=integers(-1, M, rows),
            bias_MW=bias_MW if "bias" in self.edited else nothing,
            counts_MW=counts_MW.int() if "counts" in self.edited else nothing.int(),
            mask_GX=mask_GX if "mask" in self.edited and words > 0 else nothing.int(),
            mask_id_1=torch.zeros(1, dtype=torch.int64),
        )
        return tuple(x.to(device) for x in edits)

    def shard(self, edits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The edits of the last segment alone, as a rank that holds no other has them."""
        if not edits:
            return ()
        of, first = Edits(*edits), (self.S - 1) * self.v
        word = first // 32
        return of._replace(
            bias_MW=of.bias_MW[:, first:],
            counts_MW=of.counts_MW[:, first:],
            mask_GX=of.mask_GX[:, word:],
            mask_id_1=of.mask_id_1 + word * 32,
        )


def row(kind: str, size: int, generator: torch.Generator) -> Tensor:
    """Logits of one row."""
    x = torch.randn(size, generator=generator)
    match kind:
        case "peaked":
            x = x * 1.2
            ids = torch.randperm(size, generator=generator)[:200]
            x[ids] += torch.linspace(14, 4, len(ids))
        case "clustered":
            x[: size // 4] += 5
        case "tied":
            x = (x * 2).clamp(max=3).round()
        case "flat":
            x = torch.full_like(x, -5.0)
        case "nan":
            x[torch.rand(size, generator=generator) < 0.01] = torch.nan
        case "infinite":
            x[torch.randint(0, size, (3,), generator=generator)] = torch.inf
        case "masked":
            x[torch.rand(size, generator=generator) < 0.95] = -torch.inf
        case "zeros":
            x = x.abs().floor() * x.sign()  # many of both signs, below a few others
        case "one":
            x[:] = -torch.inf
            x[size // 2] = 1.5
        case "dead":
            x[:] = -torch.inf
            x[::3] = torch.nan
        case "pitted":  # some of everything in each part
            x[::3] = torch.nan
            x[1::3] = -torch.inf
        case "huge":
            x *= 6e4 / x.abs().max()
        case "far apart":
            x[::2] = -3e38
            x[1::2] = 3e38
    return x


KINDS = (
    "gauss", "peaked", "clustered", "tied", "flat", "nan", "infinite", "masked", "zeros", "one",
    "dead", "pitted", "huge", "far apart",
)  # fmt: skip


def params(R: int, V: int, *, top_k: bool, top_p: bool, seed: int = 0) -> tuple[Tensor, ...]:
    """scale, min_p, top_k, top_p of R rows: each filter on in most rows."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(off: float) -> Tensor:
        return torch.rand(R, generator=generator) < off

    temperature = torch.rand(R, generator=generator) * 2 + 0.05
    temperature[len(KINDS) - 1 :] = 1e38  # for logits as far apart as they can be
    min_p = temperature * torch.rand(R, generator=generator).log()
    k = torch.randint(1, min(V, 300) + 2, (R,), generator=generator)
    p = (torch.rand(R, generator=generator) * (1 << 31)).long()
    return (
        math.log2(math.e) / temperature,
        torch.where(drawn(0.6), -torch.inf, min_p),
        torch.where(drawn(0.2) | ~torch.tensor(top_k), TOP_K_OFF, k),
        torch.where(drawn(0.2) | ~torch.tensor(top_p), TOP_P_OFF, p),
    )


@contextmanager
def twins() -> Iterator[None]:
    """Ops run their twins, on GPUs too."""
    with patch.object(Op, "__call__", lambda self, *args: self._function(*args)):
        yield


def mismatches(case: Case, device: str, *, beside: str = "cpu") -> Iterator[str]:
    """Names of the results in which a kernel differs from its twin, which runs on `beside`."""

    def compare(name: str, op, *args) -> list[Tensor]:
        with twins():
            wanted = op(*(moved(argument, beside) for argument in args))
        got = (op if device == "cuda" else launcher(op.name))(*args)
        results = [got] if isinstance(got, Tensor) else list(got)
        pairs = zip(results, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True)
        different.extend(name for g, w in pairs if not torch.equal(g.cpu(), w.cpu()))
        return results

    different: list[str] = []
    x_NSv, first_id_S, rows_R, V = case.logits(device)
    R = len(case.kinds if case.chosen is None else case.chosen)
    edits = case.edits(device, R)
    logits = (x_NSv, first_id_S, rows_R, edits)
    uniform_R = torch.randint(0, 1 << 62, (R,), generator=torch.Generator().manual_seed(0))
    uniform_R = uniform_R.to(device)
    compare("peak", ops.peak, *logits, V)
    for filters in FILTERS:
        shape = [p.to(device) for p in params(R, V, top_k=filters[0], top_p=filters[1])]
        named = f"weigh {filters}"
        for alone in (False, True)[: 1 + filters[1]]:
            used = *logits, *shape, *filters, alone
            peak_R, floor_R, mass_RSC, *_ = compare(f"{named} {alone}", weigh.whole, *used, V)
        row_args = (*logits, peak_R, floor_R, shape[0])
        compare("mass", ops.mass, *row_args, V)
        drawn = (mass_RSC, 0, uniform_R)
        token_R = compare("pick", ops.pick, *row_args, mass_RSC, 0, None, uniform_R, V)[0]
        told = (token_R - 1, uniform_R, uniform_R % 2 == 0)
        for masses in (mass_RSC, mass_RSC[..., :0]):
            compare("draw", ops.draw, *row_args, masses, *drawn[1:], *told, V)
        compare("lookup", ops.lookup, *row_args, None, token_R, V)
        below = (*row_args[:4], peak_R - 1, *row_args[5:])
        compare("lookup beyond the peak", ops.lookup, *below, None, token_R, V)
        value_R = torch.where(token_R % 2 == 0, peak_R, floor_R)
        compare("tally", ops.tally, *row_args, value_R, V, True)
    on_gpu = device == "cuda"  # the interpreter is slow
    for size in (8, 64) if on_gpu else (8,):
        listed_RSn = compare("shortlist", ops.shortlist, *logits, V, size)[0]
        k_R = shape[2].clamp(max=size)
        by_segment_RSn = listed_RSn.transpose(0, 1).contiguous().transpose(0, 1)
        for listed in (listed_RSn, by_segment_RSn):
            compare("sift", ops.sift, listed, *row_args[4:], k_R, shape[3], V)
            compare("join", ops.join_peaks, listed[..., :2], peak_R)
    for count in (1, 5, 9, min(V, 5000)) if on_gpu else (5, 9):
        compare(f"top {count}", ops.top, *logits, V, count)
    prefix_R = torch.zeros_like(uniform_R)
    for weighted in (False, True):
        compare("histogram", ops.histogram, *row_args, prefix_R, V, 0, weighted)
    # A draft that is much like the target, with some rows one-hot or without tokens.
    generator = torch.Generator().manual_seed(1)
    draft_MSw = case.logits("cpu")[0].float().flatten(1)[:, None, :V].roll(-1, 0)
    draft_MSw = (draft_MSw + torch.randn(draft_MSw.shape, generator=generator)).half().to(device)
    draft_rows_R = torch.arange(R, device=device) % max(len(draft_MSw), 1)
    draft_rows_R[R // 2 : R // 2 + 2] = -1
    draft = (draft_MSw, first_id_S[:1], draft_rows_R, edits)
    draft_peak_R, draft_floor_R, draft_mass_RSC, *_ = weigh.whole(*draft, *shape, *filters, True, V)
    draft_total_R = draft_mass_RSC.sum((1, 2))
    one_hot_R = torch.where(draft_rows_R < 0, token_R, -1)
    ratio_R = torch.randint(0, ops.ONE + 1, (R,), generator=generator).to(device)
    ratio_R[: R // 2] = ops.ONE
    total_R, every_R = mass_RSC.sum((1, 2)), torch.arange(R, device=device)
    of_draft = (draft_peak_R, draft_floor_R, shape[0], draft_total_R)
    drafted = (draft_MSw, draft_rows_R, edits, *of_draft, one_hot_R)
    residual_args = (*row_args, every_R, total_R, ratio_R, *drafted)
    spare_RSC = compare("residual_mass", ops.residual_mass, *residual_args, None, V)[0]
    left = (mass_RSC, spare_RSC, True, every_R, every_R)
    compare("recover", ops.recover, *residual_args, *left, 0, uniform_R, V)
    # Of other places in another order, without draft logits, and what is drawn from the target.
    turned_R = every_R.flip(0)
    index_R = turned_R.masked_fill(turned_R % 4 == 3, -1)
    compare("lookup of some", ops.lookup, *row_args, index_R, token_R, V)
    row_R = every_R.masked_fill(every_R % 5 == 2, -1).roll(1)
    hot = (None, None, (), *[None] * 4, token_R)
    for of_drafts in (drafted, hot):
        some_args = (*row_args, row_R, total_R.roll(1), None, *of_drafts)
        some_RSC = compare("residual_mass of some", ops.residual_mass, *some_args, index_R, V)[0]
        left = (mass_RSC, some_RSC, False, index_R, turned_R)
        compare("recover some", ops.recover, *some_args, *left, 0, uniform_R, V)
    # One shard of the vocabulary: its parts of a wider row.
    last = (x_NSv[:, -1:], first_id_S[-1:], rows_R, case.shard(edits))
    compare("shard's peak", ops.peak, *last, V)
    compare("shard's tally", ops.tally, *last, *row_args[4:], value_R, V, False)
    compare("shard's shortlist", ops.shortlist, *last, V, 16)
    compare("shard's mass", ops.mass, *last, peak_R, floor_R, shape[0], V)
    by_segment_RSC = mass_RSC.transpose(0, 1).contiguous().transpose(0, 1)
    drawn = (by_segment_RSC, x_NSv.shape[1] - 1, uniform_R)
    compare("shard's pick", ops.pick, *last, *row_args[4:], *drawn[:2], index_R, drawn[2], V)
    yield from (f"{name} in {case}" for name in different)


def moved(argument: object, device: str) -> object:
    """Tensors, and lists of them, on a device."""
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, tuple):
        return [moved(a, device) for a in argument]
    return argument


SMALL = Case(kinds=KINDS, S=1, v=4099, V=4099, dtype=torch.bfloat16)
FEW = replace(SMALL, kinds=("peaked", "nan", "zeros", "far apart"))
# Segments of 15 parts of 160 columns and one of 152; the vocabulary ends in another's part.
SHORT = replace(
    FEW, kinds=("pitted", "masked", "infinite"), S=2, v=2552, V=2552 + 1000, layout="buffer"
)
CASES = (
    FEW,
    SHORT,
    replace(SHORT, kinds=("pitted", "tied"), V=2552 + 997, dtype=torch.float16),
    replace(SHORT, kinds=("pitted",), v=2300, V=4600, dtype=torch.float32),
    replace(FEW, kinds=("tied", "dead"), S=3, v=1600, V=4700, dtype=torch.float32, layout="buffer"),
    replace(FEW, v=2500, V=2500, dtype=torch.float16, layout="wide", chosen=(2, -1, 0)),
    replace(FEW, kinds=("gauss",), v=2100, V=2099, dtype=torch.float32, layout="strided"),
    replace(FEW, kinds=("infinite",), S=2, v=60, V=111, dtype=torch.float32),
    replace(FEW, kinds=("gauss", "dead"), S=2, v=1, V=1),
    replace(FEW, kinds=("gauss",), S=2, v=3, V=6, chosen=()),
    replace(FEW, kinds=("peaked",), v=2500, V=2500, edited="bias counts bans mask"),
    replace(
        FEW, kinds=("tied", "infinite"), S=3, v=800, V=2300, dtype=torch.float16,
        layout="buffer", edited="counts bans", chosen=(1, -1),
    ),
    replace(FEW, kinds=("nan",), v=2100, V=2099, edited="bias mask", layout="strided"),
    replace(FEW, kinds=("infinite", "tied"), S=2, v=60, V=111, dtype=torch.float32,
            edited="bias counts bans mask"),
)  # fmt: skip
"""For the interpreter, which is slow: every layout and dtype, V below and above 2048."""


def numbers(device: str) -> Iterator[str]:
    """Names of ops on a few numbers a row whose results differ."""
    generator = torch.Generator().manual_seed(0)
    seed, position = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 300), generator=generator)
    offset = torch.randint(0, 1 << 32, (300,), generator=generator)
    counters = (seed, position, offset)
    for stream in range(5):
        run = ops.uniform if device == "cuda" else launcher("uniform")
        got = run(*(a.to(device) for a in counters), stream)
        if not torch.equal(got.cpu(), ops.uniform(*counters, stream)):
            yield "uniform"
    yield from few_numbers(device, generator)
    yield from stored(device, generator)
    yield from judged(device, generator)


def few_numbers(device: str, generator: torch.Generator) -> Iterator[str]:
    """Names of ops on a few numbers a row, several of them, whose results differ."""
    position, argmax = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 300), generator=generator)
    table_M6 = torch.randint(-(1 << 40), 1 << 40, (300, 6), generator=generator)
    table_M6[::3, 5] = 0
    place_R = torch.randint(0, 300, (150,), generator=generator)
    values_RS = torch.randn(300, 3, generator=generator).round()
    values_RS[::7] = -torch.inf
    ids_RS = torch.randint(0, 1 << 31, (300, 3), generator=generator)
    nans_RS = torch.randint(0, 9, (300, 3), generator=generator)
    packed_RS2 = torch.stack([pack_value(values_RS, ids_RS), nans_RS], 2)
    by_segment_RS2 = packed_RS2.transpose(0, 1).contiguous().transpose(0, 1)
    min_p_R = -torch.rand(300, generator=generator)
    mass_RPC = torch.randint(0, 1 << 60, (3, 300, ops.PARTS), generator=generator).transpose(0, 1)
    fields = (values_RS[:, 0], values_RS[:, 1], min_p_R, mass_RPC, position, argmax)
    wanted_Q = place_R % 3 > 0
    cases: list[tuple[Any, ...]] = [
        (ops.row_params, table_M6, place_R, position, place_R.flip(0), place_R * 2, None, 0),
        *((ops.row_params, table_M6, None, position, None, None, stream, 6) for stream in range(2)),
        (ops.join_peaks, packed_RS2, min_p_R),
        (ops.join_peaks, by_segment_RS2, min_p_R),
        (ops.deliver, ids_RS.repeat(1, 3) - 5, place_R, 5, place_R, None),
        (ops.deliver, ids_RS.repeat(1, 2)[:, :5].contiguous(), place_R, 8, place_R, position),
        (ops.take, place_R, wanted_Q, argmax, *fields),
        (ops.take, torch.where(wanted_Q, place_R, -1), None, None, *fields),
        (ops.take, place_R, wanted_Q, None, *fields[:3], mass_RPC[..., :0], *fields[4:]),
    ]
    for op, *given in cases:
        run = op if device == "cuda" else launcher(op.name)
        # As logits are, in strides of their own.
        there = [on(device, x) if isinstance(x, Tensor) else x for x in given]
        found, wanted = (*run(*there), there[-1]), (*op(*given), given[-1])  # one is changed
        for a, b in zip(found, wanted, strict=True):
            if a is not b and not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
                yield op.name


def stored(device: str, generator: torch.Generator) -> Iterator[str]:
    """The name of `store` if it writes anything else: strided segments, W < S * v."""
    x_RSv = torch.randn(4, 3, 50, generator=generator).bfloat16().transpose(1, 2)
    first_R, skipped_R = torch.tensor([2, -1, 0, 3]), torch.tensor([False, False, True, False])
    mass_RPC = torch.randint(0, 1 << 55, (50, 4, 3), generator=generator).transpose(0, 1)
    integers = torch.randint(-9, 9, (2, 4), generator=generator)
    fields = (*torch.randn(3, 4, generator=generator), mass_RPC, *integers)
    written = []
    for place, run in (
        ("cpu", ops.store),
        (device, ops.store if device == "cuda" else launcher("store")),
    ):
        kept = [*torch.zeros(3, 5), torch.zeros(5, 1, 1).long(), *torch.zeros(2, 5).long()]
        cache = [x.to(place) for x in (torch.zeros(5, 141).bfloat16(), *kept)]
        run(
            cache[0], cache[1:], first_R.to(place), 1, skipped_R.to(place), x_RSv.to(place),
            *(x.to(place) for x in fields),
        )  # fmt: skip
        written.append([x.cpu() for x in cache])
    if not all(torch.equal(a, b) for a, b in zip(*written, strict=True)):
        yield "store"


def judged(device: str, generator: torch.Generator) -> Iterator[str]:
    """Names of the ops that judge drafts whose results differ: 40 requests of up to 5 drafts."""
    Q, K, V = 40, 5, 6

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def units(*shape: int) -> Tensor:
        """Probabilities, many of them 0 or 1."""
        return torch.where(integers(0, 3, *shape) > 0, integers(0, ops.ONE, *shape), 0).where(
            integers(0, 4, *shape) > 0, torch.tensor(ops.ONE)
        )

    def compare(op: Any, *given: Any) -> Any:
        run = op if device == "cuda" else launcher(op.name)
        found = run(*(on(device, x) if isinstance(x, Tensor) else x for x in given))
        wanted = op(*given)
        both = [(found, wanted)] if isinstance(wanted, Tensor) else zip(found, wanted, strict=True)
        pairs = list(both)
        memories = {a.untyped_storage().data_ptr() for a, _ in pairs}
        if len(memories) < len(pairs) or not all(torch.equal(a.cpu(), b) for a, b in pairs):
            differing.append(op.name)
        return wanted

    differing: list[str] = []
    count_Q = integers(1, K + 2, Q)
    count_Q[-2:] = 0  # padding
    begin_Q1 = torch.cat([torch.zeros(1, dtype=torch.int64), count_Q.cumsum(0)])
    R, G = int(count_Q.sum()) + 3, int((count_Q - 1).clamp(min=0).sum()) + 2
    request_R = torch.repeat_interleave(torch.arange(Q), count_Q).flip(0)
    request_R = torch.cat([request_R, torch.zeros(3, dtype=torch.int64)])
    argmax_R, nans_R = integers(-1, V, R), integers(0, 3, R)
    greedy_R, seed_R = integers(0, 3, R) == 0, integers(-(1 << 63), (1 << 63) - 1, R)
    position_R, total_G = integers(-1, 1 << 40, R), integers(0, 1 << 20, G) << 40
    mass_RPC = integers(0, 1 << 50, 3, R, ops.PARTS).transpose(0, 1)
    spare_GPC = (units(3, G, ops.PARTS) >> 6).transpose(0, 1)
    for hot in (None, integers(0, 2, Q) == 0):
        laid = compare(
            ops.lay_out, begin_Q1, request_R, integers(-1, 9, R) * 5, integers(0, K + 1, R),
            hot, integers(-1, V + 1, Q, K), G,
        )  # fmt: skip
        row_QJ, count_Q, token_QK, place_QK, drawn_Q, (row_G, token_G, *_) = laid
        grid = (row_QJ, count_Q, token_QK)
        of_rows = (argmax_R, greedy_R, mass_RPC[:, :, : 16 if hot is None else 0])
        judged_G, _ = compare(ops.eligible, *of_rows, row_G, token_G, V)
        weight_G, draft_weight_G = torch.where(integers(0, 4, 2, G) > 0, total_G // 3, 0)
        of_draft = (None, None) if hot is None else (draft_weight_G, total_G.flip(0))
        on_grid, counters = (row_QJ, place_QK), (seed_R, position_R)
        of_drafts = (judged_G, weight_G, total_G, *of_draft, drawn_Q)
        _, _, coin_QK, _ = compare(ops.chances, *of_drafts, *on_grid, *counters)
        for block in (False, True):
            p_QK, q_QK, limit_Q = units(Q, K), units(Q, K), integers(0, 9, Q).clamp(max=count_Q)
            limit_Q = (limit_Q - 1).clamp(min=0)
            of_drafts = (p_QK, q_QK, coin_QK)
            joint_QK, *_ = compare(ops.prefixes, *of_drafts, limit_Q, place_QK, G)
            of_block = (joint_QK, spare_GPC) if block else (None, None)
            judging = (*of_drafts, *of_block, limit_Q, *on_grid, *counters)
            accepted_Q, *_ = compare(ops.accept, *judging, greedy_R)
            for judged in ((accepted_Q, integers(-1, V, Q)), (None, None)):
                compare(ops.emit, argmax_R, nans_R, greedy_R, *grid, *judged)
    yield from differing


def on(device: str, x: Tensor) -> Tensor:
    """A tensor on a device, with its strides."""
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return moved.copy_(x)


def drafted(device: str, *, large: bool = False) -> Iterator[str]:
    """Names of the ops of drafting left to right whose results differ.

    Also where one kernel differs from itself: rows alone from rows together, shards from the whole.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, 1, 5), (33, 40, 300), (70, 256, 1000)) if large else ((3, 1, 5), (20, 40, 300))
    for (Q, r, D), dtype in itertools.product(
        sizes, (torch.bfloat16, torch.float16, torch.float32)
    ):
        V, F = D + 7, max(32, 1 << (r - 1).bit_length())
        x_QSv = torch.randn(2, Q, -(-D // 2), generator=generator).to(dtype).transpose(0, 1)
        x_QSv[0, 0, 1], x_QSv[1, 1, 1], x_QSv[2, 0, 0] = torch.nan, torch.inf, -torch.inf
        before_Q = torch.randint(-1, V, (Q,), generator=generator)
        before_Q[0], before_Q[1] = 3, -1
        w1_VF, w2_DF = (torch.randn(n, r, generator=generator) for n in (V, D))
        w1_VF[3] = 0
        (left_VF, left_scale_V), (right_DF, right_scale_D) = map(ops.quantized, (w1_VF, w2_DF))
        factors = (*(pad(f, (0, F - r)) for f in (left_VF, right_DF)),)
        args = [before_Q, factors[0], left_scale_V, factors[1], right_scale_D]
        floor_Q = torch.where(torch.arange(Q) % 3 == 0, -torch.inf, torch.randn(Q) - 1)
        ids_D = torch.randperm(V, generator=generator)[:D]
        run = ops.markov if device == "cuda" else launcher("markov")
        for floor, target, width in ((None, None, D), (floor_Q, None, D + 2), (None, ids_D, V)):
            whole: list[Any] = [x_QSv, floor, *args, target, width]
            got = run(*(a.to(device) if isinstance(a, Tensor) else a for a in whole)).cpu()
            if not same(got, ops.markov(*whole)):
                yield f"markov {dtype} {(Q, r, D)}"
            alone: list[Any] = [
                x_QSv[:1],
                floor if floor is None else floor[:1],
                before_Q[:1],
                *args[1:],
            ]
            alone = [*alone, target, width]
            first = run(*(a.to(device) if isinstance(a, Tensor) else a for a in alone)).cpu()
            if not same(first, got[:1]):
                yield f"markov {dtype} {(Q, r, D)} alone"
        half = x_QSv.shape[2]
        shard = [x_QSv[:, 1:], None, *args[:3], factors[1][half:], right_scale_D[half:], None, half]
        got = run(*(a.to(device) if isinstance(a, Tensor) else a for a in shard)).cpu()
        if not same(got[:, : D - half], ops.markov(x_QSv, None, *args, None, D)[:, half:]):
            yield f"markov {dtype} {(Q, r, D)} shard"
        hidden_RH = (torch.randn(Q, D, generator=generator) * 9).to(dtype)
        hidden_RH[0, 0], hidden_RH[1, 0], hidden_RH[2, 0] = torch.nan, torch.inf, -torch.inf
        weight_H = torch.randn(D, generator=generator)
        offset_R = torch.randint(-(1 << 34), 1 << 34, (Q,), generator=generator)
        run = ops.confidence if device == "cuda" else launcher("confidence")
        told = (hidden_RH, weight_H, offset_R)
        if not torch.equal(run(*(a.to(device) for a in told)).cpu(), ops.confidence(*told)):
            yield f"confidence {dtype} {D}"


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have equal numbers, and NaN in the same places."""
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(0.5, torch.inf, -torch.inf), second.nan_to_num(0.5, torch.inf, -torch.inf)
    )


if __name__ == "__main__":
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    from dtensor_sample.ops.kernels import nucleus, passes

    # The interpreter's maximum of a number and NaN is NaN; compiled, it is the number.
    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        operator = partialmethod(InterpreterBuilder.binary_op, op=function)
        setattr(InterpreterBuilder, name, operator)
    # Rows are short and few here.
    nucleus._HELD = 64  # not all of one shall be held
    passes._ENOUGH_ITEMS = 4  # items shall have several parts, as those of many rows
    for case in CASES:
        for difference in mismatches(case, "cpu"):
            print(difference)
    for difference in (*numbers("cpu"), *drafted("cpu")):
        print(difference)
