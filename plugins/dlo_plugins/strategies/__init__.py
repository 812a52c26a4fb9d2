"""Strategies: Lightning strategies for ZeRO, FSDP, meshes and DeepSpeed, and the simulation of a mesh."""
