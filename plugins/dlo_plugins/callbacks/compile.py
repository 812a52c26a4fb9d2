"""torch.compile switched on from outside a module: what is compiled, when, and what came of it.

Modules are compiled in place (``Module.compile``), so that no wrapper shows in a checkpoint's keys. The step around
them is not: code that logs, or asks the trainer something, is not for a compiler (Lightning issue #21836).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.watch.flops import FlopCounter, is_compiled
from dlo_framework.watch.monitor import RunMonitor, batch_size
from dlo_plugins.compile_log import CompileLog
from dlo_plugins.compile_parts import (
    CUDA_GRAPHS,
    compile_in_place,
    compiled_call,
    moving_parameter,
    parts_to_compile,
    set_compiled_call,
)

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Compile(Callback):
    """Compiles the model with ``torch.compile`` for training, and says what came of it.

    Compiled is ``self.model`` of a Task, and of any other LightningModule each child that has parameters; never the
    steps themselves. Evaluation runs uncompiled, and so does a last, smaller batch of an epoch: their other shapes
    would be compiled too, for minutes. Where RunMonitor counts FLOPs, it counts them on the first batch of each size,
    which runs uncompiled for that. Checkpoints have the keys that they have without it.

    At the end of the first epoch and of the run it prints the number of graphs, graph breaks and recompilations with
    their reasons, and logs the numbers as ``compile/*``.

    Args:
        scope: ``model``, or ``blocks``: each of the repeated blocks of the parallel plan by itself. Blocks of one
            structure share their code, so that a deep model compiles many times as fast.
        mode: ``default``; ``reduce-overhead`` replays CUDA graphs, which pays where kernels are short;
            ``max-autotune`` also measures which kernels are fastest, ``max-autotune-no-cudagraphs`` does only that.
        dynamic: False compiles each input size by itself, True once for all sizes. None lets torch decide: the second
            size makes the code dynamic, so that what a batch runs through depends on the batches before it, and a
            resumed run is not bit-equal.
        backend: ``inductor``, or another that ``torch.compiler.list_backends`` names; ``aot_eager`` traces and
            generates no code.
        fullgraph: whether a graph break is an error.
        evaluate: ``eager``, or ``compiled`` for validation, test and prediction too: worth it where they take long.
        max_sizes: input sizes that each module may be compiled for. Sizes that come after that many run uncompiled.
        cache_dir: folder of compiled code, from which a later run starts in seconds; may be shared by all your runs.
            None takes ``$TORCHINDUCTOR_CACHE_DIR``, or ``dlo/inductor`` in the user's cache folder. torch's own
            default is in ``/tmp``, which a reboot empties.

    Raises:
        DloError: on arguments that do not fit, a module that is compiled already or has no such parts, a strategy
            that wraps the parts before they could be compiled, and CUDA graphs with accumulated gradients or with
            parameters that a strategy gathers for each use.
    """

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
    ) -> None:
        _check_arguments(scope, mode, backend, evaluate, max_sizes)
        self.scope = scope
        self.mode = mode
        self.dynamic = dynamic
        self.backend = backend
        self.fullgraph = fullgraph
        self.evaluate = evaluate
        self.max_sizes = max_sizes
        self.cache_dir = cache_dir
        self.tally = CompileLog()
        self._parts: dict[str, nn.Module] = {}
        self._calls: list[Callable[..., Any] | None] = []
        self._on = False
        self._cuda_graphs = False
        self._counting = False
        self._before = 0.0  # seconds of compiling that were counted before this run
        self._counter: FlopCounter | None = None
        self._ran = False  # whether any training batch was to run compiled
        self._told: str | None = None
        self._undo = contextlib.ExitStack()
        self._largest: dict[int, int] = {}

    @property
    def seconds(self) -> float:
        """Seconds spent compiling, those of the run that was resumed included."""
        return self._before + self.tally.seconds

    def state_dict(self) -> dict[str, Any]:
        """The seconds."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up those of the run that is resumed."""
        self._before = state_dict["seconds"] - self.tally.seconds

    # --- on and off ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy, and points inductor to the cache before anything starts it."""
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise DloError(
                f"Compile compiles modules before a strategy wraps them, and {type(trainer.strategy).__name__} wraps"
                " them before any callback can; use strategy ddp, or ModelParallelStrategy (FSDP2)"
            )
        self._cuda_graphs = self.mode in CUDA_GRAPHS and trainer.strategy.root_device.type == "cuda"
        self._refuse_accumulation(trainer)
        if self.backend == "inductor":
            self._undo.enter_context(environment(CACHE, str(self._cache())))

    def _cache(self) -> Path:
        """Returns the cache's folder, made."""
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
                f"Compile: {self.mode} keeps gradients in the memory of a CUDA graph, which the next micro-batch"
                f" overwrites, but accumulate_grad_batches is {trainer.accumulate_grad_batches}; set it to 1, or"
                f" mode: {CUDA_GRAPHS[self.mode]}"
            )

    def _refuse_moving(self, pl_module: LightningModule) -> None:
        name = moving_parameter(self._parts) if self._cuda_graphs else None
        if name is not None:
            strategy = type(pl_module.trainer.strategy).__name__
            self._parts = {}
            raise DloError(
                f"Compile: {self.mode} replays a CUDA graph, which reads parameters where they lay when it was"
                f" recorded, but {strategy} gathers {name} anew for each use; set mode: {CUDA_GRAPHS[self.mode]}, or"
                " take a strategy that leaves whole parameters on each rank: ddp, zero1 or zero2"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compiles: the model has been built and is on its device, and no batch has run."""
        self._begin(pl_module)

    def _begin(self, pl_module: LightningModule) -> None:
        """Compiles the parts; torch does the work when they first run."""
        if self._parts:
            return
        if is_compiled(pl_module):
            raise DloError(
                f"Compile: {type(pl_module).__name__} or a part of it is compiled already; take out its torch.compile,"
                " or this callback"
            )
        self._parts = parts_to_compile(pl_module, self.scope)
        self._refuse_moving(pl_module)
        # Each part needs code for each size, and its own again where it evaluates.
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
        options = {"mode": self.mode} if self.backend == "inductor" else {}
        for part in self._parts.values():
            compile_in_place(part, backend=self.backend, dynamic=self.dynamic, fullgraph=self.fullgraph, **options)
        self._calls = [compiled_call(part) for part in self._parts.values()]
        self._on = True

    def _switch(self, on: bool) -> None:
        """Has the parts run compiled or not."""
        if on != self._on:
            self._on = on
            for part, call in zip(self._parts.values(), self._calls, strict=True):
                set_compiled_call(part, call if on else None)

    def _end(self) -> None:
        """Leaves the modules and torch as they were."""
        self.tally.stop()
        for part in self._parts.values():
            set_compiled_call(part, None)
        self._parts, self._calls, self._on = {}, [], False
        if self._counter is not None:
            self._counter.uncompile = None
        self._counter, self._counting = None, False
        self._undo.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undoes it: Lightning tears nothing down after an exception."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undoes it."""
        self._end()

    # --- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sees to it that the FLOPs are counted, which needs batches that run uncompiled.

        They are the first of their size in the whole run, and a resumed one takes the counts over: compiled code rounds
        otherwise, and a resumed run has to round as the whole one did.
        """
        self._told, self._ran, self._counting = None, False, False
        # Until the first batch: what finds a learning rate or a batch size first would have many sizes compiled.
        self._switch(False)
        monitor = next((one for one in trainer.callbacks if isinstance(one, RunMonitor)), None)  # type: ignore[attr-defined]
        self._counter = monitor.flops if monitor is not None else None
        if self._counter is not None:
            self._counter.uncompile = self._uncompile
            self._counter.count_first()

    def _uncompile(self) -> None:
        """Has the batch that begins run uncompiled; the monitor may come before this callback or after it."""
        self._counting = True
        self._switch(False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Chooses between compiled and not, by the batch alone."""
        self._switch(not self._counting and not is_partial(trainer, batch))
        if self._cuda_graphs:
            self._refuse_accumulation(trainer)  # A callback may change it during a run.
            torch.compiler.cudagraph_mark_step_begin()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes notice of what was compiled."""
        self._ran = self._ran or self._on
        self._counting = False
        if self.tally.grown:
            self.tally.drain()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports, after the first epoch."""
        if self._told is None:
            self._report(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports, if there is anything new."""
        self._report(trainer, pl_module)

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.tally.drain()
        if not self._ran:
            return
        text = self.tally.text()
        if not self.tally.graphs:
            text += f"; nothing ran compiled: of {', '.join(self._parts)} none was called as a module, self.net(x) say"
        if any("recompile limit" in reason for reason in self.tally.given_up):
            text += f"\n  more than max_sizes={self.max_sizes} sizes came: raise it, or set dynamic: true"
        if text != self._told:
            self._told = text
            pl_module.print(text)
            for logger in trainer.loggers:
                logger.log_metrics(self.tally.scalars(), step=trainer.global_step)

    # --- evaluation ----------------------------------------------------------------------------------------

    def _evaluation_start(self, pl_module: LightningModule) -> None:
        if self.evaluate == "compiled":
            self._begin(pl_module)
        self._largest = {}
        self._switch(self.evaluate == "compiled")

    def _evaluation_batch_start(self, batch: Any, loader: int) -> None:
        """Runs a batch that is smaller than those before it uncompiled."""
        if self.evaluate == "compiled":
            size = batch_size(batch)
            self._largest[loader] = max(size, self._largest.get(loader, 0))
            self._switch(size == self._largest[loader])
            if self._cuda_graphs:
                torch.compiler.cudagraph_mark_step_begin()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs a validation uncompiled, or compiled where ``evaluate`` says so."""
        self._evaluation_start(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As in validation."""
        self._evaluation_start(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As in validation."""
        self._evaluation_start(pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Runs a last, smaller batch uncompiled."""
        self._evaluation_batch_start(batch, dataloader_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As in validation."""
        self._evaluation_batch_start(batch, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As in validation."""
        self._evaluation_batch_start(batch, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes back to what training runs."""
        self._switch(bool(self._parts))


def is_partial(trainer: Trainer, batch: Any) -> bool:
    """Returns whether the batch is the epoch's last and smaller than the loader's batches.

    It compares with what the loader says, not with the batch before, which a resumed run has not seen.
    """
    if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        return False
    full = getattr(trainer.train_dataloader, "batch_size", None)
    return isinstance(full, int) and batch_size(batch) < full


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment, and puts it back."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _check_arguments(scope: str, mode: str, backend: str, evaluate: str, max_sizes: int) -> None:
    for name, given, known in (
        ("scope", scope, ("model", "blocks")),
        ("mode", mode, ("default", *CUDA_GRAPHS, "max-autotune-no-cudagraphs")),
        ("evaluate", evaluate, ("eager", "compiled")),
        ("backend", backend, torch.compiler.list_backends(exclude_tags=())),
    ):
        if given not in known:
            raise DloError(
                f"Compile: unknown {name} '{given}'{did_you_mean(given, known) or ';'} available: {', '.join(known)}"
            )
    if mode != "default" and backend != "inductor":
        raise DloError(f"Compile: mode {mode} is inductor's, but backend is {backend}; leave one of them out")
    if max_sizes < 1:
        raise DloError(f"Compile: max_sizes is at least 1, but was {max_sizes}")
