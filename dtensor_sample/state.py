"""What outlives a step: the parameters and position of the request in each slot.

Scalar state is a few bytes a slot, so every rank holds all of it and no step moves it. The host
keeps what `add` was given and uploads it with the next plan in one copy; positions live on the
device and advance by what was emitted, so that no step waits for the device.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_sample import check
from dtensor_sample.choose import fastest, machine_of
from dtensor_sample.cost import shape_of
from dtensor_sample.debug import agree, debug_by_default
from dtensor_sample.draft.cache import DraftCache
from dtensor_sample.exchange import EXCHANGES, WHOLE, Axis, check_exchange
from dtensor_sample.params import Filters, RowParams, SamplingParams, filters_of, pack
from dtensor_sample.predict import constants_of
from dtensor_sample.process import Processor, SlotEdits, per_token
from dtensor_sample.random import derive_seed

if TYPE_CHECKING:
    from dtensor_sample.plan import ShardPlan

HostPart: TypeAlias = "Callable[[ShardPlan], None]"
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
MOST = (1 << 31) - 1
"""Of slots and of draft tokens: what fits in memory is less."""
MOST_POSITION = (1 << 62) - 1
"""Of a request as it begins: so far from the end of int64 that it is never reached."""
EVERY_FILTER = Filters(top_k=True, top_p=True, drawn=True)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """An admitted request. A slot's next request is another one, even if all of it is the same."""

    params: SamplingParams
    seed: int
    """Its own, or the one derived for it."""
    position: int
    """Of its first token in its own sequence."""


class SamplingState:
    """Per-slot state of up to `max_num_reqs` requests, the same on every rank of the axis.

    Building it is collective: ranks agree on one base seed for unseeded requests.

    Args:
        mesh: one-dimensional; in a larger mesh pass its sampling axis, `mesh["tp"]`.
        vocab_size: V, without padding, in [1, 2**31).
        max_num_reqs: slots, >= 1.
        num_speculative_tokens: K, >= 0: a request has up to K + 1 rows of logits.
        exchange: "batch", "vocab", "replicate" or "auto".
        logprobs_mode: what is told of requests that ask for it: "raw_logprobs", of the logits as
            they came; "processed_logprobs", of the distribution that tokens are drawn from, after
            temperature and filters; "raw_logits" or "processed_logits", values in place of their
            log-probabilities.
        seed: base seed in [0, 2**64) of requests without one; drawn at random by default. On a mesh
            with data-parallel axes too, every row of ranks needs a base seed of its own.
        processors: what changes values in ways of its own, for every request (see `Processor`).
        debug: compare across ranks, at every step, what must be replicated, and name the rank that
            differs, at the price of small collectives and a host sync a step. None: the environment
            variable DTENSOR_SAMPLE_DEBUG.

    Raises:
        ValueError: an argument out of its range, or not the same on every rank. Whichever rank has
            it, all ranks raise, but for a `mesh` that is none.

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
        logprobs_mode: str = "raw_logprobs",
        seed: int | None = None,
        processors: Sequence[Processor] = (),
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
        self.needs_whole_rows: str | None = None
        """Why steps of this state need whole rows, if they do: said to who asks for "vocab", which
        "auto" then does not take."""
        own_seed, error = None, None
        replicated: dict[str, object] = {}
        try:
            self.vocab_size = check.vocabulary(vocab_size)
            self.max_num_reqs = check.integer("max_num_reqs", max_num_reqs, 1, MOST)
            self.num_speculative_tokens = check.integer(
                "num_speculative_tokens", num_speculative_tokens, 0, MOST
            )
            self.exchange = check_exchange(exchange)
            self.logprobs_mode = check.one_of("logprobs_mode", logprobs_mode, LOGPROBS_MODES)
            own_seed = None if seed is None else check.seed_bits("seed", seed)
            self.debug = (
                debug_by_default() if debug is None else check.instance("debug", debug, bool)
            )
            self.processors = self._checked(processors)
            replicated = {
                "vocab_size": self.vocab_size,
                "max_num_reqs": self.max_num_reqs,
                "num_speculative_tokens": self.num_speculative_tokens,
                "exchange": self.exchange,
                "logprobs_mode": self.logprobs_mode,
                "processors": [{"per_token": per_token(each)} for each in self.processors],
                "seed": own_seed,
                "debug": self.debug,
                "hardware": constants_of(machine_of(mesh.device_type)),
            }
        except ValueError as refused:
            error = refused
        # Ranks that were built differently, or not at all, would leave the others waiting later.
        agree(self.axis, self.device, error, **replicated)
        with torch.inference_mode(False):  # updated in place, by steps inside and outside of it
            self.padded_positions = self._zeros(self.max_num_reqs + 1)
            """[max_num_reqs + 1] int64: `positions`, and one that padding moves on."""
            self.positions = self.padded_positions[:-1]
            """[max_num_reqs] int64: position of each slot's next token in its own sequence; of a
            request just added, from the next plan on."""
            self.params_table = self._zeros(self.max_num_reqs, len(RowParams._fields))
            """[max_num_reqs, 6] int64: packed parameters (see `RowParams`)."""
        self.drafts = DraftCache(
            self.axis,
            num_slots=self.max_num_reqs,
            K=self.num_speculative_tokens,
            vocab_size=self.vocab_size,
            moves=self.exchange == "auto",
        )
        """The draft-logits cache."""
        self._drafts_expected = False
        self._settled: str | None = None
        """What "auto" is for good once wide state is to come that stays where it is."""
        self._suited: tuple[int, str] | None = None
        """What suits the drafts of all requests there are, of which version."""
        self._loop = False
        """Whether those are drawn in a loop."""
        self.on_select: Callable[[ShardPlan, Tensor], None] | None = None
        """What to do when a plan selects rows, while a `GraphedStep` runs."""
        self.host_parts: list[tuple[int, HostPart]] | None = None
        """While a graph is captured: what each replay must do on the host, with which of the step's
        plans."""
        self.version = 0
        """How often a slot was filled or freed: plans of one version have the same requests."""
        self.slot_edits = SlotEdits(
            self.axis,
            self.device,
            num_slots=self.max_num_reqs,
            K=self.num_speculative_tokens,
            vocab_size=self.vocab_size,
        )
        """What requests ask of their values."""
        self._requests: dict[int, Request] = {}
        self._staged: dict[int, tuple[int, ...]] = {}
        self._unseeded = 0
        self._base_seed = self._common(secrets.randbits(63)) if own_seed is None else own_seed

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        position: int | None = None,
    ) -> None:
        """Admit a request into an empty slot.

        Args:
            slot: in [0, max_num_reqs).
            params: what it asks for.
            prompt_token_ids: its prompt, ids in [0, vocab_size).
            output_token_ids: what it has emitted already, if it is resumed.
            position: of its next token in its own sequence, in [0, 2**62); by default after those.

        Raises:
            ValueError: bad arguments or a slot in use. Nothing changes.
        """
        slot = check.integer("slot", slot, 0, self.max_num_reqs - 1)
        if slot in self._requests:
            raise ValueError(f"slot {slot} is in use: remove(slot) first")
        check.instance("params", params, SamplingParams)
        ids = params.logprob_token_ids
        check.integers("logprob_token_ids", ids, None, 0, self.vocab_size - 1)
        prompt = check.integers("prompt_token_ids", prompt_token_ids, None, 0, self.vocab_size - 1)
        output = check.integers("output_token_ids", output_token_ids, None, 0, self.vocab_size - 1)
        params.check_ids(self.vocab_size)
        if self.processors and params.wants.logprobs and self.logprobs_mode.startswith("raw"):
            raise ValueError(
                'logprobs_mode must be a "processed" one to tell logprobs with custom processors, '
                f"which keep no raw logits, got {self.logprobs_mode!r}"
            )
        start = len(prompt) + len(output) if position is None else position
        start = check.integer("position", start, 0, MOST_POSITION)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._base_seed, self._unseeded, child=1)
            self._unseeded += 1
        self._requests[slot] = Request(params, seed, start)
        self.version += 1
        self._staged[slot] = (*pack(params, seed), start)
        self.slot_edits.admit(slot, params, prompt, output)
        if params.needs.wide and (self.slot_edits.exchange or self._settled) is None:
            self._settled = self.suiting()  # what they keep stays where it is

    def remove(self, slot: int) -> None:
        """Free a slot; ValueError if no request is in it."""
        slot = check.integer("slot", slot, 0, self.max_num_reqs - 1)
        if self._requests.pop(slot, None) is None:
            raise ValueError(f"slot {slot} holds no request")
        self._staged.pop(slot, None)
        self.version += 1
        self.drafts.forget([slot])
        self.slot_edits.remove(slot)

    def request(self, slot: int) -> "Request":
        """The request in a slot; ValueError if it holds none."""
        if slot not in self._requests:
            raise ValueError(f"slot {slot} holds no request: add it first")
        return self._requests[slot]

    @property
    def bound_exchange(self) -> str | None:
        """What "auto" has to be, since wide state lies or will lie by it; None: it is free."""
        settled = self.settled_exchange
        if settled is None and self._drafts_expected:
            if self._suited is None or self._suited[0] != self.version:
                params = [request.params for request in self._requests.values()]
                # Rounded up, so that one request more or less seldom means another exchange.
                about = min(1 << (len(params) - 1).bit_length(), self.max_num_reqs) if params else 0
                self._suited = self.version, self.suiting(about, filters_of(params))
            return self._suited[1]
        return settled

    @property
    def settled_exchange(self) -> str | None:
        """What it has to be whatever requests there are; drafts that are verified free it again."""
        return self.slot_edits.exchange or self.drafts.exchange or self._settled

    @property
    def possible_exchanges(self) -> tuple[str, ...]:
        """What "auto" may take if it is free."""
        return EXCHANGES if self.needs_whole_rows is None else WHOLE

    def expect_drafts(self, exchange: str | None = None, *, loop: bool = False) -> None:
        """Let "auto" be an exchange that keeps 1/P of draft logits on each rank, or one request's.

        Args:
            exchange: which, from now on; None: the fastest for drafts of about as many requests as
                there are.
            loop: whether they are drawn in a loop over the logits of all K.
        """
        self._drafts_expected, self._settled = True, exchange or self._settled
        self._loop, self._suited = self._loop or loop, None

    def suiting(self, requests: int = 0, filters: Filters = EVERY_FILTER) -> str:
        """What is fastest for so many requests, of what keeps 1/P of wide state on each rank.

        For none, what is fastest for a full state with all filters. What a state of one request
        keeps is as large on every rank as on its owner.
        """
        if requests == 0:
            requests, filters = self.max_num_reqs, EVERY_FILTER
        K, P = self.num_speculative_tokens, self.axis.size
        rows_B = [K + 1] * requests
        owners_B = [slot % P for slot in range(requests)]
        among = self.possible_exchanges
        if self.max_num_reqs > 1:
            among = tuple(name for name in among if name != "replicate")
        return fastest(
            machine_of(self.device.type),
            shape_of(True, P, rows_B, owners_B),
            shape_of(False, P, rows_B, owners_B),
            self.vocab_size,
            filters,
            torch.bfloat16,
            K=K,
            draft_dtype=torch.bfloat16,
            method="block",
            loop=self._loop,
            among=among,
        )

    def digest(self, slots: Sequence[int]) -> dict[str, object]:
        """What must be the same on every rank about the requests of `slots`, by name."""
        return {
            "requests": {f"slot {slot}": self._requests.get(slot) for slot in slots},
            "requests' drafts": self.drafts.digest(slots),
            "requests' edits": self.slot_edits.digest(slots),
            "base seed": self._base_seed,
            "unseeded requests": self._unseeded,
        }

    def pinned(self, exchange: str | None) -> dict[int, int]:
        """The rank that must sample each slot that it keeps something of, if one must."""
        return self.drafts.owners() | self.slot_edits.owners() if exchange == "batch" else {}

    def room(self) -> list[int]:
        """Of how many more requests each rank can keep drafts, biases and counts."""
        room = self.drafts.room()
        for slot, owner in self.slot_edits.owners().items():
            room[owner] -= not self.drafts.keeps(slot)
        return room

    def upload(self) -> None:
        """Bring the device up to date with `add`: one copy, and none when nothing was added."""
        if self._staged:
            rows = np.array([(slot, *row) for slot, row in self._staged.items()], dtype=np.int64)
            staged = torch.from_numpy(rows).to(self.device, non_blocking=True)
            self.params_table.index_copy_(0, staged[:, 0], staged[:, 1:-1])
            self.positions.index_copy_(0, staged[:, 0], staged[:, -1])
            self._staged.clear()

    def _checked(self, processors: object) -> tuple[Processor, ...]:
        """Custom processors, and what follows from them."""
        if not isinstance(processors, Sequence) or isinstance(processors, str | bytes):
            raise ValueError(
                f"processors must be a sequence of callables, got {type(processors).__name__}"
            )
        for i, processor in enumerate(processors):
            if not callable(processor):
                raise ValueError(f"processors[{i}] must be callable, got {processor!r}")
        if not all(map(per_token, processors)):
            self.needs_whole_rows = "a processor has no attribute per_token of True"
            if self.exchange == "vocab":
                raise ValueError(
                    f'exchange must be one of {WHOLE}, got "vocab": {self.needs_whole_rows}'
                )
        return tuple(processors)

    def on_host(self, plan: "ShardPlan", act: "HostPart") -> None:
        """Do what a step does besides launching kernels: now, or at every replay of its graph."""
        if self.host_parts is None:
            act(plan)
        else:
            self.host_parts.append((plan.number, act))

    def agree(self, error: ValueError | None = None, **replicated: object) -> None:
        """In debug mode, raise on every rank if `replicated` differs on any (see `debug.agree`)."""
        if self.debug:
            agree(self.axis, self.device, error, **replicated)
        elif error is not None:
            raise error

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _common(self, number: int) -> int:
        """The first rank's number."""
        return int(self.axis.all_gather(torch.tensor([number], device=self.device))[0, 0].item())
