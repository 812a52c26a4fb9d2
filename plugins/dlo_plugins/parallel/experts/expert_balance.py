"""Callback that logs and plots the balance of a mixture of experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlo_framework.callback import PluginCallback
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.experts.balance import (
    LayerBalance,
    RouterLoad,
    describe_balance,
    find_routers,
    sum_loads,
    token_group,
    watch_loads,
)
from dlo_framework.strategy_abilities import mesh_groups
from dlo_framework.strategy_contract import contract_of, plain_name
from dlo_framework.task import checkable_module
from dlo_framework.watch.media import is_logged, log_scalars, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ExpertBalance(PluginCallback):
    """Logs how evenly the tokens of training are spread over the experts, and plots it.

    It supports dlo's mixtures and those of transformers whose routers return logits, weights and indices. Tokens are
    those of all ranks and micro-batches since the last time, and recomputed ones count once.

    Logged for each router, and as the mean over the routers (without a name): `experts/variation`, the load's standard
    deviation over its mean; `experts/peak`, the busiest expert's load over the mean; `experts/dropped`, the fraction of
    choices beyond the capacity; `experts/entropy`, that of a token's scores as a fraction of that of equal scores. The
    plot goes to the loggers of images (`experts/load`) and to `expert_balance.png` in the run's folder, at each
    validation and at the end.

    Args:
        every: Number of optimizer steps between two logs; None for `trainer.log_every_n_steps`.
        log_experts: Whether each expert's load is logged too: `experts/load/<router>/<number>`.

    Raises:
        DloError: If `every` is below 1, or the model has no mixture of experts.
    """

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it draws a run and changes nothing in it"

    def __init__(self, every: int | None = None, log_experts: bool = False) -> None:
        check_number("ExpertBalance: every", every, "at least 1", "leave it out")
        self.every, self.log_experts = every, log_experts
        self._loads: list[RouterLoad] = []
        self._handles: list[RemovableHandle] = []
        self._last_step = 0
        #: Optimizer steps of the logs, and the balance of each router by name.
        self.history: list[tuple[int, dict[str, LayerBalance]]] = []

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks that the model has a mixture of experts, before processes start.

        Raises:
            DloError: If it has none.
        """
        if (checkable := checkable_module(module)) is not None:
            _check(checkable)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch the routers."""
        self._remove()
        _check(pl_module)
        self._loads, self._handles = watch_loads(pl_module)
        self._last_step, self.history = trainer.global_step, []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Logs the balance if the batch ended an optimizer step that is due."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        if step % self.every == 0 if self.every else is_logged(trainer, step):
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        balances = gather_balance(trainer, self._loads)
        if balances:
            self.history.append((trainer.global_step, balances))
            log_scalars(trainer, balance_scalars(balances, self.log_experts))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plots the balance so far."""
        if not trainer.sanity_checking:
            self._plot(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plots the balance of the run, and ends the watch."""
        if self._handles and any(load.counts is not None for load in self._loads):
            self._log(trainer)
        path = self._plot(trainer)
        if self.history and trainer.is_global_zero:
            last = balance_scalars(self.history[-1][1], False)
            rank_zero_info(
                f"experts: busiest {last['experts/peak']:.2f} times the mean load, {last['experts/dropped']:.1%} of"
                f" choices dropped{f'; plotted in {path}' if path is not None else ''}"
            )
        self._remove()

    def _plot(self, trainer: Trainer) -> Path | None:
        if not self.history:
            return None
        path = Path(trainer.default_root_dir) / "expert_balance.png"
        return save_figure(trainer, "ExpertBalance", "experts/load", path, lambda: draw_load(self.history))

    def _remove(self, *_: Any, **__: Any) -> None:
        """Ends the watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._loads = [], []

    on_exception = _remove


def _check(module: Any) -> None:
    if not find_routers(module):
        raise DloError(
            f"ExpertBalance: the model must have a mixture of experts, got {type(module).__name__}; set experts:"
            " {count: 8}, or leave the callback out"
        )


def gather_balance(trainer: Trainer, loads: list[RouterLoad]) -> dict[str, LayerBalance]:
    """Returns the balance of each router over all ranks, and sets the sums to 0; called on all ranks.

    Args:
        trainer: Trainer of the run.
        loads: Sums of this rank.
    """
    sums = sum_loads(loads, token_group(trainer), trainer.strategy.root_device)
    groups = mesh_groups(contract_of(trainer.strategy))
    if groups is not None and groups.spec.pp > 1:
        stages: list[list[Tensor]] = [[] for _ in range(groups.spec.pp)]
        dist.all_gather_object(stages, sums, group=groups.group("pp"))
        sums = [max(parts, key=len) for parts in zip(*stages, strict=True)]  # Other stages' have no elements.
    balances = {plain_name(load.name): describe_balance(part) for load, part in zip(loads, sums, strict=True)}
    return {name: balance for name, balance in balances.items() if balance is not None}


def balance_scalars(balances: dict[str, LayerBalance], log_experts: bool) -> dict[str, float]:
    """Returns the scalars of a log, by name.

    Args:
        balances: Balance of each router.
        log_experts: Whether each expert's load is among them.
    """
    scalars: dict[str, float] = {}
    for key in ("variation", "peak", "dropped", "entropy"):
        values = {name: float(getattr(balance, key)) for name, balance in balances.items()}
        scalars[f"experts/{key}"] = sum(values.values()) / len(values)
        scalars |= {f"experts/{key}/{name}": value for name, value in values.items()}
    if log_experts:
        for name, balance in balances.items():
            scalars |= {f"experts/load/{name}/{number}": value for number, value in enumerate(balance.load.tolist())}
    return scalars


def draw_load(history: list[tuple[int, dict[str, LayerBalance]]]) -> Figure:
    """Returns a figure of the load of each router's experts: at the last log, and over the run; 1 is the mean.

    Args:
        history: Optimizer steps, and the balance of each router.
    """
    import numpy as np
    from matplotlib.figure import Figure

    names = list(history[-1][1])
    most = max(len(balance.load) for balance in history[-1][1].values())

    def relative(balances: dict[str, LayerBalance]) -> Any:  # [layers, experts]
        rows = np.full((len(names), most), np.nan)
        for row, name in enumerate(names):
            if name in balances:
                load = balances[name].load.numpy()
                rows[row, : len(load)] = load * len(load)
        return rows

    figure = Figure(figsize=(11, 2.5 + 0.25 * len(names)), layout="constrained")
    last, course = figure.subplots(1, 2)
    options: dict[str, Any] = {"aspect": "auto", "cmap": "coolwarm", "vmin": 0, "vmax": 2, "interpolation": "nearest"}
    last.imshow(relative(history[-1][1]), **options)
    last.set_yticks(range(len(names)), names, fontsize=6)
    last.set_xlabel("expert")
    last.set_title(f"load over the mean, step {history[-1][0]}")
    # [layers * experts, logs]
    over_time = np.stack([relative(balances).reshape(-1) for _, balances in history], axis=1)
    steps = [step for step, _ in history]
    span = (steps[0] - 0.5, steps[-1] + 0.5, len(names) * most - 0.5, -0.5)
    image = course.imshow(over_time, extent=span, **options)
    for row in range(1, len(names)):
        course.axhline(row * most - 0.5, color="black", linewidth=0.5)
    course.set_yticks(
        [row * most + (most - 1) / 2 for row in range(len(names))], [str(row) for row in range(len(names))]
    )
    course.set_xlabel("optimizer step")
    course.set_ylabel("router, by experts")
    course.set_title("over the run")
    figure.colorbar(image, ax=course)
    return figure
