"""The plug-in of the runs: rank 0 writes down when it comes where, each rank its process."""

import os
import time

from lightning.pytorch import Callback


class Marks(Callback):
    """Appends lines ``TIME PLACE STEP`` to the file that ``CHAOS_MARKS`` names."""

    def _mark(self, trainer, place: str, every_rank: bool = False) -> None:
        if trainer.is_global_zero or every_rank:
            line = f"{time.time()} {place} {trainer.global_step}\n".encode()
            file = os.open(os.environ["CHAOS_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)

    def setup(self, trainer, pl_module, stage):
        self._mark(trainer, f"pid-{trainer.global_rank}-{os.getpid()}", every_rank=True)

    def on_train_batch_start(self, trainer, *_):
        self._mark(trainer, "batch")  # In the first one what compiles does so.

    def on_train_batch_end(self, trainer, *_):
        self._mark(trainer, "step")

    def on_validation_start(self, trainer, *_):
        if not trainer.sanity_checking:
            self._mark(trainer, "validation")

    def on_save_checkpoint(self, trainer, *_):
        self._mark(trainer, "save")

    def on_train_end(self, trainer, *_):
        self._mark(trainer, "end")
