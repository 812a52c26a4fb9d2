"""Optimizers that tasks name and timm does not have, or not for every strategy.

Each is the class of a library, in a form whose state canonical checkpoints can hold. The entry points in the group
``dlo_framework.optimizers`` give them their names.
"""
