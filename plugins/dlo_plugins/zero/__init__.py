"""ZeRO: the partition (`partition`), flat groups of parameters (`group`), optimizer shards (`shares`), the engine."""
