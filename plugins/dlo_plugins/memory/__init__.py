"""Rotor: which activations of a chain of blocks to keep, recompute or offload, for the fastest step within a budget.

Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited memory. Beaumont,
Eyraud-Dubois, Herrmann, Joly & Shilova, 2019, arXiv 1911.13214. Efficient Combination of Rematerialization and
Offloading for Training DNNs. Beaumont, Eyraud-Dubois & Shilova, NeurIPS 2021. A
:class:`~dlo_plugins.memory.schedule.Chain` holds bytes and times of the blocks, a
:class:`~dlo_plugins.memory.schedule.Schedule` says what happens to each block, and
:func:`~dlo_plugins.memory.schedule.simulate` computes a schedule's time and memory.
"""
