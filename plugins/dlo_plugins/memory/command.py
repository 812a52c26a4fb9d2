"""``dlo remat``: prints the schedule that Rotor chooses within a memory budget, before a run."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError, check_number

_LINK = "50GB/s"
_HELP = """Print which blocks of a config's model are kept and which are recomputed within a memory budget.

No process is started, and no memory for the model is needed: bytes and times of the blocks are those of `dlo plan`, and
of the times only the ratios count."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override. With the
callback Rotor, a run measures the times itself.

exit codes: 0, or 2 for bad input, such as a budget in which no schedule fits"""


def main(argv: list[str]) -> int:
    """Print the schedule of recomputation within a memory budget, before a run.

    Example:
        dlo remat --config my.yaml --budget 12GB --png schedule.png

    Raises:
        DloError: If the input is invalid, or no schedule fits in the budget.
    """
    parser = CommandParser("dlo remat", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--budget", default="60%", help="memory for a rank's activations: 12GB, or 60%% of all kept")
    parser.add_argument("--offload", action="store_true", help="also copy activations to the host")
    parser.add_argument("--link", help="rate of these copies in each direction (default: 50GB/s, PCIe 5)")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: devices x num_nodes; for auto, those of the axes)"
    )
    parser.add_argument("--micro-batch", type=int, help="samples of a rank's batch (default: the datamodule's)")
    parser.add_argument("--png", help="file for the picture of the first rank's schedule")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, found = parser.parse_with_run(argv)
    for key in ("ranks", "micro_batch"):
        value = getattr(options, key)
        check_number(f"remat: --{key.replace('_', '-')}", value, "at least 1", "leave it out")

    with prepared_process(found):
        from dlo_plugins.memory.planning import Budget
        from dlo_plugins.memory.scheduled_blocks import parse_link
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun

        budget = Budget.parse(options.budget)
        if budget.is_auto:
            raise DloError(
                "remat: --budget must be a size or a share, got auto, which a run measures; give 12GB or 60%"
            )
        if options.link is not None and not options.offload:
            raise DloError(f"remat: --link must come with --offload, got {options.link} without; add --offload")
        link = parse_link(options.link or _LINK)
        if link is None:
            raise DloError("remat: --link must be a rate, got auto, which a run measures; give 25GB/s")
        run = SimulatedRun(found, options.ranks, "dlo remat", infers_ranks=True)
        from dlo_plugins.plan.run_memory import predict_chains

        count = run.trainer.world_size
        ranks = predict_chains(run.user_config, run.model, run.datamodule, count, options.micro_batch)
    from dlo_plugins.memory.planning import describe_plan, plan_ranks, to_json

    if options.offload:
        ranks = [replace(rank, link=link) for rank in ranks]
    plans = plan_ranks(ranks, budget)
    if options.png:
        _draw(plans[0][0], options.png)
    if options.json:
        print(json.dumps([[to_json(plan) for plan in own] for own in plans], indent=1))
        return 0
    for place, own in enumerate(plans):
        for plan in own:
            print((f"pipeline rank {place}: " if len(plans) > 1 else "") + describe_plan(plan))
    return 0


def _draw(plan: Any, path: str) -> None:
    from dlo_plugins.memory.planning import draw_schedule

    if importlib.util.find_spec("matplotlib") is None:
        raise DloError("remat: --png needs matplotlib, which is not installed; pip install 'dlo_framework[plots]'")
    figure = draw_schedule(plan.measured.chain, plan.schedule, plan.measured.stem, plan.budget, plan.link)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DloError(f"remat: --png must be a file that can be written, got {path} ({error}); name a .png") from error
