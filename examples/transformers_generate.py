"""Generate text with transformers under tensor parallelism, sampled by `dtensor_sample`.

    torchrun --nproc_per_node=2 examples/transformers_generate.py MODEL "Once upon a time"
    torchrun --nproc_per_node=2 examples/transformers_generate.py --packed MODEL "Hello" "1, 2, 3,"
    torchrun --nproc_per_node=2 examples/transformers_generate.py --tp-plan auto MODEL "Hello"

MODEL is what `from_pretrained` takes: a folder, or a name on the Hub. Needs transformers 5.24 or
newer, and 2 ranks or more: on one, transformers makes no mesh.

With the plan of the model itself ("auto"), `lm_head` gathers its output and every rank holds all
logits; with `{"lm_head": "colwise"}` each keeps its own columns, and nothing is gathered.

Shapes: B requests, L tokens of the longest so far; N tokens of a packed step, K tokens cached with
them; V the vocabulary.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    replicated,
    sample,
    vocab_sharded,
)


def main() -> None:
    """Load a model on all ranks, generate, print."""
    args = parse_arguments()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2:
        sys.exit("transformers_generate.py: error: start it with torchrun, on 2 ranks or more")
    model = load_model(args.model, args.tp_plan, ranks)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer(text)["input_ids"] for text in args.prompts]
    own = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    texts = (generate_packed if args.packed else generate)(
        model, prompts, own.spawn(len(prompts)), max_new_tokens=args.max_new_tokens
    )
    if dist.get_rank() == 0:
        for prompt, token_ids in zip(prompts, texts, strict=True):
            print(tokenizer.decode(prompt + token_ids, skip_special_tokens=True))
    dist.barrier()
    dist.destroy_process_group()


def load_model(name: str, tp_plan: str, ranks: int) -> Any:
    """The model, sharded over all ranks: its `lm_head` too if the plan is "colwise"."""
    plan = "auto" if tp_plan == "auto" else {"lm_head": tp_plan}
    config = DistributedConfig(tp_size=ranks, tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(name, distributed_config=config)


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """Continue prompts, padded on the left to one length."""
    input_ids, mask_BL = pad_left(prompts, model.device)
    position_ids = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    position = mask_BL.sum(-1)  # of the token to draw
    batch_params = SamplingParams.batch(params, model.device)
    mesh, V = model._device_mesh["tp"], model.config.vocab_size
    end_ids = torch.tensor(end_token_ids(model), dtype=torch.int64, device=model.device)
    tokens: list[Tensor] = []
    cache, ended_B = None, torch.zeros_like(position, dtype=torch.bool)
    while len(tokens) < max_new_tokens and not ended_B.all():
        output = model(
            input_ids=input_ids,
            attention_mask=mask_BL,
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1]
        if is_sharded(model):
            # [sample]
            logits = vocab_sharded(logits, mesh, vocab_size=V)  # these are this rank's columns
            # [/sample]
        else:
            logits = replicated(logits, mesh)
        # [sample]
        next_tokens = sample(logits, batch_params, position=position)
        # [/sample]
        tokens.append(next_tokens)
        check_tokens(next_tokens.tolist())
        ended_B |= torch.isin(next_tokens, end_ids)
        input_ids, position_ids = next_tokens[:, None], position[:, None]
        mask_BL = torch.nn.functional.pad(mask_BL, (0, 1), value=1)
        cache, position = output.cache, position + 1
    return [until_end(row, model) for row in torch.stack(tokens, 1).tolist()]


@torch.inference_mode()
def generate_packed(
    model: Any,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """The same, packed: the tokens of all requests are one row, in the cache too.

    A mask keeps requests apart, and `lm_head` sees only the rows that are sampled, in the order in
    which their owners want them.
    """
    mesh, V, device = model._device_mesh["tp"], model.config.vocab_size, model.device
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=len(prompts))
    sharder, sampler = BatchSharder(state), Sampler(state)
    for slot, prompt in enumerate(prompts):
        state.add(slot, params[slot], prompt_token_ids=prompt)

    texts: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    new = [list(prompt) for prompt in prompts]
    cache, cached = None, [0] * len(prompts)
    request_K = position_K = torch.empty(0, dtype=torch.int64, device=device)
    while running:
        request_N = torch.tensor([slot for slot in running for _ in new[slot]], device=device)
        position_N = torch.tensor(
            [cached[slot] + i for slot in running for i in range(len(new[slot]))], device=device
        )
        request_K = torch.cat([request_K, request_N])
        position_K = torch.cat([position_K, position_N])
        mask_NK = (request_K == request_N[:, None]) & (position_K <= position_N[:, None])
        starts = accumulate((len(new[slot]) for slot in running), initial=0)
        plan = sharder.plan(running, query_start_loc=list(starts))
        output = model(
            input_ids=torch.tensor([[i for slot in running for i in new[slot]]], device=device),
            attention_mask=mask_NK[None, None],
            position_ids=position_N[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=plan.logits_indices,
        )
        if is_sharded(model):
            logits = vocab_sharded(output.logits[0], mesh, vocab_size=V)
        else:
            logits = replicated(output.logits[0], mesh)
        tokens = sampler(logits, plan).token_ids[:, 0].tolist()
        check_tokens(tokens)
        cache = output.cache
        for slot, token in zip(running, tokens, strict=True):
            cached[slot] += len(new[slot])
            texts[slot].append(token)
            new[slot] = [token]
        running = [
            slot
            for slot in running
            if len(texts[slot]) < max_new_tokens and texts[slot][-1] not in end_token_ids(model)
        ]
    return texts


def check_tokens(tokens: Sequence[int]) -> None:
    """Stop where a row left no token to draw, as if all its logits were NaN: -1 is no input."""
    if min(tokens) < 0:
        raise RuntimeError(f"no token could be drawn for request {tokens.index(-1)}")


def is_sharded(model: Any) -> bool:
    """Whether a rank's logits are its own columns only, and not all."""
    return bool(model.tp_plan["lm_head"] == "colwise")


def pad_left(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts [B, L], and 1 where there is a token."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def end_token_ids(model: Any) -> list[int]:
    """The ids that end a text."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def until_end(token_ids: list[int], model: Any) -> list[int]:
    """Up to the first id that ends a text."""
    ends = [i for i, token_id in enumerate(token_ids) if token_id in end_token_ids(model)]
    return token_ids[: ends[0] + 1] if ends else token_ids


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Generate text with transformers under tensor parallelism."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a name on the Hub")
    add("prompts", nargs="+", metavar="PROMPT", help="texts to continue")
    add("--tp-plan", choices=("colwise", "auto"), default="colwise", help="of lm_head")
    add("--packed", action="store_true", help="pack prompts into one row, instead of padding them")
    add("--max-new-tokens", type=int, default=24, metavar="N", help="at most (default: 24)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="in [0, 1] (default: 1, off)")
    add("--seed", type=int, default=0, help="of all requests (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
