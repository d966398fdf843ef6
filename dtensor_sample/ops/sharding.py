"""How ops behave when their arguments are DTensors: one table for all that take any.

What judges drafts, and what moves results, takes plain tensors only. All others see logits as
`[rows, P, v]`: the vocabulary unflattened into the P segments that ranks hold. That shape is the
same whether rows are sharded (`batch`), segments are (`vocab`), or nothing
is (`replicate`), so one op has one meaning under each, and only these placements differ.
"""

from torch._ops import OpOverload
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

_BATCH, _VOCAB = 0, 1
_PLACEMENTS: dict[str, tuple[Placement | None, Placement | None, Placement | None]] = {
    "logits": (Shard(0), Shard(1), Replicate()),
    "row": (Shard(0), Replicate(), Replicate()),
    "same": (Replicate(), Replicate(), Replicate()),
    "segment": (Replicate(), Shard(0), Replicate()),
    "row_segment": (Shard(0), Shard(1), Replicate()),
    "row_sum": (Shard(0), Partial("sum"), Replicate()),
    "row_max": (Shard(0), Partial("max"), Replicate()),
    "-": (None, None, None),
}


def shard_like(op: OpOverload, outputs: str, inputs: str) -> None:
    """Register `op` for DTensors: what its outputs and its arguments are, in order, by name.

    Edits are "-": they come with plain tensors only.
    """

    @register_sharding(op)  # type: ignore[untyped-decorator]
    def _(*_args: object) -> list[tuple[list[Placement | None], list[Placement | None]]]:
        return [
            (
                [_PLACEMENTS[kind][layout] for kind in outputs.split()],
                [_PLACEMENTS[kind][layout] for kind in inputs.split()],
            )
            for layout in range(3)
        ]
