"""``dlo lr-find``: tries learning rates before a training, and suggests one."""

from __future__ import annotations

from dlo_framework.cli.command_table import HELP_ALL, HELP_WORDS
from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.run import train

HELP = """usage: dlo lr-find --config FILE [--KEY VALUE ...]

Try learning rates before a training, and suggest one. Nothing is trained, validated or saved.

  --config FILE               config of the training: a path, or a name that `dlo configs` lists
  --KEY VALUE                 any option of `dlo fit`; `dlo fit --help` lists them, but no --ckpt_path
  --trainer.callbacks+ LRFinder --trainer.callbacks.KEY VALUE
                              option of the sweep, such as num_steps or min_lr; `dlo plugins show LRFinder` lists them
  --help-all                  every key of the Trainer, with types and defaults

examples:
  dlo lr-find --config quickstart
  dlo lr-find --config my.yaml --trainer.callbacks+ LRFinder --trainer.callbacks.num_steps 50"""


def main(argv: list[str]) -> int:
    """Try learning rates before a training, and suggest one.

    Example:
        dlo lr-find --config my.yaml
    """
    if any(word in HELP_WORDS for word in argv):
        print(HELP)
        return 0
    config_scan = scan(["fit", *("--help" if word == HELP_ALL else word for word in argv)])

    def build() -> None:
        from dlo_plugins.schedules.lr_finder import find_lr

        find_lr(config_scan)

    return train(config_scan, build)
