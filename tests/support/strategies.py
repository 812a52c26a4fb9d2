"""Strategies of two ranks and of four by name, for tests that compare them; they travel to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dlo_framework.testing import Case
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy

PP = partial(MeshStrategy, pp=2, micro_batches=2)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "auto": partial(str, "auto"),
    "ddp": partial(str, "ddp"),
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
    "zero3_offload": partial(ZeroStrategy, 3, offload="both"),
    "fsdp": FSDPStrategy,
    "fsdp_offload": partial(FSDPStrategy, offload=True),
    "tp": partial(MeshStrategy, tp=2),
    "sp": partial(MeshStrategy, tp=2, sequence_parallel=True),
    "cp": partial(MeshStrategy, cp=2),
    "ulysses": partial(MeshStrategy, cp=2, cp_method="ulysses"),
    "pp": PP,
    "zero bubble": partial(PP, schedule="ZBH1"),
    "ep": partial(MeshStrategy, dp_shard=2, ep=2),
    "shard x sp": partial(MeshStrategy, dp_shard=2, tp=2, sequence_parallel=True),
    "cp x tp": partial(MeshStrategy, cp=2, tp=2),
    "pp x cp": partial(PP, cp=2),
    "ep x tp": partial(MeshStrategy, dp_shard=2, tp=2, ep=2),
    "copies": partial(MeshStrategy, dp_replicate=2),
    "copies x shard": partial(MeshStrategy, dp_replicate=2, dp_shard=2),
    "copies x sp": partial(MeshStrategy, dp_replicate=2, tp=2, sequence_parallel=True),
    "copies x pp": partial(PP, dp_replicate=2),
    "copies x cp": partial(MeshStrategy, dp_replicate=2, cp=2),
    "copies x ep": partial(MeshStrategy, dp_replicate=2, dp_shard=2, ep=2),
    "late copies": partial(PP, dp_replicate=2, schedule="PipeDream2BW"),
    **{f"deepspeed_{stage}": partial(DeepSpeedBridge, stage=stage) for stage in (1, 2, 3)},
}


def named_cases(names: Iterable[str], trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    """Returns a case of a parity test for each strategy.

    Args:
        names: Names of strategies.
        trainer: Options of the trainer.
        **arguments: Arguments of the function that builds the model and its data.
    """
    text = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return [Case(STRATEGIES[name], arguments, trainer or {}, f"{name}, {text}") for name in names]
