"""ZeRO as a Lightning strategy.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054. ZeRO-Offload: Democratizing Billion-Scale Model Training. Ren et al., 2021, arXiv 2101.06840.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.checkpoint import Shard
from dlo_framework.distributed.canonical import OWNER, ShardOwner, clean, readable
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.initialise import Initialiser, check_initialisable, on_meta
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_framework.distributed.units import find_units
from dlo_framework.errors import DloError
from dlo_plugins.fsdp.policy import default_param_dtype, parse_dtype
from dlo_plugins.zero.engine import ZeroEngine, ZeroOptions

MIB = 2**20
#: The Trainer's precision, and what autocast then computes in.
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ZeroStrategy(ShardedStrategy):
    """Divides optimizer state, gradients and parameters among the ranks: ZeRO, stages 1 to 3.

    Of a model of psi parameters in single precision under Adam, a rank of N holds 16 psi bytes without it; 8 psi +
    8 psi / N in stage 1 (optimizer state divided), 4 psi + 12 psi / N in stage 2 (gradients too), 16 psi / N in
    stage 3 (parameters too). Stages 1 and 2 pass 2 psi elements a step, as plain data parallelism does, stage 3
    passes 3 psi. With `param_dtype: bfloat16` it holds 2 psi + 16 psi / N in stages 1 and 2, and 16 psi / N in stage 3.

    Aliases: `zero1 zero2 zero3 zero2_offload zero3_offload`.

    Args:
        stage: 1, 2 or 3.
        offload: what lives in CPU memory: the `optimizer` (its state and step, the gradient shards and, in stage 3, a
            copy of the shards that it steps), the `parameters` (their shards, of frozen ones too; stage 3), or `both`.
            Of `parameters` alone, the shards come to the device for a step.
        bucket_mb: gradients that are reduced at once, in MiB (stages 1 and 2; stage 3 reduces unit by unit).
        find_unused: whether parameters may go without a gradient in a step. Otherwise that is an error that names
            them.
        units: names of the modules whose parameters are gathered together in stage 3, and that wait for the last step's
            in stages 1 and 2; by default the model's blocks.
        param_dtype: what parameters in single precision are gathered and computed in, with master weights in single
            precision, divided: `bfloat16` under `bf16-mixed`, where it is the default on accelerators; `float16` under
            `16-mixed`; `float32` for their own. Batch norms keep single precision.
        reduce_dtype: what gradients are summed in; by default single precision, in which they are always kept.
        meta_init: whether `configure_model` builds the model without memory, which each unit gets as it is divided:
            for models larger than a device's memory, in stage 3. Each module's `reset_parameters` then initialises it,
            alike on all ranks; or a checkpoint does, or each rank's own part of trained weights.
        timeout_minutes: how long a collective may take before a rank gives the others up.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload: Literal["optimizer", "parameters", "both"] | None = None,
        bucket_mb: float = 25.0,
        find_unused: bool = False,
        units: list[str] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        meta_init: bool = False,
        timeout_minutes: float = 10.0,
    ) -> None:
        if stage not in (1, 2, 3):
            raise DloError(f"ZeRO has stages 1, 2 and 3, but stage was {stage}")
        if offload not in (None, "optimizer", "parameters", "both"):
            raise DloError(f"offload is optimizer, parameters or both, but was {offload}")
        if offload in ("parameters", "both") and stage < 3:
            raise DloError(f"offload: {offload} needs stage 3; in stage {stage} every rank holds whole parameters")
        if bucket_mb <= 0:
            raise DloError(f"bucket_mb is positive, but was {bucket_mb}")
        super().__init__(timeout_minutes=timeout_minutes)
        self.stage, self.offload, self.bucket_mb, self.find_unused, self.units = (
            stage,
            offload,
            bucket_mb,
            find_unused,
            units,
        )
        self.dtypes, self.meta_init = (param_dtype, reduce_dtype), meta_init
        self.engine: ZeroEngine | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the short names known: ``--trainer.strategy zero2``."""
        for name, arguments in (
            ("zero1", {"stage": 1}),
            ("zero2", {"stage": 2}),
            ("zero3", {"stage": 3}),
            ("zero2_offload", {"stage": 2, "offload": "optimizer"}),
            ("zero3_offload", {"stage": 3, "offload": "both"}),
        ):
            strategy_registry.register(name, cls, description=f"ZeRO: {arguments}", **arguments)

    # --- setting up ----------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Checks what the Trainer's options decide, as soon as they are known: no process has started yet."""
        self._gathered_dtypes()
        super()._configure_launcher()

    def _gathered_dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Returns what parameters are gathered in, and what their gradients are summed in; None for their own dtype.

        Raises:
            DloError: if they do not go with the Trainer's precision.
        """
        precision, (gathered, reduced) = str(self.precision_plugin.precision), self.dtypes
        if gathered is None:
            gathered = default_param_dtype(precision, self.root_device)
        param, reduce = parse_dtype("param_dtype", gathered), parse_dtype("reduce_dtype", reduced)
        if param not in (None, torch.float32, _AUTOCAST.get(precision)):
            wanted = next((key for key, value in _AUTOCAST.items() if value == param), "32-true")
            raise DloError(
                f"param_dtype of ZeroStrategy must be float32 or what precision {precision} casts to, got {gathered};"
                f" set the trainer's precision to {wanted}, or leave param_dtype out"
            )
        if param in (None, torch.float32):
            if reduce not in (None, torch.float32):
                raise DloError(
                    f"reduce_dtype must come with a param_dtype in half precision, got {reduced} alone; set param_dtype"
                    " too, or leave reduce_dtype out"
                )
            return None, None
        return param, reduce

    def shard(self, trainer: Trainer) -> None:
        """Builds the optimizers, and moves the parameters into flat groups."""
        module, fitting = self._module(), trainer.state.fn == TrainerFn.FITTING
        communicator, initialise = Communicator(), self._initialiser(trainer)
        if self.stage < 3:
            if initialise is not None:
                initialise(module, "")
            module.to(self.root_device)
        if fitting:
            self._whole_again()
            self.setup_optimizers(trainer)
        if fitting or (self.stage == 3 and self.engine is None):
            self.engine = self._build(communicator, initialise)
            if self.engine.arrivals is not None:
                self.engine.arrivals.enabled = not _may_read_weights(trainer, module)
        if self.stage == 3:
            for submodule in module.modules():
                for name, buffer in submodule.named_buffers(recurse=False):
                    submodule._buffers[name] = buffer.to(self.root_device)
        else:
            for parameter in module.parameters():
                if not (fitting and parameter.requires_grad):
                    communicator.broadcast(parameter.data)
        self.share_buffers()

    def needs_all_ranks(self, module: nn.Module) -> bool:
        """Returns whether a forward of a part of the module gathers weights: in stage 3."""
        return self.stage == 3 and super().needs_all_ranks(module)

    def _initialiser(self, trainer: Trainer) -> Initialiser | None:
        """Returns what gives the module its values, if it was built without.

        Raises:
            DloError: if a tensor would stay without.
        """
        module = self._module()
        if not on_meta(module):
            return None
        check_initialisable(module, loads_weights=trainer.ckpt_path is not None)
        return Initialiser(self.root_device, self.broadcast(torch.initial_seed()))

    def _build(self, communicator: Communicator, initialise: Initialiser | None) -> ZeroEngine:
        module = self._module()
        units = self.units if self.units is not None else find_units(module)
        gathered, reduced = self._gathered_dtypes()
        element = max((p.element_size() for p in module.parameters()), default=4)
        options = ZeroOptions(
            stage=self.stage,
            bucket_elements=int(self.bucket_mb * MIB / element),
            offload_optimizer=self.offload in ("optimizer", "both"),
            offload_parameters=self.offload in ("parameters", "both"),
            find_unused=self.find_unused,
            gathered_dtype=gathered,
            reduced_dtype=reduced,
        )
        engine = ZeroEngine(module, self.optimizers, units, communicator, self.root_device, options, initialise)
        module.__dict__[OWNER] = ShardOwner(self, communicator.size if engine.holds_shards else 1, engine.dissolve)
        return engine

    def forget_module(self) -> None:
        """Called when another strategy has taken the module over."""
        self.engine = None

    def _whole_again(self) -> None:
        """Undoes an earlier run's partition: this run makes its own."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.dissolve()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Builds the optimizers anew: an earlier run's hold shards that are gone."""
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    # --- a step --------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step, with what it needs gathered."""
        with self._step("training"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._step("validation"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._step("test"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._step("predict"):
            return super().predict_step(*args, **kwargs)

    @contextlib.contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        """Gathers what a step needs from its beginning."""
        gathering = self.engine.gathering if self.engine is not None else None
        if self.engine is not None and self.engine.arrivals is not None:
            with self.engine.arrivals.step(kind):
                yield
            return
        if gathering is None:
            yield
            return
        gathering.begin_step()
        with gathering.watch_step(kind):
            yield
        if kind == "training" and not self._module().automatic_optimization:
            gathering.release_all()

    def _leave(self) -> None:
        self.finish_step()
        if self.engine is not None and self.engine.gathering is not None:
            self.engine.gathering.release_all()

    def finish_step(self) -> None:
        """Waits for the parameters and shards of the last step."""
        if self.engine is not None:
            self.engine.finish_step()

    def on_validation_end(self) -> None:
        """Frees what the evaluation gathered."""
        self._leave()

    on_test_end = on_predict_end = on_train_end = on_validation_end

    def teardown(self) -> None:
        """Ends the run; a single rank, which holds all of the parameters, leaves them readable."""
        if self.engine is not None and self.engine.communicator.size == 1:
            for group in self.engine.groups:
                group.finish_gather()
        super().teardown()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Tells the engine that gradients are coming."""
        assert self.engine is not None
        self.engine.before_backward(self._module().automatic_optimization)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Lets the engine end their reduction."""
        assert self.engine is not None
        self.engine.after_backward(self._module().automatic_optimization)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        assert self.engine is not None
        self.engine.sync = False
        try:
            yield
        finally:
            self.engine.sync = True

    # --- state ---------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state by name: in stage 3, or with master weights, this rank's slices."""
        self.finish_step()
        if self.engine is None or not self.engine.holds_shards:
            return super().lightning_module_state_dict()
        first_names = {id(p): clean(name) for name, p in self._module().named_parameters()}
        with self._names():
            state = super().lightning_module_state_dict()
            whole = self._module().state_dict(keep_vars=True)
        for name, value in whole.items():
            piece = self.engine.shard(first_names[id(value)]) if id(value) in first_names else None
            if piece is not None:
                state[clean(name)] = piece
        return state

    def state_names(self) -> set[str]:
        """Returns the names of all of the module's state."""
        with self._names():
            return super().state_names()

    def _names(self) -> AbstractContextManager[None]:
        """Returns a context in which the module's state may be taken for its names and buffers."""
        gathering = self.engine.gathering if self.engine is not None else None
        return gathering.allow_names() if gathering is not None else contextlib.nullcontext()

    def held_tensors(self) -> list[Tensor]:
        """Returns the memory of this rank's parameters, or of its shards of them, and of the buffers."""
        self.finish_step()
        if self.engine is None or not self.engine.holds_shards:
            return super().held_tensors()
        grouped = {id(parameter) for group in self.engine.groups for parameter in group.parameters}
        held: list[Tensor] = []
        for group in self.engine.groups:
            held += [group.shard] if group.has_master_weights or not group.keep_full else group.parameters
        held += [parameter for parameter in self._module().parameters() if id(parameter) not in grouped]
        return [*held, *self._module().buffers()]

    @property
    def zero_stage(self) -> int:  # type: ignore[override]
        """The stage: what is divided."""
        return self.stage

    @property
    def has_master_weights(self) -> bool:  # type: ignore[override]
        """Whether parameters are gathered in half precision."""
        return self.engine is not None and self.engine.options.gathered_dtype is not None

    @property
    def nan_hint(self) -> str:  # type: ignore[override]
        """What may make a loss NaN where weights arrive during the forward; empty where they arrive before it."""
        arrivals = self.engine.arrivals if self.engine is not None else None
        if arrivals is None or not arrivals.enabled or self.world_size == 1:
            return ""
        return (
            f"zero{self.stage} has weights read as NaN that a step reads outside their block's forward where the first"
            " step did not: read them in the first step too, or take strategy ddp"
        )

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        assert self.engine is not None
        held = self.engine.bytes_held()
        if self.stage < 3:
            held["parameters"] += sum(p.nbytes for p in self._module().parameters() if not p.requires_grad)
        held["optimizer"] = held.pop("masters") + int(super().state_bytes()["optimizer"])
        return {**held}

    def refresh(self) -> None:
        """Brings parameters and shards together after either was written to."""
        if self.engine is not None:
            self.engine.refresh()

    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns the gradients of an unfinished accumulation: stage 1 has them whole, the others this rank's part."""
        assert self.engine is not None
        if self.engine.options.reduces_each:
            return dict(self.engine.gradient_shards())
        trained = {clean(name): p for name, p in self._module().named_parameters() if p.requires_grad}
        have = torch.tensor([p.grad is not None for p in trained.values()], dtype=torch.uint8, device=self.root_device)
        anywhere = self.engine.communicator.maximum(have).tolist()  # Ranks may have used different parameters.
        return {
            name: self.reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), reduce_op="mean")
            for (name, p), used in zip(trained.items(), anywhere, strict=True)
            if used
        }

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Takes up an unfinished accumulation."""
        assert self.engine is not None
        if not self.engine.options.reduces_each:
            super().restore_gradients(saved)
        else:
            gradients = readable(saved)
            for name, shard in self.engine.open_window(gradients).items():
                gradients.read_into(name, shard)

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns this rank's share of an optimizer's parameters."""
        return self._share(optimizer).local_params

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the names of each parameter group's parameters, those of other ranks' shares too."""
        return self._share(optimizer).group_names

    def canonical(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a state tensor as the slice of the parameter-shaped one that it is."""
        return self._share_of(name).as_shard(name, value)

    def room(self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns room for this rank's slice of a state tensor."""
        return self._share_of(name).empty_shard(name, shape, dtype)

    def _share(self, optimizer: Optimizer) -> Any:
        assert self.engine is not None
        number = next(n for n, own in enumerate(self.optimizers) if own is optimizer)
        return self.engine.shares[number]

    def _share_of(self, name: str) -> Any:
        assert self.engine is not None
        return next(share for share in self.engine.shares if name in share.shapes)

    def about(self) -> dict[str, Any]:
        """Returns what a checkpoint's manifest says of the run."""
        return {**super().about(), "stage": self.stage}


#: Callbacks of Lightning's that read weights, or call a user's functions, between a step and the next forward.
_READERS = (WeightAveraging, StochasticWeightAveraging, LambdaCallback, ModelPruning)
#: Who asks for weights through the strategy, if at all.
_ASKING = ("lightning.", "dlo_framework.", "dlo_plugins.", "dlo_tasks.")
#: What of a module is called between a step and the next forward.
_BETWEEN = (
    *("on_before_zero_grad", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_model_eval", "on_save_checkpoint"),
    *("on_validation_epoch_end", "on_validation_end", "on_train_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def _may_read_weights(trainer: Trainer, module: nn.Module) -> bool:
    """Returns whether a callback or the module may read weights between a step and the next forward.

    They read the module's own parameters then, which nobody can see; so all gathers end with the step.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(c, _READERS) or not type(c).__module__.startswith(_ASKING) for c in callbacks):
        return True
    known = type(module).__mro__
    homes = [home for name in _BETWEEN if (home := next((c for c in known if name in vars(c)), None)) is not None]
    by_hand = not getattr(module, "automatic_optimization", True)
    return by_hand or any(not home.__module__.startswith(_ASKING) for home in homes)
