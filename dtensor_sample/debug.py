"""Debug mode: catch arguments that should be replicated and are not, before they mix data or hang.

Every rank digests what it was given and all ranks compare digests in one small all-gather. A rank
whose arguments were refused takes part too, with its error in place of a digest, so that one rank's
mistake raises on all of them at once instead of leaving the others in a collective.
"""

import hashlib
import os

import torch
from torch import Tensor

from dtensor_sample.exchange import Axis


def debug_by_default() -> bool:
    """Whether the environment variable DTENSOR_SAMPLE_DEBUG is set to anything but 0."""
    return os.environ.get("DTENSOR_SAMPLE_DEBUG", "0") not in ("", "0")


def agree(axis: Axis, device: torch.device, error: ValueError | None, **replicated: object) -> None:
    """Raise ValueError on every rank unless all hold equal arguments and none holds an error.

    Args:
        axis: the ranks that compare; every one of them must call this.
        device: where the collective runs.
        error: what this rank's own arguments were refused for.
        replicated: named arguments: tensors (compared by content), or anything with a stable repr.

    Raises:
        ValueError: `error` itself on the rank that has one; on the others, and where digests
            differ, a message that names the ranks and the arguments.
    """

    def gathered(numbers: list[int]) -> list[list[int]]:
        """[numbers, P]: those of every rank."""
        every_PN: list[list[int]] = axis.all_gather(torch.tensor(numbers, device=device)).tolist()
        return [list(seen) for seen in zip(*every_PN, strict=True)]

    # First what has the same form whatever a rank does: ranks in different calls part here.
    refusals, calls = gathered([int(error is not None), _digest(list(replicated))])
    if error is not None:
        raise error
    if any(refusals):
        refused = [rank for rank, flag in enumerate(refusals) if flag]
        raise ValueError(f"arguments were refused on rank {_listed(refused)} of {axis.size}")
    if odd := _odd(calls):
        raise ValueError(
            f"every rank must make the same call: rank {_listed(odd)} of {axis.size} makes another"
        )
    if not replicated:
        return
    for name, seen in zip(
        replicated, gathered(list(map(_digest, replicated.values()))), strict=True
    ):
        if odd := _odd(seen):
            raise ValueError(
                f"{name} must be the same on every rank, and differs on rank {_listed(odd)} of "
                f"{axis.size}; rank {axis.rank} has {_shown(replicated[name])}"
            )


def _odd(seen: list[int]) -> list[int]:
    """The ranks that differ from most."""
    common = max(seen, key=seen.count)
    return [rank for rank, number in enumerate(seen) if number != common]


def _digest(value: object) -> int:
    if isinstance(value, Tensor):
        value = (tuple(value.shape), value.dtype, value.tolist())
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
