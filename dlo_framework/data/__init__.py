"""Data parts that every task shares: a sampler and a loader that resume exactly."""
