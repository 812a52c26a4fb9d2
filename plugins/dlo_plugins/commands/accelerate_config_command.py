"""``dlo config from-accelerate``: a config of Hugging Face Accelerate as a config of dlo."""

from __future__ import annotations

from pathlib import Path

from dlo_framework.cli.command_parser import CommandParser

_HELP = """Print the file that `accelerate config` wrote as the trainer section of a config.

  dlo config from-accelerate default_config.yaml > machine.yaml
  dlo fit --config my.yaml --config machine.yaml

Devices, machines, precision, FSDP, DeepSpeed, parallelism and compilation are translated. Comments name what has no
place there. Neither Accelerate nor torch is imported.

exit codes: 0, or 2 for a file or a value that dlo does not have"""


def main(argv: list[str]) -> int:
    """Print a config of Hugging Face Accelerate as the trainer section of a config.

    Example:
        dlo config from-accelerate default_config.yaml
    """
    parser = CommandParser("dlo config from-accelerate", description=_HELP)
    parser.add_argument("file", metavar="FILE", help="YAML or JSON file that `accelerate config` wrote")
    options = parser.parse_args(argv or ["--help"])
    from dlo_plugins.commands.accelerate_translation import to_yaml

    print(to_yaml(Path(options.file)), end="")
    return 0
