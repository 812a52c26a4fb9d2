"""dlo: plug-ins for training large models on Lightning, each switched on by one line of YAML.

The public names, and every installed plug-in by its name, are loaded when first used, so that ``import dlo_framework``
costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dlo_framework._version import __version__
from dlo_framework.moved import MovedModules

if TYPE_CHECKING:
    from dlo_framework.checkpoint.loading import load_from_checkpoint as load_from_checkpoint
    from dlo_framework.cli.run import load_config as load_config
    from dlo_framework.errors import DloError as DloError
    from dlo_framework.plan import Applier as Applier
    from dlo_framework.plan import ParallelPlan as ParallelPlan
    from dlo_framework.plan import Phase as Phase
    from dlo_framework.task import Task as Task
    from dlo_framework.trainer import Trainer as Trainer

_HOMES = {
    "Applier": "dlo_framework.plan",
    "DloError": "dlo_framework.errors",
    "ParallelPlan": "dlo_framework.plan",
    "Phase": "dlo_framework.plan",
    "Task": "dlo_framework.task",
    "Trainer": "dlo_framework.trainer",
    "load_config": "dlo_framework.cli.run",
    "load_from_checkpoint": "dlo_framework.checkpoint.loading",
}
__all__ = ["__version__", *_HOMES]
sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> Any:
    """Returns a public name, or the class of an installed plug-in; imports its module, and no other plug-in's."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name[:1].isupper():  # Python asks a module for other names too, such as its submodules' and `__path__`.
        from dlo_framework.errors import did_you_mean
        from dlo_framework.registry import Registry

        registry = Registry()
        names = [plugin.name for plugin in registry.plugins()]
        if name in names:
            return registry.load(name)
        hint = did_you_mean(name, [*_HOMES, *names]) or "; `dlo plugins` lists the plug-ins"
        raise AttributeError(f"module 'dlo_framework' has no attribute {name!r}{hint}")
    raise AttributeError(f"module 'dlo_framework' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, and those of the installed plug-ins."""
    from dlo_framework.registry import Registry

    return sorted({*globals(), *__all__, *(plugin.name for plugin in Registry().plugins())})
