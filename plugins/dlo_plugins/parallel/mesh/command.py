"""``dlo mesh``: draws the mesh of a config without starting a process."""

from __future__ import annotations

import json

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.cli.run import prepared_process
from dlo_framework.config_only import config_only
from dlo_framework.errors import check_number
from dlo_framework.strategy_abilities import ArrangesRanks
from dlo_framework.strategy_contract import contract_of

_HELP = """Draw the mesh of a config: the coordinates of each rank on the axes, and its shards of the model.

No process is started, and no weights or data are read: the model is built on the meta device."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override, such as
--trainer.strategy.init_args.tp 4.

exit codes: 0, or 2 for bad input, such as a mesh that does not fit the model or the ranks"""


def main(argv: list[str]) -> int:
    """Draw which rank holds which shards of a model, without starting a process.

    Example:
        dlo mesh --config my.yaml --ranks 16

    Raises:
        DloError: If the input is invalid, the strategy has no mesh, or the mesh does not fit.
    """
    parser = CommandParser("dlo mesh", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--ranks", type=int, help="number of ranks (default: trainer.devices x trainer.num_nodes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, config_scan = parser.parse_with_run(argv)
    check_number("mesh: --ranks", options.ranks, "at least 1")

    with prepared_process(config_scan), config_only("dlo mesh"):
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun

        run = SimulatedRun(config_scan, options.ranks, "dlo mesh")
        mesh = contract_of(run.trainer.strategy).ability(ArrangesRanks, "dlo mesh")
        description = mesh.describe(run.model, run.datamodule)
        for frozen in run.second_models():
            twin = frozen.check(run.model, run.datamodule)
            description = description.beside(mesh.describe(twin, run.datamodule, dtype=frozen.dtype), frozen.offload)
    print(json.dumps(description.to_json(), indent=1) if options.json else description.text())
    return 0
