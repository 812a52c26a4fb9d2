"""The command line of ``dlo fit`` for comparisons: parsed once, and built and trained as often as it takes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from dlo_framework.cli.lightning_cli import DEFAULT_SEED, DloCLI, check_strategy
from dlo_framework.cli.scan import Scan
from dlo_framework.errors import DloError
from dlo_framework.testing.record import Record
from dlo_framework.testing.training import Setting, quiet, record_training, trainer_options


class ParityCLI(DloCLI):
    """``dlo fit`` that builds nothing until :meth:`train`, and makes no run folder.

    Args:
        found: the scanned command line, with ``fit`` as its command.
    """

    def __init__(self, found: Scan) -> None:
        self._is_open = False
        quiet()
        super().__init__(found)
        config = self.config[self.command]
        if config.ckpt_path:
            raise DloError("parity begins with the weights that the config names; remove --ckpt_path")
        check_strategy(config.trainer.strategy)
        self._is_open = True

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses, under the command's own name."""
        self._subcommand_parsers[self.command].prog = "dlo parity"
        super().parse_arguments(parser, args)

    def instantiate_classes(self) -> None:
        """Builds model and data, once :meth:`train` asks for them."""
        if self._is_open:
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Checks the parts; the trainer is made with what records it."""
        self._check_parts(self._get(self.config_init, "trainer"))

    def _run_subcommand(self, subcommand: str) -> None:
        """Runs nothing: Lightning (2.6) would start the command as the last thing of its constructor."""

    def train(self, setting: Setting) -> Record:
        """Builds everything anew, trains, and returns what happened.

        Raises:
            DloError: on what the trainer or a part refuses.
        """
        seed_everything(setting.seed, workers=True, verbose=False)
        self.instantiate_classes()
        options = dict(self._get(self.config_init, "trainer"))
        strategy = options["strategy"] if setting.ranks is not None else "auto"
        try:
            return record_training(self.model, self.datamodule, options, setting, strategy, self._make_trainer)
        except MisconfigurationException as error:
            raise DloError(str(error)) from error

    def check(self, ranks: int) -> None:
        """Builds what so many ranks would train, for what they would refuse: they take seconds to start.

        Raises:
            DloError: likewise.
        """
        self.instantiate_classes()
        options = dict(self._get(self.config_init, "trainer"))
        setting = Setting(steps=1, seed=self.seed(), ranks=ranks)
        self._build_trainer(trainer_options(options, setting, options["strategy"]) | {"callbacks": None})

    def _make_trainer(self, options: dict[str, Any]) -> Trainer:
        return self._build_trainer(options)

    def seed(self) -> int:
        """Returns the config's seed; dlo's own where it is to be random, or none."""
        seed = self.config[self.command].seed_everything
        return DEFAULT_SEED if isinstance(seed, bool) or seed is None else int(seed)

    def devices(self) -> int:
        """Returns how many ranks the config asks for, at least 2."""
        devices = self.config[self.command].trainer.devices
        if isinstance(devices, list):
            return max(2, len(devices))
        return max(2, int(devices)) if str(devices).isdigit() else 2

    def precision(self) -> Any:
        """Returns the config's precision."""
        return self.config[self.command].trainer.precision

    def strategy_name(self) -> str:
        """Returns the config's strategy as people call it."""
        strategy = self.config[self.command].trainer.strategy
        return strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]
