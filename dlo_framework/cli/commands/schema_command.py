"""``dlo schema``: writes the JSON schema of configs, for completion in editors."""

from __future__ import annotations

import json
from pathlib import Path

from dlo_framework.atomic_file import write_atomic
from dlo_framework.cli.command_parser import CommandParser
from dlo_framework.cli.config_schema import make_schema
from dlo_framework.registry import Registry

DESCRIPTION = """Print the JSON schema of configs, with every installed plug-in, for completion and checks in editors.

  dlo schema --out dlo.schema.json

An editor with yaml-language-server reads it in a config whose first line is

  # yaml-language-server: $schema=dlo.schema.json"""


def main(argv: list[str]) -> int:
    """Prints the schema, or writes it to a file."""
    parser = CommandParser("dlo schema", description=DESCRIPTION)
    parser.add_argument("--out", metavar="FILE", help="file to write (default: print)")
    out = parser.parse_args(argv).out
    text = json.dumps(make_schema(Registry()), indent=1)
    if out is None:
        print(text)
        return 0
    write_atomic(Path(out), f"{text}\n")
    print(f"wrote {out}; first line of a config: # yaml-language-server: $schema={out}")
    return 0
