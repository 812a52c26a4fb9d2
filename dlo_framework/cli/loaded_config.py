"""`load_config`: trainer, model and data of a config as objects, for scripts and notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.config_scan import ConfigScan, scan
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from dlo_framework.trainer import Trainer


@dataclass
class LoadedConfig:
    """Objects of a config, ready to fit.

    Attributes:
        trainer: Trainer, whose first fit creates the run folder.
        model: Module.
        data: Datamodule; None if the config has none.
    """

    trainer: Trainer
    model: LightningModule
    data: LightningDataModule | None

    def fit(self, ckpt_path: str | Path | None = None) -> None:
        """Trains, as ``dlo fit --ckpt_path`` does."""
        self.trainer.fit(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def validate(self, ckpt_path: str | Path | None = None) -> Any:
        """Evaluates on the validation data; returns the metrics."""
        return self.trainer.validate(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def test(self, ckpt_path: str | Path | None = None) -> Any:
        """Evaluates on the test data; returns the metrics."""
        return self.trainer.test(self.model, datamodule=self.data, ckpt_path=ckpt_path)

    def predict(self, ckpt_path: str | Path | None = None) -> Any:
        """Returns predictions."""
        return self.trainer.predict(self.model, datamodule=self.data, ckpt_path=ckpt_path)


def load_config(*configs: str | Path, options: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Builds the trainer, model and data of a config, as ``dlo fit --config`` does before it trains.

    Args:
        configs: Paths, or names of shipped configs, such as `quickstart`; later ones override earlier ones.
        options: Values by dotted key, such as `{"trainer.max_epochs": 3}`; they override the configs.

    Raises:
        DloError: If a config cannot be read, or a key or value is invalid.
    """
    if not configs:
        raise DloError("load_config must get a config, got none; pass a path or a name, such as 'quickstart'")
    words = [word for config in configs for word in ("--config", str(config))]
    words += [f"--{key}={_to_text(value)}" for key, value in (options or {}).items()]
    found = scan(["fit", *words])
    with prepared_process(found):
        return _build(found)


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, Path) else json.dumps(value)


def _build(found: ConfigScan) -> LoadedConfig:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from dlo_framework.cli.lightning_cli import DloCLI
    from dlo_framework.trainer import Trainer

    cli = DloCLI(found, "load_config")
    if cli.options.ckpt_path:
        raise DloError("load_config: ckpt_path must be unset; pass it to fit, validate, test or predict")
    try:
        cli.build()
        return LoadedConfig(cli.make_trainer(Trainer), cli.model, cli.datamodule)
    except MisconfigurationException as error:
        raise DloError(str(error)) from error
