"""What MeshStrategy and FSDPStrategy are made of: the mesh's groups, the appliers in their order, the memory of it."""
