"""Settings that both the Trainer and DeepSpeed's JSON have: batch size, accumulation, precision and clipping.

DeepSpeed requires ``train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks``, and
derives missing values. dlo's `data.batch_size` is the global batch of one micro-step: DeepSpeed's micro-batch times the
ranks, or its train batch divided by the accumulation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.json_file import DeepSpeedJson, get, get_source, get_stage, put

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CLIPPING = "gradient_clipping"

#: Section of the JSON that each of Lightning's precisions enables.
SECTIONS = {"32-true": None, "16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}

#: Lightning's precision for each section of the JSON.
PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class TrainerSettings:
    """Trainer settings that DeepSpeed's JSON has too.

    Attributes:
        precision: Lightning's name of the precision, such as `bf16-mixed`.
        accumulation: Number of micro-batches per optimizer step.
        clip_val: Gradient norm to clip to; None if the Trainer does not set it, 0 for off.
        clip_algorithm: Clipping by `norm`, the meaning of None, or by `value`.
        micro_batch_size: Number of samples per rank and micro-step; None if it is unknown or varies.
        world_size: Number of ranks that see different data.
    """

    precision: str
    accumulation: int
    clip_val: float | None
    clip_algorithm: str | None
    micro_batch_size: int | None
    world_size: int


# --- a JSON, completed from the Trainer --------------------------------------------------------------------


def fill_from_trainer(config: Mapping[str, Any], settings: TrainerSettings) -> DeepSpeedJson:
    """Returns a configuration completed with the Trainer's settings: batch size, accumulation, clipping, precision.

    ``"auto"`` and missing values are filled in from the Trainer. Without ``gradient_clipping`` in either, clipping is
    off (DeepSpeed's own default is a norm of 1.0). Without a stage it is 0, as in DeepSpeed.

    Args:
        config: Configuration that ``merge_options`` returned.
        settings: Settings of the Trainer.

    Raises:
        DloError: If both set different values, or DeepSpeed does not support a setting.
    """
    source = get_source(config)
    result = DeepSpeedJson(copy.deepcopy(dict(config)), source)
    fill_batch_size(result, settings, source)
    fill_clipping(result, settings, source)
    fill_precision(result, settings, source)
    put(result, "zero_optimization.stage", get_stage(result))
    for key in [key for key, value in result.items() if value == "auto"]:
        del result[key]  # DeepSpeed reads "auto" as the default inside sections, but not at the top level.
    return result


def fill_batch_size(config: dict[str, Any], settings: TrainerSettings, source: str) -> None:
    """Fills in the three batch settings, in place.

    If neither the JSON nor the Trainer has the micro-batch, it is 1, as in Lightning: DeepSpeed uses it only for its
    throughput log.

    Raises:
        DloError: If they contradict each other or the Trainer.
    """
    (train, micro, _), world, own = _batch(config), settings.world_size, settings.accumulation
    steps = _steps(config, world)
    derived = "" if config.get(STEPS) == steps else f" ({TRAIN} {train} / ({MICRO} {micro} x {world} ranks))"
    if steps not in (None, own):
        raise DloError(
            f"{source}: {STEPS} must equal trainer.accumulate_grad_batches {own}, got {steps}{derived}; set"
            f' --trainer.accumulate_grad_batches {steps}, or "{STEPS}": "auto" in the JSON'
        )
    key = MICRO if micro is not None else TRAIN
    if train is not None:
        micro = micro or max(1, train // (own * world))
        product = micro * own * world
        if train != product:
            raise DloError(
                f"{source}: {TRAIN} must be {MICRO} {micro} x {STEPS} {own} x {world} ranks = {product}, got {train};"
                f" set {TRAIN} {product}, or leave it out"
            )
    if micro is not None and settings.micro_batch_size not in (None, micro):
        raise _other_batch(micro, key, config[key], settings, source)
    micro = settings.micro_batch_size or micro or 1
    config.update({TRAIN: micro * own * world, MICRO: micro, STEPS: own})


def check_batch_sizes(config: Mapping[str, Any], source: str) -> None:
    """Checks that the three batch settings are numbers of samples, or are left to the Trainer.

    Raises:
        DloError: For the first that is not.
    """
    for key in (TRAIN, MICRO, STEPS):
        value = config.get(key)
        if value not in (None, "auto") and _number(value) is None:
            raise DloError(f'{source}: {key} must be an integer of at least 1 or "auto", got {value!r}')


def _other_batch(micro: int, key: str, value: int, settings: TrainerSettings, source: str) -> DloError:
    """Returns the error for data whose batch size differs from the JSON's; `key` is the JSON's key for it."""
    assert settings.micro_batch_size is not None
    world, loaded = settings.world_size, settings.micro_batch_size
    means = f"{micro} samples per rank and micro-step"
    if key == TRAIN:
        means += f" ({world} ranks, trainer.accumulate_grad_batches {settings.accumulation})"
    return DloError(
        f"data.batch_size must be {micro * world} for {key} {value} of {source}, which means {means}, got"
        f" {loaded * world} (the global batch: {loaded} per rank); set --data.batch_size {micro * world}, or"
        f' "{key}": "auto" in the JSON'
    )


def get_precision_section(config: Mapping[str, Any]) -> str | None:
    """Returns the section that a JSON enables, `fp16` or `bf16`; None if it enables neither."""
    return next((section for section in ("fp16", "bf16") if get(config, f"{section}.enabled") is True), None)


def fill_precision(config: dict[str, Any], settings: TrainerSettings, source: str) -> None:
    """Enables the section of the Trainer's precision, and disables the other one, in place.

    Raises:
        DloError: If the JSON contradicts it, or DeepSpeed does not support the precision.
    """
    if settings.precision not in SECTIONS:
        raise DloError(
            f"trainer.precision must be one of {', '.join(SECTIONS)} under DeepSpeed, got {settings.precision}"
        )
    wanted, asked = SECTIONS[settings.precision], get_precision_section(config)
    is_off = wanted is not None and get(config, f"{wanted}.enabled") is False
    if is_off or asked not in (None, wanted):
        section, given, fix = (wanted, "false", "32-true") if is_off else (asked, "true", PRECISIONS[str(asked)])
        raise DloError(
            f"{source}: {section}.enabled must agree with trainer.precision {settings.precision}, got {given}; set"
            f' --trainer.precision {fix}, or "{section}": {{"enabled": "auto"}} in the JSON'
        )
    for section in ("fp16", "bf16"):
        if section == wanted:
            config[section] = {**config.get(section, {}), "enabled": True}
        elif section in config:
            config[section] = {**config[section], "enabled": False}
            if len(config[section]) == 1:
                del config[section]


def fill_clipping(config: dict[str, Any], settings: TrainerSettings, source: str) -> None:
    """Sets ``gradient_clipping`` in place: to the Trainer's value, the JSON's, or 0, which is off.

    Raises:
        DloError: If the two differ, or clipping is by value.
    """
    given = config.get(CLIPPING)
    given = None if given == "auto" else given
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or given < 0):
        raise DloError(f"{source}: {CLIPPING} must be a norm, or 0 for off, got {given!r}; set 1.0, or leave it out")
    wanted = settings.clip_val
    if (wanted or given) and settings.clip_algorithm == "value":
        raise DloError(
            "trainer.gradient_clip_algorithm must be norm under DeepSpeed, got value; set"
            " --trainer.gradient_clip_algorithm norm, or use another strategy, such as zero2"
        )
    if given is not None and wanted is not None and float(given) != float(wanted):
        raise DloError(
            f"{source}: {CLIPPING} must equal trainer.gradient_clip_val {wanted}, got {given}; set it in one place:"
            f' leave one of the two out, or "{CLIPPING}": "auto" in the JSON'
        )
    config[CLIPPING] = float(next((value for value in (wanted, given) if value is not None), 0.0))


# --- the Trainer's options, from a JSON --------------------------------------------------------------------


def get_trainer_options(config: Mapping[str, Any], ranks: int | None = None) -> dict[str, Any]:
    """Returns the Trainer's options that a JSON sets, by Lightning's names.

    Args:
        config: Configuration that ``merge_options`` returned.
        ranks: Number of ranks, from which DeepSpeed derives the accumulation if the JSON has only the two batch sizes.
    """
    options: dict[str, Any] = {}
    section = get_precision_section(config)
    if section is not None:
        options["precision"] = PRECISIONS[section]
    steps = _steps(config, ranks)
    if steps is not None:
        options["accumulate_grad_batches"] = steps
    clipping = config.get(CLIPPING)
    if isinstance(clipping, int | float):
        options["gradient_clip_val"] = float(clipping)
    return options


def infer_ranks(config: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks that a configuration's three batch settings imply; None if one is missing."""
    train, micro, steps = _batch(config)
    return train // (micro * steps) if train and micro and steps and train % (micro * steps) == 0 else None


def _batch(config: Mapping[str, Any]) -> list[int | None]:
    """Returns train batch, micro-batch and accumulation; None for those that a configuration leaves open."""
    return [_number(config.get(key)) for key in (TRAIN, MICRO, STEPS)]


def _steps(config: Mapping[str, Any], ranks: int | None) -> int | None:
    """Returns the accumulation, which DeepSpeed derives where a JSON has only the two batch sizes; None if open."""
    train, micro, steps = _batch(config)
    derives = steps is None and train and micro and ranks and train % (micro * ranks) == 0
    return train // (micro * ranks) if derives else steps  # type: ignore[operator]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def get_open_settings(config: Mapping[str, Any], given: Mapping[str, Any], datamodule: Any = None) -> dict[str, Any]:
    """Returns the JSON's settings that the Trainer leaves at its default, after a check that the two agree.

    So a JSON works unchanged, and its values need no repetition. A setting is open if it has the Trainer's default;
    Lightning does not distinguish `accumulate_grad_batches: 1` from unset.

    Args:
        config: Configuration that ``merge_options`` returned.
        given: Arguments of the Trainer.
        datamodule: Datamodule with a known batch size.

    Raises:
        DloError: If both set different values.
    """
    ranks = count_trainer_ranks(given)
    options = get_trainer_options(config, ranks)
    open_ones = {"precision": None, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    taken = {key: value for key, value in options.items() if given.get(key) == open_ones[key]}
    fill_from_trainer(
        config, read_settings({**given, **taken}, ranks or infer_ranks(config) or 1, datamodule if ranks else None)
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
