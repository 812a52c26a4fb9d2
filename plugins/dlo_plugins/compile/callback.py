"""Callback that compiles a model with torch.compile, without a change to its code, and reports the compilations.

Modules are compiled in place (``Module.compile``), so that no wrapper shows in a checkpoint's keys. The step around
them is not compiled: code that logs or uses the trainer does not suit a compiler (Lightning issue #21836). The
optimizer's step and the task's loss can be.

Graphs, graph breaks and recompilations: torch shows them only in its logs (``TORCH_LOGS=graph_breaks,recompiles``). The
numbers come from ``torch._dynamo``, which is private: each read of it is one function at the end of this file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dlo_framework.batches import batch_size, tree_leaves
from dlo_framework.callback import PluginCallback, traits_of
from dlo_framework.costs import FlopCounter, is_compiled
from dlo_framework.distributed.optimizer_steps import IMPLEMENTATIONS, StepOverride, take_bare_step
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.progress import loader_batch_size
from dlo_framework.strategy_abilities import BlocksInPlace, SeparateParameters, SeparateSteps
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task import Task
from dlo_framework.watch.media import log_scalars
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.compile.compile_blocks import (
    CUDA_GRAPHS,
    compile_in_place,
    compiled_call,
    modules_to_compile,
    moving_parameter,
    set_compiled_call,
)

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Compile(PluginCallback):
    """Compiles the model with ``torch.compile`` for training, and reports the compilations.

    It compiles ``self.model`` of a Task, and each child with parameters of any other LightningModule; it never compiles
    the steps themselves. Evaluation runs uncompiled, as does the last batch of an epoch if it is smaller: their other
    shapes would be compiled too, for minutes. RunMonitor counts FLOPs on the first batch of each size, which runs
    uncompiled for that. Checkpoints have the same keys as without this callback.

    At the end of the first epoch and of the run it prints the number of graphs, graph breaks and recompilations with
    their reasons, and logs the numbers as ``compile/*``.

    Args:
        scope: Scope: ``model``, or ``blocks`` to compile each repeated block of the parallel plan separately. Blocks of
            one structure share their code, so that a deep model compiles many times faster.
        mode: Mode of ``torch.compile``: ``default``; ``reduce-overhead`` replays CUDA graphs, which pays off for short
            kernels; ``max-autotune`` also measures which kernels are fastest; ``max-autotune-no-cudagraphs`` only
            measures.
        dynamic: False to compile each input size separately, True to compile once for all sizes. None lets torch
            decide: the second size makes the code dynamic. The code for a batch then depends on the batches before it,
            and a resumed run is not bit-equal.
        backend: Backend: ``inductor``, or another of ``torch.compiler.list_backends``; ``aot_eager`` traces without
            generating code.
        fullgraph: Whether a graph break is an error.
        evaluate: Mode of validation, test and prediction: ``eager``, or ``compiled``, which pays off if they take long.
        max_sizes: Number of input sizes for which each module may be compiled. Further sizes run uncompiled.
        cache_dir: Folder of compiled code, from which a later run starts in seconds; all your runs may share it.
            None uses ``$TORCHINDUCTOR_CACHE_DIR``, or ``dlo/inductor`` in the user's cache folder. torch's own
            default is in ``/tmp``, which a reboot empties.
        loss: Whether to compile the task's ``loss`` too.
        optimizer: Whether to compile the optimizer's step too, by its foreach implementation. A new learning rate is no
            new compilation; other values of the parameter groups must stay. With a mode that replays CUDA graphs,
            forward, backward and the step are graphs, and all batches must have the shapes of the first.

    Raises:
        DloError: If an argument does not fit, a module is compiled already or none can be compiled, a strategy
            wraps the modules too early, or CUDA graphs meet accumulated gradients or parameters that a strategy
            gathers for each use.
    """

    example = "{scope: blocks, backend: aot_eager}"

    def __init__(
        self,
        scope: Literal["model", "blocks"] = "model",
        mode: Mode = "default",
        dynamic: bool | None = False,
        backend: str = "inductor",
        fullgraph: bool = False,
        evaluate: Literal["eager", "compiled"] = "eager",
        max_sizes: int = 16,
        cache_dir: str | None = None,
        loss: bool = False,
        optimizer: bool = False,
    ) -> None:
        for name, given, known in (
            ("scope", scope, ("model", "blocks")),
            ("mode", mode, get_args(Mode)),
            ("evaluate", evaluate, ("eager", "compiled")),
            ("backend", backend, torch.compiler.list_backends(exclude_tags=())),
        ):
            check_choice(f"Compile: {name}", given, known)
        if mode != "default" and backend != "inductor":
            raise DloError(f"Compile: backend must be inductor for mode {mode}, got {backend}; leave one of them out")
        check_number("Compile: max_sizes", max_sizes, "at least 1", "16 is the default")
        self.scope = scope
        self.mode = mode
        self.dynamic = dynamic
        self.backend = backend
        self.fullgraph = fullgraph
        self.evaluate = evaluate
        self.max_sizes = max_sizes
        self.cache_dir = cache_dir
        self.loss = loss
        self.optimizer = optimizer
        if optimizer:
            self.needs_full_step = (
                "optimizer of Compile must be false, got true, which compiles one step of all tensors; leave one of the"
                " two out"
            )
        self.tally = CompileLog()
        self._parts: dict[str, nn.Module] = {}
        self._calls: list[Callable[..., Any] | None] = []
        self._on = False
        self._cuda_graphs = self._fixed_shapes = False
        self._counting = False
        self._before = 0.0  # seconds of compiling before this run
        self._counter: FlopCounter | None = None
        self._ran = False  # whether a training batch has run with compiling on
        self._reported: str | None = None
        self._undo = contextlib.ExitStack()
        self._largest: dict[int, int] = {}
        self._loss: CompiledLoss | None = None
        self._optimizers: list[CompiledOptimizer] = []
        self._shapes: list[tuple[int, ...]] | None = None  # of the batches, if they must not change

    @property
    def seconds(self) -> float:
        """Seconds of compiling, including those of the resumed run."""
        return self._before + self.tally.seconds

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds of compiling."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the seconds of the resumed run."""
        self._before = state_dict["seconds"] - self.tally.seconds

    # --- on and off ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy, and sets inductor's cache folder before inductor starts."""
        contract = contract_of(trainer.strategy)
        contract.ability(SeparateParameters, "Compile")
        contract.ability(BlocksInPlace, "Compile")
        if self.optimizer:
            contract.ability(SeparateSteps, "Compile(optimizer: true)")
        self._cuda_graphs = self.mode in CUDA_GRAPHS and trainer.strategy.root_device.type == "cuda"
        self._refuse_accumulation(trainer)
        if self.loss and not isinstance(pl_module, Task):
            raise DloError(
                f"Compile: loss: true must have a Task, whose loss is a method, got {type(pl_module).__name__}; leave"
                " it out, or derive from dlo_framework.Task"
            )
        self._fixed_shapes = self._cuda_graphs and self.optimizer  # The whole step replays CUDA graphs.
        for other in trainer.callbacks if stage == "fit" and self._fixed_shapes else ():  # type: ignore[attr-defined]
            if traits_of(other).changes_batch_shapes:
                self._refuse_shapes(type(other).__name__)
        if self.backend == "inductor":
            before = os.environ.get(CACHE)
            self._undo.callback(_set_cache, before)
            _set_cache(str(self._cache()))

    def _cache(self) -> Path:
        """Makes the cache folder, and returns it."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(self.cache_dir or os.environ.get(CACHE) or Path(home) / "dlo" / "inductor").absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DloError(
                f"Compile: cannot make the cache folder {folder}: {error.strerror}; choose another with cache_dir"
            ) from error
        return folder

    def _refuse_accumulation(self, trainer: Trainer) -> None:
        if self._cuda_graphs and trainer.accumulate_grad_batches > 1:
            raise DloError(
                f"Compile: accumulate_grad_batches must be 1 for mode {self.mode}, whose CUDA graph overwrites the"
                f" gradients at the next micro-batch, got {trainer.accumulate_grad_batches}; set it to 1, or"
                f" mode: {CUDA_GRAPHS[self.mode]}"
            )

    def _refuse_shapes(self, got: str, also: str = "") -> None:
        raise DloError(
            f"Compile: batches must keep their shapes for optimizer: true with mode {self.mode}, whose CUDA graphs have"
            f" fixed ones, got {got}; set mode: {CUDA_GRAPHS[self.mode]}{also}"
        )

    def _check_shapes(self, batch: Any) -> None:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if torch.is_tensor(leaf)]
        if self._shapes is not None and shapes != self._shapes:
            self._refuse_shapes(f"{shapes} after {self._shapes}", ", or pad documents to one length")
        self._shapes = shapes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the modules to run compiled; torch compiles them when they first run. No batch has run yet."""
        if self._parts:
            return
        if is_compiled(pl_module):
            raise DloError(
                f"Compile: modules must not be compiled already, got torch.compile in {type(pl_module).__name__};"
                " remove it, or this callback"
            )
        parts = modules_to_compile(pl_module, self.scope)
        name = moving_parameter(parts) if self._cuda_graphs else None
        if name is not None:
            raise DloError(
                f"Compile: parameters must keep their memory for mode {self.mode}, which replays a CUDA graph, got"
                f" {type(trainer.strategy).__name__}, which gathers {name} for each use; set mode:"
                f" {CUDA_GRAPHS[self.mode]}, or a strategy that keeps full parameters on each rank: ddp, zero1 or zero2"
            )
        self._parts = parts
        # Each module needs code for each size, and more code where it evaluates.
        limit = self.max_sizes * len(self._parts) * (2 if self.evaluate == "compiled" else 1)
        dynamo = torch._dynamo.config
        self._undo.enter_context(
            dynamo.patch(
                recompile_limit=max(dynamo.recompile_limit, limit),
                accumulated_recompile_limit=max(dynamo.accumulated_recompile_limit, limit),
            )
        )
        self._before += self.tally.seconds
        self.tally.start()
        options = self._options()
        for part in self._parts.values():
            compile_in_place(part, **options)
        if self.loss:
            self._loss = CompiledLoss(pl_module, **options)
        self._calls = [compiled_call(part) for part in self._parts.values()]
        self._on = True

    def _options(self) -> dict[str, Any]:
        mode = {"mode": self.mode} if self.backend == "inductor" else {}
        return {"backend": self.backend, "dynamic": self.dynamic, "fullgraph": self.fullgraph, **mode}

    def _switch(self, on: bool) -> None:
        """Switches the modules and the loss between compiled and uncompiled."""
        if self._loss is not None:
            self._loss.on = on
        if on != self._on:
            self._on = on
            for part, call in zip(self._parts.values(), self._calls, strict=True):
                set_compiled_call(part, call if on else None)

    def _end(self, *_: Any, **__: Any) -> None:
        """Restores the modules and torch's settings; Lightning calls no teardown after an exception."""
        self.tally.stop()
        for part in self._parts.values():
            set_compiled_call(part, None)
        for optimizer in self._optimizers:
            optimizer.restore()
        if self._loss is not None:
            self._loss.restore()
        self._parts, self._calls, self._on = {}, [], False
        self._optimizers, self._loss, self._shapes = [], None, None
        if self._counter is not None:
            self._counter.uncompile = None
        self._counter, self._counting = None, False
        self._undo.close()

    on_exception = teardown = _end

    # --- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets RunMonitor count FLOPs, for which a batch runs uncompiled.

        It is the first batch of its size in the run. A resumed run restores the counts: compiled code rounds
        differently, and a resumed run must round as the uninterrupted one.
        """
        self._reported, self._ran, self._counting = None, False, False
        # Off until the first batch: a finder of a learning rate or a batch size would have many sizes compiled.
        self._switch(False)
        if self.optimizer and not self._optimizers:
            self._optimizers = [CompiledOptimizer(one, **self._options()) for one in trainer.optimizers]
            for optimizer in self._optimizers:
                optimizer.on = False
        monitor = next((one for one in trainer.callbacks if isinstance(one, RunMonitor)), None)  # type: ignore[attr-defined]
        self._counter = monitor.flops if monitor is not None else None
        if self._counter is not None:
            self._counter.uncompile = self._uncompile
            self._counter.count_first()

    def _uncompile(self) -> None:
        """Makes the next batch run uncompiled; the monitor may be before this callback or after it."""
        self._counting = True
        self._switch(False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Chooses between compiled and uncompiled code by the batch only."""
        partial = is_partial(trainer, batch)
        self._switch(not self._counting and not partial)
        for optimizer in self._optimizers:
            optimizer.on = True
        if self._fixed_shapes and not partial:
            self._check_shapes(batch)
        if self._cuda_graphs:
            self._refuse_accumulation(trainer)  # A callback may change it during a run.
            torch.compiler.cudagraph_mark_step_begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Counts the compilations of the batch."""
        self._ran = self._ran or self._on
        self._counting = False
        if self.tally.grown:
            self.tally.drain()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports after the first epoch."""
        if self._reported is None:
            self._report(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports if there are new compilations."""
        self._report(trainer, pl_module)

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tally.drain()
        if not self._ran:
            return
        text = self.tally.text()
        if not self.tally.graphs:
            text += f"; no module ran compiled: call {', '.join(self._parts)} as modules, for example self.net(x)"
        if any("recompile limit" in reason for reason in self.tally.given_up):
            text += f"\n  more than max_sizes={self.max_sizes} input sizes: raise it, or set dynamic: true"
        if text != self._reported:
            self._reported = text
            pl_module.print(text)
            log_scalars(trainer, self.tally.scalars())

    # --- evaluation ----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches to the mode of ``evaluate``."""
        if self.evaluate == "compiled":
            self.on_fit_start(trainer, pl_module)
        self._largest = {}
        self._switch(self.evaluate == "compiled")

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Makes a batch that is smaller than those before it run uncompiled."""
        if self.evaluate == "compiled":
            size = batch_size(batch)
            self._largest[dataloader_idx] = max(size, self._largest.get(dataloader_idx, 0))
            self._switch(size == self._largest[dataloader_idx])
            if self._cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches back to the mode of training."""
        self._switch(bool(self._parts))


def check_block_scope(who: str, trainer: Trainer) -> None:
    """Checks that no callback compiles the full model, where another needs calls of its blocks.

    Raises:
        DloError: One does.
    """
    if any(isinstance(other, Compile) and other.scope == "model" for other in trainer.callbacks):  # type: ignore[attr-defined]
        raise DloError(
            f"{who}: Compile must have scope: blocks, got scope: model, whose graph holds all blocks; set scope: blocks"
        )


def is_partial(trainer: Trainer, batch: Any) -> bool:
    """Returns whether the batch is the epoch's last and smaller than the loader's batches.

    It compares with the loader's batch size, not with the batch before, which a resumed run has not seen.
    """
    if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        return False
    full = loader_batch_size(trainer)
    return full is not None and batch_size(batch) < full


def _set_cache(folder: str | None) -> None:
    os.environ.pop(CACHE, None)
    if folder is not None:
        os.environ[CACHE] = folder


#: Values of parameter groups that a step does not read, or that are set for it.
_OTHERS = ("params", "lr", *IMPLEMENTATIONS, "initial_lr", "name", "lr_scale")


class CompiledOptimizer:
    """Replaces an optimizer's step by a compiled one until :meth:`restore`.

    During the step, the learning rates are tensors, and the foreach implementation is used: torch.compile makes one
    graph of its operations, and a new rate needs no new code. Outside the step, the rates are numbers, which schedulers
    and checkpoints know. Step hooks and closures are called as by torch, uncompiled.

    Args:
        optimizer: Optimizer of torch with a foreach implementation.
        **options: Options of :func:`torch.compile`.

    Raises:
        DloError: The optimizer has no foreach implementation.
    """

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        name = type(optimizer).__name__
        if not all("foreach" in group for group in optimizer.param_groups):
            raise DloError(
                f"Compile: optimizer: true must have an optimizer with a foreach implementation, got {name}; use adamw"
                " or another one of torch.optim, or leave it out"
            )
        self.optimizer, self.on = optimizer, True
        self._compiled = torch.compile(self._step_without_hooks, **options)
        self._rates = [torch.tensor(0.0) for _ in optimizer.param_groups]
        self._values: list[dict[str, Any]] | None = None
        self._moved = False
        self._override = StepOverride(optimizer, self._update, lambda: self.on)

    def restore(self) -> None:
        """Gives the optimizer its own step back."""
        self._override.restore()

    def _update(self) -> None:
        if is_in_torch_dispatch_mode():  # Such as a count of FLOPs, under which torch.compile compiles nothing.
            self._step_without_hooks()
            return
        if not self._moved:  # Compiled code needs the step counts on the parameters' device.
            self._moved = True
            for parameter, state in self.optimizer.state.items():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(parameter.device)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.grad._is_view():
                parameter.grad = parameter.grad.detach()  # Of a DDP bucket: torch 2.11 needs no views.
        with self._compilable():
            self._compiled()

    def _step_without_hooks(self) -> None:
        take_bare_step(self.optimizer)

    @contextlib.contextmanager
    def _compilable(self) -> Iterator[None]:
        """Sets the parameter groups' values for the compiled code, and restores them."""
        groups = self.optimizer.param_groups
        self._check_values()
        keys = ("lr", *IMPLEMENTATIONS)
        held = [{key: group[key] for key in keys if key in group} for group in groups]
        try:
            for number, group in enumerate(groups):
                device = next((p.device for p in group["params"]), torch.device("cpu"))
                if number == len(self._rates):
                    self._rates.append(torch.tensor(0.0))
                if self._rates[number].device != device:
                    self._rates[number] = self._rates[number].to(device)
                group["lr"] = self._rates[number].fill_(group["lr"])
                chosen = {"foreach": True, "fused": False, "capturable": True}  # Only so may the rate be a tensor.
                group.update({key: value for key, value in chosen.items() if key in group})
            yield
        finally:
            for group, values in zip(groups, held, strict=True):
                group.update(values)

    def _check_values(self) -> None:
        """Checks that values are those of the first step, for which the code was compiled.

        Raises:
            DloError: Another value than the learning rate has changed.
        """
        values = [
            {key: value for key, value in group.items() if key not in _OTHERS and not isinstance(value, Tensor)}
            for group in self.optimizer.param_groups
        ]
        known, self._values = self._values, values
        for before, now in zip(known or [], values, strict=False):
            for key, value in now.items():
                if before.get(key, value) != value:
                    raise DloError(
                        f"Compile: optimizer: true must have constant parameter groups but for lr, got {key}"
                        f" {before[key]} and then {value}, for which each step would be compiled again; set"
                        " cycle_momentum: false of OneCycle, or leave it out"
                    )


class CompiledLoss:
    """Replaces the method `loss` of a task by a compiled one until :meth:`restore`.

    Args:
        task: Task.
        **options: Options of :func:`torch.compile`.
    """

    def __init__(self, task: Any, **options: Any) -> None:
        self.task, self.on = task, True
        self._plain = task.loss
        self._compiled = torch.compile(task.loss, **options)
        task.__dict__["loss"] = self

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """Returns the loss of outputs for a batch."""
        return (self._compiled if self.on else self._plain)(outputs, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLoss:
        return self  # A copy of the task that is made during a fit computes the same.

    def restore(self) -> None:
        """Gives the task its own method back."""
        self.task.__dict__.pop("loss", None)


class CompileLog:
    """Counts torch's compilations between :meth:`start` and :meth:`stop`, in this process.

    Attributes:
        graphs: Number of compiled graphs, including recompiled ones.
        breaks: Places and reasons of graph breaks, each with its count.
        recompiles: Reasons of recompilations, each with its count.
        given_up: Reasons for which a function runs uncompiled, each with its count.
        seconds: Wall time of compiling, including backward passes, which torch compiles at their first run.
        grown: Whether there were compilations since the last :meth:`drain`.
    """

    def __init__(self) -> None:
        self._running, self._since = False, 0.0
        self._clear()

    def _clear(self) -> None:
        self.graphs, self.seconds, self.grown = 0, 0.0, False
        self.breaks: Counter[str] = Counter()
        self.recompiles: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self._seen_breaks = 0
        self._last: Any = None

    def start(self) -> None:
        """Sets all counts to 0, and begins to count."""
        self._clear()
        self._seen_breaks = len(_graph_breaks())
        compilations = _compilations()
        self._last = compilations[-1] if compilations else None
        self._running = True
        # Around each outermost compilation (torch 2.11 to 2.15: private).
        torch._dynamo.callback.on_compile_start(self._began)
        torch._dynamo.callback.on_compile_end(self._ended)

    def stop(self) -> None:
        """Counts the compilations since the last call of :meth:`drain`, and ends."""
        if self._running:
            self.drain()
            self._running = False
            handler: Any = vars(torch._dynamo.callback)["callback_handler"]
            handler.remove_start_callback(self._began)
            handler.remove_end_callback(self._ended)

    def _began(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since
        self.grown = True

    def drain(self) -> None:
        """Counts the compilations since the last call; torch keeps only the last 64."""
        self.grown = False
        breaks = _graph_breaks()
        # torch.compiler.reset() empties the list.
        new = breaks[self._seen_breaks :] if len(breaks) >= self._seen_breaks else breaks
        self._seen_breaks = len(breaks)
        self.breaks.update(describe_break(one.reason, one.user_stack) for one in new)
        compilations = _compilations()
        places = [place for place, one in enumerate(compilations) if one is self._last]
        for one in compilations[places[-1] + 1 if places else 0 :]:
            self._count(one)
        self._last = compilations[-1] if compilations else None

    def _count(self, one: Any) -> None:
        if one.is_forward is False or one.is_runtime:
            return  # The backward of a graph that was counted, or the tuning of its kernels.
        if one.fail_type:
            self.given_up[first_line(one.fail_reason or one.fail_type)] += 1
        else:
            self.graphs += 1
            if one.recompile_reason:
                self.recompiles[first_line(without_compile_id(one.recompile_reason))] += 1

    def scalars(self) -> dict[str, float]:
        """Returns the counts by their logged names."""
        return {
            "compile/graphs": float(self.graphs),
            "compile/graph_breaks": float(self.breaks.total()),
            "compile/recompiles": float(self.recompiles.total()),
            "compile/given_up": float(self.given_up.total()),
            "compile/seconds": self.seconds,
        }

    def text(self) -> str:
        """Returns the counts as a line, and a line for each reason."""
        total = f"{self.graphs} graph{'s' * (self.graphs != 1)} in {self.seconds:.1f} s"
        counts = (_times(self.breaks, "graph break"), _times(self.recompiles, "recompilation"))
        lines = [f"compiled {total}, {', '.join(counts)}"]
        for what, reasons in (
            ("graph break", self.breaks),
            ("recompiled", self.recompiles),
            ("runs uncompiled", self.given_up),
        ):
            lines += [f"  {what} {count}x: {reason}" for reason, count in reasons.most_common()]
        return "\n".join(lines)


def _times(reasons: Counter[str], what: str) -> str:
    count = reasons.total()
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def first_line(text: str) -> str:
    """Returns the first line that is not empty; the rest of torch's messages is advice on how to debug."""
    return next((" ".join(line.split()) for line in text.splitlines() if line.strip()), text)


def without_compile_id(reason: str) -> str:
    """Returns a recompilation's reason without the leading number of the old graph, such as ``0/1: ``."""
    return re.sub(r"^\[?\d+/\d+\]?: ", "", reason)


def describe_break(reason: str, stack: Any) -> str:
    """Returns a graph break's reason, with its place in the code if torch knows it."""
    if not stack:
        return first_line(reason)
    place = stack[-1]
    return f"{Path(place.filename).name}:{place.lineno} in {place.name}: {first_line(reason)}"


def _compilations() -> list[Any]:
    """Returns torch's records of its last compilations, oldest first (torch 2.11 to 2.15: private).

    Fields read: ``is_forward``, ``is_runtime``, ``fail_type``, ``fail_reason`` and ``recompile_reason``.
    """
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _graph_breaks() -> list[Any]:
    """Returns torch's records of all graph breaks so far: ``reason``, ``user_stack`` (2.11 to 2.15: private)."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons
