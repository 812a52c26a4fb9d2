"""The pipeline's engine: runs a schedule on a model that is cut into stages.

Any Python forward can be cut (:mod:`.gates`), micro-batches may have any shapes, and what each rank computed when can
be recorded. It knows neither Lightning nor optimizers.
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
from dlo_framework.plan import ParallelPlan
from dlo_plugins.pipeline.actions import Action, Kind
from dlo_plugins.pipeline.assign import Split
from dlo_plugins.pipeline.assign import make_stages as make_stages
from dlo_plugins.pipeline.costs import PartCosts
from dlo_plugins.pipeline.cutting import cut
from dlo_plugins.pipeline.exchange import Exchange
from dlo_plugins.pipeline.gates import Passage, Shapes
from dlo_plugins.pipeline.layout import signatures
from dlo_plugins.pipeline.leaks import LeakCheck
from dlo_plugins.pipeline.precision import no_autocast
from dlo_plugins.pipeline.schedules import Schedule, forward_only, make_schedule, placement, splits_backward
from dlo_plugins.pipeline.simulate import Timeline
from dlo_plugins.pipeline.spans import Recorder, gather
from dlo_plugins.pipeline.tied import TiedWeights, tied_groups_across
from dlo_plugins.pipeline.transport import Transport
from dlo_plugins.pipeline.weight_grads import WeightGradients


@dataclass
class _Step:
    """What a step has under way."""

    micro_batches: Sequence[Any]
    signatures: list[Any]
    exchange: Exchange
    forward: Callable[[Any], Any]
    loss: Callable[[Any, Any], Tensor] | None = None
    weights: Sequence[float] = ()
    seed: Tensor | float = 1.0
    #: By stage and micro-batch: what was received, and what backward begins at.
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    put_off: dict[tuple[int, int], deque[Callable[[], None]]] = field(default_factory=dict)
    #: By stage: backwards (and weight gradients, where they are apart) that are still to come.
    left: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    total: Tensor | float = 0.0


class Pipeline:
    """Trains and evaluates a model that lies on several ranks, stage by stage.

    It cuts the model: parameters of other ranks' stages become meta tensors under their names. Build it when tensor and
    context parallelism have rewritten the model and before anything wraps or fills it; whatever happens to the blocks
    later (recomputation, compile, FSDP2 on stem units, blocks and head, not on the model itself) it goes along with.

    Args:
        model: a task's `model`; may lie on the meta device.
        plan: names are relative to the model.
        group: the ranks of the pipeline, in the order of stages.
        schedule: GPipe, 1F1B, Interleaved1F1B, ZBH1, ZBV or DualPipeV.
        stages_per_rank: for Interleaved1F1B; 2 by default.
        split: blocks of each stage, or `balanced` by cost.
        costs: by which it is balanced; by default the numbers of parameters.
        device: on which this rank computes.

    Attributes:
        stages: of the model.
        holds: tells which names this rank holds, and of which it is the first holder.
        placement: of the stages on ranks.
        before_backward: called before each backward with the stage, the micro-batch, and whether the stage's gradients
            are complete after it. Where weight gradients come later they never are: then look at `gradients_ready`.
        gradients_ready: called with a stage when its gradients of the step are complete.
        loss_ready: called with each micro-batch's loss in training, on the rank of the last stage.
        record: whether to record what is computed when; it makes ranks start each step together.
        most_shapes: of micro-batches that are remembered; of each new one the ranks tell each other once.

    Raises:
        DloError: for a schedule or split that does not fit the model and the ranks.
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
        costs: PartCosts | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.group, self.device = model, group, torch.device(device)
        self.schedule, self.stages_per_rank = schedule, stages_per_rank
        self.rank = dist.get_rank(group)
        self.placement = placement(schedule, dist.get_world_size(group), stages_per_rank)
        self.stages = make_stages(model, plan, self.placement.stages, split, costs)
        self.own_stages = self.placement.stages_of(self.rank)
        tied = tied_groups_across(model, self.stages, self.placement)
        self.holds = cut(model, self.stages, self.own_stages)
        self._transport = Transport(group, self.device)
        self._transport.connect([*self.placement.neighbours(), *(pair for shared in tied for pair in shared.pairs())])
        self.tied = TiedWeights(model, tied, self._transport)
        self._weight_gradients: WeightGradients | None = None
        self.before_backward: Callable[[int, int, bool], None] | None = None
        self.gradients_ready: Callable[[int], None] | None = None
        self.loss_ready: Callable[[Tensor], None] | None = None
        self.record = False
        self._recorder = Recorder(self.device)
        self._exchange = Exchange(self._transport, self.placement, self.device)
        self._schedules: dict[int, Schedule] = {}
        self._shapes: dict[tuple[int, Any], Shapes] = {}
        self._checked: set[tuple[int, bool]] = set()
        self._seen: set[Any] = set()

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so has outputs and losses."""
        return self.placement.rank_of(self.placement.stages - 1) == self.rank

    # --- steps ---------------------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Sequence[Any],
        forward: Callable[[Any], Any],
        loss: Callable[[Any, Any], Tensor],
        weights: Sequence[float] | None = None,
        seed: Tensor | float = 1.0,
        *,
        sum_tied: bool = True,
    ) -> Tensor:
        """Runs forward and backward of all micro-batches; gradients are added to the held parameters' `.grad`.

        Args:
            micro_batches: on this rank's device, the same on all ranks of the pipeline.
            forward: calls the model, or a part of it, on a micro-batch. It runs for each stage, up to its end.
            loss: of what `forward` returned and the micro-batch: a scalar. It runs in the last stage alone.
            weights: of the micro-batches' losses in the step's; by default all the same, one in sum.
            seed: what the losses are multiplied by for backward only, as a gradient scaler asks.
            sum_tied: whether to sum the gradients of tied weights over the ranks that hold them. Where several of these
                steps make up one of the optimizer, do so in the last alone.

        Returns:
            The weighted sum of the losses, without the seed; the same on all ranks of the pipeline.

        Raises:
            DloError: if the model's forward cannot be cut where it is, or the schedule cannot run so many
                micro-batches.
        """
        number = len(micro_batches)
        schedule = self._scheduled(number)
        step = self._step(schedule, micro_batches, forward)
        step.loss, step.seed = loss, seed
        step.weights = [1.0 / number] * number if weights is None else weights
        for action in schedule.orders[self.rank]:
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                step.left[action.stage] = step.left.get(action.stage, 0) + 1
        self._prepare_weight_gradients()
        if self.record:
            self._recorder.begin(self.group)
        for action in schedule.orders[self.rank]:
            if action.kind is Kind.FORWARD:
                self._forward(step, action)
            elif action.is_backward:
                self._backward(step, action)
            else:
                self._weights(step, action)
        step.exchange.finish()
        if sum_tied:
            self.tied.sum_gradients()
        return self._everywhere(step.total)

    def evaluate(self, micro_batches: Sequence[Any], forward: Callable[[Any], Any]) -> list[Any] | None:
        """Runs the forward of any number of micro-batches, without gradients.

        Args:
            micro_batches: on this rank's device, the same on all ranks of the pipeline.
            forward: calls the model, or a part of it, on a micro-batch.

        Returns:
            What `forward` returned for each micro-batch on the rank of the last stage; None elsewhere.
        """
        schedule = forward_only(self.placement, len(micro_batches))
        with torch.no_grad():
            step = self._step(schedule, micro_batches, forward)
            if self.record:
                self._recorder.begin(self.group)
            for action in schedule.orders[self.rank]:
                self._forward(step, action)
            step.exchange.finish()
        return [step.outputs[n] for n in range(len(micro_batches))] if self.is_last else None

    def rehearse(self, micro_batches: Sequence[Any], forward: Callable[[Any], Any]) -> None:
        """Learns the shapes of hidden states without other ranks, so that steps can run where none answer.

        For a model that lies on the meta device, whose steps (with torch's fake process group, say) compute no values.

        Args:
            micro_batches: on the meta device, of the shapes that are to come.
            forward: calls the model, or a part of it, on a micro-batch.

        Raises:
            DloError: if the model's forward cannot be cut where it is.
        """
        assert all(parameter.is_meta for parameter in self.model.parameters())
        known = signatures(micro_batches, self.model, self.device)
        for key, micro_batch in dict(zip(known, micro_batches, strict=True)).items():
            hidden, shapes = None, Shapes()
            for stage in range(self.stages.count - 1):
                check = LeakCheck() if stage else None
                passage = Passage(self.model, self.stages, stage, self.device, hidden, shapes, True, check)
                result = passage.run(partial(forward, micro_batch))
                self._shapes[stage + 1, key] = shapes = passage.known
                self._exchange.learn(stage + 1, key, result, shapes)
                hidden = result.detach().requires_grad_(result.requires_grad)

    def timeline(self) -> Timeline:
        """Returns what all ranks computed when in the last recorded step; a collective call."""
        return gather(self._recorder.timed(), self.group)

    # --- actions -------------------------------------------------------------------------------------------

    def _forward(self, step: _Step, action: Action) -> None:
        _, stage, number = action
        received = step.exchange.hidden(stage, number) if stage else None
        with self._timed(action):
            result = self._passage(step, stage, number, received)
            if stage + 1 == self.stages.count:
                if step.loss is None:
                    step.outputs[number] = result
                    return
                result = step.loss(result, step.micro_batches[number])
                if self.loss_ready is not None:
                    self.loss_ready(result)
                step.total = step.total + step.weights[number] * result.detach().double()
        if stage + 1 < self.stages.count:
            step.exchange.send_hidden(stage + 1, number, result, self._shapes[stage + 1, step.signatures[number]])
        if step.loss is not None:
            step.kept[stage, number] = received, result

    def _passage(self, step: _Step, stage: int, number: int, received: Tensor | None) -> Any:
        key = step.signatures[number]
        if stage > 0 and (stage, key) not in self._shapes:
            self._shapes[stage, key] = step.exchange.shapes(stage, key)
        shapes = self._shapes[stage, key] if stage else Shapes()
        last = stage + 1 == self.stages.count
        record = not last and (stage + 1, key) not in self._shapes
        checked = (stage, self.model.training)
        check = LeakCheck() if stage and checked not in self._checked else None
        passage = Passage(self.model, self.stages, stage, self.device, received, shapes, record, check)
        result = passage.run(lambda: step.forward(step.micro_batches[number]))
        self._checked.add(checked)
        if record:
            self._shapes[stage + 1, key] = passage.known
        return result

    def _backward(self, step: _Step, action: Action) -> None:
        kind, stage, number = action
        received, result = step.kept.pop((stage, number))
        last_stage = stage + 1 == self.stages.count
        gradient: Tensor | None
        if last_stage:
            gradient = torch.as_tensor(step.seed, dtype=result.dtype, device=result.device) * step.weights[number]
        else:
            gradient = step.exchange.gradient(stage, number) if result.requires_grad else None
        if kind is Kind.BACKWARD:
            step.left[stage] -= 1
        complete = kind is Kind.BACKWARD and not step.left[stage]
        if self.before_backward is not None:
            self.before_backward(stage, number, complete)
        with self._timed(action), self._putting_off(step, action), no_autocast(self.device.type):
            if result.requires_grad:
                torch.autograd.backward(result, gradient)
        del result, gradient
        if received is not None and received.requires_grad:
            found, received.grad = received.grad, None
            step.exchange.send_gradient(stage - 1, number, torch.zeros_like(received) if found is None else found)
        if complete and self.gradients_ready is not None:
            self.gradients_ready(stage)

    def _weights(self, step: _Step, action: Action) -> None:
        _, stage, number = action
        assert self._weight_gradients is not None
        with self._timed(action), no_autocast(self.device.type):
            self._weight_gradients.run(step.put_off.pop((stage, number)))
        step.left[stage] -= 1
        if not step.left[stage] and self.gradients_ready is not None:
            self.gradients_ready(stage)

    @contextlib.contextmanager
    def _putting_off(self, step: _Step, action: Action) -> Iterator[None]:
        if action.kind is not Kind.INPUT:
            yield
            return
        store = self._weight_gradients
        assert store is not None
        store.open = step.put_off[action.stage, action.micro_batch] = deque()
        try:
            yield
        finally:
            store.open = None

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        if not self.record:
            yield
            return
        start = self._recorder.now()
        yield
        self._recorder.add(action, start, self._recorder.now())

    # --- around them ---------------------------------------------------------------------------------------

    def _step(self, schedule: Schedule, micro_batches: Sequence[Any], forward: Callable[[Any], Any]) -> _Step:
        known = signatures(micro_batches, self.model, self.device)
        self._remember(known)
        return _Step(micro_batches, known, self._exchange.start(schedule, known), forward)

    def _remember(self, known: Sequence[Any]) -> None:
        """Forgets all shapes when there are too many: all ranks of the pipeline at once, since they see the same."""
        self._seen.update(known)
        if len(self._seen) > self.most_shapes:
            self._seen = set(known)
            self._shapes.clear()
            self._exchange.forget()

    def can_run(self, number: int) -> bool:
        """Returns whether the schedule has an order for so many micro-batches."""
        try:
            self._scheduled(number)
        except DloError:
            return False
        return True

    def _scheduled(self, number: int) -> Schedule:
        if number not in self._schedules:
            ranks = self.placement.ranks
            self._schedules[number] = make_schedule(self.schedule, ranks, number, self.stages_per_rank)
        return self._schedules[number]

    def _prepare_weight_gradients(self) -> None:
        """Has layers put weight gradients off: at the first step, when blocks are as they stay."""
        if self._weight_gradients is None and splits_backward(self.schedule):
            self._weight_gradients = WeightGradients()
            for stage in self.own_stages:
                for name in self.stages.blocks_of(stage):
                    self._weight_gradients.install(self.model.get_submodule(name))

    def _everywhere(self, total: Tensor | float) -> Tensor:
        # On other ranks than the last a number is overwritten; zeros are made where they lie, a number is copied there.
        value = torch.zeros((), dtype=torch.float64, device=self.device)
        if isinstance(total, Tensor):
            value += total.detach()
        source = self.placement.rank_of(self.placement.stages - 1)
        dist.broadcast(value, group=self.group, group_src=source)
        return value
