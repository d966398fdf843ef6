"""The ways to sample that `bench.py` and `bench_decode.py` compare, from sharded logits to tokens.

A step without speculation draws a token for each of B rows. With K drafts a request it draws those
from K blocks of draft logits, [B, V] each, and verifies them in T = B * (K + 1) rows of the
target's, where row j of a request gives p of the token after its draft j. Shapes are those of
`dtensor_sample`; J = K + 1.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.exchange import EXCHANGES

OWN = (*EXCHANGES, "auto")
"""How this library runs a step."""


class Way(NamedTuple):
    """One way to run a step."""

    step: Callable[[], Tensor]
    """Token ids [B], or with drafts [B, J], -1 after the last one."""
    kept_bytes: int = 0
    """What it keeps from step to step besides the logits that it is given."""
    exchange: str | None = None
    """What this library runs it under."""


def ways(
    mesh: DeviceMesh, target_TV: DTensor, K: int, drafts: Sequence[DTensor], params: SamplingParams
) -> Iterator[tuple[str, Way]]:
    """Every way to run a step on these logits, with its name; no `drafts`: they are one-hot."""
    T = target_TV.shape[0]
    for exchange in OWN:
        yield exchange, own_way(mesh, exchange, target_TV, K, drafts, params)
    if K:
        step = functools.partial(gathered_and_verified, target_TV, K, drafts, params)
        yield "gather + sample", Way(step)
        return
    yield "gather + sample", Way(functools.partial(gathered, target_TV, params))
    if params == SamplingParams() and T % mesh.size() == 0:
        yield "all-to-all + Gumbel", Way(functools.partial(gumbel, mesh, target_TV, params))
    if importlib.util.find_spec("flashinfer") is not None:
        yield "gather + FlashInfer", Way(functools.partial(flashinfer, target_TV, params))


def state_of(
    mesh: DeviceMesh, exchange: str, V: int, B: int, K: int, params: SamplingParams
) -> SamplingState:
    """A state of B equal requests."""
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=B,
        num_speculative_tokens=K,
        seed=1,
        exchange=exchange,
    )
    for slot in range(B):
        state.add(slot, params)
    return state


def own_way(
    mesh: DeviceMesh,
    exchange: str,
    target_TV: DTensor,
    K: int,
    drafts: Sequence[DTensor],
    params: SamplingParams,
) -> Way:
    """What this library does under one exchange."""
    T, V = target_TV.shape
    B = T // (K + 1)
    state = state_of(mesh, exchange, V, B, K, params)

    def make(rows: int) -> ShardPlan:
        return sharder.plan(range(B), [rows] * B, positions=[0] * B)

    def select(plan: ShardPlan, logits: DTensor) -> DTensor:
        return vocab_sharded(plan.select(logits.to_local()), mesh, vocab_size=V)

    # With owners by position, rows in batch order are rows in the plan's order but for padding.
    sharder = BatchSharder(state, owners="position")
    plan = make(1)
    if K == 0:
        step = functools.partial(sampled, Sampler(state), select(plan, target_TV), plan)
        return Way(step, exchange=plan.exchange.name)
    draw = functools.partial(one_hot, mesh, B, K, V)
    if drafts:
        rows = [select(plan, logits) for logits in drafts]
        draw = functools.partial(drafted, DraftSampler(state), rows, plan)
    draw()  # where drafts are kept, they are verified: so this plan comes after the first of them
    plan = make(K + 1)
    verify = RejectionSampler(state, method="block")
    step = functools.partial(verified, verify, select(plan, target_TV), plan, draw)
    return Way(step, state.drafts.bytes, plan.exchange.name)


def sampled(sampler: Sampler, rows: DTensor, plan: ShardPlan) -> Tensor:
    """A token for each request."""
    return sampler(rows, plan).token_ids[:, 0]


def drafted(drafter: DraftSampler, drafts: Sequence[DTensor], plan: ShardPlan) -> Tensor:
    """Draft tokens [B, K]."""
    return torch.stack([drafter(rows, plan, step=k) for k, rows in enumerate(drafts)], 1)


def one_hot(mesh: DeviceMesh, B: int, K: int, V: int) -> Tensor:
    """[B, K] some draft tokens, that nobody drew."""
    return (torch.arange(K, device=mesh.device_type) % V).repeat(B, 1)


def verified(
    verifier: RejectionSampler, rows: DTensor, plan: ShardPlan, draw: Callable[[], Tensor]
) -> Tensor:
    """The tokens that drafts and target give, up to J for each request."""
    return verifier(rows, plan, draw()).token_ids


def gathered(logits_TV: DTensor, params: SamplingParams) -> Tensor:
    """All logits to all ranks, and every row sampled on each, in the usual PyTorch operations."""
    return pick(probabilities(gather(logits_TV), params))


def gathered_and_verified(
    target_TV: DTensor, K: int, drafts: Sequence[DTensor], params: SamplingParams
) -> Tensor:
    """The same for drafts and their verification: all rows on all ranks, in PyTorch."""
    if not drafts:
        p_TV = probabilities(gather(target_TV), params)
        p_BJV = p_TV.view(-1, K + 1, p_TV.shape[1])
        return accept(p_BJV, None, one_hot(target_TV.device_mesh, len(p_BJV), K, p_TV.shape[1]))
    B, V = drafts[0].shape
    q_BJV = torch.zeros(B, K + 1, V, device=target_TV.device)  # nothing is drafted after the last
    tokens = []
    for k, logits_BV in enumerate(drafts):
        q_BJV[:, k] = probabilities(gather(logits_BV), params)
        tokens.append(pick(q_BJV[:, k]))
    p_BJV = probabilities(gather(target_TV), params).view(B, K + 1, V)
    return accept(p_BJV, q_BJV, torch.stack(tokens, 1))


def gather(logits_TV: DTensor) -> Tensor:
    """Whole rows on every rank."""
    whole_TV: Tensor = logits_TV.redistribute(placements=[Replicate()]).to_local()
    return whole_TV


def probabilities(logits_TV: Tensor, params: SamplingParams) -> Tensor:
    """[T, V] float32: filters and softmax as scripts have them; top-p sorts whole rows."""
    x_TV = logits_TV.float() / params.temperature
    if params.top_k:
        least_T1 = x_TV.topk(min(params.top_k, x_TV.shape[1])).values[:, -1:]
        x_TV = x_TV.masked_fill(x_TV < least_T1, -torch.inf)
    if params.top_p < 1:
        sorted_TV, id_TV = x_TV.sort(descending=True)
        probs_TV = sorted_TV.softmax(-1)
        beyond_TV = probs_TV.cumsum(-1) - probs_TV >= params.top_p
        x_TV = x_TV.masked_fill(beyond_TV.scatter(1, id_TV, beyond_TV), -torch.inf)
    return x_TV.softmax(-1)


def pick(weights_BV: Tensor) -> Tensor:
    """[B]: an id drawn by weight; what torch.multinomial does, without its host sync."""
    return (weights_BV / torch.empty_like(weights_BV).exponential_(1)).argmax(-1)


def accept(p_BJV: Tensor, q_BJV: Tensor | None, token_BK: Tensor) -> Tensor:
    """Rejection sampling of drafts (Leviathan et al., 2023), without a host sync.

    Args:
        p_BJV: the target's probabilities; row j is of the token after draft j.
        q_BJV: the drafts', with a last row of zeros; None: drafts were chosen, not drawn.
        token_BK: the drafts.

    Returns:
        [B, J] token ids, -1 after the last.
    """
    B, K = token_BK.shape
    row_B, step_J = (torch.arange(n, device=token_BK.device) for n in (B, K + 1))
    coin_BK = torch.rand(B, K, device=token_BK.device)
    if q_BJV is not None:
        coin_BK = coin_BK * q_BJV[:, :K].gather(2, token_BK[..., None])[..., 0]
    passed_BK = coin_BK < p_BJV[:, :K].gather(2, token_BK[..., None])[..., 0]
    accepted_B = passed_BK.to(torch.int64).cumprod(1).sum(1)
    padded_BJ = torch.nn.functional.pad(token_BK, (0, 1), value=-1)
    # What the refused draft leaves of p; after the last draft, p itself.
    p_BV = p_BJV[row_B, accepted_B]
    if q_BJV is not None:
        rest_BV = (p_BV - q_BJV[row_B, accepted_B]).clamp(min=0)
    else:
        refused_B1 = padded_BJ.gather(1, accepted_B[:, None])
        kept_B1 = p_BV.gather(1, refused_B1.clamp(min=0)) * (refused_B1 < 0)
        rest_BV = p_BV.scatter(1, refused_B1.clamp(min=0), kept_B1)
    next_B = pick(torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV))
    token_BJ = padded_BJ.masked_fill(step_J >= accepted_B[:, None], -1)
    return torch.where(step_J == accepted_B[:, None], next_B[:, None], token_BJ)


def flashinfer(logits_TV: DTensor, params: SamplingParams) -> Tensor:
    """All logits to all ranks, and every row sampled on each by FlashInfer's kernels."""
    sample = importlib.import_module("flashinfer.sampling").top_k_top_p_sampling_from_logits
    x_TV = gather(logits_TV)
    token_T: Tensor = sample(x_TV, params.top_k or x_TV.shape[1], params.top_p)
    return token_T


def gumbel(mesh: DeviceMesh, logits_TV: DTensor, params: SamplingParams) -> Tensor:
    """Rows to owners by one all-to-all and a copy; there one random number per logit."""
    local_Tv, P = logits_TV.to_local(), mesh.size()
    width = -(-logits_TV.shape[1] // P)
    padded_Tv = torch.nn.functional.pad(local_Tv, (0, width - local_Tv.shape[1]), value=-torch.inf)
    received = torch.empty_like(padded_Tv)
    dist.all_to_all_single(received, padded_Tv, group=mesh.get_group())
    x_RV = received.view(P, -1, width).transpose(0, 1).flatten(1).float() / params.temperature
    token_R = (x_RV - torch.empty_like(x_RV).exponential_(1).log()).argmax(-1)
    return DTensor.from_local(token_R, mesh, [Shard(0)], run_check=False).full_tensor()


def check(
    mesh: DeviceMesh, target_TV: DTensor, K: int, drafts: Sequence[DTensor], params: SamplingParams
) -> None:
    """End the program unless all ways give tokens, and the exchanges equal and right ones.

    Greedy steps have one right answer: the largest logits, as far as drafts are the largest too.
    """
    V = target_TV.shape[1]
    found = {name: way.step() for name, way in ways(mesh, target_TV, K, drafts, params)}
    for name, ids in found.items():
        first = ids.view(-1, K + 1)[:, 0]
        if not ((ids >= -1) & (ids < V)).all() or (first < 0).any():
            raise SystemExit(f"{name} gives ids beyond the vocabulary")
    greedy = SamplingParams(temperature=0.0)
    right = chain(target_TV, K, drafts)
    for name in OWN:
        chosen = own_way(mesh, name, target_TV, K, drafts, greedy).step().view(right.shape)
        if not torch.equal(found[name], found["batch"]) or not torch.equal(chosen, right):
            raise SystemExit(
                "the exchanges differ from each other, or greedy tokens from the largest"
            )


def chain(target_TV: DTensor, K: int, drafts: Sequence[DTensor]) -> Tensor:
    """[B, J]: the largest ids of each request's rows, up to the first that was not drafted."""
    largest_BJ = target_TV.full_tensor().argmax(-1).view(-1, K + 1)
    ended_B = torch.zeros_like(largest_BJ[:, 0], dtype=torch.bool)
    token_BK = one_hot(target_TV.device_mesh, len(largest_BJ), K, target_TV.shape[1])
    for k in range(K):
        token_B = drafts[k].full_tensor().argmax(-1) if drafts else token_BK[:, k]
        ended_B |= largest_BJ[:, k] != token_B
        largest_BJ[:, k + 1].masked_fill_(ended_B, -1)
    return largest_BJ
