"""``dlo plan`` ranks the parallel plans of a config; ``dlo remat`` prints its schedule of recomputation."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.cli.run import prepared_process
from dlo_framework.config_only import config_only
from dlo_framework.errors import DloError, check_number
from dlo_framework.units import parse_bytes
from dlo_plugins.plan.machine import load_machine

_HELP = """Find the parallel plan that trains a config's model fastest in a given memory.

No data, weights or GPU are needed: the model is profiled on fake tensors, and its times follow from the rates of a
machine. Only --measure starts processes, on the machine that it measures."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

exit codes: 0, or 2 for bad input, such as a memory that no plan fits"""


def main(argv: list[str]) -> int:
    """Rank the parallel plans of a config for some GPUs: time, memory and why.

    Example:
        dlo plan --config my.yaml --gpus 64 --nodes 8 --memory 80GB --machine h100

    Raises:
        DloError: If the input is invalid, the model cannot be profiled, or nothing fits.
    """
    parser = CommandParser("dlo plan", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--gpus", type=int, help="number of GPUs of all nodes (default: devices x num_nodes)")
    parser.add_argument("--nodes", type=int, help="number of nodes (default: from the machine's ranks of a node)")
    parser.add_argument("--memory", help="memory of a GPU, such as 80GB (default: the machine's)")
    parser.add_argument("--machine", help="a100, h100, h200, v100, cpu, or a file (default: h100)")
    parser.add_argument(
        "--measure", nargs="?", const="", help="measure this machine, write machine.yaml, and plan for it"
    )
    parser.add_argument("--batch", type=int, help="rows of a step on all GPUs (default: the config's)")
    parser.add_argument("--fix", action="append", default=[], metavar="KEY=VALUE", help="fixed value, such as tp=8")
    parser.add_argument("--top", type=int, default=5, help="number of plans (default: 5)")
    parser.add_argument("--out", type=Path, help="folder for the plans' configs, plan_1.yaml and so on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, config_scan = parser.parse_with_run(argv)
    check_options(options)

    if options.measure is None:
        load_machine(options.machine)  # Before torch is imported.
    with prepared_process(config_scan), config_only("dlo plan"):
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun
        from dlo_plugins.plan.plan_report import plan_run, report_json, report_text

        run = SimulatedRun(config_scan, 1, "dlo plan", unplanned=True)
        gpus, nodes = count_gpus(run.user_config, options)
        planned = plan_run(run.user_config, run.model, run.datamodule, gpus, nodes, options, len(run.second_models()))
    files = planned.write(options.out) if options.out is not None else []
    print(json.dumps(report_json(planned), indent=1) if options.json else report_text(planned))
    if files and not options.json:
        print(f"\nwritten to {options.out}: {files[0].name} to {files[-1].name}; dlo fit --config {files[0]}")
    if options.measure is not None and not options.json:
        print(f"the measured machine: --machine {options.machine}")
    return 0


def count_gpus(config: dict[str, Any], options: argparse.Namespace) -> tuple[int, int | None]:
    """Returns the numbers of GPUs and of nodes: those of the options, or else of the config.

    Raises:
        DloError: Neither says how many GPUs there are.
    """
    if options.gpus is not None:
        return options.gpus, options.nodes
    trainer = config.get("trainer") or {}
    devices, nodes = trainer.get("devices"), options.nodes or trainer.get("num_nodes") or 1
    if not isinstance(devices, int) or devices < 1:
        raise DloError(f"plan: --gpus must be set where trainer.devices has no number, got {devices}; set --gpus 8")
    return devices * nodes, nodes


def check_options(options: argparse.Namespace) -> None:
    """Checks the command's own options.

    Raises:
        DloError: A number is below 1, or a text has another form; the message has the fix.
    """
    for name in ("gpus", "nodes", "batch", "top"):
        value = getattr(options, name)
        check_number(f"plan: --{name}", value, "at least 1")
    if options.measure:
        raise DloError(f"plan: --measure must come without a value, got {options.measure}; leave that out")
    if options.measure is not None and options.machine is not None:
        raise DloError(
            f"plan: --measure must come without --machine, got --machine {options.machine}; leave one of them out"
        )
    options.machine = options.machine or "h100"
    options.memory = None if options.memory is None else parse_bytes(options.memory, "plan: --memory")
    pairs = [entry.partition("=") for entry in options.fix]
    wrong = next((entry for entry, (_, equals, _) in zip(options.fix, pairs, strict=True) if not equals), None)
    if wrong is not None:
        raise DloError(f"plan: --fix must be KEY=VALUE, got {wrong}; such as --fix tp=8")
    options.fix = {key: value for key, _, value in pairs}


_LINK = "50GB/s"
_REMAT_HELP = """Print which blocks of a config's model are kept and which are recomputed within a memory budget.

No process is started, and no memory for the model is needed: bytes and times of the blocks are those of `dlo plan`, and
of the times only the ratios count."""

_REMAT_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override. With the
callback Rotor, a run measures the times itself.

exit codes: 0, or 2 for bad input, such as a budget in which no schedule fits"""


def remat(argv: list[str]) -> int:
    """Print the schedule of recomputation within a memory budget, before a run.

    Example:
        dlo remat --config my.yaml --budget 12GB --png schedule.png

    Raises:
        DloError: If the input is invalid, or no schedule fits in the budget.
    """
    parser = CommandParser("dlo remat", description=_REMAT_HELP, epilog=_REMAT_EPILOG)
    parser.add_argument("--budget", default="60%", help="memory for a rank's activations: 12GB, or 60%% of all kept")
    parser.add_argument("--offload", action="store_true", help="also copy activations to the host")
    parser.add_argument("--link", help="rate of these copies in each direction (default: 50GB/s, PCIe 5)")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: devices x num_nodes; for auto, those of the axes)"
    )
    parser.add_argument("--micro-batch", type=int, help="samples of a rank's batch (default: the datamodule's)")
    parser.add_argument("--png", help="file for the picture of the first rank's schedule")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, config_scan = parser.parse_with_run(argv)
    for key in ("ranks", "micro_batch"):
        value = getattr(options, key)
        check_number(f"remat: --{key.replace('_', '-')}", value, "at least 1", "leave it out")

    with prepared_process(config_scan), config_only("dlo remat"):
        from dlo_plugins.memory.planning import Budget, describe_plan, plan_ranks, to_json
        from dlo_plugins.memory.scheduled_blocks import parse_link
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun
        from dlo_plugins.plan.run_memory import predict_chains

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
        run = SimulatedRun(config_scan, options.ranks, "dlo remat", infers_ranks=True)
        count = run.trainer.world_size
        ranks = predict_chains(run.user_config, run.model, run.datamodule, count, options.micro_batch)
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
