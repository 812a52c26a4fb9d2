"""Recomputes activations by the fastest schedule within a memory budget (Rotor).

Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory. Beaumont,
Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, arXiv 1911.13214.

It is a callback, because every strategy has finished its work on the model when training starts: blocks are cut,
compiled and sharded, and their calls gather what they need. So one mechanism serves the strategies, and the measured
blocks are those that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from dlo_framework.agreement import gather_then_scatter
from dlo_framework.batches import tree_leaves
from dlo_framework.callback import PluginCallback, callbacks_of, traits_of
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.recompute import recompute, undo_recompute
from dlo_framework.strategy_abilities import BlocksInPlace, Pipelined
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task import inner_model, model_and_plan
from dlo_framework.units import format_bytes
from dlo_framework.watch.media import log_scalars, save_figure
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.compile.callback import check_block_scope
from dlo_plugins.memory.activation_checkpoint import contexts_for
from dlo_plugins.memory.block_survey import AllocationLog, BlockSurvey
from dlo_plugins.memory.planning import (
    Budget,
    MeasuredChain,
    MeasuredRank,
    Plan,
    draw_schedule,
    free_memory,
    plan_ranks,
    replay_in_flight,
)
from dlo_plugins.memory.schedule import Keep, Link
from dlo_plugins.memory.scheduled_blocks import (
    HostLink,
    ScheduledBlocks,
    SimulatedLink,
    StreamLink,
    measure_link,
    parse_link,
)


class Rotor(PluginCallback):
    """Recomputes activations by the fastest schedule within a memory budget.

    The first batches recompute each block, and measure bytes and times of the blocks, forward and backward. Then a
    dynamic program chooses for each block whether to keep all of its activations, to keep the outputs of its matrix
    products (`selective`), or to run it again in backward, alone or in regions of blocks, which may nest. Gradients,
    random numbers and buffers are those of a run without it.

    Args:
        budget: Memory for the activations of a rank's step: a size such as `12GB`, a share such as `60%` of what they
            take if all are kept, or `auto` for the memory that is left beside all else that a step needs. Parameters,
            their gradients, optimizer state and the batch are not counted.
        offload: Whether activations may also be copied to the host between forward and backward, where that is faster
            than to recompute them. Copies run beside computation, on two streams of an accelerator.
        link: Rate of the copies in each direction, such as `25GB/s`, or `auto`, which measures it on an accelerator. On
            a CPU a rate is needed: the copies are simulated, and take that long.
        slots: Number of slots that the dynamic program divides the budget into.

    Attributes:
        plans: Schedules of this rank, one for each of its pipeline stages; empty until they are made.
        executed: Blocks that run by the schedules.
        measured: Peak bytes of this rank's activations in the first batch that runs by the schedules; 0 until then.

    Raises:
        DloError: The budget is malformed or too small, the model has no plan with blocks, its blocks recompute already,
            or `offload` has no link.
    """

    example = "{budget: 90%}"

    #: Why `dlo parity` trains without it: the compared process has other memory.
    left_out_of_parity = "it changes the memory of a run, and nothing else in it"
    #: Number of batches before the measured ones: a run monitor counts FLOPs in them.
    wait = 2

    def __init__(self, budget: str = "auto", offload: bool = False, link: str = "auto", slots: int = 500) -> None:
        check_number("Rotor: slots", slots, "at least 10", "use 500")
        self.budget, self.slots = Budget.parse(budget), slots
        self.offload, self.link = offload, parse_link(link)
        if self.link is not None and not offload:
            raise DloError(f"Rotor: link must come with offload: true, got {link} without; set offload: true")
        #: Link that the copies run on; on a CPU, a simulated one.
        self.host_link: HostLink | None = None
        self.plans: list[Plan] = []
        self.executed: list[ScheduledBlocks] = []
        self._surveys: list[BlockSurvey] = []
        self._recomputed: list[nn.Module] = []
        self._log: AllocationLog | None = None
        self._batches = self._measured_bytes = self._peak = self.measured = 0

    # --- on and off ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the model, and begins to survey its blocks."""
        contract_of(trainer.strategy).ability(BlocksInPlace, "Rotor")
        check_block_scope("Rotor", trainer)
        device = trainer.strategy.root_device
        if self.offload and self.link is None and device.type == "cpu":
            raise DloError(
                "Rotor: offload must have a link on a CPU, where there is none to measure, got link: auto; set link:"
                " 25GB/s, which is simulated, or leave offload out"
            )
        self._begin_survey(trainer, pl_module)

    def _begin_survey(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        self._batches = self.measured = 0
        model = inner_model(pl_module)

        def parameters() -> list[Tensor]:
            return list(pl_module.parameters())

        full = contract_of(trainer.strategy).zero_stage in (0, 1)
        for names, is_last in _chains(trainer, pl_module):
            blocks = [model.get_submodule(name) for name in names]
            self._surveys.append(BlockSurvey(blocks, names, is_last, parameters, full_gradients=full))

    def _remove(self, *_: Any, **__: Any) -> None:
        """Makes the blocks run as they did before."""
        self._end_log()
        for survey in self._surveys:
            survey.remove()
        for executed in self.executed:
            executed.remove()
        undo_recompute(self._recomputed)
        self._surveys, self.executed, self._recomputed = [], [], []

    on_train_end = on_exception = _remove

    # --- measuring -----------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins the measurement of a batch, if it is one of those."""
        size = _batch_bytes(batch)
        for executed in self.executed:
            executed.begin_step()
        if not self._surveys:
            self._check_size(trainer, pl_module, size)
        if not self._surveys and self.plans and not self.measured:
            self._begin_log(trainer)
        if self._surveys and self._batches == self.wait:
            self._measured_bytes = size
            log = self._begin_log(trainer)
            for survey in self._surveys:
                survey.begin_bytes(log)
        elif self._surveys and self._batches == self.wait + 1:
            for survey in self._surveys:
                survey.times_blocks = True
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Begins the copies back to the device that the head's backward runs beside."""
        for executed in self.executed:
            executed.begin_backward()

    def _check_size(self, trainer: Trainer, pl_module: LightningModule, size: int) -> None:
        """Surveys again for a larger batch, if all ranks have larger ones at the same time.

        The ranks vote in each batch if a callback may change their sizes: a survey on some of them would not end.
        """
        grows = is_larger = size > self._measured_bytes
        if trainer.world_size > 1:
            changes = any(traits_of(callback).changes_batch_shapes for callback in callbacks_of(trainer))
            grows = changes and trainer.strategy.reduce_boolean_decision(is_larger)
        if grows:
            self._begin_survey(trainer, pl_module)
            return
        if not is_larger:
            return
        rank_zero_warn(
            f"Rotor: a batch of {size} bytes is larger than the measured one of {self._measured_bytes}, so that"
            " activations may exceed the budget; sort or pad the samples to one size"
        )
        self._measured_bytes = size

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the measurement of a batch; after the last one, plans."""
        peak = 0
        if self._log is not None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            others = self._log.numbers([*gradients, *pl_module.parameters()]) | self._log.left_by_backward(0)
            peak = self._log.usage(0, without=others).peak
            for survey in self._surveys:
                survey.end_bytes(gradients)
            self._end_log()
        if not self._surveys:
            if peak:
                self.measured = peak
                self._show(trainer)
            return
        self._batches += 1
        if peak:
            self._peak = peak
        elif self._batches >= self.wait + 2 and all(survey.is_complete for survey in self._surveys):
            self._plan(trainer)

    def _begin_log(self, trainer: Trainer) -> AllocationLog:
        self._log = AllocationLog(trainer.strategy.root_device)
        return self._log.__enter__()

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.__exit__(None, None, None)
            self._log = None

    # --- planning ------------------------------------------------------------------------------------------

    def _plan(self, trainer: Trainer) -> None:
        in_flight: tuple[int, ...] = (1,) * len(self._surveys)
        pipelined = contract_of(trainer.strategy).find_ability(Pipelined)
        if pipelined is not None:
            pipeline = pipelined.pipeline
            in_flight = [*replay_in_flight(pipeline.schedule_for(pipelined.micro_batches))][pipeline.rank].most
        device = trainer.strategy.root_device

        def measure() -> MeasuredRank:
            chains = [
                MeasuredChain(survey.chain(), survey.stem, survey.refusal, count, survey.stem_backward)
                for survey, count in zip(self._surveys, in_flight, strict=True)
            ]
            local = max(1, trainer.world_size // max(1, trainer.num_nodes))
            link = self.link or (measure_link(device) if self.offload else None)
            return MeasuredRank(tuple(chains), free_memory(device, self._peak, local), link)

        group = dist.group.WORLD if trainer.world_size > 1 else None
        self.plans = gather_then_scatter(group, measure, lambda ranks: plan_ranks(ranks, self.budget, self.slots))
        surveys = self._surveys
        self._remove()
        if self.offload and self.plans:
            self.host_link = self._make_link(device, self.plans[0].link)
        for survey, plan in zip(surveys, self.plans, strict=True):
            self._execute(survey, plan, pipelined is not None)
        _count_flops_again(trainer)
        for plan in self.plans:
            rank_zero_info(f"Rotor: {plan.describe()}")
        self._show(trainer)

    def _make_link(self, device: torch.device, link: Link | None) -> HostLink:
        """Returns the link of the copies; a test or a benchmark may give a simulated one another clock."""
        assert link is not None
        return SimulatedLink(link) if device.type == "cpu" else StreamLink(device)

    def _execute(self, survey: BlockSurvey, plan: Plan, pipelined: bool) -> None:
        nodes = plan.schedule.nodes
        if not plan.measured.refusal:
            blocks = ScheduledBlocks(survey.blocks, survey.names, plan.schedule, self.host_link, pipelined)
            self.executed.append(blocks)
            return
        for block, node in zip(survey.blocks, nodes, strict=False):
            if isinstance(node, Keep) and node.mode == 0:
                continue
            recompute([block], contexts_for(block) if isinstance(node, Keep) else None)
            self._recomputed.append(block)

    def _show(self, trainer: Trainer) -> None:
        """Logs what is predicted and measured, and draws the first schedule of rank 0."""
        if not (trainer.is_global_zero and self.plans):
            return
        plan = self.plans[0]
        predicted = sum(each.peak * each.measured.in_flight for each in self.plans)
        scalars = {"rotor/predicted_bytes": float(predicted), "rotor/predicted_overhead": plan.overhead}
        if self.offload:
            scalars["rotor/offloaded_bytes"] = float(plan.offloaded)
        if self.measured:
            scalars["rotor/measured_bytes"] = float(self.measured)
            amounts = format_bytes(self.measured), format_bytes(predicted)
            rank_zero_info(f"Rotor: activations of a step take {amounts[0]}, predicted {amounts[1]}")
        log_scalars(trainer, scalars)
        args = plan.measured.chain, plan.schedule, plan.measured.stem, plan.budget, plan.link
        measured = self.measured if len(self.plans) == plan.measured.in_flight == 1 else 0
        path = Path(trainer.default_root_dir) / "rotor.png"
        save_figure(trainer, "Rotor", "rotor/schedule", path, lambda: draw_schedule(*args, measured=measured))


def _chains(trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[list[str], bool]]:
    """Yields the names of the blocks of each of this rank's chains, and whether the model's head follows them.

    Raises:
        DloError: The model has no plan with blocks.
    """
    pipelined = contract_of(trainer.strategy).find_ability(Pipelined)
    if pipelined is not None:
        stages = pipelined.pipeline.stages
        for stage in pipelined.pipeline.own_stages:
            yield stages.blocks_of(stage), stage + 1 == stages.count
        return
    model, plan = model_and_plan(pl_module)
    names = plan.block_names(model)
    if not names:
        raise DloError(
            f"Rotor: the parallel plan must name blocks, got none of {type(pl_module).__name__}; name them in"
            " Task.parallel_plan: ParallelPlan(blocks=(...))"
        )
    yield names, True


def _batch_bytes(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _count_flops_again(trainer: Trainer) -> None:
    """Makes the run monitor count the FLOPs of a step again, as those of the surveyed steps differ."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunMonitor) and callback.flops is not None and callback.flops.uncompile is None:
            callback.flops.forget()
