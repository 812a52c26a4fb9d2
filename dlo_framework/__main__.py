"""Entry point of ``dlo`` and of ``python -m dlo_framework``."""

import sys

from dlo_framework.run.process import exits_on_interrupt


def main() -> int:
    """Imports the command line, and runs it; returns the exit code."""
    with exits_on_interrupt():
        from dlo_framework.cli.main import main as run_command
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
