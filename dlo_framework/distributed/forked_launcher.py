"""`ForkedLauncher`: starts a run's ranks as copies of a notebook's process, and brings the results back into it.

A notebook has no script that ranks could run, so that its process is forked, as under Lightning's `ddp_notebook`. All
ranks are copies; the notebook's own process waits. Its objects must not have used CUDA before.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessRaisedException

from dlo_framework.checkpoint import load, save
from dlo_framework.distributed.control_group import control_group
from dlo_framework.errors import DloError
from dlo_framework.random_streams import seed_generators

#: Name of the weights' checkpoint in the temporary folder.
_WEIGHTS = "weights.ckpt"


class ForkedLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for strategies that shard weights too.

    Lightning's (2.6.6) saves rank 0's ``state_dict``, which under a sharding strategy is not the model's. This one
    saves a canonical checkpoint on all ranks, from which the notebook's module gets its weights. It overrides the two
    private methods that collect and restore results.

    Args:
        strategy: Strategy of the run.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")
        self._folder = ""

    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the ranks, calls the function on each, and returns rank 0's result once all have ended.

        Raises:
            DloError: Torch refuses backward in forked ranks, for what an earlier cell has done.
        """
        self._folder = tempfile.mkdtemp(prefix="dlo-notebook-")
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            if "autograd's threading" not in str(error):
                raise
            raise DloError(
                "ranks of a notebook must be forked before its process starts autograd's threads for devices, which an"
                " earlier cell has started (a plan, a prediction of memory, or a backward on a GPU); restart the kernel"
                " and train on several ranks first, or write a script (%%writefile train.py) and run it"
            ) from error
        finally:
            shutil.rmtree(self._folder)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        """Saves the trained weights on all ranks, and returns rank 0's results."""
        path = None
        if trainer.state.fn == TrainerFn.FITTING:
            path = str(Path(self._folder) / _WEIGHTS)
            save({"state_dict": trainer.strategy.lightning_module_state_dict()}, path, group=control_group(trainer))
        if not trainer.is_global_zero:
            return None
        saver: Any = trainer.checkpoint_callback
        best = getattr(saver, "best_model_path", None)
        extra = {**self.get_extra_results(trainer), "seed": torch.initial_seed()}
        return _WorkerOutput(best, path, trainer.state, results, extra)

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: Trainer) -> None:
        """Gives the notebook's trainer, module and random numbers what rank 0 and the trained weights have."""
        saver: Any = trainer.checkpoint_callback
        if worker_output.best_model_path is not None and saver is not None:
            saver.best_model_path = str(worker_output.best_model_path)
        if worker_output.weights_path is not None:
            module = trainer.strategy.lightning_module
            assert module is not None
            module.configure_model()  # The ranks have built their own.
            module.load_state_dict(load(worker_output.weights_path)["state_dict"], strict=False)
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)
        seed_generators(worker_output.extra["seed"])
