"""Communication of data parallelism in fewer bytes: sign compression, and the optimizers made for it."""
