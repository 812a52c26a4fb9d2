"""Lightning's entry points, read once a process.

Each Trainer (Lightning 2.6) reads the metadata of all installed packages for callbacks that they add: a third of the
time of a run of a tiny net. Imported in tests' processes and in the server of ranks; tests install no such callbacks.
"""

from functools import cache

from lightning.fabric.utilities import registry

registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]
