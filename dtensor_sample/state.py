"""What outlives a step: the parameters and position of the request in each slot.

Scalar state is a few bytes a slot, so every rank holds all of it and no step moves it. The host
keeps what `add` was given and uploads it with the next plan in one copy; positions live on the
device and advance by what was emitted, so that no step waits for the device.
"""

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_sample.debug import agree, debug_by_default
from dtensor_sample.draft.cache import DraftCache
from dtensor_sample.exchange import Axis, check_exchange
from dtensor_sample.layout import check_vocab_size
from dtensor_sample.params import (
    Filters,
    RowParams,
    SamplingParams,
    check_seed,
    filters_of,
    integer,
)
from dtensor_sample.params import pack as pack_params
from dtensor_sample.random import derive_seed

_COLUMNS = len(RowParams._fields)


class SamplingState:
    """Per-slot state of up to `max_num_reqs` requests, the same on every rank of the axis.

    Building it is collective: ranks agree on one base seed for unseeded requests.

    Args:
        mesh: one-dimensional; in a larger mesh pass its sampling axis, `mesh["tp"]`.
        vocab_size: V, without padding, in [1, 2**31).
        max_num_reqs: slots, >= 1.
        num_speculative_tokens: K, >= 0: a request has up to K + 1 rows of logits.
        exchange: "batch", "vocab", "replicate" or "auto".
        seed: base seed in [0, 2**64) of requests without one; drawn at random by default.
        debug: compare across ranks, at every step, what must be replicated, and name the rank that
            differs, at the price of small collectives and a host sync a step. None: the environment
            variable DTENSOR_SAMPLE_DEBUG.

    Raises:
        ValueError: an argument out of its range.

    Example:
        >>> state = SamplingState(mesh["tp"], vocab_size=32000)              # doctest: +SKIP
        >>> state.add(0, SamplingParams(seed=1), prompt_token_ids=[5, 9])    # doctest: +SKIP
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        vocab_size: int,
        max_num_reqs: int = 256,
        num_speculative_tokens: int = 0,
        exchange: str = "auto",
        seed: int | None = None,
        debug: bool | None = None,
    ) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            shown = mesh if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise ValueError(
                f'mesh must be a DeviceMesh of one dimension (mesh["tp"]), got {shown}'
            )
        self.axis = Axis.of(mesh)
        self.axis_name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None
        self.device = torch.empty(0, device=mesh.device_type).device
        self.vocab_size = check_vocab_size(vocab_size)
        self.max_num_reqs = _at_least("max_num_reqs", max_num_reqs, 1)
        self.num_speculative_tokens = _at_least("num_speculative_tokens", num_speculative_tokens, 0)
        self.exchange = check_exchange(exchange)
        self.debug = debug_by_default() if debug is None else debug
        self.positions = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        """[max_num_reqs] int64: position of each slot's next token in its own sequence."""
        self.params_table = torch.zeros(
            self.max_num_reqs, _COLUMNS, dtype=torch.int64, device=self.device
        )
        """[max_num_reqs, 6] int64: packed parameters (see `RowParams`)."""
        self.drafts = DraftCache(
            self.axis,
            num_slots=self.max_num_reqs,
            K=self.num_speculative_tokens,
            vocab_size=self.vocab_size,
        )
        """The draft-logits cache."""
        self._requests: dict[int, SamplingParams] = {}
        self._staged: dict[int, tuple[int, ...]] = {}
        self._admitted = 0
        self._base_seed = (
            self._common(secrets.randbits(63)) if seed is None else check_seed("seed", seed)
        )

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        position: int | None = None,
    ) -> None:
        """Admit a request into an empty slot.

        Args:
            slot: in [0, max_num_reqs).
            params: what it asks for.
            prompt_token_ids: its prompt, ids in [0, vocab_size).
            position: of its next token in its own sequence; by default after the prompt.

        Raises:
            ValueError: bad arguments or a slot in use. Nothing changes.
        """
        slot = self.check_slot(slot)
        if slot in self._requests:
            raise ValueError(f"slot {slot} is in use: remove(slot) first")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        prompt = np.asarray(prompt_token_ids)
        flat_integers = prompt.ndim == 1 and (prompt.dtype.kind in "iu" or prompt.size == 0)
        if not flat_integers or ((prompt < 0) | (prompt >= self.vocab_size)).any():
            raise ValueError(
                f"prompt_token_ids must be a flat list of ids in [0, {self.vocab_size}), "
                f"got {prompt_token_ids!r}"
            )
        if position is not None and not 0 <= integer("position", position) < 1 << 63:
            raise ValueError(f"position must be >= 0 and < 2**63, got {position}")
        position = len(prompt) if position is None else integer("position", position)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._base_seed, self._admitted, child=1)
            self._admitted += 1
        self._requests[slot] = params
        self._staged[slot] = (*pack_params(params, seed), position)

    def remove(self, slot: int) -> None:
        """Free a slot; ValueError if no request is in it."""
        slot = self.check_slot(slot)
        if self._requests.pop(slot, None) is None:
            raise ValueError(f"slot {slot} holds no request")
        self._staged.pop(slot, None)
        self.drafts.forget([slot])

    def check_slot(self, slot: object) -> int:
        """`slot` as an int in [0, max_num_reqs)."""
        number = integer("slot", slot)
        if not 0 <= number < self.max_num_reqs:
            raise ValueError(f"slot must be in [0, {self.max_num_reqs}), got {number}")
        return number

    def params_of(self, slot: int) -> SamplingParams:
        """The parameters of the request in a slot; ValueError if it holds none."""
        if slot not in self._requests:
            raise ValueError(f"slot {slot} holds no request: add it first")
        return self._requests[slot]

    def filters(self, slots: Sequence[int]) -> Filters:
        """The filters that any request of `slots` uses."""
        return filters_of([self._requests[slot] for slot in slots])

    def digest(self, slots: Sequence[int]) -> object:
        """What must be the same on every rank about the requests of `slots`."""
        params = [self._requests.get(slot) for slot in slots]
        drafts = self.drafts.digest(slots)
        return params, drafts, self._base_seed, self._admitted, self.vocab_size

    def upload(self) -> None:
        """Bring the device up to date with `add`: one copy, and none when nothing was added."""
        if self._staged:
            rows = np.array([(slot, *row) for slot, row in self._staged.items()], dtype=np.int64)
            staged = torch.from_numpy(rows).to(self.device, non_blocking=True)
            self.params_table.index_copy_(0, staged[:, 0], staged[:, 1:-1])
            self.positions.index_copy_(0, staged[:, 0], staged[:, -1])
            self._staged.clear()

    def agree(self, error: ValueError | None = None, **replicated: object) -> None:
        """In debug mode, raise on every rank if `replicated` differs on any (see `debug.agree`)."""
        if self.debug:
            agree(self.axis, self.device, error, **replicated)
        elif error is not None:
            raise error

    def _common(self, number: int) -> int:
        """The first rank's number."""
        return int(self.axis.all_gather(torch.tensor([number], device=self.device))[0, 0].item())


def _at_least(name: str, value: object, low: int) -> int:
    number = integer(name, value)
    if number < low:
        raise ValueError(f"{name} must be >= {low}, got {number}")
    return number
