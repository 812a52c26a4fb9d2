"""``dlo doctor``: checks what a run needs of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.doctor_checks import (
    Finding,
    check_devices,
    check_network,
    check_packages,
    check_ranks_meet,
    check_storage,
)
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.versions import versions

DESCRIPTION = """Check versions, devices and their links, disk, ports, optional packages, and a collective of two ranks.

Exit code 1 if a check fails. Send the output with a report of a problem."""


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if a check fails."""
    parser = CommandParser("dlo doctor", description=DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that reduce a tensor; 0 starts none (default: 2)")
    parser.add_argument("--run.dir", dest="runs", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    given = parser.parse_args(argv)
    if given.ranks < 0 or given.ranks == 1:
        raise DloError(f"--ranks must be 0 or at least 2, got {given.ranks}; 2 checks that ranks can meet")
    findings = []
    for finding in _find(Path(given.runs), given.ranks):
        findings.append(finding)
        if not given.json:
            print(f"{finding.status:<6} {finding.name:<18} {finding.text}", flush=True)
    if given.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    return int(any(finding.status == "fails" for finding in findings))


def _find(folder: Path, ranks: int) -> Iterator[Finding]:
    for name, version in versions().items():
        yield Finding(name, "ok", version)
    yield from check_packages(Registry())
    yield from check_devices()
    yield from check_storage(folder)
    yield from check_network()
    if ranks:
        yield check_ranks_meet(ranks)
