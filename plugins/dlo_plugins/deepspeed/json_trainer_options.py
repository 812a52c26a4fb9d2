"""Trainer options that a DeepSpeed JSON sets too: read from the JSON, and used where the Trainer has the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.batch_settings import MICRO, STEPS, TRAIN
from dlo_plugins.deepspeed.config import fill_from_trainer
from dlo_plugins.deepspeed.json_precision import CLIPPING, get_precision_section
from dlo_plugins.deepspeed.trainer_settings import TrainerSettings

#: Lightning's precision for each section of the JSON.
PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


def get_trainer_options(config: Mapping[str, Any], ranks: int | None = None) -> dict[str, Any]:
    """Returns the Trainer's options that a JSON sets, by Lightning's names.

    Args:
        config: Configuration that ``resolve`` returned.
        ranks: Number of ranks, from which DeepSpeed derives the accumulation if the JSON has only the two batch sizes.
    """
    found: dict[str, Any] = {}
    section = get_precision_section(config)
    if section is not None:
        found["precision"] = PRECISIONS[section]
    train, micro, steps = (_number(config.get(key)) for key in (TRAIN, MICRO, STEPS))
    if steps is None and train is not None and micro is not None and ranks and train % (micro * ranks) == 0:
        steps = train // (micro * ranks)
    if steps is not None:
        found["accumulate_grad_batches"] = steps
    clipping = config.get(CLIPPING)
    if isinstance(clipping, int | float):
        found["gradient_clip_val"] = float(clipping)
    return found


def infer_json_ranks(config: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks that a JSON's three batch settings imply; None if one is missing."""
    train, micro, steps = (_number(config.get(key)) for key in (TRAIN, MICRO, STEPS))
    if train is None or micro is None or steps is None or train % (micro * steps):
        return None
    return train // (micro * steps)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def get_open_settings(config: Mapping[str, Any], given: Mapping[str, Any], datamodule: Any = None) -> dict[str, Any]:
    """Returns the JSON's settings that the Trainer leaves at its default, after a check that the two agree.

    So a JSON works unchanged, and its values need no repetition. A setting is open if it has the Trainer's default;
    Lightning does not distinguish `accumulate_grad_batches: 1` from unset.

    Args:
        config: Configuration that ``resolve`` returned.
        given: Arguments of the Trainer.
        datamodule: Datamodule with a known batch size.

    Raises:
        DloError: If both set different values.
    """
    ranks = count_trainer_ranks(given)
    found = get_trainer_options(config, ranks)
    open_ones = {"precision": None, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    taken = {key: value for key, value in found.items() if given.get(key) == open_ones[key]}
    fill_from_trainer(
        config, read_settings({**given, **taken}, ranks or infer_json_ranks(config) or 1, datamodule if ranks else None)
    )
    return taken


def read_settings(given: Mapping[str, Any], ranks: int, datamodule: Any = None) -> TrainerSettings:
    """Returns the Trainer settings that a JSON has too, from the Trainer's arguments.

    Args:
        given: Arguments of the Trainer.
        ranks: Number of ranks that see different data.
        datamodule: Datamodule with a known batch size.

    Raises:
        DloError: If Lightning does not have the precision.
    """
    batch = datamodule.batch_size if isinstance(datamodule, ResumableDataModule) else 0
    algorithm = given.get("gradient_clip_algorithm")
    return TrainerSettings(
        precision=normalize_precision(given.get("precision")),
        accumulation=int(given.get("accumulate_grad_batches") or 1),
        clip_val=given.get("gradient_clip_val"),
        clip_algorithm=None if algorithm is None else str(getattr(algorithm, "value", algorithm)),
        micro_batch_size=batch // ranks if batch and batch % ranks == 0 else None,
        world_size=ranks,
    )


def normalize_precision(precision: Any) -> str:
    """Returns Lightning's own name of a Trainer's precision: `32-true` for None, 32 and `32`.

    Calls a private function of Lightning 2.6 in ``lightning.fabric.connector``, which has no public one.

    Raises:
        DloError: If Lightning does not have the precision.
    """
    from lightning.fabric.connector import _convert_precision_to_unified_args

    try:
        return str(_convert_precision_to_unified_args(precision) or "32-true")
    except ValueError as error:
        raise DloError(f"trainer.precision: {error}") from error


def count_trainer_ranks(given: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks that a Trainer's arguments ask for; None if it depends on the machine."""
    devices: Any = given.get("devices")
    number = len(devices) if isinstance(devices, list | tuple) else int(devices) if str(devices).isdigit() else 0
    return number * int(given.get("num_nodes") or 1) or None
