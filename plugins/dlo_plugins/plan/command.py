"""``dlo plan``: ranks the parallel plans of a config for some GPUs, without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.run import prepared_process
from dlo_framework.errors import DloError, check_number
from dlo_framework.units import parse_bytes
from dlo_plugins.plan.machine import load_machine

_HELP = """Find the parallel plan that trains a config's model fastest in a given memory.

No weights are read, and no GPU is needed: the model is profiled on fake tensors, and its times follow from the rates of
a machine. Only --measure starts processes, on the machine that it measures."""

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
    options, found = parser.parse_with_run(argv)
    check_options(options)

    if options.measure is None:
        load_machine(options.machine)
    with prepared_process(found):
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun
        from dlo_plugins.plan.plan_report import plan_run, report_json, report_text

        run = SimulatedRun(found, 1, "dlo plan", unplanned=True)
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
