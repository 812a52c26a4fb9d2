"""Prunes weights while a model trains: magnitude, movement, gradual schedules and N:M patterns, under any strategy.

- Gradual magnitude pruning: Zhu & Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model
  compression", 2017, arXiv 1710.01878, equation 1.
- Movement pruning: Sanh, Wolf & Rush, "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020, arXiv 2005.07683. It
  departs from the paper in that scores are accumulated with rate 1 and not stepped by an optimizer, and that the kept
  fraction follows the schedule at intervals.
- N:M patterns with SR-STE: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch",
  2021, arXiv 2102.04010.
- Lottery tickets, the masks of the next round from a round's trained weights: Frankle & Carbin, "The Lottery Ticket
  Hypothesis: Finding Sparse, Trainable Neural Networks", 2019, arXiv 1803.03635; rewinding to an early step: Frankle,
  Dziugaite, Roy & Carbin, "Linear Mode Connectivity and the Lottery Ticket Hypothesis", 2020, arXiv 1912.05671.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlo_framework.atomic_file import write_atomic
from dlo_framework.callback import PluginCallback
from dlo_framework.checkpoint import check, load, save
from dlo_framework.checkpoint.loading import LazyStateDict, as_lazy_state_dict
from dlo_framework.defaults import ASSUMED_METRIC, find_best_metric
from dlo_framework.distributed.step_primitives import prepend_post_hook
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean
from dlo_framework.progress import check_end, epochs_of_run, epochs_seen, fraction_at, parse_position, run_fraction
from dlo_framework.rehearsal import run_folder
from dlo_framework.shards import FlatShard, Shard, local_data, shard_maker
from dlo_framework.strategy_abilities import SeparateParameters, SeparateSteps
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import log_scalars, save_figure
from dlo_plugins.parallel.mesh.mesh_description import prepare_model
from dlo_plugins.prune.layers import (
    NMPattern,
    PrunableLayer,
    check_kernels,
    check_pattern,
    select_layers,
    use_sparse_kernels,
)
from dlo_plugins.prune.pruned_shards import MASKS, PrunedShard, PrunedShards, order_keys
from dlo_plugins.schedules.schedule_free import ScheduleFree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Prune(PluginCallback):
    """Prunes weights of linear layers and convolutions while the model trains.

    From `begin` to `end` the pruned fraction rises to `amount`; afterwards the masks are final. Pruned weights are
    exactly zero after every step, and so are their gradients and the optimizer's state of them. With a `pattern`, the
    masks follow the pattern from `begin`, and pruned weights keep training aside, so that they can return until `end`
    (SR-STE). Checkpoints hold the masks under the weights' names, and resume under any strategy.

    It logs `prune/sparsity`, and at the end of training writes `pruning.json` and `pruning.png` into the run's folder:
    the validation metric over the sparsity, and the sparsity of each layer.

    Args:
        method: Score of a weight, the smallest of which are pruned: `magnitude`, or `movement`, the accumulated
            movement away from zero, which suits fine-tuning. Pruned weights can return under `movement`.
        amount: Fraction of the weights that is pruned in the end, in (0, 1); None with a `pattern`, which sets it, or
            with `masks` that stay as they are.
        scope: Weights that are compared: `global` for all of the model together, `layer` for each layer's own.
        schedule: `gradual` for the cubic schedule of Zhu & Gupta, `one_shot` to prune once, at `begin`.
        begin: Point of the run at which pruning begins, in epochs or percent.
        end: Point after which the masks are final; not used by `one_shot`.
        every: Number of steps between two choices of masks; None for 1 with a pattern and 20 otherwise.
        skip: Patterns of layers that stay dense, such as `model.patch_embed` or `model.blocks.*.attn`; None skips the
            output layer, `[]` nothing.
        pattern: `none`, or `n:m`, such as `2:4`: N of M consecutive weights along the input dim are kept.
        decay: Factor of SR-STE's decay of pruned weights towards zero; 2e-4 in the paper.
        masks: Checkpoint whose masks the run starts with; None starts dense.
        kernels: Kernels of evaluations outside a fit: `dense`, or `semi_structured` for torch's 2:4 kernels, which need
            an NVIDIA GPU of compute capability 8.0 or later.

    Attributes:
        layers: Layers that are pruned; empty before training.
        shards: This rank's masks; None before the first step.

    Raises:
        DloError: If a value is out of range, a pattern of `skip` matches nothing, a layer cannot have the pattern, the
            schedule begins after the run's end, or the strategy is not one whose state dlo can read.
    """

    example = "{amount: 0.5, begin: 0%, end: 60%, every: 1}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    needs_equal_copies = True

    def __init__(
        self,
        method: Literal["magnitude", "movement"] = "magnitude",
        amount: float | None = None,
        scope: Literal["global", "layer"] = "global",
        schedule: Literal["gradual", "one_shot"] = "gradual",
        begin: str | float = "10%",
        end: str | float = "75%",
        every: int | None = None,
        skip: list[str] | None = None,
        pattern: str = "none",
        decay: float = 2e-4,
        masks: str | None = None,
        kernels: Literal["dense", "semi_structured"] = "dense",
    ) -> None:
        self.method, self.amount, self.scope, self.schedule = method, amount, scope, schedule
        self.pattern = NMPattern.parse(pattern)
        self.begin = parse_position(begin, "Prune: begin", in_samples=False)
        self.end = parse_position(end, "Prune: end", in_samples=False)
        self.every = every if every is not None else 1 if self.pattern else 20
        self.skip, self.decay, self.masks, self.kernels = skip, decay, masks, kernels
        self._check_values()
        self.layers: list[PrunableLayer] = []
        self._handle: RemovableHandle | None = None
        self._reset()

    def _check_values(self) -> None:
        for key, value, known in (
            ("method", self.method, ("magnitude", "movement")),
            ("scope", self.scope, ("global", "layer")),
            ("schedule", self.schedule, ("gradual", "one_shot")),
            ("kernels", self.kernels, ("dense", "semi_structured")),
        ):
            check_choice(f"Prune: {key}", value, known)
        if self.amount is not None:
            rule = "above 0 and below 1, a fraction of the weights"
            check_number("Prune: amount", self.amount, rule, "0.8 prunes four of five")
        if self.pattern is None and self.amount is None and self.masks is None:
            raise DloError("Prune: amount must be set without a pattern or masks, got none; 0.8 prunes four of five")
        if self.pattern is not None and self.amount is not None:
            raise DloError(
                f"Prune: amount must be left out with pattern '{self.pattern}', which prunes {self.pattern.sparsity:g},"
                f" got {self.amount:g}; remove one of them"
            )
        check_number("Prune: every", self.every, "at least 1 step", "set 20")
        check_number("Prune: decay", self.decay, "at least 0", "the paper has 2e-4")
        if self.begin.unit == self.end.unit and self.begin.value >= self.end.value and self.schedule == "gradual":
            raise DloError(f"Prune: begin must be before end, got {self.begin} and {self.end}; set an earlier begin")
        if self.kernels == "semi_structured" and self.pattern != NMPattern(2, 4):
            raise DloError(
                f"Prune: kernels: semi_structured must have pattern: '2:4', got '{self.pattern or 'none'}'; set the"
                " pattern, or kernels: dense"
            )

    def _reset(self) -> None:
        self.shards: PrunedShards | None = None
        self._items: list[PrunedShard] = []  # Where a snapshot of the run finds the tensors.
        self._pending: Any = None  # Masks of a checkpoint, until the optimizer's tensors hold values.
        self._restored = self._steps = False
        self._last: int | None = None
        self._done = False
        self._curve: list[dict[str, Any]] = []
        self._counted = -1  # Step after which weights were masked last, under DeepSpeed.

    @property
    def trains_pruned(self) -> bool:
        """Whether pruned weights train aside, as in SR-STE."""
        return self.pattern is not None and self.method == "magnitude" and self.schedule == "gradual"

    # --- before processes start ----------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the options against the model and the run, before any process starts.

        Raises:
            DloError: If they do not fit.
        """
        self._check_strategy(trainer)
        self._check_schedule(trainer)
        if self.masks is not None:
            check(self.masks)
            read_masks(self.masks)
        if self.kernels == "semi_structured":
            check_kernels(trainer.strategy.root_device, str(trainer.precision))
        built, _ = prepare_model(module)
        layers = select_layers(built, self.skip)
        if self.pattern is not None:
            shapes = {name.replace("_orig_mod.", ""): tuple(p.shape) for name, p in built.named_parameters()}
            check_pattern(layers, shapes, self.pattern)

    def _check_strategy(self, trainer: Trainer) -> None:
        contract = contract_of(trainer.strategy)
        contract.ability(SeparateParameters, "Prune")
        if contract.zero_stage is None:
            raise DloError(f"Prune does not support {contract.ability_owner}: {SeparateParameters.missing}")

    def _bounds(self, trainer: Trainer) -> tuple[float, float]:
        """Returns the fractions of the run at which pruning begins and ends."""
        begin = run_fraction(trainer, self.begin, "Prune", "begin")
        return begin, run_fraction(trainer, self.end, "Prune", "end")

    def _check_schedule(self, trainer: Trainer) -> None:
        check_end(trainer)
        begin, end = self._bounds(trainer)
        if begin >= 1:
            raise DloError(
                f"Prune: begin must be before the end of training, got {self.begin} of"
                f" {epochs_of_run(trainer):g} epochs; set '50%' or less"
            )
        if self.schedule == "gradual" and not begin < end <= 1:
            raise DloError(
                f"Prune: end must be after begin and within the run, got {self.end} with begin"
                f" {self.begin} in {epochs_of_run(trainer):g} epochs; set '75%'"
            )

    # --- the run's begin and end ---------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets an earlier run."""
        self._remove_hook()
        self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Chooses the layers, applies the masks that the run starts with, and follows the optimizer's steps."""
        self._check_strategy(trainer)
        self._check_schedule(trainer)
        if len(trainer.optimizers) != 1:
            raise DloError(
                f"Prune: configure_optimizers must return one optimizer, got {len(trainer.optimizers)}; use one with"
                " several parameter groups"
            )
        self.layers = select_layers(pl_module, self.skip)
        if self.masks is not None and self._pending is None:
            self._start_with(trainer, read_masks(self.masks))
        if self._steps_all(trainer):
            # Elsewhere weights are masked at the batch's end.
            self._handle = prepend_post_hook(trainer.optimizers[0], lambda *_: self._after_step(trainer, 1))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightEMA | ScheduleFree):
                callback.restrictions.append(self._restrict_average)

    @torch.no_grad()
    def _start_with(self, trainer: Trainer, masks: LazyStateDict) -> None:
        """Sets the weights that a checkpoint's masks prune to zero, in the module's own layout."""
        held = trainer.strategy.lightning_module_state_dict()
        for layer in self.layers:
            shard = held.get(layer.name)
            if not isinstance(shard, Shard):
                continue  # It belongs to another stage.
            values = local_data(shard)
            kept = torch.empty_like(values, dtype=torch.bool)
            masks.read_into(layer.name, shard_maker(shard)(kept))
            values.masked_fill_(~kept, 0)
        contract_of(trainer.strategy).refresh()
        self._pending = {MASKS: masks}
        self._done = self.amount is None and self.pattern is None

    def _remove_hook(self, *_: Any, **__: Any) -> None:
        """Stops following the optimizer."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    on_exception = _remove_hook

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the report."""
        self._remove_hook()
        if self.shards is not None:
            self._report(trainer, self.shards.layer_sparsity())

    # --- steps ---------------------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Masks the gradients, or puts pruned weights back that train aside."""
        if self.shards is None:
            self._prepare(trainer)
        shards, self._steps = self.shards, True
        assert shards is not None
        if self._trains_aside(shards):
            shards.restore_dense(self.decay)
            self._restored = True
            return
        if shards.keeps_dense:
            shards.accumulate_movement()
        shards.mask_gradients()

    def _prepare(self, trainer: Trainer) -> None:
        """Makes the masks, now that the optimizer's tensors hold values, and loads those of a checkpoint."""
        contract = contract_of(trainer.strategy)
        optimizer = trainer.optimizers[0]
        can_return = not self._done and (self.trains_pruned or self.method == "movement")
        self.shards = PrunedShards(
            contract,
            optimizer,
            self.layers,
            trainer.strategy.root_device,
            keeps_dense=can_return,
            accumulates=can_return and self.method == "movement",
        )
        if self.pattern is not None:
            check_pattern(self.layers, self.shards.shapes, self.pattern)
        pending, self._pending = self._pending, None
        if pending is not None:
            self.shards.load(pending)
        self._items = self.shards.items

    def _after_step(self, trainer: Trainer, ahead: int) -> None:
        """Chooses masks where one is due, and sets pruned weights to zero.

        Args:
            trainer: Trainer of the run.
            ahead: Number of steps that are done and not yet counted by the trainer.
        """
        shards, is_step, self._steps = self.shards, self._steps, False
        if shards is None or not is_step:  # ScheduleFree puts its average into the weights like a step.
            return
        step = trainer.global_step + ahead
        self._restored = False
        sparsity = self._due(trainer, step)
        if sparsity is None:
            (shards.reapply if self._trains_aside(shards) else shards.apply)()
            return
        if self.pattern is not None:
            shards.choose_pattern(self.pattern)
        else:
            shards.choose(sparsity, self.scope)
        self._last = step
        if self._done and shards.keeps_dense:
            shards.freeze()
        if not self._trains_aside(shards):
            shards.mask_optimizer_state()
        log_scalars(trainer, {"prune/sparsity": shards.target}, step)

    def _trains_aside(self, shards: PrunedShards) -> bool:
        return shards.keeps_dense and self.trains_pruned

    def _due(self, trainer: Trainer, step: int) -> float | None:
        """Returns the sparsity of a choice that is due after a step; None if none is."""
        if self._done:
            return None
        now = fraction_at(trainer, epochs_seen(trainer, with_this_batch=True), step)
        begin, end = self._bounds(trainer)
        if now < begin:
            return None
        final = self.pattern.sparsity if self.pattern is not None else self.amount
        assert final is not None
        if self.schedule == "one_shot" or now >= end:
            self._done = True
            return final
        if self._last is not None and step - self._last < self.every:
            return None
        return cubic_sparsity((now - begin) / (end - begin), final)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Masks the weights under DeepSpeed, and after a step that the loss scaler skipped."""
        if self.shards is None:
            return
        if not self._steps_all(trainer):
            self._after_deepspeed_step(trainer)
            return
        if self._restored:
            self.shards.reapply()
        self._restored = self._steps = False

    @staticmethod
    def _steps_all(trainer: Trainer) -> bool:
        """Returns whether the optimizer steps all parameters at once; DeepSpeed steps its groups one by one."""
        return contract_of(trainer.strategy).find_ability(SeparateSteps) is not None

    def _after_deepspeed_step(self, trainer: Trainer) -> None:
        if trainer.global_step == self._counted:
            return
        self._counted, before, trained_aside = trainer.global_step, self._last, self._restored
        self._after_step(trainer, 0)
        if trained_aside or self._last != before:
            contract_of(trainer.strategy).refresh()

    # --- averages, checkpoints, reports --------------------------------------------------------------------

    @torch.no_grad()
    def _restrict_average(self, strategy: Any) -> None:
        """Sets the pruned weights of an average that is in the module to zero."""
        if self.shards is not None:
            for values, pruned in self.shards.masks_in(strategy.lightning_module_state_dict()):
                values.masked_fill_(pruned, 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the schedule and the report's points."""
        return {"last": self._last, "done": self._done, "curve": list(self._curve)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position in the schedule."""
        self._last, self._done, self._curve = state_dict["last"], state_dict["done"], list(state_dict["curve"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the masks, and values and scores of weights that can return."""
        if self.shards is not None:
            checkpoint[PRUNING] = self.shards.state()
        elif self._pending is not None:
            checkpoint[PRUNING] = self._pending

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the masks of a resumed run until the optimizer's tensors hold values."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._pending = checkpoint.get(PRUNING)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the metric at the current sparsity."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        metric, _ = find_best_metric(pl_module) or ASSUMED_METRIC
        value = trainer.callback_metrics.get(metric)
        if value is None:
            return
        sparsity = self.shards.target if self.shards is not None else 0.0
        point = {"step": trainer.global_step, "sparsity": sparsity, "metric": metric}
        self._curve.append({**point, "value": float(value), "time": time.time()})

    def _report(self, trainer: Trainer, layers: dict[str, float]) -> None:
        """Writes the report and its picture, and logs the picture."""
        assert self.shards is not None
        total = sum(layers[name] * size for name, size in zip(self.shards.names, self.shards.sizes, strict=True))
        sparsity = total / sum(self.shards.sizes)
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        if folder.is_dir() and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            report = {"sparsity": sparsity, "layers": layers, "curve": self._curve}
            write_atomic(folder / "pruning.json", json.dumps(report, indent=1) + "\n")
            path, draw = folder / "pruning.png", lambda: draw_training(self._curve, layers)
            save_figure(trainer, "Prune", "prune/report", path, draw)
        rank_zero_info(f"Prune: {sparsity:.1%} of {sum(self.shards.sizes):,} weights in {len(layers)} layers are zero")

    # --- evaluation ----------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Uses sparse kernels in an evaluation outside a fit, where they are configured."""
        if self.kernels == "semi_structured" and trainer.state.fn != TrainerFn.FITTING:
            check_kernels(trainer.strategy.root_device, str(trainer.precision))
            names = [layer.name for layer in select_layers(pl_module, self.skip)]
            count = use_sparse_kernels(pl_module, names)
            rank_zero_info(f"Prune: {count} of {len(names)} layers run torch's semi-structured kernels")

    on_test_start = on_predict_start = on_validation_start


#: Files in the folder of the rounds.
START, LAYERS = "start.ckpt", "layers.json"


class TicketStart(PluginCallback):
    """Saves a run's state at a step, from which each round of `dlo ticket` trains its masked weights.

    `dlo ticket` adds it to the first round; see Frankle et al. 2020, arXiv 1912.05671.

    Args:
        folder: Folder for `start.ckpt` and `layers.json`.
        step: Number of optimizer steps before the state is saved; 0 for the initial weights.
        skip: Patterns of layers that stay dense; None skips the output layer.

    Raises:
        DloError: If `step` is negative or not before the run's end, or a pattern matches nothing.
    """

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it saves a checkpoint, and changes nothing"

    def __init__(self, folder: str, step: int = 0, skip: list[str] | None = None) -> None:
        check_number("ticket: --rewind", step, "at least 0 steps", "0 is the initial weights")
        self.folder, self.step, self.skip = Path(folder), step, skip
        self._saved_at = -1

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the step and the patterns, before any process starts.

        Raises:
            DloError: If they do not fit the run or the model.
        """
        check_end(trainer)
        if 0 <= trainer.max_steps <= self.step:
            raise DloError(
                f"ticket: --rewind must be before the run's last step {trainer.max_steps}, got {self.step}; use"
                f" {trainer.max_steps // 10}"
            )
        built, _ = prepare_model(module)
        select_layers(built, self.skip)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the names of the layers, and saves the initial state if it is the one to rewind to."""
        if trainer.is_global_zero:
            layers = select_layers(pl_module, self.skip)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / LAYERS, json.dumps([layer.name for layer in layers], indent=1) + "\n")
        self._save_at(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Saves the state at the step."""
        self._save_at(trainer)

    def _save_at(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and self._saved_at != self.step:
            self._saved_at = self.step
            trainer.save_checkpoint(self.folder / START)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the run has reached the step.

        Raises:
            DloError: If it ended before.
        """
        if trainer.global_step < self.step:
            raise DloError(
                f"ticket: --rewind must be before the run's end, got step {self.step} in a run of"
                f" {trainer.global_step} steps; use {max(0, trainer.global_step // 10)}"
            )


def cubic_sparsity(progress: float, final: float, initial: float = 0.0) -> float:
    """Returns the sparsity at a point of the schedule: ``s_f + (s_i - s_f) (1 - progress)^3``.

    It rises fast at first, while many weights are redundant, and slowly at the end.

    Args:
        progress: Fraction of the way from the schedule's begin to its end; values outside [0, 1] are clamped.
        final: Sparsity at the end.
        initial: Sparsity at the begin.
    """
    left = 1.0 - min(1.0, max(0.0, progress))
    return final + (initial - final) * left**3


def ticket_sparsity(round_number: int, amount: float) -> float:
    """Returns the sparsity after rounds that each prune a fraction of the remaining weights: ``1 - (1 - amount)^n``.

    Args:
        round_number: Number of rounds so far; 0 gives a dense model.
        amount: Fraction of the remaining weights that each round prunes.
    """
    return 1.0 - (1.0 - amount) ** round_number


#: Key of the state of pruning in a checkpoint.
PRUNING = "pruning"
#: Key of the trained weights in a checkpoint whose ``state_dict`` is their average.
TRAINED = "current_model_state"


def magnitude_masks(
    weights: Mapping[str, Tensor], before: Mapping[str, Tensor], sparsity: float, scope: str
) -> dict[str, Tensor]:
    """Returns masks that prune a fraction of the weights, those with the smallest magnitudes.

    Args:
        weights: Full weights by name.
        before: Masks of the round, by name; true for kept weights. What they prune stays pruned.
        sparsity: Fraction to prune of all weights; at least that of ``before``.
        scope: ``global`` to compare all weights, ``layer`` to compare each layer's own.

    Returns:
        bool masks by name; true for kept weights.
    """
    names = sorted(weights)
    masks: dict[str, Tensor] = {}
    for group in [[name] for name in names] if scope == "layer" else [names]:
        keys = [order_keys(weights[name].abs(), ~before[name] if name in before else None).flatten() for name in group]
        order = torch.cat(keys).argsort(stable=True)  # Of equal weights the first are pruned.
        kept = torch.ones_like(order, dtype=torch.bool)
        kept[order[: round(sparsity * len(order))]] = False
        parts = kept.split([weights[name].numel() for name in group])
        masks |= {name: part.view(weights[name].shape) for name, part in zip(group, parts, strict=True)}
    return masks


def next_masks(checkpoint: str | Path, names: Sequence[str], sparsity: float, scope: str) -> dict[str, Tensor]:
    """Returns the masks of the next round, from the trained weights of a round's checkpoint.

    Args:
        checkpoint: Checkpoint of the round, saved under any strategy.
        names: Names of the weights to prune.
        sparsity: Fraction of them to prune, that of earlier rounds included.
        scope: ``global`` or ``layer``.

    Raises:
        DloError: If the checkpoint lacks a weight.
    """
    content = load(checkpoint, level="size")
    state = as_lazy_state_dict(content.get(TRAINED) or content["state_dict"])
    absent = next((name for name in names if name not in state), None)
    if absent is not None:
        raise DloError(
            f"checkpoint must hold the pruned weights, got {checkpoint} without {absent}{did_you_mean(absent, state)}"
        )
    saved = content.get(PRUNING, {}).get(MASKS, {})
    before = as_lazy_state_dict(saved)
    weights = {name: state[name].float() for name in names}
    return magnitude_masks(weights, {name: before[name].bool() for name in names if name in before}, sparsity, scope)


def save_masks(masks: Mapping[str, Tensor], path: Path) -> None:
    """Writes masks as a checkpoint that `Prune` starts with."""
    shards = {name: FlatShard(mask.flatten(), mask.shape, 0) for name, mask in masks.items()}
    save({"state_dict": {}, PRUNING: {MASKS: shards}}, path, about={"kind": "masks"})


def read_masks(path: str | Path) -> LazyStateDict:
    """Returns the masks of a checkpoint, which are read lazily.

    Raises:
        DloError: If it holds none.
    """
    pruning = load(path, level="size").get(PRUNING) or {}
    if MASKS not in pruning:
        raise DloError(
            f"Prune: masks must name a checkpoint of a pruned run, got {path} without masks; train one first"
        )
    return as_lazy_state_dict(pruning[MASKS])


def kept_fraction(masks: Mapping[str, Tensor]) -> float:
    """Returns the fraction of weights that masks keep."""
    return sum(int(masks[name].sum()) for name in masks) / sum(masks[name].numel() for name in masks)


def draw_training(curve: Sequence[Mapping[str, Any]], layers: Mapping[str, float]) -> Figure:
    """Returns a figure of a run: the metric over the sparsity at each validation, and each layer's sparsity.

    Where the sparsity is always the same, as with a pattern, the metric is over the steps.

    Args:
        curve: Points with ``step``, ``sparsity``, ``metric`` and ``value``, in the order of the run.
        layers: Fraction of each weight that is pruned at the end.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_step = len({point["sparsity"] for point in curve}) == 1
    places = [point["step"] if by_step else 100 * point["sparsity"] for point in curve]
    left.plot(places, [point["value"] for point in curve], "o-", markersize=3)
    left.set_xlabel("step" if by_step else "pruned weights, percent")
    left.set_ylabel(curve[-1]["metric"] if curve else "")
    left.set_title("validation while weights are pruned")
    names = list(layers)
    right.bar(range(len(names)), [100 * layers[name] for name in names])
    right.set_ylim(0, 100)
    right.set_ylabel("pruned, percent")
    right.set_title("layers at the end")
    shown = range(0, len(names), max(1, len(names) // 12))
    right.set_xticks(list(shown), [names[number].removesuffix(".weight") for number in shown], rotation=90, fontsize=6)
    return figure
