"""Built-in plug-ins; each is imported only when a config names it."""

import dlo_framework  # noqa: F401 -- old import paths
