"""Command line of ``dlo fit`` for ``dlo parity``: parsed once, then built and trained several times."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DEFAULT_SEED, DloCLI
from dlo_framework.errors import DloError
from dlo_framework.run_setup import check_strategy
from dlo_framework.testing.record import Record
from dlo_framework.testing.training import Setting, record_training, silence_lightning, trainer_options


class ParityCLI(DloCLI):
    """``dlo fit`` that builds nothing until :meth:`train`, and makes no run folder.

    Args:
        found: Scanned command line, with ``fit`` as its command.
    """

    prog = "dlo parity"

    def __init__(self, found: ConfigScan) -> None:
        self._is_open = False
        silence_lightning()
        super().__init__(found)
        config = self.config[self.command]
        if config.ckpt_path:
            raise DloError("parity: --ckpt_path must be unset; remove it: both runs start from the config's weights")
        check_strategy(config.trainer.strategy)
        self._is_open = True

    def instantiate_classes(self) -> None:
        """Builds model and data when :meth:`train` or :meth:`check` calls it, not in the constructor."""
        if self._is_open:
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Checks the parts; :meth:`train` builds the trainer, with what records it."""
        self._check_parts(self._get(self.config_init, "trainer"))

    def _run_subcommand(self, subcommand: str) -> None:
        """Does nothing: Lightning (2.6) would start the command at the end of its constructor."""

    def train(self, setting: Setting) -> Record:
        """Builds model, data and trainer again, trains, and returns the record of the training.

        Raises:
            DloError: If the trainer or a part refuses its options.
        """
        seed_everything(setting.seed, workers=True, verbose=False)
        self.instantiate_classes()
        options = dict(self._get(self.config_init, "trainer"))
        strategy = options["strategy"] if setting.ranks is not None else "auto"
        try:
            return record_training(self.model, self.datamodule, options, setting, strategy, self._build_trainer)
        except MisconfigurationException as error:
            raise DloError(str(error)) from error

    def check(self, ranks: int) -> None:
        """Builds the run of ``ranks`` ranks in this process, so that errors show before ranks take seconds to start.

        Raises:
            DloError: If the trainer or a part refuses its options.
        """
        self.instantiate_classes()
        options = dict(self._get(self.config_init, "trainer"))
        setting = Setting(steps=1, seed=self.seed(), ranks=ranks)
        self._build_trainer(trainer_options(options, setting, options["strategy"]) | {"callbacks": None})

    def seed(self) -> int:
        """Returns the config's seed, or the default seed where the config asks for none or a random one."""
        seed = self.config[self.command].seed_everything
        return DEFAULT_SEED if isinstance(seed, bool) or seed is None else int(seed)

    def devices(self) -> int:
        """Returns the number of ranks that the config asks for, at least 2."""
        devices = self.config[self.command].trainer.devices
        if isinstance(devices, list):
            return max(2, len(devices))
        return max(2, int(devices)) if str(devices).isdigit() else 2

    def precision(self) -> Any:
        """Returns the config's precision."""
        return self.config[self.command].trainer.precision

    def strategy_name(self) -> str:
        """Returns the short name of the config's strategy."""
        strategy = self.config[self.command].trainer.strategy
        return strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]
