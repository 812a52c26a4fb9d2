"""Features that are gone from DeepSpeed, and what to take in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.paths import get
from dlo_plugins.deepspeed.schema import removed_keys

#: Optimizer types of earlier versions, lower-cased.
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

#: What to do instead, where dlo or DeepSpeed has something.
_INSTEAD = {
    "elasticity": "leave it out: dlo's checkpoints are read at any number of ranks, so a run may be resumed on more or"
    " fewer",
    "amp": "leave it out: --trainer.precision 16-mixed or bf16-mixed",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "leave it out",
    "nebula": "leave it out: --run.async_checkpoints true writes checkpoints in the background",
    "sparse_attention": "leave it out: torch's scaled_dot_product_attention takes its place",
}


def check_removed(config: Mapping[str, Any], source: str) -> None:
    """Checks that a configuration asks for nothing that is gone from DeepSpeed.

    Raises:
        DloError: for the first such thing, with what to take in its place.
    """
    absent = object()
    for section, keys in removed_keys().items():
        for key in keys:
            path = f"{section}.{key}" if section else key
            if get(config, path, absent) is not absent:
                raise DloError(f"{source}: DeepSpeed has no '{path}' any more; {_INSTEAD.get(key, 'leave it out')}")
    optimizer = config.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(name, str) and name.lower() in _ONE_BIT:
        raise DloError(
            f"{source}: DeepSpeed has no optimizer {name} any more; dlo has its compression for any data-parallel"
            " strategy: take Adam (or Lamb) of your task and add the callback GradientCompression"
        )
