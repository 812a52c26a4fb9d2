"""Checks for features that DeepSpeed has removed, with their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.nested_paths import get
from dlo_plugins.deepspeed.schema import removed_keys

#: Optimizer types of earlier versions, in lower case.
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")

#: Replacement of each removed key, in dlo or DeepSpeed.
_INSTEAD = {
    "elasticity": "leave it out: dlo's checkpoints can be resumed on any number of ranks",
    "amp": "leave it out: --trainer.precision 16-mixed or bf16-mixed",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "leave it out",
    "nebula": "leave it out: --run.async_checkpoints true writes checkpoints in the background",
    "sparse_attention": "leave it out: torch's scaled_dot_product_attention replaces it",
}


def check_removed(config: Mapping[str, Any], source: str) -> None:
    """Checks that a configuration has no key that DeepSpeed has removed.

    Raises:
        DloError: For the first one, with its replacement.
    """
    absent = object()
    for section, keys in removed_keys().items():
        for key in keys:
            path = f"{section}.{key}" if section else key
            if get(config, path, absent) is not absent:
                raise DloError(f"{source}: DeepSpeed has removed '{path}'; {_INSTEAD.get(key, 'leave it out')}")
    optimizer = config.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if isinstance(name, str) and name.lower() in _ONE_BIT:
        raise DloError(
            f"{source}: DeepSpeed has removed the optimizer {name}; use your task's Adam (or Lamb) with the callback"
            " GradientCompression, which compresses under any data-parallel strategy"
        )
