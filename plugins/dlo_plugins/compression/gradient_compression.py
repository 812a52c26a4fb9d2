"""Gradient compression for data parallelism: half precision, PowerSGD, post-local SGD, 1-bit Adam and LAMB."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.distributed.precision import with_sharded_clipping
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.progress import optimizer_steps
from dlo_framework.strategy_abilities import CommunicationHooks, HalfPrecisionGradients
from dlo_framework.strategy_contract import contract_of, has_one_process, plain_name
from dlo_framework.watch.media import is_logged, log_scalars
from dlo_plugins.compression.compressed_all_reduce import BLOCK, CompressedAllReduce
from dlo_plugins.compression.ddp_hooks import (
    KEY,
    GradientHook,
    HalfHook,
    OneBitHook,
    PostLocalHook,
    PowerSGD,
    PowerSGDHook,
    average_tensors,
    one_bit_state,
    powersgd_state,
    restore_one_bit,
    restore_powersgd,
)
from dlo_plugins.compression.one_bit import OneBitAdam, OneBitLamb, OneBitOptimizer

Method = Literal["fp16", "bf16", "powersgd", "post_local_sgd", "one_bit"]
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Optimizers whose names a config can use with the callback.
OPTIMIZERS = (OneBitAdam, OneBitLamb)


class GradientCompression(PluginCallback):
    """Sends fewer bytes of gradients between ranks.

    | method | sent bytes, relative to plain data parallelism | mean of the gradients |
    |---|---|---|
    | `bf16`, `fp16` | 1/2 | rounded |
    | `powersgd` | about `matrix_rank` (1/rows + 1/columns), after `start_step` | approximated, errors are sent later |
    | `post_local_sgd` | about 1 / (2 `period`), after `start_step` | of a node; weights are averaged every `period` |
    | `one_bit` | 1/28, after the optimizer's `freeze_step` | not computed: momenta are averaged, one bit per element |

    `one_bit` needs an optimizer made for it: :class:`OneBitAdam` or :class:`OneBitLamb`. The callback works with
    strategy `ddp` and automatic optimization, with accumulation, and in any precision. `bf16` and `fp16` work under all
    strategies of dlo: gradients that ranks with different samples sum (ZeRO, FSDP, the data axes of a mesh, DeepSpeed)
    are sent in half precision, and kept in their own; all-gathers of parameters stay as they are. In a single process
    it has no effect.

    Logged every ``trainer.log_every_n_steps``: ``comm/sent_mb``, the megabytes that each rank sends in a step, and
    ``comm/sent_share``, their ratio to plain data parallelism. Bytes are counted for a ring all-reduce, which sends
    each element twice, except for a rank's own shard. They are logged under `ddp` alone.

    Args:
        method: Method of the table.
        start_step: Number of steps of plain data parallelism at the start, for `powersgd` and `post_local_sgd`. None
            for a tenth of the run, and at least 2.
        matrix_rank: Number of columns of the factors that approximate a matrix, for `powersgd`; 1 to 4 are usual, 32
            for some language models.
        period: Number of steps between averages of the weights, for `post_local_sgd`.
        node_size: Number of consecutive ranks, for example those of a node, that average gradients in each step, for
            `post_local_sgd`; 1 for no such groups.
        block: Number of elements that share a scale, for `one_bit`; a multiple of 8.

    Raises:
        DloError: If a value is out of range, the strategy does not fit the method, the method does not support manual
            optimization or several optimizers, or `one_bit` has no optimizer made for it.
    """

    example = "{method: bf16}"

    #: It reads gradients, or hooks the optimizer's step.
    needs_gradients = True
    needs_equal_copies = True

    def __init__(
        self,
        method: Method,
        start_step: int | None = None,
        matrix_rank: int = 1,
        period: int = 8,
        node_size: int = 1,
        block: int = BLOCK,
    ) -> None:
        check_choice("GradientCompression: method", method, get_args(Method))
        for name, value in (("matrix_rank", matrix_rank), ("period", period), ("node_size", node_size)):
            check_number(f"GradientCompression: {name}", value, "at least 1", "leave it out")
        least = 2 if method == "powersgd" else 0
        check_number("GradientCompression: start_step", start_step, f"at least {least} for {method}", "leave it out")
        if block < 8 or block % 8:
            raise DloError(
                f"GradientCompression: block must be a multiple of 8, got {block}; set {max(8, block // 8 * 8)}"
            )
        self.method, self.start_step, self.matrix_rank = method, start_step, matrix_rank
        self.period, self.node_size, self.block = period, node_size, block
        if method in ("powersgd", "one_bit"):
            self.prevents_replay = f"method {method} keeps what it has not sent; use bf16 or fp16, or leave it out"
        #: Hook that reduces gradients; None in a single process.
        self.hook: GradientHook | None = None
        #: All-reduce that averages momenta; None for other methods than one_bit.
        self.all_reduce: CompressedAllReduce | None = None
        self._by_strategy = False  # whether the strategy compresses, not a hook of DDP
        self._trainer: Trainer | None = None
        self._precision: Precision | None = None
        self._loaded: Any = None
        self._steps, self._sent, self._plain = 0, 0.0, 0.0

    # --- setting up ----------------------------------------------------------------------------------------

    @agreed_errors()
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks strategy, optimization and callbacks before the model is built."""
        self.hook = self.all_reduce = self._loaded = None
        if stage != "fit" or has_one_process(trainer.strategy):
            return
        contract = contract_of(trainer.strategy)
        self._by_strategy = contract.find_ability(CommunicationHooks) is None
        if self._by_strategy:
            if self.method not in _HALVES:
                contract.ability(CommunicationHooks, f"GradientCompression(method: {self.method})")
            contract.ability(HalfPrecisionGradients, "GradientCompression").send_gradients_in(_HALVES[self.method])
            return
        if self.method not in ("fp16", "bf16") and not pl_module.automatic_optimization:
            raise DloError(
                f"GradientCompression: optimization must be automatic for method {self.method}, got"
                f" {type(pl_module).__name__}, which optimizes manually; set method: bf16"
            )
        if self.method == "post_local_sgd" and any(isinstance(each, WeightEMA) for each in callbacks_of(trainer)):
            raise DloError(
                "GradientCompression: method must not be post_local_sgd with WeightEMA, as ranks' weights differ"
                " between averages, got both; leave one of the two out"
            )
        if trainer.world_size % self.node_size:
            raise DloError(
                f"GradientCompression: node_size must divide the {trainer.world_size} ranks, got {self.node_size};"
                f" set {math.gcd(self.node_size, trainer.world_size)}"
            )

    @agreed_errors()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Registers the hook with DDP, and sets the optimizer's communicator."""
        self._trainer = trainer
        self._steps, self._sent, self._plain = trainer.global_step, 0.0, 0.0
        if self._by_strategy:
            return
        if trainer.world_size == 1:
            rank_zero_info(f"GradientCompression: {self.method} has no effect in a single process")
            return
        model = trainer.strategy.model
        assert isinstance(model, DistributedDataParallel)
        if self.method in ("one_bit", "post_local_sgd") and len(trainer.optimizers) != 1:
            raise DloError(
                f"GradientCompression: {type(pl_module).__name__} must have one optimizer for method {self.method},"
                f" got {len(trainer.optimizers)}; set method: bf16"
            )
        self.hook = self._make_hook(trainer, pl_module)
        self.hook.register(model)

    def _make_hook(self, trainer: Trainer, pl_module: LightningModule) -> GradientHook:
        if self.method == "one_bit":
            return self._one_bit(trainer)
        if self.method in ("fp16", "bf16"):
            return HalfHook(_HALVES[self.method])
        start = self.start_step
        if start is None:
            steps = optimizer_steps(trainer)
            start = max(2, int(steps / 10)) if steps != float("inf") else 1000
        if self.method == "post_local_sgd":
            group = dist.new_subgroups(self.node_size)[0] if self.node_size > 1 else None
            return PostLocalHook(start, self._step, group)
        names = {id(parameter): plain_name(name) for name, parameter in pl_module.named_parameters()}
        powersgd = PowerSGD(names, self.matrix_rank, start)
        return PowerSGDHook(powersgd, self._step, trainer.strategy.root_device)

    def _one_bit(self, trainer: Trainer) -> GradientHook:
        optimizer = trainer.optimizers[0]
        if not isinstance(optimizer, OneBitOptimizer):
            raise DloError(
                "GradientCompression: optimizer must be OneBitAdam or OneBitLamb for method one_bit, got"
                f" {type(optimizer).__name__}; with dlo's tasks set `optimizer: OneBitAdam` and"
                " `optimizer_args: {freeze_step: ...}`, 15 to 25% of the run's steps"
            )
        steps = optimizer_steps(trainer)
        if optimizer.freeze_step >= steps:
            rank_zero_warn(
                "GradientCompression compresses no step: freeze_step must be below the run's"
                f" {steps:.0f} steps, got {optimizer.freeze_step}; {max(1, round(steps / 5))} is usual"
            )
        self.all_reduce = CompressedAllReduce(block=self.block)
        optimizer.communicator = self.all_reduce
        self._precision = trainer.strategy.precision_plugin
        clipping: Any = with_sharded_clipping(self._precision, self._norm)
        trainer.strategy.precision_plugin = clipping
        return OneBitHook(optimizer)

    def _step(self) -> int:
        assert self._trainer is not None
        return self._trainer.global_step

    def _norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the norm for clipping: of the mean gradient, or the mean of the ranks' norms if there is none."""
        norm = total_norm(collect_gradients(optimizer))
        if self.all_reduce is not None and isinstance(optimizer, OneBitOptimizer) and optimizer.compressing:
            return self.all_reduce.mean(norm)
        return norm

    # --- state ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds each rank's unsent errors to the checkpoint; for post-local SGD, saves the mean of the weights."""
        if isinstance(self.hook, PowerSGDHook):
            checkpoint[KEY] = powersgd_state(self.hook.powersgd)
        elif self.all_reduce is not None and self.all_reduce.layout is not None:
            optimizer = trainer.optimizers[0]
            assert isinstance(optimizer, OneBitOptimizer)
            checkpoint[KEY] = one_bit_state(self.all_reduce, optimizer)
        elif isinstance(self.hook, PostLocalHook) and self.hook.local:
            self._save_mean(pl_module, checkpoint, trainer.strategy.root_device)

    def _save_mean(self, pl_module: LightningModule, checkpoint: dict[str, Any], device: torch.device) -> None:
        """Replaces weights and optimizer states in a checkpoint by the ranks' mean; the run's own do not change."""
        trained = {plain_name(name) for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        mappings = [checkpoint["state_dict"]]
        for optimizer in checkpoint.get("optimizer_states", ()):
            mappings += optimizer["state"].values()
        copies = []
        for mapping in mappings:
            for key, value in mapping.items():
                of_weights = mapping is checkpoint["state_dict"]
                if isinstance(value, Tensor) and value.is_floating_point() and (key in trained or not of_weights):
                    mapping[key] = value.detach().clone()
                    copies.append(mapping[key])
        average_tensors(copies, device)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps the checkpoint's unsent errors until the optimizer exists."""
        self._loaded = checkpoint.get(KEY)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the ranks' unsent errors."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or self.hook is None:
            return
        if isinstance(self.hook, PowerSGDHook):
            problem = restore_powersgd(self.hook.powersgd, loaded)
        elif self.all_reduce is not None:
            optimizer = trainer.optimizers[0]
            assert isinstance(optimizer, OneBitOptimizer)
            problem = restore_one_bit(self.all_reduce, optimizer, loaded)
        else:
            problem = f"it is {loaded['method']}'s"
        if problem:
            rank_zero_warn(
                f"GradientCompression: the checkpoint's compression errors are dropped, as {problem}; they start"
                " at zero, from which training recovers in some steps"
            )

    # --- training ------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Averages the weights at the end of a period, and logs the sent bytes."""
        steps = trainer.global_step
        if self.hook is None or steps == self._steps:
            return
        if isinstance(self.hook, PostLocalHook) and self.hook.is_averaged(steps, self.period):
            self._average_weights(pl_module)
        sent, plain = self.bytes_sent(), self.hook.plain_bytes
        if is_logged(trainer, steps):
            done = (sent - self._sent) / (steps - self._steps)
            share = (sent - self._sent) / max(plain - self._plain, 1.0)
            log_scalars(trainer, {"comm/sent_mb": done / 1e6, "comm/sent_share": share}, steps)
        self._steps, self._sent, self._plain = steps, sent, plain

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Averages the weights, so that all ranks end with the same."""
        if isinstance(self.hook, PostLocalHook) and self.hook.local:
            self._average_weights(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the strategy's own clipping."""
        if self._precision is not None:
            trainer.strategy.precision_plugin, self._precision = self._precision, None
        self._trainer = None

    def bytes_sent(self) -> float:
        """Returns the bytes that this rank has sent since the fit began."""
        gradients = 0.0 if self.hook is None else self.hook.bytes_sent
        return gradients + (0.0 if self.all_reduce is None else self.all_reduce.bytes_sent)

    def _average_weights(self, pl_module: LightningModule) -> None:
        assert self.hook is not None
        weights = [parameter.data for parameter in pl_module.parameters() if parameter.requires_grad]
        average_tensors(weights, pl_module.device)
        self.hook.count(sum(weight.nbytes for weight in weights))
