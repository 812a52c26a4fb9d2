"""Base of all strategies: processes, collectives, precision and canonical checkpoints."""
