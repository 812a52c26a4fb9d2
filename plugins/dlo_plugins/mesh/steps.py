"""Runs the steps of a sharded module on a mesh: forward, backward, and the reduction of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.checkpoint import CutShard, Shard
from dlo_framework.checkpoint.shards import with_cut
from dlo_framework.distributed.unused import unused_message
from dlo_framework.errors import DloError
from dlo_plugins.appliers.context_parallel import ContextParallel
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.fsdp.optimizers import OptimizerShares
from dlo_plugins.fsdp.state import ShardedState
from dlo_plugins.mesh.pipelined import PipelinedTask

#: Prefix of the model's parameters in the task's names; the pipeline uses names without it.
_MODEL = "model."


class MeshSteps(ShardedState):
    """Part of MeshStrategy that runs steps.

    Attributes:
        fully_shard: Applier that shards state over the ranks that share a copy of the model.
    """

    fully_shard: FullyShard
    #: Fix in the message about parameters without a gradient.
    allow_unused = (
        "set find_unused by the strategy's `appliers: [{class_path: FullyShard, init_args: {find_unused: true}}]`"
    )
    #: Runs the steps where the model is cut into a pipeline's stages.
    pipelined: PipelinedTask | None = None
    #: Applier that shards sequences over ranks.
    _context: ContextParallel

    def __init__(self, timeout_minutes: float) -> None:
        super().__init__(timeout_minutes)
        self._last = True  # whether the running backward is the last of its accumulation

    def _shard_batch(self, batch: Any) -> Any:
        """Returns this rank's shard of a batch that the ranks of one model share."""
        return batch

    @contextlib.contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Makes each rank run the model on full sequences inside the block; cp ranks then write the same text."""
        with self._context.local():
            yield

    # --- a step --------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's training step, with its parameters gathered."""
        assert self.sharding is not None
        with self._reset_on_error(), self.precision_plugin.train_step_context():
            if self.pipelined is None:
                return self.sharding.call("training_step", self._shard_batch(batch), *args)
            self._open_window()
            self.sharding.set_sync(False)
            self.sharding.set_keep_gathered(True)
            found = self.sharding.call(self.pipelined.train, self._shard_batch(batch), self._loss_scale())
            assert self._usage is not None
            self._usage.record_accumulated()
            return found

    def validation_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's validation step, with its parameters gathered."""
        assert self.sharding is not None
        with self._reset_on_error(), self.precision_plugin.val_step_context():
            if self.pipelined is not None:
                return self.sharding.call(self.pipelined.evaluate, self._shard_batch(batch))
            return self.sharding.call("validation_step", self._shard_batch(batch), *args)

    def test_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's test step, with its parameters gathered."""
        assert self.sharding is not None
        with self._reset_on_error(), self.precision_plugin.test_step_context():
            if self.pipelined is not None:
                return self.sharding.call(self.pipelined.evaluate, self._shard_batch(batch))
            return self.sharding.call("test_step", self._shard_batch(batch), *args)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        """Runs the module's predict step, with its parameters gathered."""
        assert self.sharding is not None
        with self._reset_on_error(), self.precision_plugin.predict_step_context():
            if self.pipelined is not None:
                return self.sharding.call(self.pipelined.predict, batch, *args)
            return self.sharding.call("predict_step", batch, *args)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs a backward pass; resets the sharding if it raises."""
        with self._reset_on_error():
            return super().backward(*args, **kwargs)

    @contextlib.contextmanager
    def _reset_on_error(self) -> Iterator[None]:
        """Resets the sharding if a step raises; a search for the largest batch catches the error."""
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
        """Frees the parameters that the evaluation gathered, since the next may have other weights."""
        self._free_gathered()

    on_test_end = on_predict_end = on_train_end = on_validation_end

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Drops the gradients of the last step, to which FSDP would add."""
        assert self.sharding is not None
        self._open_window()
        self.sharding.set_keep_gathered(False)
        self.sharding.set_sync(self._last or self.fully_shard.sync_every_micro_batch)

    def _open_window(self) -> None:
        """Begins an accumulation, unless one is open."""
        assert self._shares is not None
        assert self._usage is not None
        self._usage.announced = True
        automatic, is_open = self._module().automatic_optimization, self._open
        # Parameters with dropped gradients count as unused: in manual optimization another backward may come first.
        self._usage.used -= self._shares.drop_gradients(
            lambda share: not is_open or (not automatic and OptimizerShares.grads_dropped(share))
        )
        if self._complete:
            self._keep_one_sum()
        self._open, self._complete = True, False

    @torch.no_grad()
    def _keep_one_sum(self) -> None:
        """Keeps summed gradients on one rank and zeroes the others' copies, since they will be summed again.

        In manual optimization a backward may add to them before a step.
        """
        assert self.sharding is not None
        for name, parameter in self.sharding.parameters.items():
            if parameter.grad is not None and not self._restores_sum(name):
                parameter.grad.zero_()

    def _loss_scale(self) -> Tensor:
        """Returns Lightning's factor of the loss for backward, from accumulation and the loss scale."""
        trainer = self._module().trainer
        scale = torch.ones((), device=self.root_device) / trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scale if scaler is None else scaler.scale(scale)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Reduces the gradients and sets those of the optimizer shards."""
        assert self.sharding is not None
        assert self._shares is not None
        assert self._usage is not None
        self._usage.announced = False
        automatic = self._module().automatic_optimization
        if self._last or self.fully_shard.sync_every_micro_batch:
            used = self._used(automatic)
            self.sharding.average_scalars()
            if self._last:  # Summed once per accumulation: a second sum would count each rank's copy again.
                self.sharding.reduce_partial_gradients()
                if self.pipelined is not None:
                    self.pipelined.pipeline.tied.sum_gradients()
                self._complete = True
            for name, parameter in self.sharding.parameters.items():
                if name not in used:
                    parameter.grad = None
            if self._last:
                self._shares.set_grads(used)
                self._open = not automatic
                if automatic:
                    self._usage.used.clear()

    def _used(self, automatic: bool) -> set[str]:
        """Returns the parameters that any rank has used in this step.

        Raises:
            DloError: Parameters have no gradient, and ``find_unused`` is off.
        """
        assert self.sharding is not None
        assert self._usage is not None
        used = self._usage.used
        if self.fully_shard.find_unused:
            trained = [name for name, parameter in self.sharding.parameters.items() if parameter.requires_grad]
            bits = torch.tensor([name in used for name in trained], dtype=torch.uint8, device=self.root_device)
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.sharding.groups.data)
            used = {name for name, bit in zip(trained, bits.tolist(), strict=True) if bit}
            used |= self._tied_on_any_rank(used)
            self._usage.used |= used
        elif automatic and self._last and (absent := self._usage.absent()):
            raise DloError(unused_message(absent, self.allow_unused))
        return set(used)

    def _tied_on_any_rank(self, names: Iterable[str]) -> set[str]:
        """Returns the parameters tied across stages that are among ``names`` on any of their ranks."""
        if self.pipelined is None:
            return set()
        found = self.pipelined.pipeline.tied.anywhere({name.removeprefix(_MODEL) for name in names})
        return {f"{_MODEL}{name}" for name in found}

    @torch.no_grad()
    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, averaged over the ranks.

        Partial sums, which the accumulation's end completes, are completed here in copies, because a checkpoint must
        load on any mesh. The run continues with the partial sums.
        """
        assert self.sharding is not None
        found = super().accumulated_gradients()
        if self._complete:
            return found
        tied = self._tied_on_any_rank(found)
        for name in tied - found.keys():  # Only another stage has used it.
            zeros = torch.zeros_like(self.sharding.parameters[name])
            found[name] = with_cut(zeros, self.sharding.layout.cuts.get(name))
        self.sharding.reduce_partial({name: _memory(gradient) for name, gradient in found.items()})
        if self.pipelined is not None:
            shares = {name.removeprefix(_MODEL): _memory(found[name]) for name in tied}
            self.pipelined.pipeline.tied.sum(shares)
        return found

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Marks the micro-batches of an accumulation that no step follows."""
        self._last = False
        try:
            yield
        finally:
            self._last = True


def _memory(gradient: Shard) -> Tensor:
    """Returns the tensor of a gradient's shard."""
    part = gradient.part if isinstance(gradient, CutShard) else gradient
    assert isinstance(part, Tensor)
    return part
