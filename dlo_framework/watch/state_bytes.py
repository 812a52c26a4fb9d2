"""Reports of a run's first steps: memory of a rank by kind, beside ZeRO's formula, and communication by axis.

The formula is from ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari et al., 2020,
arXiv 1910.02054, sections 3 and 5.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.batches import leaves
from dlo_framework.callback import PluginCallback
from dlo_framework.costs import is_compiled
from dlo_framework.distributed.traffic import Traffic, TrafficCounter
from dlo_framework.frozen_model import find_frozen_models
from dlo_framework.local_memory import states_per_parameter
from dlo_framework.strategy_abilities import ArrangesRanks, Pipelined, mesh_groups
from dlo_framework.strategy_contract import contract_of, plain_name

#: Optimizer step at which a run is measured: before the first step optimizers have no state.
STEP = 2


@dataclass
class StateBytes:
    """Bytes on one rank.

    Attributes:
        parameters: Bytes of trained and frozen parameters.
        gradients: Bytes of gradients after the last backward of a step.
        optimizer: Bytes of optimizer state.
        activations: Bytes that a micro-batch's forward saved for its backward, in a pipeline the largest sum of those
            in flight; None where they could not be measured, as in a compiled model.
        second_models: Bytes of models that do not train, such as a teacher; None in a run without.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float | None = None
    second_models: float | None = None


def paper_bytes(
    parameters: int,
    ranks: int,
    stage: int,
    *,
    frozen: int = 0,
    element: int = 4,
    states: float = 2,
    masters: bool = False,
) -> StateBytes:
    """Returns the bytes on a rank by the ZeRO paper's formula.

    Args:
        parameters: Number of trained parameters (the paper's psi).
        ranks: Number of ranks that state is sharded over (its N_d).
        stage: Stage of ZeRO: 0 for plain data parallelism, 1 to 3 for the paper's P_os, P_os+g, P_os+g+p.
        frozen: Number of frozen parameters, which have neither gradients nor state.
        element: Bytes of an element of parameters, gradients and state. The paper's 16 psi are 2 + 2 + 12 for half
            precision with master weights; in single precision there are none, and they are 4 + 4 + 8.
        states: Number of state tensors of the parameter's size; Adam has two, with 8 bits about half a one.
        masters: Whether parameters and gradients have half of these bytes, with master weights that count as a state.
    """
    single = parameters * element
    used = single / 2 if masters else single
    return StateBytes(
        parameters=(used + frozen * element) / (ranks if stage >= 3 else 1),
        gradients=used / (ranks if stage >= 2 else 1),
        optimizer=single * (states + masters) / (ranks if stage >= 1 else 1),
    )


class StateReport(PluginCallback):
    """Measures, on the run's second optimizer step, the memory of each kind of state; on by default.

    Activations are those of the largest batch: they are measured again for each batch that has more elements than all
    before it. It logs ``memory/state/*`` in GB, and adds the bytes to the summary: for each kind, the maximum over the
    ranks.

    Attributes:
        found: Measurement; None before it.
        formula: Bytes by the ZeRO paper's formula for the strategy; None for a strategy without a stage.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self) -> None:
        self.found: StateBytes | None = None
        self.formula: StateBytes | None = None
        self._activations: float | None = None
        self._elements, self._grows = 0, False  # of the largest batch; whether this one is larger
        self._gradients = 0.0
        self._hooks: saved_tensors_hooks | None = None
        self._watched = SavedTensorCounter(())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clears an earlier run's measurement."""
        if stage == "fit":
            self.found = self.formula = self._activations = None
            self._elements = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts to count the tensors that a pipeline's step saves, whose backward runs before its loss is returned."""
        elements = sum(leaf.numel() for leaf in leaves(batch) if isinstance(leaf, Tensor))
        self._grows = elements > self._elements
        if self.found is not None and not self._grows:
            return
        if self._measures(trainer, pl_module):
            self._elements = max(elements, self._elements)
        pipelined = contract_of(trainer.strategy).find_ability(Pipelined) is not None
        if pipelined and self._hooks is None and self._measures(trainer, pl_module):
            self._watched = SavedTensorCounter(pl_module.parameters())
            self._start_watch()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Counts the tensors that a micro-batch's forward has saved, before the backward frees them."""
        if self._hooks is not None:
            self._end_watch()
            self._note(self._watched.peak)
        elif (self.found is None or self._grows) and self._measures(trainer, pl_module):
            self._note(saved_bytes(loss, pl_module.parameters()))

    def _note(self, activations: float | None) -> None:
        self._activations = max(activations or 0.0, self._activations or 0.0) or None

    def _measures(self, trainer: Trainer, module: LightningModule) -> bool:
        return (self.found is None or self._grows) and trainer.global_step >= STEP - 1 and not is_compiled(module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measures the gradients before they are freed."""
        if self.found is None and trainer.global_step >= STEP - 1:
            self._gradients = contract_of(trainer.strategy).state_bytes()["gradients"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Completes the measurement, and logs it, once the step is done."""
        if self.found is not None or trainer.global_step < STEP:
            return
        held = contract_of(trainer.strategy).state_bytes()
        seconds = find_frozen_models([pl_module, *trainer.callbacks])  # type: ignore[attr-defined]
        own = StateBytes(
            held["parameters"],
            self._gradients,
            held["optimizer"],
            self._activations,
            float(sum(model.held_bytes() for model in seconds)) if seconds else None,
        )
        self.found = _max_over_ranks(trainer, own)
        self.formula = _formula(trainer, pl_module)
        scalars = {
            f"memory/state/{name}": value / 1e9 for name, value in asdict(self.found).items() if value is not None
        }
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the activations of the largest batch."""
        if self.found is not None and self.found.activations is not None:
            own = replace(self.found, activations=self._activations)
            self.found.activations = _max_over_ranks(trainer, own).activations

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Removes the hooks in the block: torch keeps them in a stack, which nobody restores after it."""
        watches = self._hooks is not None
        self._end_watch()
        try:
            yield
        finally:
            if watches:
                self._start_watch()

    def _start_watch(self) -> None:
        self._hooks = self._watched.hooks()
        self._hooks.__enter__()

    def _end_watch(self, *_: Any, **__: Any) -> None:
        """Removes the hooks of a step that failed."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    on_exception = _end_watch

    def summary(self) -> dict[str, Any] | None:
        """Returns the measured bytes and the formula's, for ``summary.json``; None if the run was too short."""
        if self.found is None:
            return None
        formula = (
            {key: value for key, value in asdict(self.formula).items() if value is not None} if self.formula else None
        )
        return {**asdict(self.found), "formula": formula}


class SavedTensorCounter:
    """Counter of the bytes of tensors saved for a backward on this rank, without parameters.

    Args:
        parameters: Parameters of the model.

    Attributes:
        peak: Largest number of bytes that were saved at a time.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters if not isinstance(p, DTensor)}
        self._uses: Counter[int] = Counter()  # saved tensors by the address of their memory
        self._bytes = self.peak = 0

    def add(self, tensor: Tensor) -> tuple[int, int]:
        """Counts a tensor's memory, once for tensors that share it; returns its address and bytes, for `remove`."""
        if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
            return 0, 0
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._own:
            return 0, 0
        self._uses[address] += 1
        self._bytes += size * (self._uses[address] == 1)
        self.peak = max(self.peak, self._bytes)
        return address, size

    def remove(self, address: int, size: int) -> None:
        """Ends the count of a tensor that the graph has freed."""
        self._uses[address] -= 1
        self._bytes -= size * (self._uses[address] == 0)

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks that count the tensors saved under them, each until its graph frees it."""
        return saved_tensors_hooks(lambda tensor: _SavedTensor(self, tensor), lambda saved: saved.tensor)


class _SavedTensor:
    """Tensor in the place of which a graph keeps this object."""

    def __init__(self, counter: SavedTensorCounter, tensor: Tensor) -> None:
        self.tensor, self._counter, self._counted = tensor, counter, counter.add(tensor)

    def __del__(self) -> None:
        self._counter.remove(*self._counted)


def saved_bytes(loss: Tensor, parameters: Iterable[Tensor]) -> float | None:
    """Returns the bytes of tensors that a loss's graph saves for its backward, without parameters; None if none.

    It walks the graph's nodes. Hooks on saved tensors would be simpler, but torch.func refuses to run under any.
    """
    counter = SavedTensorCounter(parameters)
    waiting, seen = [loss.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in _saved_attributes(type(node)):
            entry = getattr(node, name)
            for saved in entry if isinstance(entry, tuple | list) else (entry,):
                # With hooks of others, this is the tensor that they saved; a recomputed block has no tensor here.
                if isinstance(saved.data, Tensor):
                    counter.add(saved.data)
    return float(counter.peak) or None


@functools.cache
def _saved_attributes(kind: type) -> list[str]:
    """Returns the attributes of a kind of node with its saved tensors."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _max_over_ranks(trainer: Trainer, own: StateBytes) -> StateBytes:
    """Returns the maximum of each figure over all ranks."""
    values = [value or 0.0 for value in asdict(own).values()]
    if trainer.world_size > 1:
        held = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
        values = trainer.strategy.reduce(held, reduce_op="max").tolist()
    known = zip(values, asdict(own).values(), strict=True)
    return StateBytes(*(maximum if value is not None else None for maximum, value in known))  # type: ignore[arg-type]


def _formula(trainer: Trainer, module: LightningModule) -> StateBytes | None:
    """Returns the formula's figures for the run's strategy, with as many state tensors as its optimizers keep."""
    strategy = contract_of(trainer.strategy)
    stage = strategy.zero_stage
    if stage is None:
        return None
    named = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    psi = sum(strategy.full_size(name, parameter) for name, parameter in named if parameter.requires_grad)
    masters = strategy.has_master_weights
    element = 4 if masters else max((p.element_size() for p in trained), default=4)
    kept = states_per_parameter(trainer.strategy.optimizers) / element
    mesh = strategy.find_ability(ArrangesRanks)
    ranks = trainer.world_size if mesh is None else mesh.shard_size
    frozen = sum(strategy.full_size(name, parameter) for name, parameter in named if not parameter.requires_grad)
    return paper_bytes(psi, ranks, stage, frozen=frozen, element=element, states=kept, masters=masters)


# --- communication -------------------------------------------------------------------------------------------


class TrafficReport(PluginCallback):
    """Counts, on one of a run's first steps on several ranks, what the first rank sends; on by default.

    It adds the bytes of the step to the summary, all micro-batches included: for each axis of the mesh and kind of
    collective, where a buffer of n elements counts n, as in the ZeRO paper. Groups of a strategy without a mesh have
    the axis ``data``. A compiled model is not counted.

    Attributes:
        found: Communication; None before it is counted.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self) -> None:
        self.found: tuple[Traffic, ...] | None = None
        self._counter: TrafficCounter | None = None
        self._began = 0
        self._is_new_step = False
        self._steps: int | None = None  # optimizer steps at the end of the last batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clears an earlier run's count."""
        if stage == "fit":
            self.found = self._steps = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts to count with the first micro-batch of a step, once the optimizer has state."""
        if self._steps is None or self._steps < STEP or self._counter is not None or self.found is not None:
            return
        if self._is_new_step and trainer.is_global_zero and trainer.world_size > 1 and not is_compiled(pl_module):
            groups = mesh_groups(contract_of(trainer.strategy))
            self._began = trainer.global_step
            self._counter = TrafficCounter((lambda name: "data") if groups is None else groups.axis_of)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Completes the count with the last micro-batch of the step."""
        if self._counter is not None and trainer.global_step > self._began:
            self.found = self._counter.found
            self._end()
        self._is_new_step = trainer.global_step != self._steps
        self._steps = trainer.global_step

    def _end(self, *_: Any, **__: Any) -> None:
        """Drops the count of a step that the run did not complete."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)

    on_train_end = on_exception = _end

    def summary(self) -> list[dict[str, Any]] | None:
        """Returns the communication for ``summary.json``; None if nothing was counted."""
        return None if self.found is None else [asdict(row) for row in self.found]
