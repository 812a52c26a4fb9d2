"""The list of optimizers that tasks name, to which packages add by entry points in `dlo_framework.optimizers`."""

from __future__ import annotations

from torch.optim import Optimizer

from dlo_framework.registry.named_functions import NamedFunctions

#: Optimizer classes by name. A constructor takes parameter groups, ``lr``, ``weight_decay`` and more arguments by
#: keyword. A class attribute ``callback`` is the path of a callback that the optimizer needs, and ``schedule_free``
#: says that its learning rate must have no schedule.
OPTIMIZERS: NamedFunctions[type[Optimizer]] = NamedFunctions("optimizer", "dlo_framework.optimizers")
