"""``dlo fit`` that builds its objects and does not train; `load_config` returns them."""

from __future__ import annotations

from typing import Any

from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.errors import DloError
from dlo_framework.trainer import Trainer


class ObjectCLI(DloCLI):
    """``dlo fit`` with a :class:`~dlo_framework.trainer.Trainer`, which makes the run folder when it fits."""

    prog = "load_config"
    trainer: Trainer

    def _parse_ckpt_path(self) -> None:
        """Refuses a checkpoint: the methods of the trainer take one."""
        if self.config[self.command].ckpt_path:
            raise DloError("load_config: ckpt_path must be unset; pass it to fit, validate, test or predict")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer."""
        config = self.config[self.command]
        self._runs()  # Sets the name.
        options = {**self._get(self.config_init, "trainer"), **kwargs}
        return Trainer(
            run_name=config.run.name,
            run_dir=config.run.dir,
            async_checkpoints=config.run.async_checkpoints,
            checkpoint_format=config.run.checkpoint_format,
            stop_grace=config.run.stop_grace,
            save_minutes=config.run.save_minutes,
            config=self._config_to_keep(),
            **options,
        )

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing: Lightning (2.6) would start the command at the end of its constructor."""
