"""FSDP2 for MeshStrategy and FSDPStrategy: the data mesh, mixed precision, sharding, and optimizer shards."""
