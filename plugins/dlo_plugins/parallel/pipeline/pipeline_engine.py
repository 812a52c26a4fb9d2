"""The pipeline's engine: runs a schedule on a model that is cut into stages.

It cuts any Python forward (:mod:`.gates`), accepts micro-batches of any shapes, and can record a timeline of what each
rank computes. It knows neither Lightning nor optimizers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import TensorPlace, tensor_places, tensors_replaced
from dlo_framework.models.autocast import no_autocast, uncached
from dlo_framework.models.experts.auxiliary_loss import in_micro_batch
from dlo_framework.models.recompute import BufferGuard, recomputed_later
from dlo_framework.plan import ParallelPlan
from dlo_framework.random_streams import random_stream
from dlo_plugins.parallel.pipeline.exchange import Exchange, TiedWeights, Transport, batch_signatures, find_tied_groups
from dlo_plugins.parallel.pipeline.gates import Placeholder, SkipCheck, StageForward, StageShapes
from dlo_plugins.parallel.pipeline.model_stages import Split, make_stages, release_other_stages
from dlo_plugins.parallel.pipeline.pipeline_schedules import (
    Action,
    ActionKind,
    Schedule,
    flushes,
    forward_only,
    make_placement,
    make_schedule,
    splits_backward,
)
from dlo_plugins.parallel.pipeline.simulation import Recorder, Timeline, gather_timeline
from dlo_plugins.parallel.pipeline.weight_grads import WeightGradients, WeightVersion, set_gradients, take_gradients


@dataclass
class _Step:
    """State of a step."""

    micro_batches: Sequence[Any]
    signatures: list[Any]
    exchange: Exchange
    forward: Callable[[Any], Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    weights: Sequence[float | Tensor] = ()
    seed: Tensor | float = 1.0
    #: By stage and micro-batch: the received hidden state, and the output at which backward begins.
    saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    #: By stage and micro-batch: the weight gradients still to compute.
    deferred: dict[tuple[int, int], deque[Callable[[], None]]] = field(default_factory=dict)
    #: Number of its first micro-batch, counted through steps that hand backwards to the next one.
    first: int = 0
    #: Stages and micro-batches whose backward the next step runs, and the copy of the weights that they use.
    in_flight: frozenset[tuple[int, int]] = frozenset()
    version: WeightVersion | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    total: Tensor | float = 0.0
    #: By stage and micro-batch: what :attr:`Pipeline.micro_batch_state` had in the forward.
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    #: Stages that keep only their inputs, and by stage and micro-batch what they recompute from.
    recomputed: frozenset[int] = frozenset()
    inputs: dict[tuple[int, int], _StageInput] = field(default_factory=dict)
    #: Key of the step, which its micro-batches' keys begin with.
    key: object = field(default_factory=object)
    #: Number on which the random numbers of its micro-batches depend, the same on all stages.
    stream: int = 0


@dataclass
class _StageInput:
    """What a stage keeps of a micro-batch to recompute its forward.

    Attributes:
        received: Hidden state that it has received; None in the first stage, which has the micro-batch itself.
        again: Context in which buffers have their values before the forward, and keep those after it.
        is_counted: Whether the forward built a graph, in which routers count their tokens.
    """

    received: Tensor | None
    again: contextlib.AbstractContextManager[None]
    is_counted: bool


@dataclass(frozen=True)
class MicroBatchState:
    """State outside of the model that a forward of a micro-batch uses, and its backward, which may recompute.

    Attributes:
        save: Function that returns the state after a forward.
        load: Function that sets it again before the backward, also after other batches.
    """

    save: Callable[[], Any]
    load: Callable[[Any], None]


@dataclass
class DelayedStep:
    """Result of a step that the next step applies, where a schedule does not flush.

    Attributes:
        gradients: Gradients of this rank's parameters by name, summed over neither tied weights nor other axes; None
            before the first step that ends an accumulation.
        loss: Loss of the last step, which the next one returns.
    """

    gradients: dict[str, Tensor] | None
    loss: Tensor


class Pipeline:
    """Engine that trains and evaluates a model whose stages are on several ranks.

    Under a schedule without flushes (:attr:`delays`), each step sets the gradients of the step before, which it
    completes, and returns its loss. The first step sets none, and returns its own loss. If an optimizer step
    accumulates several, the last of them sets the gradients of the accumulation before.

    It cuts the model: parameters of other ranks' stages become meta tensors under their names. Build it after tensor
    and context parallelism have rewritten the model, and before the model is wrapped or initialised. The blocks may
    change later: recomputation, compile, FSDP2 on stem units, blocks and head (not on the model itself) all work.

    Args:
        model: A task's `model`, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        group: Process group of the pipeline's ranks, in the order of stages.
        schedule: Name of the schedule; one of :data:`~dlo_plugins.parallel.pipeline.pipeline_schedules.SCHEDULES`.
        stages_per_rank: Number of stages that each rank holds, for schedules that leave it open; 2 by default there.
        split: Number of blocks of each stage, or `balanced` by cost.
        device: Device on which this rank computes.

    Attributes:
        stages: Stages of the model.
        ownership: Predicate for the names that this rank holds; `ownership.is_first_holder` for those of which it is
            the first holder.
        placement: Placement of the stages on ranks.
        micro_batch_state: State that is kept from each forward to its backward; None for none.
        drain_context: Function that returns a context for the backwards of :meth:`drain`, which are outside of steps.
        weight_gradients_ready: Callback after each action that has computed deferred weight gradients.
        loss_ready: Callback in training, called with each micro-batch's loss on the rank of the last stage.
        record: Whether to record a timeline; if so, all ranks start each step together.
        delays: Whether a step's gradients are set by the next step.
        delayed: Gradients that are complete and not applied, after :meth:`drain` or in an accumulation, and a loss.
        has_gradients: Whether the last training step has set gradients.
        most_shapes: Number of micro-batch shapes that are kept. For each new shape, ranks send each other its layout
            once.

    Raises:
        DloError: If the schedule or the split does not fit the model and the ranks.
    """

    most_shapes = 1024

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        group: dist.ProcessGroup,
        *,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        split: Split = "balanced",
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.group, self.device = model, group, torch.device(device)
        self.schedule, self.stages_per_rank = schedule, stages_per_rank
        self._splits_backward = splits_backward(schedule)
        self.delays = not flushes(schedule)
        self.delayed: DelayedStep | None = None
        self.has_gradients = True
        self._carried: _Step | None = None
        self._loss: tuple[Tensor, dist.Work | None] | None = None  # of the step before, where gradients are delayed
        self.rank = dist.get_rank(group)
        self.placement = make_placement(schedule, dist.get_world_size(group), stages_per_rank)
        self.stages = make_stages(model, plan, self.placement.stages, split)
        self.own_stages = self.placement.stages_of(self.rank)
        tied = find_tied_groups(model, self.stages, self.placement)
        pairs = [(shared.ranks[0], other) for shared in tied for other in shared.ranks[1:]]
        self._shared_buffers = self.stages.shared_buffers(model)
        self.ownership = release_other_stages(model, self.stages, self.own_stages)
        self._transport = Transport(group, self.device)
        self._transport.connect([*self.placement.neighbours(), *pairs])
        self.tied = TiedWeights(model, tied, self._transport)
        self._weight_gradients: WeightGradients | None = None
        self._absent: list[TensorPlace] | None = None
        self._buffers: BufferGuard | None = None
        #: By stage and signature: whether the stage's output has a gradient, known from the first forward.
        self._has_gradient: dict[tuple[int, Any], bool] = {}
        self.micro_batch_state: MicroBatchState | None = None
        self.weight_gradients_ready: Callable[[], None] | None = None
        self.loss_ready: Callable[[Tensor], None] | None = None
        self.drain_context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.record = False
        self._recorder = Recorder(self.device)
        self._exchange = Exchange(self._transport, self.placement, self.device)
        self._schedules: dict[int, Schedule] = {}
        self._shapes: dict[tuple[int, Any], StageShapes] = {}
        self._seen: set[Any] = set()
        self._has_marked = False

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, which has outputs and losses."""
        return self.placement.rank_of(self.placement.stages - 1) == self.rank

    # --- steps ---------------------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Sequence[Any],
        forward: Callable[[Any], Any],
        loss: Callable[[Any, Any], Tensor],
        weights: Sequence[float | Tensor] | None = None,
        seed: Tensor | float = 1.0,
        *,
        stream: int = 0,
        sum_tied: bool = True,
        accumulates: bool = False,
        ends_window: bool = True,
    ) -> Tensor:
        """Runs forward and backward of all micro-batches, and adds gradients to the `.grad` of this rank's parameters.

        Args:
            micro_batches: Micro-batches on this rank's device, the same on all ranks of the pipeline.
            forward: Function that calls the model, or some of its modules, on a micro-batch. Each stage runs it up to
                the end of the stage.
            loss: Function of the output of `forward` and the micro-batch that returns a scalar loss. Only the last
                stage runs it.
            weights: Weight of each micro-batch's loss; by default equal weights that sum to one.
            seed: Factor on the losses for backward only, as a gradient scaler needs.
            stream: Number of the batch in the run, on which the random numbers of its forwards depend.
            sum_tied: Whether to sum the gradients of tied weights over the ranks that hold them. If one optimizer step
                accumulates over several calls, set it in the last call only.
            accumulates: Whether the optimizer step accumulates the call before too; of use where gradients are delayed.
            ends_window: Whether the optimizer steps after this call; of use where gradients are delayed.

        Returns:
            The weighted sum of the losses, without the seed; the same on all ranks of the pipeline. Where gradients are
            delayed, that of the step before, which needs no wait for the last stage.

        Raises:
            DloError: If the model's forward cannot be cut at the stages' boundaries, or the schedule cannot run this
                number of micro-batches.
        """
        number = len(micro_batches)
        schedule = self.schedule_for(number)
        step = self._step(schedule, micro_batches, forward, stream)
        step.loss, step.seed = loss, seed
        step.weights = [1.0 / number] * number if weights is None else weights
        step.recomputed = schedule.recomputed_stages
        own = schedule.orders[self.rank]
        if ends_window:  # Otherwise their backward has the same weights.
            step.in_flight = frozenset((a.stage, a.micro_batch + number) for a in own if a.micro_batch < 0)
        self._prepare_weight_gradients()
        if self.delays and not accumulates:
            take_gradients(self.model)  # Those of the last optimizer step.
        if self.record:
            self._recorder.begin(self.group)
        with self._shared_buffers_kept():
            self._run(step, own)
        if self.delays:
            total = self._delay(step, ends_window)
        else:
            total, sent = self._start_broadcast(step.total)
            sent.wait()
        if sum_tied and self.has_gradients:
            self.tied.sum_gradients()
        return total

    def _run(self, step: _Step, order: Sequence[Action]) -> None:
        """Runs this rank's actions of a step, with those that the step before has left to it.

        Args:
            step: Step.
            order: Actions.
        """
        before = self._carried
        for action in order:
            if action.micro_batch < 0:
                if before is not None:
                    # Blocks that recompute use the weights of their forward.
                    with contextlib.nullcontext() if before.version is None else before.version.applied():
                        self._backward(before, action, action.micro_batch + len(before.micro_batches))
            elif action.kind is ActionKind.FORWARD:
                self._forward(step, action)
            elif action.kind is ActionKind.RECOMPUTE:
                self._recompute(step, action)
            elif action.is_backward:
                self._backward(step, action, action.micro_batch)
            else:
                self._compute_weight_gradients(step, action)
        step.exchange.finish()

    # --- delayed gradients ---------------------------------------------------------------------------------

    def _delay(self, step: _Step, ends_window: bool) -> Tensor:
        """Keeps the gradients of this step for a later one; returns the loss of the step before.

        At the end of an accumulation, those of the accumulation before, which are complete, are set.
        """
        loss = self._last_loss()
        self._end_carried()
        if ends_window:
            gradients = take_gradients(self.model)
            if step.version is None:  # The last stage has no micro-batch in flight.
                step.version = WeightVersion()
            step.version.add_gradients(gradients)
            complete = None if self.delayed is None else self.delayed.gradients
            self.delayed = None
            self.has_gradients = complete is not None
            set_gradients(self.model, complete or {})
        self._carried = step
        self._loss = self._start_broadcast(step.total)
        if loss is None:
            loss = self._last_loss()
            assert loss is not None
        return loss

    def _end_carried(self) -> None:
        """Ends the step before, whose backwards have all run; those of an open accumulation are on the parameters."""
        step, self._carried = self._carried, None
        if step is not None and step.version is not None:
            loss = self._last_loss()
            assert loss is not None
            self.delayed = DelayedStep(step.version.gradients, loss)

    def _last_loss(self) -> Tensor | None:
        """Returns the loss of the step before, once it has come from the last stage; None before the first step."""
        if self._loss is None:
            return None if self.delayed is None else self.delayed.loss
        value, work = self._loss
        if work is not None:
            work.wait()
            self._loss = value, None
        return value

    def drain(self) -> DelayedStep | None:
        """Runs the backwards that the last step has left to the next one; all ranks of the pipeline call it.

        The next step goes on as without it, after a wait of all ranks. Evaluation and checkpoints need it.

        Returns:
            What the next step applies; None if no step has run, or the schedule flushes.
        """
        step = self._carried
        if step is None:
            return self.delayed
        schedule = self.schedule_for(len(step.micro_batches)).drain()
        first = step.first + len(step.micro_batches)
        drained = _Step((), [], self._exchange.start(schedule, [], first), step.forward, first=first)
        # The optimizer may not have stepped yet. Those of an open accumulation stay: the backwards add to them.
        gradients = None if step.version is None else take_gradients(self.model)
        record, self.record = self.record, False
        with self.drain_context():
            self._run(drained, schedule.orders[self.rank])
        self.record = record
        if gradients is not None:
            set_gradients(self.model, gradients)
        loss = self._last_loss()
        assert loss is not None
        self._end_carried()
        self.delayed, self._loss = DelayedStep(None if self.delayed is None else self.delayed.gradients, loss), None
        return self.delayed

    def reset(self) -> None:
        """Drops what earlier steps have left, after an error or before another run."""
        self._carried = self.delayed = self._loss = None
        self.has_gradients = True

    def evaluate(
        self, micro_batches: Sequence[Any], forward: Callable[[Any], Any], stream: int = -1
    ) -> list[Any] | None:
        """Runs the forward of any number of micro-batches, without gradients.

        Args:
            micro_batches: Micro-batches on this rank's device, the same on all ranks of the pipeline.
            forward: Function that calls the model, or some of its modules, on a micro-batch.
            stream: Number on which the random numbers of its forwards depend; no training step has it.

        Returns:
            Output of `forward` for each micro-batch on the rank of the last stage; None on other ranks.
        """
        self.drain()
        schedule = forward_only(self.placement, len(micro_batches))
        with torch.no_grad():
            step = self._step(schedule, micro_batches, forward, stream)
            if self.record:
                self._recorder.begin(self.group)
            for action in schedule.orders[self.rank]:
                self._forward(step, action)
            step.exchange.finish()
        return [step.outputs[n] for n in range(len(micro_batches))] if self.is_last else None

    def record_shapes(self, micro_batches: Sequence[Any], forward: Callable[[Any], Any]) -> None:
        """Records the shapes of hidden states without other ranks, so that steps can run where no rank answers.

        Tensors compute no values: the model and the micro-batches are on the meta device, or fake, those of other
        ranks' stages too (for example with torch's fake process group).

        Args:
            micro_batches: Micro-batches in the shapes of the later steps.
            forward: Function that calls the model, or some of its modules, on a micro-batch.

        Raises:
            DloError: If the model's forward cannot be cut at the stages' boundaries.
        """
        last = min(max(self.own_stages), self.stages.count - 2)
        known = batch_signatures(micro_batches, self.model, self.device)
        for key, micro_batch in dict(zip(known, micro_batches, strict=True)).items():
            hidden, shapes = None, StageShapes()
            for stage in range(last + 1):
                passage = StageForward(self.model, self.stages, stage, self.device, hidden, shapes, True)
                result = passage.run(partial(forward, micro_batch))
                self._shapes[stage + 1, key] = shapes = passage.known
                self._exchange.set_layout(stage + 1, key, result, shapes)
                hidden = result.detach().requires_grad_(result.requires_grad)

    def timeline(self) -> Timeline:
        """Returns the timeline of all ranks in the last recorded step; a collective call."""
        return gather_timeline(self._recorder.timed(), self.group)

    # --- actions -------------------------------------------------------------------------------------------

    def _forward(self, step: _Step, action: Action) -> None:
        _, stage, number = action
        received = step.exchange.receive_hidden(stage, step.first + number) if stage else None
        keeps_input = stage in step.recomputed
        with self._timed(action), self._version_of(step, stage, number), self._stream(step, number):
            if keeps_input:
                result = self._keep_input(step, stage, number, received)
            else:
                result = self._run_stage(step, stage, number, received)
            if stage + 1 == self.stages.count:
                if step.loss is None:
                    SkipCheck(self.model).check_values(result, "a model's output")
                    step.outputs[number] = result
                    return
                self._mark_kept(stage)
                with self.without_other_stages():
                    result = step.loss(result, step.micro_batches[number])
                if self.loss_ready is not None:
                    self.loss_ready(result)
                step.total = step.total + step.weights[number] * result.detach().double()
        if stage + 1 < self.stages.count:
            step.exchange.send_hidden(
                stage + 1, step.first + number, result, self._shapes[stage + 1, step.signatures[number]]
            )
        if step.loss is not None and self.micro_batch_state is not None:
            step.states[stage, number] = self.micro_batch_state.save()
        if step.loss is not None and not keeps_input:
            step.saved[stage, number] = received, result

    def _version_of(self, step: _Step, stage: int, number: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the weights that a forward uses."""
        if (stage, number) not in step.in_flight:
            return contextlib.nullcontext()
        if step.version is None:
            step.version = WeightVersion(self.model, self.ownership)
        return step.version.applied()

    def _mark_kept(self, stage: int) -> None:
        """Puts placeholders where the blocks of other ranks would keep tensors with a graph, as those of a stage do.

        A loss that sums what blocks keep in attributes would lose the terms of these blocks. It is done once: what
        blocks keep does not change after the first forward.
        """
        if self._has_marked:
            return
        self._has_marked = True
        held = {name for own in self.own_stages for name in self.stages.blocks_of(own)}
        others = [name for name in self.stages.blocks if name not in held]
        check = SkipCheck(self.model)
        check.is_received, check.place = True, f"after '{self.stages.blocks[-1]}'"
        for block in self.stages.blocks_of(stage):
            for path, module in self.model.get_submodule(block).named_modules():
                for key, value in list(vars(module).items()):
                    items = value if isinstance(value, list) else [value]
                    if not any(isinstance(item, Tensor) and item.grad_fn is not None for item in items):
                        continue
                    for name in others:
                        inside = dict(self.model.get_submodule(name).named_modules()).get(path)
                        if type(inside) is type(module) and inside is not module:
                            source = f"{name}.{path}.{key}".replace("..", ".")
                            mark = Placeholder(torch.zeros((), device=self.device), source, check)
                            vars(inside)[key] = [mark] if isinstance(value, list) else mark

    @staticmethod
    def _seed(step: _Step, number: int) -> int:
        """Returns the seed of a micro-batch, the same on all stages; it draws nothing."""
        return hash((torch.initial_seed(), step.stream, number))

    def _stream(self, step: _Step, number: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the random numbers of a micro-batch."""
        return random_stream(self._seed(step, number), self.device, also_python=True)

    def _keep_input(self, step: _Step, stage: int, number: int, received: Tensor | None) -> Any:
        """Returns a stage's output without its activations, and keeps what :meth:`_recompute` needs.

        The first forward of a signature builds a graph, to find out whether the output has a gradient. Later ones
        build none. Autocast must not cache the casts of weights there, which have no gradient either.
        """
        if self._buffers is None:  # Modules do not change after the first step.
            self._buffers = BufferGuard(self.model)
        key = stage, step.signatures[number]
        once, again = self._buffers.contexts()
        builds = key not in self._has_gradient
        step.inputs[stage, number] = _StageInput(received, again, builds)
        if received is not None:  # A block may write to its input.
            received = received.detach().clone().requires_grad_(received.requires_grad)
        uncaches = contextlib.nullcontext() if builds else uncached(self.device.type)
        with once, torch.set_grad_enabled(builds), uncaches, recomputed_later():
            result = self._run_stage(step, stage, number, received)
        needs = self._has_gradient.setdefault(key, result.requires_grad)
        return result.detach().requires_grad_(needs)

    def _recompute(self, step: _Step, action: Action) -> None:
        """Computes a stage's forward again with its activations: same random numbers, and buffers change once."""
        _, stage, number = action
        kept = step.inputs.pop((stage, number))
        with self._timed(action), kept.again, self._stream(step, number):
            result = self._run_stage(step, stage, number, kept.received, kept.is_counted)
        step.saved[stage, number] = kept.received, result

    def _run_stage(
        self, step: _Step, stage: int, number: int, received: Tensor | None, is_counted: bool = False
    ) -> Any:
        key = step.signatures[number]
        if stage > 0 and (stage, key) not in self._shapes:
            self._shapes[stage, key] = step.exchange.get_shapes(stage, key)
        shapes = self._shapes[stage, key] if stage else {}
        last = stage + 1 == self.stages.count
        record = not last and (stage + 1, key) not in self._shapes
        seed = self._seed(step, number)
        passage = StageForward(self.model, self.stages, stage, self.device, received, shapes, record, seed)
        with in_micro_batch((step.key, stage, number), recomputes=is_counted):
            result = passage.run(lambda: step.forward(step.micro_batches[number]))
        if record:
            self._shapes[stage + 1, key] = passage.known
        return result

    def _backward(self, step: _Step, action: Action, number: int) -> None:
        """Computes the gradients of a stage, and sends that of the received hidden state to the stage before."""
        stage = action.stage
        received, result = step.saved.pop((stage, number))
        last_stage = stage + 1 == self.stages.count
        gradient: Tensor | None
        if last_stage:
            seed = torch.as_tensor(step.seed, dtype=result.dtype, device=result.device)
            gradient = (seed * step.weights[number]).to(result.dtype)
        else:
            gradient = step.exchange.receive_gradient(stage, step.first + number) if result.requires_grad else None
        if self.micro_batch_state is not None:
            self.micro_batch_state.load(step.states.pop((stage, number)))
        named = in_micro_batch((step.key, stage, number))
        with self._timed(action), self._deferring(step, action), no_autocast(self.device.type), named:
            if result.requires_grad:
                self._run_backward(result, gradient)
        if received is not None and received.requires_grad:
            input_gradient, received.grad = received.grad, None
            input_gradient = torch.zeros_like(received) if input_gradient is None else input_gradient
            step.exchange.send_gradient(stage - 1, step.first + number, input_gradient)

    def _run_backward(self, result: Tensor, gradient: Tensor | None) -> None:
        try:
            torch.autograd.backward(result, gradient)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise DloError(
                f"{self.schedule} does not support a forward that writes to its weights: the backward of an earlier"
                " micro-batch needs the values from before; write to them in on_train_batch_start, or train with pp=1"
            ) from error

    def _compute_weight_gradients(self, step: _Step, action: Action) -> None:
        _, stage, number = action
        assert self._weight_gradients is not None
        with self._timed(action), no_autocast(self.device.type):
            deferred = step.deferred.pop((stage, number))
            while deferred:  # Each frees what it keeps.
                deferred.popleft()()
            if self.weight_gradients_ready is not None:
                self.weight_gradients_ready()

    @contextlib.contextmanager
    def _deferring(self, step: _Step, action: Action) -> Iterator[None]:
        if action.kind is not ActionKind.INPUT:
            yield
            return
        store = self._weight_gradients
        assert store is not None
        store.deferred = step.deferred[action.stage, action.micro_batch] = deque()
        try:
            yield
        finally:
            store.deferred = None

    @contextlib.contextmanager
    def _shared_buffers_kept(self) -> Iterator[None]:
        """Checks that buffers that several stages share do not change: the order of changes would be another."""
        before = {name: self.model.get_buffer(name) for name in self._shared_buffers}
        versions = {name: buffer._version for name, buffer in before.items()}
        yield
        for name, buffer in before.items():
            if self.model.get_buffer(name) is not buffer or buffer._version != versions[name]:
                raise DloError(
                    f"a buffer that several stages share must not change in training, got '{name}'; give each block a"
                    " module of its own, keep the blocks in one stage (split), or train with pp=1"
                )

    def without_other_stages(self) -> contextlib.AbstractContextManager[None]:
        """Makes each use of another stage's weights an error inside the block, which is outside of forwards."""
        if self._absent is None or any(key not in at for at, key, _ in self._absent):  # A callback may parametrize.
            check = SkipCheck(self.model, "use the optimizer's weight_decay for a penalty on weights")
            check.is_received, check.place = True, "in the loss"
            tensors = (*self.model.named_parameters(), *self.model.named_buffers())
            marks = {
                id(tensor): Placeholder.of_weight(tensor, name, check, self.device)
                for name, tensor in tensors
                if not self.ownership(name)
            }
            self._absent = [(at, key, marks[id(old)]) for at, key, old in tensor_places(self.model) if id(old) in marks]
        return tensors_replaced(self._absent)

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        if not self.record:
            yield
            return
        start = self._recorder.now()
        yield
        self._recorder.add(action, start, self._recorder.now())

    # --- helpers -------------------------------------------------------------------------------------------

    def _step(
        self, schedule: Schedule, micro_batches: Sequence[Any], forward: Callable[[Any], Any], stream: int
    ) -> _Step:
        known = batch_signatures(micro_batches, self.model, self.device)
        self._limit_shapes(known)
        before = self._carried
        first = before.first + len(before.micro_batches) if before is not None else 0
        exchange = self._exchange.start(schedule, known, first)
        return _Step(micro_batches, known, exchange, forward, first=first, stream=stream)

    def _limit_shapes(self, known: Sequence[Any]) -> None:
        """Clears all shapes when there are too many: on all ranks in the same step, since they see the same batches."""
        self._seen.update(known)
        if len(self._seen) > self.most_shapes:
            self.drain()
            self._seen = set(known)
            self._shapes.clear()
            self._has_gradient.clear()
            self._exchange.clear()

    def can_run(self, number: int) -> bool:
        """Returns whether the schedule can run a number of micro-batches."""
        try:
            self.schedule_for(number)
        except DloError:
            return False
        return True

    def schedule_for(self, number: int) -> Schedule:
        """Returns the schedule of a number of micro-batches."""
        if number not in self._schedules:
            ranks = self.placement.ranks
            self._schedules[number] = make_schedule(self.schedule, ranks, number, self.stages_per_rank)
        return self._schedules[number]

    def _prepare_weight_gradients(self) -> None:
        """Makes the layers defer weight gradients; at the first step, since blocks do not change after it."""
        if self._weight_gradients is None and self._splits_backward:
            self._weight_gradients = WeightGradients()
            for stage in self.own_stages:
                for name in self.stages.blocks_of(stage):
                    self._weight_gradients.install(self.model.get_submodule(name))

    def _start_broadcast(self, total: Tensor | float) -> tuple[Tensor, dist.Work]:
        # Other ranks receive the value. Zeros are made on the device; a Python number would be copied there.
        value = torch.zeros((), dtype=torch.float64, device=self.device)
        if isinstance(total, Tensor):
            value += total.detach()
        source = self.placement.rank_of(self.placement.stages - 1)
        work = dist.broadcast(value, group=self.group, group_src=source, async_op=True)
        assert work is not None
        return value, work
