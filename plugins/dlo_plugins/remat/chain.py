"""Chain of stages: bytes and seconds of each block of a model, by the ways in which it can run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Mode:
    """One way in which a stage runs forward with gradients.

    Attributes:
        name: Name of the mode: `all`, `selective`, ...
        saved: Bytes that it keeps for backward, with the stage's output and without its input.
        forward: Seconds of the forward.
        backward: Seconds of the backward, with what the mode recomputes.
        forward_peak: Transient bytes of the forward, above its input and `saved`.
        backward_peak: Transient bytes of the backward, above its input, `saved` and the gradients of input and output.
        movable: Whether what it keeps can be copied to the host and back.
    """

    name: str
    saved: int
    forward: float
    backward: float
    forward_peak: int = 0
    backward_peak: int = 0
    movable: bool = True


@dataclass(frozen=True)
class Stage:
    """Stage of a chain: a block, or the head with the loss.

    Attributes:
        name: Name of the stage's module.
        output: Bytes of the stage's output, and of its gradient; 0 for a loss.
        modes: Ways in which the stage runs with gradients; the first keeps everything.
        forward_peak: Transient bytes of a forward that keeps nothing, above its input and output. Such a forward takes
            the first mode's `forward` seconds.
        gathered: Bytes of the stage's parameters that a sharding strategy gathers for its forward. In backward they
            stay gathered from a recomputation to the stage's own backward.
    """

    name: str
    output: int
    modes: tuple[Mode, ...]
    forward_peak: int = 0
    gathered: int = 0

    @property
    def forward(self) -> float:
        """Seconds of a forward that keeps nothing."""
        return self.modes[0].forward


@dataclass(frozen=True)
class Chain:
    """Stages that run one after another, each on the output of the one before.

    Attributes:
        stages: The blocks of a plan, then the head with the loss. The last stage is never recomputed.
        input: Bytes of the first stage's input, which stays on the device until the first stage's backward.

    Raises:
        DloError: A chain without stages, a stage without modes, a size or time that is negative or not finite, or a
            mode that saves less than the stage's output.
    """

    stages: tuple[Stage, ...]
    input: int

    def __post_init__(self) -> None:
        if not self.stages:
            raise DloError("stages must have at least one stage, got none; give the plan's blocks and the head")
        _check_number("chain", "input", self.input)
        for index, stage in enumerate(self.stages):
            where = f"stage {index} ({stage.name})"
            if not stage.modes:
                raise DloError(f"modes of {where} must have at least one mode, got none; give the one that keeps all")
            for key in ("output", "forward_peak", "gathered"):
                _check_number(where, key, getattr(stage, key))
            for mode in stage.modes:
                for field in fields(mode):
                    if field.name not in ("name", "movable"):
                        _check_number(f"mode {mode.name} of {where}", field.name, getattr(mode, field.name))
                if mode.saved < stage.output:
                    raise DloError(
                        f"saved of mode {mode.name} of {where} must include its output of {stage.output} bytes, got"
                        f" {mode.saved}; add the output's bytes"
                    )

    def __len__(self) -> int:
        return len(self.stages)

    def input_of(self, stage: int) -> int:
        """Returns the bytes of a stage's input, which are also those of the input's gradient."""
        return self.stages[stage - 1].output if stage else self.input

    def interior(self, stage: int, mode: int = 0) -> int:
        """Returns the bytes that a stage keeps for backward besides its input and output."""
        return self.stages[stage].modes[mode].saved - self.stages[stage].output

    @property
    def kept_bytes(self) -> int:
        """Bytes of the input and of all that the stages keep in their first modes."""
        return self.input + sum(stage.modes[0].saved for stage in self.stages)

    @property
    def kept_time(self) -> float:
        """Seconds of forward and backward of all stages in their first modes: a step without recomputation."""
        return sum(stage.modes[0].forward + stage.modes[0].backward for stage in self.stages)


def _check_number(where: str, key: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise DloError(f"{key} of {where} must be a finite number of at least 0, got {value}; measure it again")


@dataclass(frozen=True)
class Link:
    """Link on which the copies of each direction run in the order of their issue, beside computation.

    Attributes:
        to_host: Bytes per second from the device to the host.
        to_device: Bytes per second from the host to the device.

    Raises:
        DloError: A rate that is not a finite number above 0.
    """

    to_host: float
    to_device: float

    def __post_init__(self) -> None:
        for key in ("to_host", "to_device"):
            if not 0 < (value := getattr(self, key)) < math.inf:
                raise DloError(
                    f"{key} must be a finite number of bytes per second above 0, got {value}; 25e9 is that of PCIe 4"
                )
