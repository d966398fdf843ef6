"""Debug mode: catch arguments that should be replicated and are not, before they mix data or hang.

Ranks tell each other whether their arguments were refused, so that one rank's mistake raises on all
of them at once instead of leaving the others in a collective. Then they compare digests of what
they were given. These are two small all-gathers; where digests differ, ranks look for the first
part that does.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dtensor_sample.exchange import Axis

T = TypeVar("T")


def debug_by_default() -> bool:
    """Whether the environment variable DTENSOR_SAMPLE_DEBUG is set to anything but 0."""
    return os.environ.get("DTENSOR_SAMPLE_DEBUG", "0") not in ("", "0")


def checked(
    axis: Axis, device: torch.device, check: Callable[[], T], told: Callable[[T], dict[str, object]]
) -> T:
    """What `check` makes of the arguments of a call; in debug mode ranks agree on them first.

    Args:
        axis: the ranks that compare, in debug mode.
        device: where the collective runs.
        check: raises ValueError for what it refuses.
        told: of what `check` returns, what must be the same on every rank, as for `agree`.

    Raises:
        ValueError: what `check` raises; in debug mode as `agree` says.
    """
    if not debug_by_default():
        return check()
    found, error = None, None
    try:
        found = check()
    except ValueError as refused:
        error = refused
    agree(axis, device, error, **({} if found is None else told(found)))
    assert found is not None
    return found


def agree(axis: Axis, device: torch.device, error: ValueError | None, **replicated: object) -> None:
    """Raise ValueError on every rank unless all hold equal arguments and none holds an error.

    Args:
        axis: the ranks that compare; every one of them must call this.
        device: where the collective runs.
        error: what this rank's own arguments were refused for.
        replicated: named arguments: tensors (compared by content), or anything with a stable repr;
            mappings and named tuples of these, too.

    Raises:
        ValueError: `error` itself on the rank that has one; on the others, and where digests
            differ, a message that names the ranks, the argument and the first part that differs.
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
            usual = next(rank for rank in range(axis.size) if rank not in odd)
            told = _every(axis, device, _lines(name, _plain(replicated[name])))
            pairs = list(itertools.zip_longest(told[usual], told[odd[0]]))
            a, b = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
            raise ValueError(
                f"{name} must be the same on every rank, and differs on rank {_listed(odd)} of "
                f"{axis.size}: rank {usual} has {_shown(a)}, rank {odd[0]} has {_shown(b)}"
            )


def _odd(seen: list[int]) -> list[int]:
    """The ranks that differ from most."""
    common = max(seen, key=seen.count)
    return [rank for rank, number in enumerate(seen) if number != common]


def _digest(value: object) -> int:
    digest = hashlib.blake2b(repr(_plain(value)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _plain(value: object) -> object:
    """What stands for a value: numbers for tensors."""
    if isinstance(value, Tensor):
        return {"shape": tuple(value.shape), "dtype": value.dtype, "values": value.tolist()}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {key: _plain(part) for key, part in zip(value._fields, value, strict=True)}
    return value


def _lines(path: str, value: object) -> Iterator[str]:
    """Every part of a value, by its path, and how many parts there are."""
    parts: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    else:
        yield f"{path} = {value!r}"
        return
    parts = list(parts)
    yield f"len({path}) = {len(parts)}"
    for key, part in parts:
        yield from _lines(f"{path}[{key}]", part)


def _every(axis: Axis, device: torch.device, lines: Iterable[str]) -> list[list[str]]:
    """The lines of every rank."""
    text = "\n".join(lines).encode()
    longest = int(axis.all_gather(torch.tensor([len(text)], device=device)).max())
    padded = torch.tensor(list(text.ljust(longest, b"\n")), dtype=torch.uint8, device=device)
    every = axis.all_gather(padded).tolist()
    return [bytes(row).decode().rstrip("\n").split("\n") for row in every]


def _shown(text: str | None) -> str:
    if text is None:
        return "no more of it"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
