"""Precision and gradient clipping, which DeepSpeed's JSON and the Trainer both have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.facts import TrainerFacts
from dlo_plugins.deepspeed.paths import get

CLIPPING = "gradient_clipping"

#: The section of the JSON that is enabled under each of Lightning's precisions.
SECTIONS = {"32-true": None, "16-mixed": "fp16", "16-true": "fp16", "bf16-mixed": "bf16", "bf16-true": "bf16"}


def check_precision(config: Mapping[str, Any], source: str) -> None:
    """Checks that a JSON asks for one precision.

    Raises:
        DloError: if it asks for two.
    """
    if all(get(config, f"{section}.enabled") is True for section in ("fp16", "bf16")):
        raise DloError(f"{source} enables both fp16 and bf16; set enabled: false in one of the two")


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Returns the section that a JSON enables, `fp16` or `bf16`; None where it enables neither."""
    return next((section for section in ("fp16", "bf16") if get(config, f"{section}.enabled") is True), None)


def with_precision(config: dict[str, Any], facts: TrainerFacts, source: str) -> None:
    """Enables the section of the Trainer's precision, and switches the other one off, in place.

    Raises:
        DloError: where the JSON says otherwise, and for a precision that DeepSpeed has not.
    """
    if facts.precision not in SECTIONS:
        raise DloError(
            f"trainer.precision is {facts.precision}, which DeepSpeed does not have; take {', '.join(SECTIONS)}"
        )
    wanted, asked = SECTIONS[facts.precision], precision_of(config)
    if asked is not None and asked != wanted:
        fitting = {"fp16": "16-mixed", "bf16": "bf16-mixed"}[asked]
        raise DloError(
            f"{source} says {asked}.enabled true, trainer.precision is {facts.precision}; set --trainer.precision"
            f' {fitting}, or "{asked}": {{"enabled": "auto"}} in the JSON'
        )
    if wanted is not None and get(config, f"{wanted}.enabled") is False:
        raise DloError(
            f"{source} says {wanted}.enabled false, trainer.precision is {facts.precision}; set --trainer.precision"
            f' 32-true, or "{wanted}": {{"enabled": "auto"}} in the JSON'
        )
    for section in ("fp16", "bf16"):
        if section == wanted:
            config[section] = {**config.get(section, {}), "enabled": True}
        elif section in config:
            config[section] = {**config[section], "enabled": False}
            if len(config[section]) == 1:
                del config[section]


def with_clipping(config: dict[str, Any], facts: TrainerFacts, source: str) -> None:
    """Sets ``gradient_clipping``, in place: the Trainer's, the JSON's, or 0, which is off.

    Raises:
        DloError: where the two differ, and for clipping by value.
    """
    given = config.get(CLIPPING)
    given = None if given == "auto" else given
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float) or given < 0):
        raise DloError(f"{source}: {CLIPPING} is a norm, or 0 for none, but was {given!r}")
    wanted = facts.clip_val
    if (wanted or given) and facts.clip_algorithm == "value":
        raise DloError(
            "trainer.gradient_clip_algorithm is value, but DeepSpeed clips by the norm alone; set"
            " --trainer.gradient_clip_algorithm norm, or take another strategy, such as zero2"
        )
    if given is not None and wanted is not None and float(given) != float(wanted):
        raise DloError(
            f"{source} says {CLIPPING} {given}, trainer.gradient_clip_val is {wanted}; set it in one place: leave one"
            f' of the two out, or "{CLIPPING}": "auto" in the JSON'
        )
    config[CLIPPING] = float(next((value for value in (wanted, given) if value is not None), 0.0))
