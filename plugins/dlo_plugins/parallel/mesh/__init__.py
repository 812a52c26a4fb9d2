"""Steps, pipelining and descriptions of meshes, for MeshStrategy and FSDPStrategy."""
