"""Fully sharded data parallelism as a Lightning strategy, on torch's FSDP2.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import Metric

from dlo_framework.distributed.launcher import set_collective_timeout
from dlo_framework.distributed.units import find_units
from dlo_framework.errors import DloError
from dlo_plugins.fsdp.initialise import check_initialisable, on_meta
from dlo_plugins.fsdp.mesh import REPLICATE, SHARD, check_reshard, mesh_sizes
from dlo_plugins.fsdp.optimizers import OptimizerShares
from dlo_plugins.fsdp.policy import mixed_precision
from dlo_plugins.fsdp.sharding import DIVERGING, Sharding, ShardOptions, named_units
from dlo_plugins.fsdp.state import ShardedState
from dlo_plugins.fsdp.usage import Usage
from dlo_plugins.zero.reduction import unused_message

#: Under this name a module that has been sharded keeps how, for the next run of it.
_SHARDING = "_dlo_sharding"


class FSDPStrategy(ShardedState):
    """Divides parameters, gradients and optimizer state among the ranks, unit by unit, with torch's FSDP2.

    A unit's parameters are gathered before its forward and its backward, and freed after; its gradients are summed
    and divided again in backward. With psi parameters in single precision under Adam, each of N ranks holds 16 psi / N
    bytes and what one unit, two with prefetch, needs in whole; a step passes 3 psi elements, 2 psi with
    `reshard_after_forward: false`.

    Aliases: `fsdp`; `hsdp` (a copy of the model on each node); `fsdp_offload`.

    Args:
        replicate: copies of the model, each divided among `shard` ranks (hybrid sharding, HSDP); -1 for as many as
            there are ranks for.
        shard: ranks that share one copy; -1 for all that are left, `node` for those of a node, so that gathers stay
            inside it.
        units: names of the modules that are gathered as one, patterns such as `model.blocks.*` too; by default the
            model's blocks, or, where there are none, submodules of at most a sixteenth of the parameters.
        reshard_after_forward: whether units are freed between forward and backward: false saves the second gather and
            holds the whole model; a number keeps them divided over so many ranks (of a node, say) until backward. By
            default all are freed but what lies outside the units, which backward needs first.
        param_dtype: what parameters are gathered and computed in: `bfloat16` halves what passes; `float16`. By
            default their own, so that losses are those of a single process at the Trainer's precision.
        reduce_dtype: what gradients are summed in; by default the parameters' own dtype.
        output_dtype: what a unit's floating-point outputs are cast to; by default they are left as they are.
        offload: whether shards and optimizer state live in CPU memory, and the CPU steps.
        meta_init: whether `configure_model` builds the model without memory, which each unit gets as it is sharded:
            for models larger than one device's memory. Each module's `reset_parameters` then initialises it, alike
            on any number of ranks; a model without these needs a checkpoint to start from.
        recompute: whether units keep their inputs alone for backward, and compute the rest again.
        forward_prefetch: units gathered ahead in forward beyond the one that runs; 0 leaves it to FSDP, which overlaps
            one on an accelerator.
        backward_prefetch: likewise in backward; by default FSDP's own, one.
        find_unused: whether parameters may go without a gradient in a step. Otherwise that is an error that names them.
        sync_every_micro_batch: whether gradients are divided after each micro-batch of an accumulation. By default
            each rank adds up whole gradients until the last one: no communication, 4 psi bytes.
        timeout_minutes: how long a collective may take before a rank gives the others up.

    Raises:
        DloError: if options contradict each other, or do not fit the ranks or the model.
    """

    def __init__(
        self,
        replicate: int = 1,
        shard: int | Literal["node"] = -1,
        units: list[str] | None = None,
        reshard_after_forward: bool | int | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        offload: bool = False,
        meta_init: bool = False,
        recompute: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int | None = None,
        find_unused: bool = False,
        sync_every_micro_batch: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        super().__init__(timeout_minutes=timeout_minutes)
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth is not None and depth < 0:
                raise DloError(f"{name} is a number of units, at least 0, but was {depth}")
        if find_unused and not DIVERGING:
            raise DloError(f"find_unused needs torch 2.15, but this is {torch.__version__}; freeze what is not used")
        self.axes, self.units = (replicate, shard), units
        self.reshard_after_forward, self.offload, self.meta_init = reshard_after_forward, offload, meta_init
        self.dtypes = (param_dtype, reduce_dtype, output_dtype)
        self.recompute, self.prefetch = recompute, (forward_prefetch, backward_prefetch)
        self.find_unused, self.sync_every_micro_batch = find_unused, sync_every_micro_batch
        self._last = True  # whether the backward under way is the last of its accumulation

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the short names known: ``--trainer.strategy fsdp``, which Lightning has for a strategy of its own."""
        _take_name("fsdp")
        for name, arguments in (
            ("fsdp", {}),
            ("hsdp", {"replicate": -1, "shard": "node"}),
            ("fsdp_offload", {"offload": True}),
        ):
            strategy_registry.register(name, cls, description=f"FSDP2: {arguments}", override=True, **arguments)

    # --- before processes start ----------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Checks what the Trainer's options decide, as soon as they are known: no process has started yet."""
        self._mesh_sizes()
        self._policy()
        if self.offload and self.root_device.type == "cuda" and self._process_group_backend is None:
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # Shards in CPU memory are saved and compared too.
        super()._configure_launcher()

    def _mesh_sizes(self) -> tuple[int, int]:
        replicate, shard = self.axes
        ranks = self.num_processes if shard == "node" else shard
        sizes = mesh_sizes(replicate, ranks, self.num_nodes * self.num_processes)
        check_reshard(self.reshard_after_forward, sizes[1])
        return sizes

    def _policy(self) -> Any:
        return mixed_precision(str(self.precision_plugin.precision), *self.dtypes)

    # --- setting up ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Lightning builds the model in it."""
        meta = empty_init if empty_init is not None else self.meta_init
        with torch.device("meta") if meta else contextlib.nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shards the module, unless an earlier run has, and builds the optimizers."""
        module = self._module()
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        known: Sharding | None = module.__dict__.get(_SHARDING)
        if known is None and self._layer_sync:
            self.model = self._layer_sync.apply(module)  # Not while fitting alone: sharded modules stay as they are.
        self.model = self.precision_plugin.convert_module(module)
        self.shard(trainer)
        self.setup_precision_plugin()
        self.barrier("sharded")

    def shard(self, trainer: Trainer) -> None:
        """Shards the module and, while fitting, its optimizers' state."""
        module = self._module()
        known: Sharding | None = module.__dict__.get(_SHARDING)
        if known is None:
            known = self._new_sharding(trainer)
            module.__dict__[_SHARDING] = known
        self.sharding = self._checked(known)
        self.sharding.collect()
        _update_properties(module, device=self.root_device)
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)
        if self._usage is not None:
            self._usage.remove()
        self._usage = self._shares = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self._shares = OptimizerShares(self.optimizers, self.sharding)
            self._usage = Usage(self.sharding)
            self._open = False

    def _options(self) -> ShardOptions:
        return ShardOptions(
            policy=self._policy(),
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
            recompute=self.recompute,
            forward_prefetch=self.prefetch[0],
            backward_prefetch=self.prefetch[1],
            whole_steps=self._module().automatic_optimization,
        )

    def _new_sharding(self, trainer: Trainer) -> Sharding:
        module = self._module()
        if on_meta(module):
            check_initialisable(module, loads_weights=trainer.ckpt_path is not None)
        units = find_units(module) if self.units is None else named_units(module, self.units)
        replicate, shard = self._mesh_sizes()
        sizes, names = ((replicate, shard), (REPLICATE, SHARD)) if replicate > 1 else ((shard,), (SHARD,))
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)
        if self._timeout is not None:
            for group in mesh.get_all_groups():
                set_collective_timeout(self._timeout, group)
        seed = self.broadcast(torch.initial_seed())
        return Sharding(module, units, mesh, self.root_device, self._options(), seed)

    def _checked(self, known: Sharding) -> Sharding:
        """Returns an earlier run's sharding, if it is what this strategy would have made."""
        replicate, shard = self._mesh_sizes()
        wanted = (self._options(), tuple(n for n in (replicate, shard) if n > 1) or (1,))
        found = (known.options, tuple(n for n in known.mesh.shape if n > 1) or (1,))
        if wanted != found or known.device != self.root_device:
            raise DloError(
                f"{type(known.module).__name__} has been sharded by an earlier run with other options, and stays so;"
                " build the model anew for a strategy with these"
            )
        return known

    # --- a step --------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step, with what it needs gathered."""
        assert self.sharding is not None
        with self._undone_if_it_raises(), self.precision_plugin.train_step_context():
            return self.sharding.call("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        assert self.sharding is not None
        with self._undone_if_it_raises(), self.precision_plugin.val_step_context():
            return self.sharding.call("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        assert self.sharding is not None
        with self._undone_if_it_raises(), self.precision_plugin.test_step_context():
            return self.sharding.call("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        assert self.sharding is not None
        with self._undone_if_it_raises(), self.precision_plugin.predict_step_context():
            return self.sharding.call("predict_step", *args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward pass."""
        with self._undone_if_it_raises():
            return super().backward(*args, **kwargs)

    @contextlib.contextmanager
    def _undone_if_it_raises(self) -> Iterator[None]:
        """Brings the sharding back to rest if a step raises: who looks for the largest batch catches that."""
        try:
            yield
        except BaseException:
            if self.sharding is not None:
                self.sharding.reset()
            if self._usage is not None:
                self._usage.used.clear()
            self._open = False
            raise

    def on_validation_end(self) -> None:
        """Frees what the evaluation gathered: another may come with other weights."""
        self._leave()

    on_test_end = on_predict_end = on_train_end = on_validation_end

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Forgets the gradients of the step before, which FSDP would add to."""
        assert self.sharding is not None
        assert self._shares is not None
        automatic, is_open = self._module().automatic_optimization, self._open
        self._shares.drop_gradients(lambda share: not is_open or (not automatic and OptimizerShares.wiped(share)))
        self._open = True
        self.sharding.sync(self._last or self.sync_every_micro_batch)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Hands the gradients that backward has left on the parameters to the optimizers."""
        assert self.sharding is not None
        assert self._shares is not None
        assert self._usage is not None
        automatic = self._module().automatic_optimization
        if self._last or self.sync_every_micro_batch:
            used = self._used(automatic)
            self.sharding.average_scalars()
            for name, parameter in self.sharding.parameters.items():
                if name not in used:
                    parameter.grad = None
            if self._last:
                self._shares.give(used)
                self._open = not automatic
                if automatic:
                    self._usage.used.clear()

    def _used(self, automatic: bool) -> set[str]:
        """Returns the parameters that any rank has used in this step.

        Raises:
            DloError: if parameters went without a gradient, and ``find_unused`` is off.
        """
        assert self.sharding is not None
        assert self._usage is not None
        trained = [name for name, parameter in self.sharding.parameters.items() if parameter.requires_grad]
        used = self._usage.used
        if self.find_unused:
            bits = torch.tensor([name in used for name in trained], dtype=torch.uint8, device=self.root_device)
            dist.all_reduce(bits, dist.ReduceOp.MAX)
            used = {name for name, bit in zip(trained, bits.tolist(), strict=True) if bit}
            self._usage.used |= used
        elif automatic and self._last and (absent := [name for name in trained if name not in used]):
            raise DloError(unused_message(absent))
        return set(used)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    @property
    def shard_size(self) -> int:
        """How many ranks share one copy of the model."""
        return self._mesh_sizes()[1]

    def about(self) -> dict[str, Any]:
        """Returns what a checkpoint's manifest says of the run."""
        replicate, shard = self._mesh_sizes()
        return {**super().about(), "mesh": {REPLICATE: replicate, SHARD: shard}}


def _take_name(name: str) -> None:
    """Takes a name from Lightning's FSDPStrategy: the Trainer (2.6) refuses the names in its list without a GPU."""
    theirs = LightningFSDP._registered_strategies
    if name in theirs:
        theirs.remove(name)
