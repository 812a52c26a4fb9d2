"""Record of a run for a comparison: loss, gradient norm and batch digest of each step, and the final state.

Full tensors are gathered on rank 0 from the shards of any strategy, with their checksums.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework.batches import batch_size, leaves
from dlo_framework.callback import PluginCallback, drops_gradients
from dlo_framework.data import data_parallel_coordinates
from dlo_framework.random_streams import random_state
from dlo_framework.shards import Box, FlatShard, Shard, held_boxes, is_tiling, slice_view
from dlo_framework.shards import full_box as whole_box
from dlo_framework.strategy_abilities import CanonicalCheckpoints, Replicas
from dlo_framework.strategy_contract import contract_of, plain_name
from dlo_framework.watch.monitor import batch_loss

#: Most bytes of the tensors in one message, unless a single tensor is larger.
_BUNDLE = 64 << 20


def gather_full_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the model's full parameters and buffers by their plain names, on the CPU, on global rank 0.

    Called on all ranks; the other ranks get an empty dict.
    """
    state = trainer.strategy.lightning_module_state_dict()
    plain = {plain_name(name): value for name, value in state.items()}
    grouped = dist.is_available() and dist.is_initialized()
    flat = any(isinstance(value, FlatShard) for value in plain.values())  # Of ZeRO 3, also on one rank.
    if not grouped or (dist.get_world_size() == 1 and not flat):
        tensors = {name: value.detach() for name, value in plain.items() if isinstance(value, Tensor)}
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
        return {name: value.cpu().clone() for name, value in whole.items()}
    return gather_full_tensors(plain)


def gather_full_tensors(state: Mapping[str, Any], *, copies: bool = False) -> dict[str, Tensor]:
    """Gathers the full tensors of a state dict that is sharded over the ranks of the default group.

    Args:
        state: State of this rank: plain tensors, DTensors, flat or cut shards. Ranks may have different names, as the
            stages of a pipeline do; values that are not tensors are left out.
        copies: Whether tensors of which ranks have copies that differ are gathered again, of the last such rank, under
            their name with :data:`COPY`.

    Returns:
        Full tensors on the CPU by name, of all ranks' names, on rank 0; an empty dict on other ranks.
    """
    held = {name: _boxes(value) for name, value in state.items() if isinstance(value, Shard)}
    told: list[Any] = [None] * dist.get_world_size()
    sums = {(name, box): checksum(part) for name, (*_, boxes) in held.items() for box, part in boxes.items() if copies}
    kind_of = {name: (shape, dtype, list(boxes)) for name, (shape, dtype, boxes) in held.items()}
    dist.all_gather_object(told, (kind_of, sums))
    sender: dict[tuple[str, Box], int] = {}
    others: dict[str, dict[Box, int]] = {}
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for rank, (of_rank, own) in enumerate(told):
        for name, (shape, dtype, boxes) in of_rank.items():
            kinds.setdefault(name, (shape, dtype))
            for box in boxes:
                first = sender.setdefault((name, box), rank)
                if copies and own[name, box] != told[first][1][name, box]:
                    others.setdefault(name, {})[box] = rank
    for name in others:
        kinds[name + COPY] = kinds[name]
        held |= {name + COPY: held[name]} if name in held else {}
        sender |= {
            (name + COPY, box): others[name].get(box, rank) for (own, box), rank in sender.items() if own == name
        }
    me, whole = dist.get_rank(), {}
    for names in _bundles(kinds):
        mine = {
            name: {box: part.cpu().clone() for box, part in held[name][2].items() if sender[name, box] == me}
            for name in names
            if name in held
        }
        parts = _gathered(mine)
        if parts is not None:
            for name in names:
                of_all = {box: part for of_rank in parts for box, part in of_rank.get(name, {}).items()}
                whole[name] = _assembled(name, *kinds[name], of_all)
    return whole


def _bundles(kinds: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Iterator[list[str]]:
    """Yields the names of tensors to send in one message, because each message has a fixed cost."""
    names: list[str] = []
    held = 0
    for name, (shape, dtype) in kinds.items():
        size = shape.numel() * dtype.itemsize
        if names and held + size > _BUNDLE:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


def _boxes(value: Shard) -> tuple[torch.Size, torch.dtype, dict[Box, Tensor]]:
    return value.shape, value.dtype, {box: part for box, part in held_boxes(value.detach()) if box.numel}


def _assembled(name: str, shape: torch.Size, dtype: torch.dtype, parts: Mapping[Box, Tensor]) -> Tensor:
    assert is_tiling(tuple(shape), parts), f"the ranks' shards of {name}, shape {tuple(shape)}, do not tile it"
    joined = torch.empty(shape, dtype=dtype)
    for box, part in parts.items():
        slice_view(joined, whole_box(tuple(shape)), box).copy_(part)
    return joined


def _gathered(item: Any) -> list[Any] | None:
    """Returns every rank's item on rank 0; None on other ranks."""
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(item, parts, dst=0)
    return parts


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor's bytes."""
    return {name: checksum(tensor) for name, tensor in weights.items()}


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Returns the CRC-32 of a tensor's elements, in row-major order, continued from the checksum ``before``."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, before) if flat.numel() else before


#: End of the name of a tensor's copy on another rank, where it differs.
COPY = " on another rank"
#: Key under which Adam and its variants keep the running mean of squared gradients.
SQUARES = "exp_avg_sq"
#: Names of attributes with the probability of a dropout, in any module: modules of transformers and torch have such
#: attributes beside ``nn.Dropout``.
_RATE = re.compile(r"(^|_)(dropout|drop|drop_path|droppath|layerdrop)(_p|_prob|_probability|_rate)?$")
#: Names of such attributes in modules whose class name matches the pattern below.
_RATE_OF_DROP = re.compile(r"^(p|prob|drop_prob|drop_rate)$")
_DROPS = re.compile(r"drop|stochasticdepth", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """Record of one optimizer step.

    Attributes:
        loss: Mean loss over the step's micro-batches and the ranks; None where ``training_step`` returned none.
        norms: Global 2-norm of the gradients before clipping, as each rank has it; empty where it is not known.
        samples: Number of samples over all ranks.
        digest: Digest of the samples, independent of their order and of the ranks that had them.
    """

    loss: float | None
    norms: tuple[float, ...]
    samples: int
    digest: int


@dataclass
class Record:
    """Record of a run on one rank, or merged over all ranks.

    Attributes:
        steps: Optimizer steps.
        place: Data-parallel rank, and number of data-parallel ranks.
        weights: Weights at the end, by name; on global rank 0.
        initial: Checksums of the weights before the first step; on global rank 0.
        moved: 2-norm of each weight's change by training; on global rank 0.
        first: Outline of each weight's change by the first step, see :func:`outline`; on global rank 0.
        kinds: Class name of the module of each parameter, by name.
        stepped: Names of the parameters of which a rank's optimizers step elements, by rank.
        optimizer: Optimizer state at the end, by ``"<key> of <name>"``; on global rank 0, and empty where the strategy
            does not return it by parameter.
        validation: Metrics of a validation at the end, by name, as each rank has them.
        batch_norms: Number of BatchNorm layers with statistics per rank.
        drew: First step in which ``training_step`` drew random numbers; None if none did.
        notes: Notes on randomness that was switched off or made equal.
    """

    steps: list[Step] = field(default_factory=list)
    place: tuple[int, int] = (0, 1)
    weights: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, int] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    stepped: list[set[str]] = field(default_factory=list)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    validation: dict[str, tuple[float, ...]] = field(default_factory=dict)
    batch_norms: int = 0
    drew: int | None = None
    notes: list[str] = field(default_factory=list)


def merge_records(records: list[Record]) -> Record:
    """Merges the ranks' records into one.

    Losses are the mean over the data-parallel ranks; ranks of one replica have the same loss, or each that of its slice
    of the sequence. Every rank's gradient norm is kept: they must be equal.

    Args:
        records: Records by rank.
    """
    assert len({len(record.steps) for record in records}) == 1, "the ranks took the same number of steps"
    first = records[0]
    merged = Record(
        place=(0, first.place[1]), weights=first.weights, initial=first.initial, batch_norms=first.batch_norms
    )
    merged.moved, merged.optimizer, merged.first, merged.kinds = first.moved, first.optimizer, first.first, first.kinds
    merged.stepped = [names for record in records for names in record.stepped]
    for name in dict.fromkeys(name for record in records for name in record.validation):
        merged.validation[name] = tuple(v for record in records for v in record.validation.get(name, ()))
    merged.notes = first.notes
    drawn = [record.drew for record in records if record.drew is not None]
    merged.drew = min(drawn) if drawn else None
    for steps in zip(*(record.steps for record in records), strict=True):
        by_place: dict[int, list[Step]] = {}
        for record, step in zip(records, steps, strict=True):
            by_place.setdefault(record.place[0], []).append(step)
        of_places = [[s.loss for s in same if s.loss is not None] for same in by_place.values()]
        known = [sum(losses) / len(losses) for losses in of_places if losses]
        merged.steps.append(
            Step(
                loss=sum(known) / len(known) if known else None,
                norms=tuple(norm for step in steps for norm in step.norms),
                samples=sum(same[0].samples for same in by_place.values()),
                digest=sum(same[0].digest for same in by_place.values()),
            )
        )
    return merged


class Recorder(PluginCallback):
    """Callback that records a run, switches its dropout off, and makes it validate after its last step.

    It must be the first of the trainer's callbacks, so that it sees gradients before others change them.

    Args:
        nudge: Seed of a change of each weight by one unit in the last place, before the first step; 0 for none.
        rounding: Largest relative change of each element of a gradient in every step, if there is a ``nudge``: each
            rank rounds its gradients to half precision, which shows in no other order of one process's samples.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self, nudge: int = 0, rounding: float = 0.0) -> None:
        self.record = Record()
        self.nudge, self._rounding = nudge, rounding if nudge else 0.0
        self._generator = torch.Generator().manual_seed(nudge)
        self._begin: dict[str, Tensor] = {}
        self._losses: list[float] = []
        self._squares: list[float] = []
        self._samples = self._digest = self._tick = 0
        self._random: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches dropout off, before the first forward pass, and records the initial weights."""
        self.record.place = data_parallel_coordinates(trainer)
        dropped = switch_off_dropout(pl_module)
        if dropped:
            self.record.notes.append(f"model: no dropout ({dropped})")
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.strict:
                config.strict = False  # Lightning (2.6) would raise where its metric has not been logged.
                name = type(config.scheduler).__name__
                self.record.notes.append(f"{name}: no step without {config.monitor}; the run validates at its end only")
        kinds = nn.modules.batchnorm._BatchNorm
        layers = [module for module in pl_module.modules() if isinstance(module, kinds)]
        self.record.batch_norms = sum(layer.training and not isinstance(layer, nn.SyncBatchNorm) for layer in layers)
        contract = contract_of(trainer.strategy)
        self.record.stepped = [{name for each in trainer.optimizers for name in contract.optimizer_tensors(each)}]
        self.record.kinds = {
            plain_name(f"{path}.{name}" if path else name): type(module).__name__
            for path, module in pl_module.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        self._begin = gather_full_weights(trainer)
        self.record.initial = checksums(self._begin)
        if self.nudge:
            nudge(pl_module, self.nudge)
        self._tick = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records the batch's digest, and the random state, to find whether the step draws random numbers."""
        samples = batch_size(batch)
        self._samples += samples
        self._digest += digest(batch, samples)
        self._random = list(leaves(random_state()))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Records the gradient norm, unless backward has stepped the gradients."""
        contract = contract_of(trainer.strategy)
        if drops_gradients(trainer):
            return
        for parameter in pl_module.parameters() if self._rounding else ():
            if parameter.grad is not None:
                noise = torch.rand(parameter.shape, generator=self._generator).to(parameter.grad) * 2 - 1
                parameter.grad.mul_(1 + self._rounding * noise)
        norm = float(contract.gradient_norm(optimizer))
        if norm or contract.zero_stage is not None:  # A foreign strategy may keep gradients out of sight.
            self._squares.append(norm**2)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Completes the record of a step, if the optimizer has made one."""
        if self.record.drew is None and not _equal(self._random, list(leaves(random_state()))):
            self.record.drew = len(self.record.steps)
        loss = batch_loss(trainer, outputs)
        if loss is not None:
            self._losses.append(float(loss))
        if trainer.global_step == self._tick:
            return
        self._tick = trainer.global_step
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        norms = (sum(self._squares) ** 0.5,) if self._squares else ()
        self.record.steps.append(Step(mean, norms, self._samples, self._digest))
        self._losses, self._squares, self._samples, self._digest = [], [], 0, 0
        if len(self.record.steps) == 1:
            weights = gather_full_weights(trainer)
            kept = {name: self._begin[name] for name in weights if name in self.record.kinds and name in self._begin}
            self.record.first = {name: outline(weights[name].double() - begin.double()) for name, begin in kept.items()}
        steps, epochs = trainer.max_steps, trainer.max_epochs or -1
        if len(self.record.steps) >= steps > 0 or (trainer.is_last_batch and trainer.current_epoch + 1 == epochs):
            trainer.should_stop = True  # Lightning (2.6) then validates before it ends the run.

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the logged metrics."""
        if trainer.sanity_checking or trainer._results is None:
            return
        logged = trainer._results.metrics(on_step=False)["callback"]
        self.record.validation = {name: (float(value),) for name, value in logged.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the final weights and the optimizers' state."""
        self.record.weights = gather_full_weights(trainer)
        self.record.moved = {
            name: float(torch.linalg.vector_norm(weight.double() - self._begin[name].double()))
            for name, weight in self.record.weights.items()
            if name in self._begin and weight.numel() and weight.shape == self._begin[name].shape
        }
        self._begin = {}
        checkpoints = contract_of(trainer.strategy).find_ability(CanonicalCheckpoints)
        if checkpoints is not None:
            self.record.optimizer = optimizer_tensors(trainer, checkpoints)
        else:
            name = type(trainer.strategy).__name__
            self.record.notes.append(f"optimizer state: not compared; {name} does not return it by parameter")


#: Number of slices of a tensor in its outline.
_SLICES = 8


def outline(change: Tensor) -> Tensor:
    """Returns the 2-norm of each eighth of a tensor's elements, and their sum over the root of their number, `[2, 8]`.

    By it two changes of a weight are compared, of which neither run has kept the weight.
    """
    slices = change.flatten().tensor_split(_SLICES)
    sums = [part.sum() / max(1, part.numel()) ** 0.5 for part in slices]
    return torch.stack([torch.stack([torch.linalg.vector_norm(part) for part in slices]), torch.stack(sums)])


def nudge(module: nn.Module, seed: int) -> None:
    """Changes each parameter's elements by one unit in the last place, up or down, as rounding would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
                target = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                moved = torch.nextafter(parameter, target)
                parameter.copy_(torch.where(parameter == 0, parameter, moved))


def optimizer_tensors(trainer: Trainer, checkpoints: CanonicalCheckpoints) -> dict[str, Tensor]:
    """Returns the optimizers' state as full tensors on the CPU, by ``"<key> of <name>"``; called on all ranks.

    Only global rank 0 gets it; the other ranks get an empty dict.
    """
    state: dict[str, Any] = {}
    for optimizer in trainer.optimizers:
        for name, values in checkpoints.optimizer_state(optimizer)["state"].items():
            state |= {f"{key} of {name}": value for key, value in values.items() if isinstance(value, Shard)}
    grouped = dist.is_available() and dist.is_initialized()
    is_cut = any(not isinstance(value, Tensor) for value in state.values())  # Also on one rank of FSDP.
    if grouped and (dist.get_world_size() > 1 or is_cut):
        replicas = contract_of(trainer.strategy).find_ability(Replicas)
        return gather_full_tensors(state, copies=replicas is None or not replicas.separates)
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def digest(batch: Any, samples: int) -> int:
    """Returns a digest of a batch's samples that does not depend on their order.

    Args:
        batch: Nested structure of tensors.
        samples: Number of samples; each row of a tensor ``[samples, ...]`` counts, other tensors do not.
    """
    rows = [0] * samples
    for leaf in reversed(list(leaves(batch))):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples:
            rows = [checksum(part, row) for row, part in zip(rows, leaf.detach().cpu(), strict=True)]
    return sum(rows)


def _equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(one, other, strict=True)
    )


def switch_off_dropout(model: nn.Module) -> str | None:
    """Sets the rate of every dropout in a model to 0: dropout, stochastic depth, layer drop.

    They are found by their attributes: ``p``, ``prob`` or ``drop_prob`` of a class with "drop" in its name;
    ``dropout``, ``attention_dropout``, ``drop_path_rate`` and the like of any other module, and of its ``config``,
    which transformers' models read in their forward pass.

    Returns:
        Modules that were switched off, such as ``12 Dropout, 6 DropPath``; None if there were none.
    """
    switched: Counter[str] = Counter()
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            attributes = getattr(holder, "__dict__", None)
            if attributes is None:
                continue
            rates = [name for name, value in attributes.items() if _is_rate(holder, name, value)]
            for name in rates:
                setattr(holder, name, 0.0)
            if rates:
                switched[type(holder).__name__] += 1
        if isinstance(module, nn.RReLU) and module.lower != module.upper:
            module.lower = module.upper = (module.lower + module.upper) / 2
            switched["RReLU"] += 1
    return ", ".join(f"{count} {name}" for name, count in sorted(switched.items())) or None


def _is_rate(holder: Any, name: str, value: Any) -> bool:
    if not isinstance(value, float) or not 0 < value <= 1:
        return False
    return bool(_RATE.search(name) or (_DROPS.search(type(holder).__name__) and _RATE_OF_DROP.match(name)))
