"""Ready tasks: a model with its loss, metrics, data and parallel plan."""
