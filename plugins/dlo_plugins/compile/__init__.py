"""torch.compile for a run's model, whole or block by block."""
