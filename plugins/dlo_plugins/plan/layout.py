"""Layout of a run, the bytes of its tensors, and the resources and wishes for which layouts are searched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.mesh import AXES, MeshSpec
from dlo_framework.units import format_bytes
from dlo_plugins.parallel.pipeline.pipeline_schedules import flushes
from dlo_plugins.plan.work import Part

#: Bytes of an element, by the name of its dtype.
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


_flushes = functools.cache(flushes)
#: Modes of recomputation that repeat a block's collectives other than those of `tp`, which some of them keep.
_REPEATS = ("full", "selective", "alternate")


def repeats_messages(mode: str) -> bool:
    """Returns whether a mode of recomputation repeats what the ranks of `cp` and of `ep` send."""
    return mode in _REPEATS


@dataclass(frozen=True)
class Layout:
    """Layout of a run that is to be costed.

    Attributes:
        mesh: Sizes of the axes.
        micro_batch: Rows of a micro-batch on one data-parallel rank.
        micro_batches: Number of micro-batches of a step.
        schedule: Name of the pipeline's schedule.
        stages_per_rank: Number of stages of a rank.
        split: Number of blocks of each stage; None for the most even split.
        zero: Stage of ZeRO over `dp_shard` x `cp`: 0 none, 1 optimizer, 2 and gradients, 3 and parameters.
        reduce_each: Whether each micro-batch reduces its gradients, so that none accumulate in full.
        sequence_parallel: Whether the ranks of `tp` share the tokens between the layers.
        recompute: Mode of recomputation of the blocks: `none`, `selective`, `attention` or `full`; or `rotor`, which
            chooses for each block.
        every: Interval of the blocks that recompute: 1 for all of them.
        budget: Bytes for a rank's activations under `rotor`.
        offload: Whether `rotor` may also copy activations to the host.
    """

    mesh: MeshSpec = field(default_factory=lambda: MeshSpec(dp_shard=1))
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    split: tuple[int, ...] | None = None
    zero: int = 3
    reduce_each: bool = False
    sequence_parallel: bool = True
    recompute: str = "none"
    every: int = 1
    budget: int = 0
    offload: bool = False

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.mesh.pp * self.stages_per_rank

    @property
    def stages_option(self) -> int | None:
        """Number of stages of a rank as MeshStrategy takes it: None for the schedule's own."""
        return self.stages_per_rank if self.stages_per_rank > 1 else None

    @property
    def sharers(self) -> int:
        """Number of ranks that share one copy of the state."""
        return self.mesh.dp_shard * self.mesh.cp

    @property
    def uses_zero_strategy(self) -> bool:
        """Whether the run has ZeroStrategy, stage 1, in place of a mesh."""
        return self.zero == 1 and not self.delays

    def exchanged_bytes(self, part: Part) -> float:
        """Returns the bytes that a rank's micro-batch exchanges in a part's forward, its own share included."""
        return part.exchanged * self.micro_batch / self.mesh.cp if self.mesh.ep > 1 else 0.0

    def stored_sharers(self, state: StateFormat) -> int:
        """Returns the number of ranks that share the stored parameters and the reduced gradients.

        ZeRO 1 shares them too where they are master weights, beside full parameters in half precision.

        Args:
            state: Bytes of the run's tensors.
        """
        shares = self.zero >= 2 or (self.zero == 1 and state.has_masters and not self.delays)
        return self.sharers if shares else 1

    @property
    def delays(self) -> bool:
        """Whether the schedule applies gradients one step later, with two versions of full weights on each rank."""
        return self.mesh.pp > 1 and not _flushes(self.schedule)

    @property
    def state_sharers(self) -> int:
        """Number of ranks that share the optimizer's state."""
        return self.sharers if self.zero else 1

    @property
    def allows_steps_in_backward(self) -> bool:
        """Whether a unit's gradients are complete in backward: one micro-batch, on ranks that hold shards or slices."""
        mesh = self.mesh
        sharded = self.zero >= 2 and mesh.dp_shard * mesh.cp > 1
        sliced = mesh.tp == mesh.world_size
        return mesh.pp == 1 and self.micro_batches == 1 and mesh.world_size > 1 and (sharded or sliced)

    @property
    def global_batch(self) -> int:
        """Rows of a step on all ranks."""
        return self.micro_batch * self.micro_batches * self.mesh.data_size

    def __str__(self) -> str:
        words = [str(self.mesh)]
        if self.mesh.pp > 1:
            words.append(self.schedule + (f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        words.append(f"micro-batch {self.micro_batch} x {self.micro_batches}")
        if self.sharers > 1:
            words.append(f"ZeRO {self.zero}" + (", reduce each micro-batch" if self.reduce_each else ""))
        if self.recompute == "rotor":
            size = f" with {format_bytes(self.budget)}" if self.budget else ""
            words.append(f"Rotor{size}" + (" and offloading" if self.offload else ""))
        elif self.recompute != "none":
            words.append(f"recompute {self.recompute}" + (f" every {self.every}" if self.every > 1 else ""))
        return ", ".join(words)


@dataclass(frozen=True)
class StateFormat:
    """Bytes of an element of a run's tensors.

    Attributes:
        compute: Name of the dtype of the products.
        parameter: Bytes of a stored parameter.
        gathered: Bytes of a parameter as computation uses it.
        gradient: Bytes of a gradient that a step accumulates.
        reduced: Bytes of a gradient while it is reduced.
        autocasts: Whether autocast casts parameters of another dtype than the products', and autograd keeps the casts.
        state: Bytes of the optimizer's state for a trained parameter, master weights included.
        fused: Whether neighbouring operations are one kernel, as in compiled code or by hand.
        compiled: Whether backward repeats what is internal to a kernel, as in compiled code.
        overlaps: Whether gradients are reduced while backward runs.
        accumulates_in_products: Whether the product that computes a weight's gradient adds it to the step's.
        steps_in_backward: Whether each unit's gradients are stepped and freed in backward, as OptimizerInBackward does.
        frees_sent: Whether a stage of a pipeline frees its output once it is sent, as Megatron does and dlo does not.
    """

    compute: str = "bfloat16"
    parameter: int = 4
    gathered: int = 2
    gradient: int = 4
    reduced: int = 4
    state: float = 8.0
    autocasts: bool = False
    fused: bool = False
    compiled: bool = False
    overlaps: bool = True
    accumulates_in_products: bool = False
    steps_in_backward: bool = False
    frees_sent: bool = False

    def casts(self, layout: Layout) -> int:
        """Returns the bytes of each parameter's cast that a step keeps; gathers in half precision need none."""
        size = SIZES[self.compute]
        gathers_casts = layout.mesh.data_size * layout.mesh.cp > 1 and self.gathered <= size
        return size if self.autocasts and not gathers_casts else 0

    def has_delayed_masters(self, layout: Layout) -> bool:
        """Returns whether both versions of weights have the gathered dtype, beside shards of master weights."""
        return layout.delays and self.has_masters and layout.mesh.data_size * layout.mesh.cp > 1

    def version_sizes(self, layout: Layout) -> tuple[float, int]:
        """Returns the bytes of a parameter where gradients are delayed: with one version of weights, and of another."""
        if self.has_delayed_masters(layout):
            return self.gathered + self.parameter / layout.state_sharers, self.gathered
        return self.parameter, self.parameter

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtypes in which parameters are gathered and gradients reduced, where these can be chosen: mixed precision."""
        if self.parameter == SIZES[self.compute]:
            return {}
        names = {SIZES[self.compute]: self.compute, self.parameter: "float32"}
        return {"param_dtype": names[self.gathered], "reduce_dtype": names[self.reduced]}

    @property
    def scales_loss(self) -> bool:
        """Whether the loss has a scale, from which gradients are freed before the step: mixed precision of float16."""
        return self.autocasts and self.compute == "float16"

    @property
    def has_masters(self) -> bool:
        """Whether stored parameters are master weights, beside others in half precision that computation uses."""
        return self.parameter > self.gathered


#: Schedules with the number of stages of a rank.
SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBV", 2), ("Varuna", 1))
#: Schedules that are planned only if they are asked for, because gradients have a delay: the loss curve is another.
DELAYED = (("PipeDream2BW", 1),)
_PLANNED = tuple(dict.fromkeys(name for name, _ in (*SCHEDULES, *DELAYED)))
#: Keys of `fix`, with their values: of an empty tuple, all numbers. `gather` and `reduce` are dtypes of the state.
_FIXABLE: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*AXES, "ep", "micro_batch"), ()),
    **{"schedule": _PLANNED, "zero": ("3", "2", "1", "0"), "recompute": ("none", "selective", "full", "rotor")},
    **{"offload": ("false", "true"), "gather": None, "reduce": None},
}


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
        for key, value in self.fix.items():
            if key not in _FIXABLE:
                raise DloError(
                    f"--fix must name one of {', '.join(_FIXABLE)}, got {key}{did_you_mean(key, [*_FIXABLE])}; such as"
                    " --fix tp=8"
                )
            known = _FIXABLE[key]
            if known and value.lower() not in map(str.lower, known):
                raise DloError(
                    f"--fix {key} must be one of {', '.join(known)}, got {value}{did_you_mean(value, known)}; leave it"
                    f" out, or use --fix {key}={known[0]}"
                )
            if known == () and not value.isdigit():
                raise DloError(f"--fix {key} must be a number, got {value!r}; such as --fix {key}=2")
        mode = self.fix.get("recompute", "rotor").lower()
        offloads = self.fix.get("offload", "false").lower() == "true"
        if not self.rotor and (self.fix.get("recompute", "").lower() == "rotor" or offloads):
            raise DloError(
                "--fix recompute=rotor and offload=true must come without a compiled model, got the callback Compile"
                " with scope: model; set its scope: blocks"
            )
        if offloads and mode != "rotor":
            raise DloError(
                f"--fix offload=true must come with Rotor, which offloads, got recompute={mode}; leave it out"
            )

    def allows(self, key: str, value: object) -> bool:
        """Returns whether a value agrees with what is fixed."""
        return key not in self.fix or str(value).lower() == self.fix[key].lower()
