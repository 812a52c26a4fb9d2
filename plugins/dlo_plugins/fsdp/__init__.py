"""What FSDPStrategy is made of: mesh, precision, initialisation, sharding, and the optimizers' share."""
