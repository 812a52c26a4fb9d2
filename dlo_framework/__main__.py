"""``python -m dlo_framework`` is ``dlo``."""

import sys

from dlo_framework.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
