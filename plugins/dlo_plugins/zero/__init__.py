"""ZeRO: the partition, flat groups of parameters, optimizer shards, and the engine that runs them."""
