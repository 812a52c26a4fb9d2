"""Coverage of tensor parallelism: the fraction of a model's parameters that is sharded, and the replicated ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dlo_plugins.tensor.division import Division

#: Number of replicated modules that a sentence names: the largest ones.
_NAMED = 3
#: Fraction of the parameters above which a model counts as fully sharded; norms are never sharded.
NEARLY_ALL = 0.99


@dataclass(frozen=True)
class Coverage:
    """Numbers of sharded and replicated parameters of a model.

    Attributes:
        total: Number of parameters.
        sharded: Number of parameters that are sharded over the ranks.
        replicated: Number of parameters that each rank holds in full, by module; numbers in its name are `*`. A
            parameter of the model itself, such as `pos_embed`, is under its own name.
    """

    total: int
    sharded: int
    replicated: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharded_fraction(self) -> float:
        """Fraction of the parameters that is sharded."""
        return self.sharded / max(self.total, 1)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as plain data, under the keys of ``dlo mesh --json``."""
        return {"total": self.total, "divided": self.sharded, "full": dict(self.replicated)}

    def describe(self) -> str:
        """Returns one line with the sharded fraction, and the modules without a rule."""
        text = f"divides {_percent(self.sharded_fraction)} of {self.total:,} parameters"
        if self.sharded_fraction >= NEARLY_ALL:
            return text
        largest = sorted(self.replicated.items(), key=lambda item: -item[1])
        named = [f"{name} ({_percent(count / self.total)})" for name, count in largest[:_NAMED]]
        more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
        return f"{text}; in full on every rank, since the plan has no rule for them: {', '.join(named)}{more}"


def measure_coverage(module: nn.Module, divisions: Mapping[str, Division]) -> Coverage:
    """Returns the numbers of sharded and replicated parameters of a model.

    Args:
        module: Full model, on any device or the meta device.
        divisions: Divisions of the sharded parameters, by name.
    """
    total = divided = 0
    full: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        total += parameter.numel()
        if name in divisions:
            divided += parameter.numel()
        else:
            full[re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0] or name)] += parameter.numel()
    return Coverage(total, divided, dict(full))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.9995 else "100%"
