"""Precision and gradient clipping, which both DeepSpeed's JSON and the Trainer set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.nested_paths import get
from dlo_plugins.deepspeed.trainer_settings import TrainerSettings

CLIPPING = "gradient_clipping"

#: Section of the JSON that each of Lightning's precisions enables.
SECTIONS = {"32-true": None, "16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}


def check_precision(config: Mapping[str, Any], source: str) -> None:
    """Checks that a JSON enables at most one precision.

    Raises:
        DloError: If it enables two.
    """
    if all(get(config, f"{section}.enabled") is True for section in ("fp16", "bf16")):
        raise DloError(f"{source}: one of fp16 and bf16 must be off, got both enabled; set enabled: false in one")


def get_precision_section(config: Mapping[str, Any]) -> str | None:
    """Returns the section that a JSON enables, `fp16` or `bf16`; None if it enables neither."""
    return next((section for section in ("fp16", "bf16") if get(config, f"{section}.enabled") is True), None)


def fill_precision(config: dict[str, Any], facts: TrainerSettings, source: str) -> None:
    """Enables the section of the Trainer's precision, and disables the other one, in place.

    Raises:
        DloError: If the JSON contradicts it, or DeepSpeed does not support the precision.
    """
    if facts.precision not in SECTIONS:
        raise DloError(f"trainer.precision must be one of {', '.join(SECTIONS)} under DeepSpeed, got {facts.precision}")
    wanted, asked = SECTIONS[facts.precision], get_precision_section(config)
    if asked is not None and asked != wanted:
        fitting = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[asked]
        raise DloError(
            f"{source}: {asked}.enabled must agree with trainer.precision {facts.precision}, got true; set"
            f' --trainer.precision {fitting}, or "{asked}": {{"enabled": "auto"}} in the JSON'
        )
    if wanted is not None and get(config, f"{wanted}.enabled") is False:
        raise DloError(
            f"{source}: {wanted}.enabled must agree with trainer.precision {facts.precision}, got false; set"
            f' --trainer.precision 32-true, or "{wanted}": {{"enabled": "auto"}} in the JSON'
        )
    for section in ("fp16", "bf16"):
        if section == wanted:
            config[section] = {**config.get(section, {}), "enabled": True}
        elif section in config:
            config[section] = {**config[section], "enabled": False}
            if len(config[section]) == 1:
                del config[section]


def fill_clipping(config: dict[str, Any], facts: TrainerSettings, source: str) -> None:
    """Sets ``gradient_clipping`` in place: to the Trainer's value, the JSON's, or 0, which is off.

    Raises:
        DloError: If the two differ, or clipping is by value.
    """
    given = config.get(CLIPPING)
    given = None if given == "auto" else given
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or given < 0):
        raise DloError(f"{source}: {CLIPPING} must be a norm, or 0 for off, got {given!r}; set 1.0, or leave it out")
    wanted = facts.clip_val
    if (wanted or given) and facts.clip_algorithm == "value":
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
