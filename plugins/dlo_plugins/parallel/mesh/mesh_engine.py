"""The mesh engine: gathers parameters for a step, reduces its gradients, and sets those of the optimizer shards.

One step, for each micro-batch of an accumulation:

1. :meth:`MeshEngine.train` runs the task's training step with parameters gathered. Under a pipeline the schedule runs
   forward and backward of all micro-batches there, outside of any forward of FSDP; Lightning's ``backward`` then only
   reduces the gradients, since it comes after ``zero_grad``.
2. :meth:`MeshEngine.before_backward` opens the accumulation window, if none is open, and drops the last gradients.
3. :meth:`MeshEngine.reduce_gradients` sums partial and tied gradients at the window's end, before the user's
   ``on_after_backward``.
4. :meth:`MeshEngine.after_backward` sets the gradients of the tensors that the optimizers step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.costs import is_compiled
from dlo_framework.distributed.gradient_check import is_shipped, unused_message
from dlo_framework.errors import DloError, shown_names
from dlo_framework.local_memory import local_tensor, state_bytes
from dlo_framework.shards import Shard, SlicedShard, attach_slice
from dlo_framework.strategy_abilities import DelayedGradients
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.gathered_copies import ShardsInHooks
from dlo_plugins.parallel.fsdp.row_shards import like_gradient
from dlo_plugins.parallel.fsdp.sharded_optimizers import OptimizerShards, UsedParams
from dlo_plugins.parallel.fsdp.sharding import local_shard
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.parallel.pipeline.pipeline_engine import DelayedStep
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps
from dlo_plugins.parallel.tensor.full_values import FullValues
from dlo_plugins.parallel.user_code import meet_all

#: Prefix of the model's parameters in the task's names; the pipeline uses names without it.
_MODEL = "model."


@dataclass
class _Fit:
    """State of a fit.

    Attributes:
        shares: Shards that the optimizers step.
        usage: Record of the parameters with gradients.
        is_open: Whether gradients are being accumulated.
        is_summed: Whether partial gradients have been summed since the last backward.
    """

    shares: OptimizerShards
    usage: UsedParams
    is_open: bool = False
    is_summed: bool = False


class MeshEngine(DelayedGradients):
    """Runs the steps of a sharded module, and gives access to this rank's state of it.

    Args:
        module: LightningModule that has been sharded.
        state: Result of the parallelization, kept on the module.
        shard: Applier whose options ``find_unused`` and ``sync_every_micro_batch`` hold.
        allow_unused: Fix in the message about parameters without a gradient.

    Attributes:
        sharded: Sharding of the module.
        pipelined: Task with the pipeline's stages; None without a pipeline.
        ends_window: Whether an optimizer step follows the running backward.
    """

    def __init__(self, module: LightningModule, state: ParallelState, shard: FullyShard, allow_unused: str) -> None:
        self.module, self.sharded, self.pipelined = module, state.sharded, state.pipelined
        self._shard, self._allow_unused = shard, allow_unused
        self.ends_window = True
        self._state: _Fit | None = None
        self._gradient_hooks: list[RemovableHandle] = []
        self._reduced: set[str] | None = None  # Parameters with complete gradients.
        self._watched: set[str] = set()  # Kinds of step that have been watched.
        ranks = self.sharded.tensor_parallel
        self._full_values = None
        self._watches_steps = not is_shipped(type(module))
        if ranks.size > 1:
            tried = state.tensor is None or state.tensor.is_tried
            self._full_values = FullValues(
                module, self.sharded.layout, ranks, lambda: self._fit.is_summed, is_tried=tried
            )

    def full_values(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Gives a user's code in a kind of step the full values of what ranks of `tp` have parts of."""
        values = self._full_values
        return values.watch(kind) if values is not None and self._watches_steps else contextlib.nullcontext()

    @contextlib.contextmanager
    def around_hook(self, hook: str) -> Iterator[None]:
        """Gives a hook of the user's the full values of what ranks of `tp` have parts of, and shards after evaluations.

        Args:
            hook: Name of the hook, and of the class that has it.
        """

        def meet() -> None:
            meet_all(
                self.module.trainer.strategy, f"{hook}, which uses weights", "weights under tp", f"a use in {hook}"
            )

        if hook.startswith(("on_validation_e", "on_test_e", "on_predict_e")):  # Steps leave the root gathered.
            self.sharded.reshard()
        values, runs_step = self._full_values, hook.startswith("optimizer_step ")
        with contextlib.ExitStack() as contexts:
            if values is not None:
                contexts.enter_context(values.watch(hook, meet, always=not runs_step))
            if self.sharded.is_sharded and not runs_step:
                contexts.enter_context(ShardsInHooks())
            yield

    @property
    def gives_full_values(self) -> bool:
        """Whether a user's code gets full gradients now, where ranks of `tp` have parts of them."""
        return self._full_values is not None and self._full_values.is_watching

    def begin_fit(self, optimizers: list[Optimizer], rounding: StochasticSteps | None = None) -> None:
        """Replaces the parameters in the optimizers by this rank's shards, and records the use of parameters."""
        self._state = _Fit(OptimizerShards(optimizers, self.sharded, rounding), UsedParams(self.sharded))
        self._drop_delayed()
        if self.pipelined is not None:
            self.pipelined.pipeline.drain_context = self._announced

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        """Makes gradients inside the block count as those of the strategy's own backward."""
        usage = self._fit.usage
        before, usage.announced = usage.announced, True
        try:
            yield
        finally:
            usage.announced = before

    def stop_recording(self) -> None:
        """Stops recording the use of parameters; the module is as it was before :meth:`begin_fit`."""
        if self._state is not None:
            self._state.usage.remove()

    @property
    def _fit(self) -> _Fit:
        assert self._state is not None, "begin_fit comes first"
        return self._state

    # --- steps ---------------------------------------------------------------------------------------------

    def train(self, batch: Any, *args: Any, loss_scale: Callable[[], Tensor]) -> Any:
        """Runs the module's training step with parameters gathered; under a pipeline, forward and backward.

        Args:
            batch: This rank's batch.
            *args: Further arguments of ``training_step``.
            loss_scale: Function that returns the factor of the loss in backward, for a pipeline.
        """
        if self.pipelined is None:
            self._allow_inner_backwards()
            with self.full_values("training step"), self._watch("training_step") as step:
                by_hand = not self.module.automatic_optimization
                with self._fit.shares.guard_writes() if by_hand else contextlib.nullcontext():
                    step_output = self.sharded.call_with_backwards(step, batch, *args)
                self._check_writes()
            if by_hand:
                self.sharded.compares_all = False
            return step_output
        accumulates = self._fit.is_open
        self._open_window()
        self.sharded.set_sync(False)
        self.sharded.set_keep_gathered(True)
        self.sharded.gather_roots()
        with self.full_values("training step"):
            loss = self.pipelined.train(batch, loss_scale(), accumulates, self.ends_window)
        self._fit.usage.record_accumulated()
        return loss

    def evaluate(self, step: str, batch: Any, *args: Any) -> Any:
        """Runs ``validation_step`` or ``test_step`` with parameters gathered."""
        with self.full_values(step.replace("_", " ")):
            if self.pipelined is not None:
                return self.sharded.call(self.pipelined.evaluate, batch, *args if step == "validation_step" else ())
            with self._watch(step) as function:
                step_output = self.sharded.call(function, batch, *args)
                self._check_writes()
            self.sharded.compares_all = False
            return step_output

    def predict(self, batch: Any, *args: Any) -> Any:
        """Runs ``predict_step`` with parameters gathered."""
        if self.pipelined is not None:
            return self.sharded.call(self.pipelined.predict, batch, *args)
        return self.evaluate("predict_step", batch, *args)

    @contextlib.contextmanager
    def _watch(self, kind: str) -> Iterator[Callable[..., Any]]:
        """Watches the first step of a kind: what it uses outside of units, and whether ranks write the same.

        Args:
            kind: Name of the module's method.
        """
        function, known = getattr(self.module, kind), len(self.sharded.kept)
        is_first = self.sharded.is_sharded and kind not in self._watched
        self._watched.add(kind)
        if is_first:
            self.sharded.compares_all = True
        # By hand a step has several backwards, each of which frees what it has used.
        by_hand = known > 0 and not self.sharded.options.whole_steps
        watches = by_hand or (is_first and not is_compiled(self.module))  # Compiled code hides what it uses.
        yield self.sharded.watched(function) if watches else function
        if self.sharded.kept[known:]:
            names = {submodule: name for name, submodule in self.module.named_modules()}
            kept = shown_names([names.get(copies.unit, "the root") for copies in self.sharded.kept[known:]])
            rank_zero_warn(
                f"FSDP gathers the weights of {kept} for each full step, because {kind} uses them outside these"
                " modules' own forward; that costs the memory that sharding saves"
            )

    def _check_writes(self) -> None:
        """Checks that ranks have written the same to parameters: in a watched step, and when they write to others."""
        names = self.sharded.written.names
        if names and not self.sharded.compares_all:
            strategy, shown = self.module.trainer.strategy, shown_names(names)
            what = f"parameters under {type(strategy).__name__}"
            meet_all(strategy, f"a step that writes to {shown}", what, f"a write to {shown}")
        if names or self.sharded.compares_all:
            self.sharded.check_writes()

    def _allow_inner_backwards(self) -> None:
        """Leaves parameters gathered, and gradients alone, in a backward inside the step, as of a gradient penalty."""
        self.sharded.set_sync(False)
        self.sharded.set_keep_gathered(True)

    @contextlib.contextmanager
    def reset_on_error(self) -> Iterator[None]:
        """Resets the engine if a step raises; a search for the largest batch catches the error.

        Raises:
            DloError: The step computes with weights that are sharded.
        """
        try:
            yield
        except BaseException as error:
            self.sharded.reset()
            self._reduced, self.sharded.compares_all = None, False
            if self._state is not None:
                self._state.usage.used.clear()
                self._state.is_open = False
            self._drop_delayed()
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise DloError(
                    "weights that FSDP shards must be gathered where a step computes with them, got sharded ones:"
                    " state_dict() in a step shards its module again, and later steps gather for other modules what the"
                    " first one used there; take state_dict() in a hook such as on_train_batch_end, or use strategy"
                    " zero1 or zero2"
                ) from error
            raise

    def _drop_delayed(self) -> None:
        """Drops what the next step would apply of an earlier one."""
        if self.pipelined is not None:
            self.pipelined.pipeline.reset()

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with this rank's tensors of the parameters whose gradients are reduced.

        A gradient that is a partial sum over tensor parallelism is summed over its ranks first, in each backward: its
        order is the same on all of them.
        """
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks = self._fit.shares.watch_gradients(ready)

    def before_backward(self) -> None:
        """Opens an accumulation window, and sets whether this backward reduces gradients."""
        self._open_window()
        self.sharded.set_keep_gathered(False)
        self.sharded.set_sync(self.ends_window or self._shard.sync_every_micro_batch)

    def _open_window(self) -> None:
        """Drops the gradients of the last step, to which FSDP would add; none of a window that is open."""
        fit, automatic = self._fit, self.module.automatic_optimization
        fit.usage.announced = True
        is_open = fit.is_open
        # Parameters with dropped gradients count as unused: in manual optimization another backward may come first.
        fit.usage.used -= fit.shares.drop_gradients(
            lambda share: not is_open or (not automatic and OptimizerShards.grads_dropped(share))
        )
        # In manual optimization a backward may add to summed gradients before a step, and they are summed again: one
        # rank keeps the sum, the others zeros.
        for name, parameter in self.sharded.parameters.items() if fit.is_summed else ():
            if parameter.grad is not None and not self._restores_sum(name):
                parameter.grad.detach().zero_()
        fit.is_open, fit.is_summed = True, False

    def _restores_sum(self, name: str) -> bool:
        """Returns whether this rank, of those that sum a gradient, restores the saved sum."""
        layout = self.sharded.layout
        return name not in layout.tied_copies and not (name in layout.partial and self.sharded.groups.coordinates.tp)

    def reduce_gradients(self) -> None:
        """Sums gradients that ranks have partial sums of, so that parameters have those of the run.

        Raises:
            DloError: Parameters have no gradient, and ``find_unused`` is off, or ranks have written other values.
        """
        self.sharded.finish_backward()
        self._check_writes()
        self._fit.shares.forget_gradients()
        if self.module.automatic_optimization:
            self.sharded.compares_all = False
        fit, automatic = self._fit, self.module.automatic_optimization
        fit.usage.announced = False
        delays = self.pipelined is not None and self.pipelined.pipeline.delays
        if not (self.ends_window or (self._shard.sync_every_micro_batch and not delays)):
            return
        if self.pipelined is not None and not self.pipelined.pipeline.has_gradients:
            fit.usage.used.clear()  # The first step of a run with delayed gradients applies none.
            fit.shares.set_grads(())
            return
        used = self._used(automatic)
        if self.ends_window or not self.sharded.is_replicated:
            self.sharded.average_gradients()
        if self.ends_window:  # Summed once per accumulation: a second sum would count each rank's copy again.
            self.sharded.reduce_partial()
            if self.pipelined is not None:
                self.pipelined.pipeline.tied.sum_gradients()
            fit.is_summed = True
        for name, parameter in self.sharded.parameters.items():
            if name not in used:
                parameter.grad = None
        self._reduced = used if self.ends_window else None

    def after_backward(self) -> None:
        """Sets the gradients of the tensors that the optimizers step, at the window's end."""
        fit, automatic = self._fit, self.module.automatic_optimization
        used, self._reduced = self._reduced, None
        if used is not None:
            fit.shares.set_grads(used)
            fit.is_open = not automatic
            if automatic:
                fit.usage.used.clear()
        if not automatic:
            self._allow_inner_backwards()

    def _used(self, automatic: bool) -> set[str]:
        """Returns the parameters that any rank has used in this step.

        Raises:
            DloError: Parameters have no gradient, and ``find_unused`` is off.
        """
        usage = self._fit.usage
        used = set(usage.used)
        if self._shard.find_unused:
            trained = [name for name, parameter in self.sharded.parameters.items() if parameter.requires_grad]
            flags = self.sharded.any_rank([name in used for name in trained])
            used = {name for name, flag in zip(trained, flags, strict=True) if flag}
            used |= self._tied_on_any_rank(used)
            usage.used |= used
        elif automatic and self.ends_window and (absent := usage.absent()):
            raise DloError(unused_message(absent, self._allow_unused))
        return used

    def _tied_on_any_rank(self, names: Iterable[str]) -> set[str]:
        """Returns the parameters tied across stages that are among ``names`` on any of their ranks."""
        if self.pipelined is None:
            return set()
        tied = self.pipelined.pipeline.tied.named_on_any_rank({name.removeprefix(_MODEL) for name in names})
        return {f"{_MODEL}{name}" for name in tied}

    # --- state of module and optimizers --------------------------------------------------------------------

    def state_bytes(self, optimizers: list[Optimizer]) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        held: list[Tensor] = list(self.sharded.parameters.values())
        if self._state is not None:
            held += self._state.usage.gathered.values()
            held += [tensor for optimizer in optimizers for tensor in self.shares.tensors(optimizer).values()]
        return state_bytes(held, optimizers)

    @property
    def shares(self) -> OptimizerShards:
        """Shards that the optimizers step."""
        return self._fit.shares

    # --- unfinished accumulations --------------------------------------------------------------------------

    @torch.no_grad()
    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, averaged over the ranks.

        Partial sums, which the accumulation's end completes, are completed here in copies, because a checkpoint must
        load on any mesh. The run continues with the partial sums; they are returned too, under names of their own, so
        that one that resumes on the same mesh adds in the same order.
        """
        if self.pipelined is not None:
            self.pipelined.pipeline.drain()
        gradients = self._averaged_gradients()
        if self._fit.is_summed:
            return gradients
        tied = self._tied_on_any_rank(gradients)
        for name in tied - gradients.keys():  # Only another stage has used it.
            zeros = like_gradient(self.sharded.parameters[name])
            gradients[name] = attach_slice(zeros, self.sharded.layout.slices.get(name))
        slices = self.sharded.layout.slices
        for name, key in ((name, self._partial_key(name)) for name in list(gradients)):
            if key is not None:
                gradients[key] = attach_slice(_memory(gradients[name]).clone(), slices.get(name))
        self.sharded.reduce_partial({name: _memory(gradient) for name, gradient in gradients.items()})
        if self.pipelined is not None:
            shares = {name.removeprefix(_MODEL): _memory(gradients[name]) for name in tied}
            self.pipelined.pipeline.tied.sum_tensors(shares)
        return gradients

    @torch.no_grad()
    def delayed_gradients(self) -> tuple[dict[str, Shard] | None, float] | None:
        """Returns the gradients that the next step applies, complete as in :meth:`accumulated_gradients`, and a loss.

        The micro-batches in flight end first; the run goes on as without it. None if gradients are not delayed, or no
        step has run; no gradients in the first accumulation.
        """
        delayed = self.pipelined.pipeline.drain() if self.pipelined is not None else None
        if delayed is None:
            return None
        assert self.pipelined is not None
        loss = float(self.sharded.mean(delayed.loss.clone()))
        if delayed.gradients is None:
            return None, loss
        copies = {name: gradient.detach().clone() for name, gradient in delayed.gradients.items()}
        gradients = {f"{_MODEL}{name}": gradient for name, gradient in copies.items()}
        self.sharded.average(gradients)
        self.sharded.reduce_partial(gradients)
        self.pipelined.pipeline.tied.sum_tensors(copies)
        slices = self.sharded.layout.slices
        return {name: attach_slice(gradient, slices.get(name)) for name, gradient in gradients.items()}, loss

    @torch.no_grad()
    def restore_delayed_gradients(self, saved: Mapping[str, Any] | None, loss: float) -> None:
        """Restores the gradients that the next step applies; ranks that sum one restore it once, as above."""
        assert self.pipelined is not None
        value = torch.tensor(loss, dtype=torch.float64, device=self.sharded.device)
        if saved is None:
            self.pipelined.pipeline.delayed = DelayedStep(None, value)
            return
        gradients, restored = as_lazy_state_dict(saved), dict[str, Tensor]()
        for name, parameter in self.sharded.parameters.items():
            if name in gradients:
                gradient = like_gradient(parameter)
                if self._restores_sum(name):
                    gradients.read_into(name, attach_slice(gradient, self.sharded.layout.slices.get(name)))
                restored[name.removeprefix(_MODEL)] = gradient
        self.pipelined.pipeline.delayed = DelayedStep(restored, value)

    def _averaged_gradients(self) -> dict[str, Shard]:
        parameters, gathered = self.sharded.parameters, self._fit.usage.gathered
        wholes = {name: whole.grad for name, whole in gathered.items() if whole is not parameters.get(name)}
        # Ranks may have used different parameters, but must call the same reductions.
        anywhere = functools.partial(self.sharded.any_rank, of_all_copies=True)
        unreduced = anywhere([wholes.get(name) is not None for name in parameters])
        reduced = anywhere([parameter.grad is not None for parameter in parameters.values()])
        averaged: dict[str, Shard] = {}
        for (name, parameter), adds, has in zip(parameters.items(), unreduced, reduced, strict=True):
            if not adds and not has:
                continue
            part = like_gradient(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            if adds:
                whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.sharded.device)
                gradient = wholes.get(name)
                if gradient is not None:
                    whole.copy_(gradient)
                mine = local_shard(self.sharded.mean(whole, name in self.sharded.layout.experts), parameter)
                local_tensor(part).add_(mine.to(local_tensor(part).device))  # With offload, the shard is in CPU memory.
            elif parameter.ndim == 0 or self.sharded.is_replicated:
                part = self.sharded.mean(part, name in self.sharded.layout.experts)
            self.sharded.average_copies(local_tensor(part))
            averaged[name] = attach_slice(part, self.sharded.layout.slices.get(name))
        return averaged

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation, to which the next micro-batches add their gradients.

        Saved gradients are complete sums. Partial and tied gradients are summed again at the accumulation's end, so
        each of their ranks restores its own part. On another mesh than the checkpoint's, only one of them restores the
        sum, and the others begin with zeros.
        """
        fit, gradients = self._fit, as_lazy_state_dict(saved)
        for name, parameter in self.sharded.parameters.items():
            if name in gradients:
                parameter.grad = like_gradient(parameter)
                key = self._partial_key(name)
                if key not in gradients:
                    key = name if self._restores_sum(name) else None
                if key is not None:
                    gradients.read_into(key, attach_slice(parameter.grad, self.sharded.layout.slices.get(name)))
                fit.usage.used.add(name)
        fit.is_open, fit.is_summed = True, False

    def _partial_key(self, name: str) -> str | None:
        """Returns the name of this rank's part of a gradient, among ranks that sum it; None for a complete gradient."""
        place, key = self.sharded.groups.coordinates, ""
        ranks = self.pipelined.pipeline.tied.ranks_of(name.removeprefix(_MODEL)) if self.pipelined is not None else ()
        if ranks:
            key += f"@pp{place.pp}of{'+'.join(map(str, ranks))}"
        if name in self.sharded.layout.partial:
            key += f"@tp{place.tp}of{self.sharded.groups.spec.tp}"
        return f"{name}{key}" if key else None


def _memory(gradient: Shard) -> Tensor:
    """Returns the tensor of a gradient's shard."""
    part = gradient.shard if isinstance(gradient, SlicedShard) else gradient
    assert isinstance(part, Tensor)
    return part
