"""Ready tasks: a model, its loss and metrics, its data, and how the model may be cut."""
