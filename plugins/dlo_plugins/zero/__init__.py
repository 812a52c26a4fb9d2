"""ZeRO: the partition (`partition`), flat groups of parameters (`group`), and the engine that drives them."""
