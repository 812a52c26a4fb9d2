"""Ready tasks: a model with its loss, metrics, data and parallel plan."""

import dlo_framework  # noqa: F401 -- old import paths
