"""``dlo quantise``: quantises a trained checkpoint, and reports accuracy, bytes and CPU latency before and after."""

from __future__ import annotations

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.run import train
from dlo_framework.errors import DloError

_HELP = """Quantise a trained checkpoint, and report accuracy, bytes and CPU latency before and after.

It runs in one process. Static activations are calibrated on the config's training data."""

_EPILOG = """All other options are those of `dlo validate`: --config, --ckpt_path (a path, best or last), and overrides.

exit codes: 0, or 2 for bad input"""


def main(argv: list[str]) -> int:
    """Quantise a trained checkpoint, and report accuracy, bytes and latency.

    Example:
        dlo quantise --config quickstart --ckpt_path best --scheme int8 --export model.onnx

    Raises:
        DloError: If the input is invalid.
    """
    parser = CommandParser("dlo quantise", description=_HELP, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--scheme", default="int8", help="int8, int8_static, int8_weights, int4_weights or fp8")
    parser.add_argument("--group-size", type=int, help="input features that share a scale, for int4_weights: 32 to 128")
    parser.add_argument("--skip", action="append", default=[], help="pattern of modules to leave in float; may repeat")
    parser.add_argument("--calibration-batches", type=int, default=8, help="training batches for int8_static")
    parser.add_argument(
        "--export", action="append", default=[], help="NAME.pt2, NAME.onnx, or a folder for transformers; may repeat"
    )
    parser.add_argument("--output", help="folder of report and exports (default: quantised-SCHEME in the run's folder)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options, words = parser.parse_known_args(argv)
    found = scan(["validate", *words])
    if not found.configs:
        raise DloError("quantise: --config must name a config, got none; add --config x.yaml")

    def build() -> None:
        from dlo_plugins.commands.quantise_cli import QuantiseCLI

        QuantiseCLI(found, options)

    return train(found, build)
