"""dlo: plug-ins for training large models on Lightning, each switched on by one line of YAML.

The public names are loaded when first used, so that ``import dlo_framework`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dlo_framework._version import __version__

if TYPE_CHECKING:
    from dlo_framework.applier import Applier, Phase
    from dlo_framework.checkpoint.model_loading import load_from_checkpoint
    from dlo_framework.errors import DloError
    from dlo_framework.plan import ParallelPlan
    from dlo_framework.task import Task

__all__ = ["Applier", "DloError", "ParallelPlan", "Phase", "Task", "__version__", "load_from_checkpoint"]

_HOMES = {
    "Applier": "dlo_framework.applier",
    "DloError": "dlo_framework.errors",
    "ParallelPlan": "dlo_framework.plan",
    "Phase": "dlo_framework.applier",
    "Task": "dlo_framework.task",
    "load_from_checkpoint": "dlo_framework.checkpoint.model_loading",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dlo_framework' has no attribute {name!r}")
