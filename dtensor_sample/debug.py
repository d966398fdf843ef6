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
    digests = [0 if error is None else 1, *(_digest(value) for value in replicated.values())]
    every_PN = axis.all_gather(torch.tensor(digests, device=device)).tolist()
    if error is not None:
        raise error
    refused = [rank for rank, row in enumerate(every_PN) if row[0]]
    if refused:
        raise ValueError(f"arguments were refused on rank {_listed(refused)} of {axis.size}")
    for column, name in enumerate(replicated, start=1):
        seen = [row[column] for row in every_PN]
        common = max(seen, key=seen.count)
        odd = [rank for rank, digest in enumerate(seen) if digest != common]
        if odd:
            raise ValueError(
                f"{name} must be the same on every rank, and differs on rank {_listed(odd)} of "
                f"{axis.size}; rank {axis.rank} has {_shown(replicated[name])}"
            )


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
