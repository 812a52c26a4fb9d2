"""Short runs of commands such as ``dlo profile``: some steps of a config, in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.defaults import EndCheckpoint
from dlo_framework.errors import DloError
from dlo_framework.stop import GracefulStop
from dlo_framework.trainer import Trainer


class ShortTrainer(Trainer):
    """Trainer without validation and checkpoints; GracefulStop stays, which saves nothing before the first step."""

    def _run_callbacks(
        self, users: list[Callback], run_folder: Path, model: LightningModule, config: str
    ) -> list[Callback]:
        every = super()._run_callbacks(users, run_folder, model, config)
        stop = [each for each in every if isinstance(each, GracefulStop)]
        return [*(each for each in every if not isinstance(each, Checkpoint | EndCheckpoint)), *stop]


def open_run(found: ConfigScan, name: str, reasons: dict[str, str]) -> DloCLI:
    """Builds the parts of a short run.

    Args:
        found: Scanned command line, with ``fit`` as its command.
        name: Name of the command.
        reasons: Why ``fast_dev_run`` and ``ckpt_path`` must be unset.

    Raises:
        DloError: An option rules the run out.
    """
    cli = DloCLI(found, f"dlo {name}", f"The options of `dlo {name}` are those of `dlo fit`.")
    fast, path = cli.options.trainer.fast_dev_run, cli.options.ckpt_path
    for option, value in (("trainer.fast_dev_run", fast), ("--ckpt_path", path)):
        if value:
            reason = reasons[option.rpartition(".")[2].removeprefix("--")]
            raise DloError(f"{name}: {option} must be unset; remove it: {reason}")
    cli.build()
    return cli


def train_briefly(
    cli: DloCLI, name: str, callbacks: list[Callback], cls: type[ShortTrainer] = ShortTrainer, **options: Any
) -> Path:
    """Trains in a folder under the command's name, so that the config's first run is still ``version_0``.

    Args:
        cli: Command line that :func:`open_run` returned.
        name: Name of the command.
        callbacks: Callbacks in place of the config's.
        cls: Class of the trainer.
        options: Arguments of the trainer in place of the config's.

    Returns:
        The run's folder.
    """
    callbacks = [each for each in callbacks if not isinstance(each, Checkpoint)]
    cli.runs()  # Sets the name.
    options |= {"run_name": f"{cli.options.run.name}/{name}", "num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = cli.make_trainer(cls, callbacks=callbacks, **options)
    trainer.fit(cli.model, datamodule=cli.datamodule)
    assert trainer.run_folder is not None
    return trainer.run_folder
