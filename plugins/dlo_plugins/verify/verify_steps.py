"""Callback `VerifySteps`: runs a step twice from the same state, now and then, and compares the bits.

Silent data corruption by hardware is found so in training at scale: The Llama 3 Herd of Models, Grattafiori et al.,
2024, arXiv 2407.21783, counts it among the causes of interruptions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from dlo_framework.batches import tree_leaves, tree_map_only
from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.costs import is_compiled
from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.errors import DloError, check_choice, check_number, mark_agreed, shown_names
from dlo_framework.rehearsal import check_rehearsable, trial_steps
from dlo_framework.run.resume import gather_states
from dlo_framework.shards import Shard, held_boxes
from dlo_framework.strategy_abilities import CanonicalCheckpoints, DelayedGradients
from dlo_framework.strategy_contract import contract_of, plain_name
from dlo_framework.watch.monitor import batch_loss

#: Number of columns in which the bits of a tensor are summed; a prime, so that rows that change places change the sums.
_COLUMNS = 509
#: Number of features of a module's output that are summed.
_FEATURES = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class VerifySteps(PluginCallback):
    """Runs every ``every``-th step twice from the same state, and compares the bits of all that it computes.

    Equal inputs give equal bits, unless an operation is not deterministic, or hardware computes wrongly without an
    error. The first run is on the side, through the run's own strategy, precision, callbacks, clipping and optimizer,
    and is undone: weights, buffers, optimizer state, random generators, counters and logged values. The second run is
    the step itself. With accumulation both are of its first micro-batch, on the side. Each rank compares sums of the
    bits of the outputs of modules (without compiled code), the loss, its gradients, and its part of weights, buffers
    and optimizer state.

    A check takes the time of a step, of copying the state of a rank twice, and of sums: 1.1 to 1.8 steps for small ViTs
    on a CPU. With accumulation it takes two steps of one micro-batch, and one more copy. The copies are in memory of
    the CPU, or of the device, which needs room for one copy of this rank's weights and optimizer state beside the
    activations of a step.

    Args:
        every: Number of optimizer steps between checks. The first step of a process is not checked: DDP arranges its
            buckets in it.
        on_difference: Reaction: ``raise`` ends the run in the state before the step; ``warn`` goes on.
        copies: Place of the copied state: ``cpu`` or ``device``.

    Raises:
        DloError: A value is out of range; a step cannot be repeated; or, with ``raise``, the bits differ.
    """

    example = "{every: 1}"
    #: It reads them where there are any; OptimizerInBackward has dropped them by then.
    needs_gradients = False
    reads_weights = False
    left_out_of_parity = "it changes no step"

    def __init__(
        self,
        every: int = 1000,
        on_difference: Literal["raise", "warn"] = "raise",
        copies: Literal["cpu", "device"] = "cpu",
    ) -> None:
        check_number("VerifySteps: every", every, "at least 1", "1000 costs at most 0.2% of the time")
        check_choice("VerifySteps: on_difference", on_difference, ("raise", "warn"))
        check_choice("VerifySteps: copies", copies, ("cpu", "device"))
        self.every, self.on_difference, self.copies = every, on_difference, copies
        self.checked = self.differed = 0
        self._first = 0
        self._gradients: dict[str, Tensor] | None = None  # sums of the running check

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that a step can be run twice."""
        check_rehearsable("VerifySteps", module)
        contract = contract_of(trainer.strategy)
        contract.ability(CanonicalCheckpoints, "VerifySteps")
        reasons = [one.prevents_replay for one in callbacks_of(trainer) if isinstance(one, PluginCallback)]
        if contract.find_ability(DelayedGradients) is not None:
            reasons.append("a schedule that delays gradients has micro-batches in flight between steps; use another")
        for reason in filter(None, reasons):
            raise DloError(f"VerifySteps: a step must be repeatable from the same state: {reason}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run."""
        if stage == "fit":
            self.check_run(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the first step of this process."""
        self._first = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Makes this step run twice if a check is due, and this is its first micro-batch."""
        step = trainer.global_step + 1
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        vars(loop).pop("run", None)  # A hook has skipped the batch for which it was.
        if step % self.every or trainer.global_step == self._first or batch_idx % trainer.accumulate_grad_batches:
            return
        # There, and not in this hook: others of the batch's start may still change the batch or the state.
        loop.run = functools.partial(self._run_twice, trainer, step)

    def _run_twice(self, trainer: Trainer, step: int, optimizer: Optimizer, number: int, arguments: Any) -> Any:
        """Runs the step in the place of Lightning's loop (2.6), with its arguments, and returns what it does."""
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        del loop.run
        accumulates = trainer.accumulate_grad_batches > 1
        run = functools.partial(self._run, trainer, optimizer, number)
        with trial_steps(trainer, own_batches=False, on_device=self.copies == "device") as rehearsal:
            _, first = run(tree_map_only(Tensor, torch.clone, arguments))
            if accumulates:
                rehearsal.undo()
                _, second = run(tree_map_only(Tensor, torch.clone, arguments))
        if accumulates:
            outputs = loop.run(optimizer, number, arguments)
        else:
            outputs, second = run(arguments)
        self.checked += 1
        difference = _describe(step, gather_states([name for name, sums in first.items() if sums != second.get(name)]))
        if difference and self.on_difference == "raise":
            rehearsal.undo()  # So that the state before the step can be saved.
            raise mark_agreed(DloError(difference))
        if difference:
            self.differed += 1
            rank_zero_warn(difference)
        return outputs

    def _run(
        self, trainer: Trainer, optimizer: Optimizer, number: int, arguments: Any
    ) -> tuple[Any, dict[str, list[int]]]:
        """Runs a step of one micro-batch; returns its outputs, and the sums of the bits of all that this rank has."""
        loop, contract = trainer.fit_loop.epoch_loop.automatic_optimization, contract_of(trainer.strategy)
        trainer.accumulate_grad_batches = 1
        gradients: dict[str, Tensor] = {}
        self._gradients = gradients  # The snapshot restores the attribute, and has not seen this dict.
        with _summed_outputs(trainer.lightning_module) as sums:
            outputs = loop.run(optimizer, number, arguments)
        self._gradients = None
        loss = batch_loss(trainer, outputs)
        sums |= ({} if loss is None else {"the loss": bit_sums(loss)}) | gradients
        checkpoints = contract.ability(CanonicalCheckpoints)
        with _kept_buffers(trainer.lightning_module):
            sums |= _sums_of("", trainer.strategy.lightning_module_state_dict())
        for stepped in trainer.optimizers:
            for name, values in checkpoints.optimizer_state(stepped)["state"].items():
                sums |= _sums_of(name, values)
        device = trainer.strategy.root_device
        numbers = torch.stack([value.to(device) for value in sums.values()]).tolist()  # One wait for the device.
        return outputs, dict(zip(sums, numbers, strict=True))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Reads the gradients of a step that is being checked."""
        if self._gradients is None:
            return
        tensors = contract_of(trainer.strategy).optimizer_tensors(torch_optimizer(optimizer))
        for name, tensor in tensors.items():
            if tensor.grad is not None:
                self._gradients[f"the gradient of {name}"] = bit_sums(tensor.grad)


def _describe(step: int, by_rank: list[list[str]]) -> str:
    """Returns what ranks have found; empty if there is nothing.

    Args:
        step: Number of the step, from 1.
        by_rank: Names of what differs, by rank, in the order in which a step computes it.
    """
    stages = [_stage(names[0]) for names in by_rank if names]
    if not stages:
        return ""
    ranks = [rank for rank, names in enumerate(by_rank) if names and _stage(names[0]) == min(stages)]
    names = list(dict.fromkeys(name for rank in ranks for name in by_rank[rank]))
    where = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {len(by_rank)}"
    one = "one of them" if len(ranks) > 1 else "that rank"
    cause = f"the hardware of {one} computes wrongly: leave its machine out"
    if not torch.are_deterministic_algorithms_enabled():
        cause = f"an operation is not deterministic (trainer.deterministic: true refuses such of torch), or {cause}"
    return (
        f"VerifySteps: step {step}, run twice from the same state, must give the same bits, got others on {where}:"
        f" {shown_names(names)}; {cause}, and resume from a checkpoint before the fault"
    )


def _stage(name: str) -> int:
    """Returns the place of a name in the order of a step: 0 in the forward, which other ranks' faults do not reach."""
    return 0 if name.startswith(("the output of ", "the loss")) else 1 if name.startswith("the gradient of ") else 2


@contextlib.contextmanager
def _summed_outputs(module: LightningModule) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that gets a sum of the bits of the outputs of each module with parameters of its own, by its name.

    By these a rank is found whose forward differs in bits that the loss has not. The first features are enough: later
    modules spread a difference over all. Compiled code calls no hooks.
    """
    named = [(name, part) for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))]
    names = {id(part): plain_name(name) for name, part in named}
    sums: dict[str, Tensor] = {}

    def add(part: nn.Module, _: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs) if id(part) in names else ():
            if isinstance(output, Tensor) and output.ndim:
                name = f"the output of {names[id(part)]}"
                sums[name] = _integers(output.detach()[..., :_FEATURES]).sum(dtype=torch.int64).repeat(2) + sums.get(
                    name, 0
                )

    handle = None if is_compiled(module) else register_module_forward_hook(add)
    try:
        yield sums
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def _kept_buffers(module: LightningModule) -> Iterator[None]:
    """Restores this rank's buffers after the block: for a checkpoint, strategies write rank 0's to all ranks."""
    own = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in own:
            buffer.copy_(value)


def _sums_of(parameter: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the sums of this rank's parts of a state's tensors, by canonical name."""
    names = {name: f"{name} of {parameter}" if parameter else plain_name(name) for name in values}
    return {names[name]: bit_sums(value) for name, value in values.items() if isinstance(value, Shard)}


@torch.no_grad()
def bit_sums(shard: Shard) -> Tensor:
    """Returns two integers that change if bits of this rank's part of a tensor do, or elements change places.

    Args:
        shard: Tensor, or shard of one.

    Returns:
        Tensor ``[2]`` on the device of the elements, from which nothing is read.
    """
    sums = [_sums_of_part(_integers(part)) for _, part in held_boxes(shard.detach())]
    return sum(sums[1:], start=sums[0]) if sums else torch.zeros(2, dtype=torch.int64)


def _integers(part: Tensor) -> Tensor:
    """Returns the bits of a tensor's elements as flat integers, of 8 bytes where it can be: they are the fastest."""
    part = part if part.layout is torch.strided else part.to_dense()
    part = (torch.view_as_real(part) if part.is_complex() else part).contiguous().view(-1)
    size = part.element_size()
    if part.numel() * size % 8:
        return part.view(_INTEGERS[size])
    # Sums must not depend on where a tensor lies in its memory, such as a gradient in a bucket.
    return (part.clone() if part.storage_offset() * size % 8 else part).view(torch.int64)


def _sums_of_part(bits: Tensor) -> Tensor:
    """Returns the sum of integers, and of the sums of their columns by number; each is read once."""
    rest = len(bits) % _COLUMNS
    columns = bits
    if len(bits) > _COLUMNS:
        columns = bits[: len(bits) - rest].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
        columns[:rest] += bits[len(bits) - rest :]
    weighted = columns * torch.arange(1, len(columns) + 1, device=bits.device)
    return torch.stack([columns.sum(), weighted.sum()])
