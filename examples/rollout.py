"""Reinforcement learning in a small loop: sample groups, score them, follow the policy gradient.

    torchrun --nproc_per_node=2 examples/rollout.py
    python examples/rollout.py --rounds 40 --compile --json

A model of random weights learns to count: a sample is rewarded for each token that is its
predecessor plus one, and 0 comes after the last id. Each prompt gets a group of samples with random
streams of their own, and a sample's advantage is its reward above the group's mean (GRPO without
its clipping: every update is on policy).

The trainer computes the log-probabilities of what was sampled once more, with gradients, and they
must equal those of the rollout bit for bit, or the program ends: a ratio of both is exactly 1. For
that the trainer runs the model in the shapes in which the rollout ran it. Weights are updated in
place, so that with `--compile` the compiled step goes on with new ones.

Shapes: G prompts, n samples of each, B = G * n rows, W tokens of context, L new tokens, D hidden.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_sample import SamplingParams, logprobs, sample_with_logprobs

V, W = 19, 2
"""Ids and context: 19 does not divide by the ranks, and that is fine."""
Step = Callable[[Tensor], DTensor]


def main() -> None:
    """Train, and print the mean reward of every round."""
    args = parse_arguments()
    mesh = join_ranks()
    rewards, graphs = train(
        mesh,
        rounds=args.rounds,
        prompts=args.prompts,
        samples=args.samples,
        length=args.length,
        seed=args.seed,
        compile_step=args.compile,
        show=None if args.json or dist.get_rank() else print,
    )
    if dist.get_rank() == 0 and args.json:
        print(json.dumps({"ranks": mesh.size(), "rewards": rewards, "compiled": graphs}))
    dist.barrier()
    dist.destroy_process_group()


def train(
    mesh: DeviceMesh,
    *,
    rounds: int = 20,
    prompts: int = 8,
    samples: int = 16,
    length: int = 6,
    seed: int = 0,
    compile_step: bool = False,
    show: Callable[[str], None] | None = None,
) -> tuple[list[float], int]:
    """The mean reward of every round, and how many graphs were compiled."""
    device, before = mesh.device_type, counters["stats"]["unique_graphs"]
    model = build(mesh, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, foreach=False)
    step: Step = torch.compile(model, fullgraph=True) if compile_step else model
    starts_GW = torch.arange(prompts, device=device)[:, None].expand(-1, W) * 5 % V
    starts_BW = starts_GW.repeat_interleave(samples, 0)
    rewards = []
    for number in range(rounds):
        group = SamplingParams(seed=seed + number).spawn(prompts)
        params = [own for prompt in group for own in prompt.spawn(samples)]
        tokens_BL, rollout_BL = generate(step, starts_BW, params, length)
        counted_BL = (previous(starts_BW, tokens_BL) + 1) % V
        reward_B = (tokens_BL == counted_BL).float().mean(1)
        trainer_BL = recompute(step, starts_BW, tokens_BL)
        if not torch.equal(trainer_BL.detach(), rollout_BL):
            sys.exit(f"rollout.py: round {number}: trainer and rollout differ")
        reward_Gn = reward_B.view(prompts, samples)
        advantage_B = (reward_Gn - reward_Gn.mean(1, keepdim=True)).flatten()
        loss = -(advantage_B[:, None] * trainer_BL).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward_B.mean().item())
        if show is not None:
            show(f"round {number:3}  reward {rewards[-1]:.3f}")
    return rewards, counters["stats"]["unique_graphs"] - before


def generate(
    step: Step, starts_BW: Tensor, params: list[SamplingParams], length: int
) -> tuple[Tensor, Tensor]:
    """[B, L] tokens that follow each start, and their log-probabilities."""
    batch, text_BT, told = SamplingParams.batch(params, starts_BW.device), starts_BW, []
    for position in range(W, W + length):
        # With gradients, which nobody asks for: the trainer's graph, and no second one.
        logits = step(text_BT[:, -W:].contiguous())
        tokens_B, logprobs_B = sample_with_logprobs(logits, batch, position=position)
        text_BT = torch.cat([text_BT, tokens_B[:, None]], 1)
        told.append(logprobs_B)
    return text_BT[:, W:], torch.stack(told, 1)


def recompute(step: Step, starts_BW: Tensor, tokens_BL: Tensor) -> Tensor:
    """[B, L] log-probabilities of given tokens, with gradients."""
    text_BT, length = torch.cat([starts_BW, tokens_BL], 1), tokens_BL.shape[1]
    seen = [text_BT[:, t : t + W].contiguous() for t in range(length)]
    rows = [logprobs(step(seen_BW), text_BT[:, W + t]) for t, seen_BW in enumerate(seen)]
    return torch.stack(rows, 1)


def previous(starts_BW: Tensor, tokens_BL: Tensor) -> Tensor:
    """[B, L] the token before each."""
    return torch.cat([starts_BW[:, -1:], tokens_BL[:, :-1]], 1)


class Model(nn.Module):
    """Logits of the token after the last W, sharded over the vocabulary once parallelized."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, hidden_size)
        self.mix = nn.Linear(W * hidden_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, V, bias=False)

    def forward(self, text_BW: Tensor) -> DTensor:
        hidden_BD = F.silu(self.mix(self.embed(text_BW).flatten(1)))
        logits: DTensor = self.lm_head(hidden_BD)
        return logits


def build(mesh: DeviceMesh, seed: int) -> Model:
    """A model with the same random weights on every rank, of which each keeps its columns."""
    torch.manual_seed(seed)
    model = Model().to(mesh.device_type)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(use_local_output=False)})
    return model


def join_ranks() -> DeviceMesh:
    """The mesh of all ranks that torchrun started, or of this process alone."""
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ |= {"WORLD_SIZE": "1", "RANK": "0"}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Rollouts and policy gradients in a small loop.")
    add = parser.add_argument
    add("--rounds", type=int, default=20, metavar="N", help="updates (default: %(default)s)")
    add("--prompts", type=int, default=8, metavar="G", help="of each round (default: %(default)s)")
    add("--samples", type=int, default=16, metavar="N", help="of a prompt (default: %(default)s)")
    add("--length", type=int, default=6, metavar="L", help="new tokens (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--compile", action="store_true", help="run the model under torch.compile")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
