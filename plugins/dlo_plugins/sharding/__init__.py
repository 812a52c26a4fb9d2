"""What ZeRO, FSDP and DeepSpeed share: optimizer shards, the optimizer probe, flat partitions and gathered dtypes."""
