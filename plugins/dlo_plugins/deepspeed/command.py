"""``dlo deepspeed-config``, and the options of DeepSpeed's scripts.

Scripts for DeepSpeed take ``--deepspeed --deepspeed_config ds.json``, which ``deepspeed.add_config_arguments`` defines,
so job files contain them.
"""

from __future__ import annotations

import json
import sys

from dlo_framework.cli.config_scan import CommandParser, ConfigScan, scan
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError, check_number

_HELP = """Translate between a config and a DeepSpeed JSON.

  dlo deepspeed-config --config x.yaml   prints the JSON that the run would use
  dlo deepspeed-config ds.json           prints the JSON as a config

For a strategy other than DeepSpeedBridge the JSON is the nearest equivalent: zero2 gives stage 2. No process starts."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

exit codes: 0, or 2 for bad input"""


def main(argv: list[str]) -> int:
    """Translate a config to a DeepSpeed JSON, or a DeepSpeed JSON to a config.

    Example:
        dlo deepspeed-config ds.json
    """
    parser = CommandParser("dlo deepspeed-config", description=_HELP, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, help="number of ranks (default: from the config or the JSON)")
    options, words = parser.parse_known_args(argv)
    check_number("deepspeed-config: --ranks", options.ranks, "at least 1")
    files = [word for word in words if word.endswith((".json", ".hjson"))]
    if len(words) == 1 and not words[0].startswith("-"):
        from dlo_plugins.deepspeed.translation import to_yaml

        print(to_yaml(words[0], options.ranks), end="")
        return 0
    config_scan = scan(["fit", *words])
    if not config_scan.configs:
        got = " ".join(files) or "neither"
        raise DloError(
            "deepspeed-config: the input must be a config (--config x.yaml), to print its JSON, or one JSON file"
            f" (ds.json), to print its config; got {got}"
        )
    for path, content in config_scan.configs.items():
        if "zero_optimization" in content:
            raise DloError(
                f"deepspeed-config: --config must be a config, got the DeepSpeed JSON {path}; to print its config, run"
                f" `dlo deepspeed-config {path}`"
            )
    print(_to_json(config_scan, options.ranks))
    return 0


def _to_json(config_scan: ConfigScan, ranks: int | None) -> str:
    with prepared_process(config_scan):
        from dlo_plugins.deepspeed.translation import to_json
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun

        run = SimulatedRun(config_scan, ranks, "dlo deepspeed-config")
    text = to_json(run.trainer, run.trainer_options, run.datamodule)
    if json.loads(text)["train_batch_size"] == "auto":
        print(
            'batch sizes are "auto", which `dlo fit` fills in: the batch size of this data is not known yet; to use the'
            " JSON with DeepSpeed alone, write numbers",
            file=sys.stderr,
        )
    return text


def use_json(file: str) -> dict[str, str]:
    """Returns dlo's options for ``--deepspeed_config FILE``.

    Raises:
        DloError: If no file is given.
    """
    if not file:
        raise DloError("--deepspeed_config must be a DeepSpeed JSON, got nothing; write --deepspeed_config ds.json")
    strategy = "--trainer.strategy"
    return {f"{strategy}.class_path": "DeepSpeedBridge", f"{strategy}.init_args.config": file}


def drop_switch(value: str) -> dict[str, str]:
    """Returns dlo's options for ``--deepspeed``, which has no further effect: none."""
    return {"": value} if value else {}
