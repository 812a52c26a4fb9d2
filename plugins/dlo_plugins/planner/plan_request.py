"""Resources and wishes for which plans are searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.mesh import AXES

#: Schedules with the number of stages of a rank.
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBV", 2), ("Varuna", 1))
#: Schedules that are planned only if they are asked for, because gradients have a delay: the loss curve is another.
DELAYED = (("PipeDream2BW", 1),)
#: Values that `schedule` and `zero` can be fixed at.
_PLANNED = tuple(dict.fromkeys(name for name, _ in (*SCHEDULES, *DELAYED)))
_STAGES = ("3", "2", "1", "0")
#: Keys of `fix`, beside the axes.
_FIXABLE = (*AXES, "ep", "micro_batch", "schedule", "zero", "recompute", "offload", "gather", "reduce")
#: Values that `recompute` can be fixed at.
_MODES = ("none", "selective", "full", "rotor")


@dataclass(frozen=True)
class Request:
    """Resources and wishes.

    Attributes:
        gpus: Number of ranks.
        memory: Bytes of a rank.
        global_batch: Rows of a step on all ranks.
        fix: Fixed values by key: an axis or `ep`, `micro_batch`, `schedule`, `zero`, `recompute` or `offload`; and
            `gather` and `reduce`, dtypes that the state has already.
        top: Number of plans to return.
        rotor: Whether Rotor may be chosen.
    """

    gpus: int
    memory: float
    global_batch: int
    fix: Mapping[str, str] = field(default_factory=dict)
    top: int = 5
    rotor: bool = True

    def __post_init__(self) -> None:
        for key in self.fix:
            if key not in _FIXABLE:
                raise DloError(
                    f"--fix must name one of {', '.join(_FIXABLE)}, got {key}{did_you_mean(key, _FIXABLE)}; such as"
                    " --fix tp=8"
                )
        mode = self.fix.get("recompute", "none").lower()
        if mode not in _MODES:
            raise DloError(
                f"--fix recompute must be one of {', '.join(_MODES)}, got {mode}{did_you_mean(mode, _MODES)}; leave it"
                " out, or use --fix recompute=full"
            )
        if mode == "rotor" and not self.rotor:
            raise DloError(
                "--fix recompute=rotor must come without a compiled model, got the callback Compile with scope: model;"
                " set its scope: blocks"
            )
        for key, known in (("schedule", _PLANNED), ("zero", _STAGES)):
            value = self.fix.get(key, known[0])
            if value.lower() not in (name.lower() for name in known):
                raise DloError(
                    f"--fix {key} must be one of {', '.join(known)}, got {value}{did_you_mean(value, known)}; leave it"
                    f" out, or use --fix {key}={known[0]}"
                )
        offload = self.fix.get("offload", "false").lower()
        if offload not in ("true", "false"):
            raise DloError(
                f"--fix offload must be true or false, got {offload}; leave it out, or use --fix offload=false"
            )
        if offload == "true" and (not self.rotor or self.fix.get("recompute", "rotor").lower() != "rotor"):
            raise DloError(
                "--fix offload=true must come with Rotor, which offloads, got"
                f" {f'recompute={mode}' if self.rotor else 'the callback Compile with scope: model'}; leave it out"
            )
        for key in (*AXES, "ep", "micro_batch", "zero"):
            if key in self.fix and not self.fix[key].isdigit():
                raise DloError(f"--fix {key} must be a number, got {self.fix[key]!r}; such as --fix {key}=2")

    def allows(self, key: str, value: object) -> bool:
        """Returns whether a value agrees with what is fixed."""
        return key not in self.fix or str(value).lower() == self.fix[key].lower()
