"""A compiled decode step in the style of gpt-fast, with sampling inside the compiled region.

    torchrun --nproc_per_node=2 examples/gpt_fast_step.py
    torchrun --nproc_per_node=2 examples/gpt_fast_step.py --replicated --temperature 0.8 --compare

One graph takes a token and its position to the next token, without a break: on GPUs it is a CUDA
graph too (mode "reduce-overhead"). The model has random weights: what matters here is the step.

Each rank keeps plain local shards and sums partial results, as gpt-fast does. `lm_head` keeps the
logits of this rank's ids; with `--replicated` it computes them all, on every rank.

Shapes: B requests, D hidden size, H heads and v ids of this rank, E head size, L cache length.
"""

import argparse
import os
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_sample import SamplingParams, replicated, sample, vocab_sharded
from dtensor_sample.params import BatchedParams

Step = Callable[[Tensor, Tensor, BatchedParams], Tensor]


def main() -> None:
    """Decode a batch with the compiled step; compare it with the eager one if asked to."""
    args = parse_arguments()
    mesh = join_ranks()
    model = Model(mesh, shard_head=not args.replicated).to(mesh.device_type).eval()
    own = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    params = SamplingParams.batch(own.spawn(args.batch), mesh.device_type)
    count = args.max_new_tokens

    step = compile_step(model)
    generate(model, step, params, 2)  # compiles
    started = perf_counter()
    tokens = generate(model, step, params, count).tolist()
    seconds = perf_counter() - started
    if args.compare and tokens != generate(model, model.step, params, count).tolist():
        sys.exit("gpt_fast_step.py: the compiled tokens differ from the eager ones")
    if min(map(min, tokens)) < 0:  # -1: `sample` found none
        sys.exit("gpt_fast_step.py: a row of logits left no token to draw, as if all were NaN")
    if dist.get_rank() == 0:
        for row in tokens:
            print(*row)
        print(f"{1000 * seconds / count:.2f} ms a step", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


def compile_step(model: "Model") -> Step:
    """The model's step as one graph."""
    mode = "reduce-overhead" if model.mesh.device_type == "cuda" else None
    step: Step = torch.compile(model.step, fullgraph=True, mode=mode)
    return step


@torch.no_grad()
def generate(model: "Model", step: Step, params: BatchedParams, count: int) -> Tensor:
    """[B, count] tokens after the start token 1, each step fed with the last one's."""
    rows = len(params.table)
    token_B = torch.ones(rows, dtype=torch.int64, device=model.mesh.device_type)
    position = torch.zeros((), dtype=torch.int64, device=model.mesh.device_type)
    tokens = []
    for _ in range(count):
        token_B = step(token_B, position, params).clone()  # the graph writes there again
        tokens.append(token_B)
        position = position + 1
    return torch.stack(tokens, 1)


class Model(nn.Module):
    """A decoder with random weights, the same on every rank, of which each keeps its part."""

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        shard_head: bool = True,
        vocab_size: int = 1003,
        hidden_size: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        max_batch: int = 8,
        max_length: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_heads % mesh.size():
            raise ValueError(f"{num_heads} heads do not divide by {mesh.size()} ranks")
        self.mesh, self.vocab_size, self.shard_head = mesh, vocab_size, shard_head
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=generator) * columns**-0.5
            return nn.Parameter(values, requires_grad=False)

        self.embed = weight(vocab_size, hidden_size)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            self.layers.append(Layer(weight, mesh, hidden_size, num_heads, max_batch, max_length))
        self.head = weight(vocab_size, hidden_size)
        if shard_head:
            # As torch.chunk has it: the last rank may have fewer ids.
            width = -(-vocab_size // mesh.size())
            own = self.head[mesh.get_local_rank() * width :][:width].clone()
            self.head = nn.Parameter(own, requires_grad=False)

    def step(self, token_B: Tensor, position: Tensor, params: BatchedParams) -> Tensor:
        """The next token [B] of each request, all of which are at one position."""
        x_BD = self.embed[token_B]
        for layer in self.layers:
            x_BD = layer(x_BD, position)
        x_BD = F.rms_norm(x_BD, x_BD.shape[-1:])
        logits = F.linear(x_BD, self.head) * 4
        if self.shard_head:
            # [sample]
            logits = vocab_sharded(logits, self.mesh, vocab_size=self.vocab_size)
            # [/sample]
        else:
            logits = replicated(logits, self.mesh)
        # [sample]
        return sample(logits, params, position=position + 1)
        # [/sample]


class Layer(nn.Module):
    """Attention over a static cache, and an MLP."""

    cache: Tensor

    def __init__(
        self,
        weight: Callable[[int, int], nn.Parameter],
        mesh: DeviceMesh,
        hidden_size: int,
        num_heads: int,
        max_batch: int,
        max_length: int,
    ) -> None:
        super().__init__()
        self.mesh, ranks, rank = mesh, mesh.size(), mesh.get_local_rank()
        self.heads = num_heads // ranks

        def own(full: nn.Parameter, dim: int, parts: int = 1) -> nn.Parameter:
            pieces = [piece.chunk(ranks, dim)[rank] for piece in full.chunk(parts, dim)]
            return nn.Parameter(torch.cat(pieces, dim), requires_grad=False)

        self.qkv = own(weight(3 * hidden_size, hidden_size), 0, parts=3)
        self.out = own(weight(hidden_size, hidden_size), 1)
        self.up = own(weight(4 * hidden_size, hidden_size), 0)
        self.down = own(weight(hidden_size, 4 * hidden_size), 1)
        head_size = hidden_size // num_heads
        shape = (2, max_batch, self.heads, max_length, head_size)
        self.register_buffer("cache", torch.zeros(shape))

    def forward(self, x_BD: Tensor, position: Tensor) -> Tensor:
        rows, length = len(x_BD), self.cache.shape[3]
        qkv = F.linear(F.rms_norm(x_BD, x_BD.shape[-1:]), self.qkv)
        q_BH1E, k_BH1E, v_BH1E = qkv.view(rows, 3, self.heads, 1, -1).unbind(1)
        self.cache[0, :rows].index_copy_(2, position[None], k_BH1E)
        self.cache[1, :rows].index_copy_(2, position[None], v_BH1E)
        seen_L = torch.arange(length, device=x_BD.device) <= position
        y_BH1E = F.scaled_dot_product_attention(
            q_BH1E, self.cache[0, :rows], self.cache[1, :rows], attn_mask=seen_L[None]
        )
        x_BD = x_BD + self.total(F.linear(y_BH1E.flatten(1), self.out))
        hidden = F.silu(F.linear(F.rms_norm(x_BD, x_BD.shape[-1:]), self.up))
        return x_BD + self.total(F.linear(hidden, self.down))

    def total(self, partial_BD: Tensor) -> Tensor:
        """Sum over the ranks."""
        if self.mesh.size() == 1:
            return partial_BD
        total_BD: Tensor = funcol.all_reduce(partial_BD, "sum", (self.mesh, 0))
        return total_BD


def join_ranks() -> DeviceMesh:
    """The mesh of all ranks that torchrun started."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(
        device_type, (int(os.environ.get("WORLD_SIZE", 1)),), mesh_dim_names=("tp",)
    )


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="A compiled decode step with sampling inside.")
    add = parser.add_argument
    add("--replicated", action="store_true", help="compute all logits on every rank")
    add("--compare", action="store_true", help="check that eager steps draw the same tokens")
    add("--batch", type=int, default=4, metavar="B", help="requests, at most 8")
    add("--max-new-tokens", type=int, default=16, metavar="N", help="at most 64")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    add("--top-p", type=float, default=1.0, metavar="P", help="in [0, 1] (default: 1, off)")
    add("--seed", type=int, default=0, help="of all requests (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
