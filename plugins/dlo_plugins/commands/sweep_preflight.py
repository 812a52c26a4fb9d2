"""Check of a sweep before its trials: the parser reads configs of the space, and the task names its metric.

``python -m dlo_plugins.commands.sweep_preflight FILE`` is a process of its own, so that the sweep's own imports no
torch. ``FILE`` is JSON with ``configs``, paths of configs of trials, and ``words``, further options of ``dlo fit``. It
prints one JSON object as its last line: the metric and its mode, the number of validations of a full run, or the error.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError
from dlo_plugins.commands.sweep_command import without_configs


def inspect(configs: list[str], words: list[str]) -> dict[str, Any]:
    """Parses the configs, and instantiates the task of the first one; returns what it says of the run.

    Raises:
        DloError: A config has an unknown key or a wrong value.
    """
    together = scan(["fit", *(word for path in configs for word in ("--config", path)), *words])
    with prepared_process(together):
        from dlo_framework.cli.lightning_cli import DloCLI
        from dlo_framework.defaults import ASSUMED_METRIC
        from dlo_framework.run_setup import check_strategy
        from dlo_framework.testing.training import silence_lightning

        more = without_configs(together.argv[1:])
        first, *others = (["fit", "--config", path, *more] for path in configs)
        silence_lightning()
        cli = DloCLI(scan(first), "dlo sweep")
        cli.build()
        for words in others:
            check_strategy(cli.parser.parse_args(words).fit.trainer.strategy)
        metric, mode = getattr(cli.model, "best_metric", ASSUMED_METRIC) or (None, None)
        return {"metric": metric, "mode": mode, "validations": count_validations(cli.trainer_options)}


def count_validations(trainer: dict[str, Any]) -> int | None:
    """Returns the number of validations of a full run; None if it depends on more than the trainer's epochs."""
    epochs, every = trainer.get("max_epochs"), trainer.get("check_val_every_n_epoch")
    if not isinstance(epochs, int) or epochs < 1 or trainer.get("max_steps") not in (None, -1) or not every:
        return None
    interval = trainer.get("val_check_interval")
    if interval is None or (isinstance(interval, float) and interval <= 1):
        return math.ceil(epochs / every) * round(1 / (interval or 1.0))
    return None


def main(argv: list[str]) -> int:
    """Reads the file, and prints the result as JSON."""
    asked = json.loads(Path(argv[0]).read_text())
    try:
        found = inspect(asked["configs"], asked["words"])
    except DloError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
