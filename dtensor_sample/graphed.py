"""A whole step as one CUDA graph: from hidden states to tokens, exchange and gather included.

A graph repeats the kernels and the shapes that it was captured with. What changes from step to step
is therefore data: a plan is one packed tensor of indices, parameters and positions are rows of the
state's tables, and all of them are updated in place. Shapes come from a few row capacities, to one
of which each plan is padded. Which graph a step takes follows from replicated host data, so ranks
agree on it without talking.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_sample import check
from dtensor_sample.plan import ShardPlan, check_plan
from dtensor_sample.sharder import BatchSharder
from dtensor_sample.state import HostPart, SamplingState


class _Indices:
    """Where the steps of one kind find the indices of a plan."""

    def __init__(self, plan: ShardPlan, number: int) -> None:
        self.plan: ShardPlan | None = None
        self.number = number
        self.packed = torch.empty_like(plan.packed)
        self.positions = torch.zeros_like(plan.batch_slots)

    def fill(self, plan: ShardPlan) -> None:
        """Write them; those of a plan that is already here stay."""
        if plan is not self.plan:
            self.packed.copy_(plan.packed, non_blocking=True)
            self.plan = plan
        if plan.positions is not None:
            self.positions[: len(plan.positions)].copy_(plan.positions, non_blocking=True)

    def static(self, plan: ShardPlan) -> ShardPlan:
        """The plan as it is read from here."""
        positions = None if plan.positions is None else self.positions
        return plan.on(self.packed, positions, self.number)


class _Inputs:
    """Where the steps of one kind find what changes: the indices of plans, and tensors."""

    def __init__(self, plans: Sequence[ShardPlan], tensors: Sequence[Tensor]) -> None:
        lanes, device = len(plans[0].batch_slots), plans[0].state.device
        with torch.inference_mode(False):  # written by steps inside and outside of it
            self.indices = [_Indices(plan, number) for number, plan in enumerate(plans)]
            self.tensors = [
                torch.zeros((lanes, *t.shape[1:]), dtype=t.dtype, device=device) for t in tensors
            ]
        self.filled = [0] * len(tensors)
        """Rows of each that a step gave and that none has cleared."""

    def fill(self, plans: Sequence[ShardPlan], tensors: Sequence[Tensor]) -> None:
        """Write them; rows beyond those given are zeros, not what an earlier step gave."""
        for indices, plan in zip(self.indices, plans, strict=True):
            indices.fill(plan)
        for i, (here, given) in enumerate(zip(self.tensors, tensors, strict=True)):
            rows = len(given)
            (here if rows == len(here) else here[:rows]).copy_(given, non_blocking=True)
            if rows < self.filled[i]:
                here[rows : self.filled[i]].zero_()
            self.filled[i] = rows

    def check_selected(self, plan: ShardPlan, hidden: Tensor) -> None:
        """Have it checked, in each step, that a tensor has all rows that a plan selects from it.

        The rows of padding behind those given would do otherwise, and nobody would notice. What was
        computed from a tensor, or is a part of it, is not known as such, and not checked.
        """
        for i, here in enumerate(self.tensors):
            whole = here.data_ptr() == hidden.data_ptr() and here.numel() == hidden.numel()
            if whole and hidden.is_contiguous() and len(hidden) % len(here) == 0:
                each = len(hidden) // len(here)
                plan.state.on_host(plan, partial(self._check_rows, i=i, each=each))

    def _check_rows(self, plan: ShardPlan, i: int, each: int) -> None:
        """That a tensor had enough rows, each of which is `each` that are selected from."""
        error, rows, given = None, plan.num_hidden_rows, self.filled[i] * each
        if given < rows and plan.budget is None:  # with one, rows of padding are selected last
            error = ValueError(
                f"tensors[{i}] must have at least {rows} rows, which plan.select picks from, got "
                f"{given}"
            )
        plan.state.agree(error)

    def arguments(self, plans: Sequence[ShardPlan], several: bool) -> tuple[Any, ...]:
        """What `fn` is called with."""
        static = tuple(
            indices.static(plan) for indices, plan in zip(self.indices, plans, strict=True)
        )
        return (static if several else static[0], *self.tensors)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    output: Any
    """What `fn` returned: every replay writes it anew."""
    host_parts: Sequence[tuple[int, HostPart]]
    """What each replay must do on the host, and with which plan."""
    heads: dict[int, Any]
    """The output for so many requests."""


@dataclass(eq=False)
class _Kind:
    """The steps of one kind."""

    inputs: _Inputs
    ran: bool = False
    """Whether one has run as it is, so that the next may be captured."""
    graph: _Graph | None = None


@dataclass(frozen=True, eq=False)
class _Call:
    """What a step was called with, once that was checked: the next one is often like it."""

    plan: ShardPlan | tuple[ShardPlan, ...]
    versions: tuple[int, int]
    """Of the state and of its tables of edits."""
    tensors: list[object]
    """Types, shapes and dtypes."""
    kind: _Kind

    def like(self, plan: object, versions: tuple[int, int], tensors: list[object]) -> bool:
        """Whether a call needs no other check, and is of the same kind."""
        if isinstance(plan, tuple) and isinstance(self.plan, tuple):
            same = len(plan) == len(self.plan) and all(map(is_, plan, self.plan))
        else:
            same = plan is self.plan
        return same and versions == self.versions and tensors == self.tensors


class GraphedStep:
    """Runs a function of a plan and tensors as CUDA graphs, one for each kind of step.

    The first step of a kind runs as it is, the second one is captured, and from then on they are
    replayed: the same bits each time. Kinds differ in the capacity, the exchange, what any request
    of the batch needs (to draw; top-p; top-k, and about how large; edits of its values; to be told
    how many logprobs of what sort), whether drafts with logits are verified, whether positions are
    given, and the shapes of tensors but for their rows. When a table of the state grows, of biases
    or bad words say, the requests that use it begin new kinds. Without CUDA, or with a state in
    debug mode, every step runs as it is.

    Graphs hold collectives: `close` before `destroy_process_group`, which may hang otherwise.

    Args:
        fn: the step, called as `fn(plan, *tensors)`: samplers of the state and any other work that
            a CUDA graph can hold, no host sync among it. `plan` is a tuple of plans if the step is
            called with one, say of drafting and of verifying. Returns tensors [requests, ...], a
            SamplerOutput, or tuples, lists, dicts or dataclasses of these.
        state: the one that the samplers in `fn` use.
        capacities: rows of an owner that graphs are made for. Where every rank holds all rows
            ("vocab", "replicate"), there are P times as many.
        owners: as of `BatchSharder`.
        max_graphs: how many kinds of steps are kept; beyond them the one goes that was not taken
            for longest.

    Raises:
        ValueError: names the argument.

    Example:
        >>> decode = lambda plan, hidden: sampler(lm_head(plan.select(hidden)), plan)
        >>> step = GraphedStep(decode, state, capacities=[4, 32, 128])    # doctest: +SKIP
        >>> plan = step.plan(slots)                                       # doctest: +SKIP
        >>> output = step(plan, hidden)                                   # doctest: +SKIP
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: SamplingState,
        *,
        capacities: Sequence[int],
        owners: str = "balanced",
        max_graphs: int = 64,
    ) -> None:
        if not callable(fn):
            raise ValueError(f"fn must be callable, got {type(fn).__name__}")
        self.fn, self.state = fn, check.instance("state", state, SamplingState)
        if not check.integers("capacities", capacities, None, 1):
            raise ValueError("capacities must name at least one capacity, got none")
        self._sharder = BatchSharder(state, owners=owners, buckets=capacities)
        self.max_graphs = check.integer("max_graphs", max_graphs, 1)
        self._kinds: dict[Hashable, _Kind] = {}
        """The one taken last is the last one."""
        self._latest: _Call | None = None
        self._captures = state.device.type == "cuda" and not state.debug
        self._pool: Any = None

    def plan(
        self,
        slots: Sequence[int],
        num_logits: Sequence[int] | None = None,
        *,
        query_start_loc: Sequence[int] | None = None,
        exchange: str | None = None,
        positions: Sequence[int] | Tensor | None = None,
        budget: int | None = None,
        after: ShardPlan | None = None,
    ) -> ShardPlan:
        """As `BatchSharder.plan`, padded to the smallest capacity that holds the rows.

        Its arguments mean what they mean there, `positions` too.
        With `after`, padded to as many requests as that plan has.

        Raises:
            ValueError: also if no capacity does.
        """
        return self._sharder.plan(
            slots,
            num_logits,
            query_start_loc=query_start_loc,
            exchange=exchange,
            positions=positions,
            budget=budget,
            after=after,
        )

    def __call__(self, plan: ShardPlan | tuple[ShardPlan, ...], *tensors: Tensor) -> Any:
        """Run a step; every rank of the axis must call this.

        Args:
            plan: of this object's `plan`; or some of the same requests, in the order of use, the
                later ones made `after` the first.
            tensors: plain tensors for `fn`, each of at least as many rows as the plan has requests,
                and at most as many as fit into it, `len(plan.batch_slots)`. They are copied to
                where graphs read them; rows beyond those given, of padding, are zeros. One that
                `plan.select` is called with, as it is, reshaped or as a DTensor, must have all rows
                that it selects from; of what is computed from it that is not checked.

        Returns:
            What `fn` returns, for the B requests of the plan. The next step may overwrite it.

        Raises:
            ValueError: names the argument; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode.
        """
        if not torch.is_grad_enabled():  # to turn it off takes time
            return self._run(plan, tensors)
        with torch.no_grad():
            return self._run(plan, tensors)

    def _run(self, plan: ShardPlan | tuple[ShardPlan, ...], tensors: tuple[Tensor, ...]) -> Any:
        made = self._checked(plan, tensors)
        if made is None:
            return self.fn(plan, *tensors)
        several = isinstance(plan, tuple)
        plans = plan if isinstance(plan, tuple) else (plan,)
        lanes, B = len(plans[0].batch_slots), len(plans[0].slots)
        made.inputs.fill(plans, tensors)
        if made.graph is None:
            self.state.on_select = made.inputs.check_selected
            try:
                if not (made.ran and self._captures):
                    output = self.fn(*made.inputs.arguments(plans, several))
                    made.ran = True
                    return _head(output, lanes, B)
                made.graph = self._capture(made.inputs.arguments(plans, several))
            finally:
                self.state.on_select = None
        self._do_host_parts(made.graph, plans)
        made.graph.graph.replay()
        if B not in made.graph.heads:
            made.graph.heads[B] = _head(made.graph.output, lanes, B)
        return made.graph.heads[B]

    def _checked(
        self, plan: ShardPlan | tuple[ShardPlan, ...], tensors: tuple[Tensor, ...]
    ) -> _Kind | None:
        """Check what a step is called with, unless it is like the latest one.

        Returns:
            Its kind, from now on the one that was taken last; None: it has no request.
        """
        versions = self.state.version, self.state.slot_edits.version
        told: list[object] = [
            (type(t), t.shape, t.dtype) if isinstance(t, Tensor) else None for t in tensors
        ]
        latest = None if self.state.debug else self._latest  # in debug mode, ranks always compare
        if latest is not None and latest.like(plan, versions, told):
            return latest.kind
        several, error = isinstance(plan, tuple), None
        plans = plan if isinstance(plan, tuple) else (plan,)
        plans = tuple(check_plan(each, self.state) for each in plans)
        lanes, B = (len(plans[0].batch_slots), len(plans[0].slots)) if plans else (0, 0)
        try:
            _check_plans(plans, self.state)
            _check_tensors(tensors, B, lanes)
        except ValueError as refused:
            error = refused
        self.state.agree(error)
        if lanes == 0:
            return None
        moved = self.state.slot_edits.version if plans[0].needs.edited else 0
        structures = tuple(each.structure for each in plans)
        kind = several, structures, moved, *((t.shape[1:], t.dtype) for t in tensors)
        made = self._kinds.pop(kind, None) or _Kind(_Inputs(plans, tensors))
        self._kinds[kind] = made
        if len(self._kinds) > self.max_graphs:
            del self._kinds[next(iter(self._kinds))]
        self._latest = _Call(plan, versions, told, made)
        return made

    @property
    def num_graphs(self) -> int:
        """How many kinds of steps are replayed by now."""
        return sum(kind.graph is not None for kind in self._kinds.values())

    def _do_host_parts(self, graph: _Graph, plans: Sequence[ShardPlan]) -> None:
        """All of them, or none if one refuses its plan: then nothing of the step will run."""
        drafts = self.state.drafts
        saved = drafts.saved()
        try:
            for number, part in graph.host_parts:
                part(plans[number])
        except ValueError:
            drafts.restore(saved)
            raise

    def _capture(self, arguments: tuple[Any, ...]) -> _Graph:
        if not self.num_graphs:  # a pool that all graphs have left may be gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        host_parts = self.state.host_parts = []
        try:
            # Other threads, NCCL's watchdog among them, may go on with calls of their own.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self.fn(*arguments)
        finally:
            self.state.host_parts = None
        return _Graph(graph, output, host_parts, {})

    def close(self) -> None:
        """Free the graphs and what they read from; steps after this begin anew."""
        self._kinds.clear()
        self._latest = None
        self._pool = None


def _check_plans(plans: Sequence[ShardPlan], state: SamplingState) -> None:
    if not plans:
        raise ValueError("plan must be a ShardPlan or some of them, got ()")
    for i, plan in enumerate(plans):
        plan.check_current(state)
        if plan.counts is not None:
            raise ValueError(f"plan[{i}] must be given its drafts within fn, got one that has some")
        given, wanted = ((x.slots, len(x.batch_slots)) for x in (plan, plans[0]))
        if given != wanted:
            raise ValueError(
                f"plan[{i}] must be of the slots {list(wanted[0])}, padded to {wanted[1]} of them, "
                f"as plan[0] is, got {list(given[0])} and {given[1]}"
            )


def _check_tensors(tensors: Sequence[object], B: int, lanes: int) -> None:
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise ValueError(f"tensors[{i}] must be a plain tensor, got {type(tensor).__name__}")
        if tensor.ndim == 0 or not B <= len(tensor) <= lanes:
            raise ValueError(
                f"tensors[{i}] must have {B} to {lanes} rows, as many as requests in the plan to "
                f"as many as fit, got shape {list(tensor.shape)}"
            )


def _head(output: Any, lanes: int, B: int) -> Any:
    """The B requests of a step with `lanes` of them."""
    if isinstance(output, Tensor):
        return output[:B] if output.ndim and len(output) == lanes else output
    if isinstance(output, dict):
        return {name: _head(value, lanes, B) for name, value in output.items()}
    if isinstance(output, list | tuple):
        parts = [_head(value, lanes, B) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if is_dataclass(output) and not isinstance(output, type):
        named = {f.name: _head(getattr(output, f.name), lanes, B) for f in fields(output)}
        return replace(output, **named)
    return output
