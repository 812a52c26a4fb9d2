"""Compares the prediction of a run with what its `summary.json` has measured, and stores the residuals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlo_framework import runs
from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.task import Task
from dlo_framework.units import format_bytes
from dlo_plugins.planner.layout import Layout
from dlo_plugins.planner.machine import Machine, load_machine
from dlo_plugins.planner.plan_report import profile_frozen, profile_run, run_state
from dlo_plugins.planner.rank_memory import MemoryModel, RankMemory
from dlo_plugins.planner.rotor_model import RotorModel
from dlo_plugins.planner.run_layout import given_host, read_dtypes, read_layout, rotor_budget
from dlo_plugins.planner.second_model import SecondModels
from dlo_plugins.planner.step_time import StepTime, TimeModel
from dlo_plugins.planner.traffic_check import StepTraffic, count_traffic, predict_traffic, recorded_traffic
from dlo_plugins.planner.unmodelled import find_unmodelled


@dataclass(frozen=True)
class Residual:
    """Predicted and measured value of one quantity, in seconds or bytes; None where the run has no measurement."""

    name: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class RunCheck:
    """Prediction of a run beside its measurement.

    Attributes:
        folder: Folder of the run.
        machine: Name of the machine.
        layout: Layout of the run.
        residuals: Quantities of both.
        time: Predicted time by part.
        memory: Predicted memory by part.
        traffic: Communication of a step by part; its measurement is the run's own count, or else that of a simulated
            rank.
        unmodelled: Sentences on what of the run is not in the figures.
    """

    folder: Path
    machine: str
    layout: Layout
    residuals: tuple[Residual, ...]
    time: StepTime
    memory: RankMemory
    traffic: tuple[Residual, ...] = ()
    unmodelled: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON data."""
        return {
            "run": str(self.folder),
            "machine": self.machine,
            "layout": str(self.layout),
            "residuals": {r.name: {**asdict(r), "error": r.error} for r in self.residuals},
            "traffic": {r.name: {**asdict(r), "error": r.error} for r in self.traffic},
            "predicted_seconds": asdict(self.time),
            "predicted_bytes": asdict(self.memory),
            "not_in_figures": list(self.unmodelled),
        }

    def text(self) -> str:
        """Returns the comparison as a table."""
        lines = [f"{self.folder}: {self.layout}, on {self.machine}", f"{'':<24}{'predicted':>12}{'measured':>12}"]
        lines += [_row(residual) for residual in self.residuals]
        if self.traffic:
            lines.append(f"{'traffic of a step':<24}{'predicted':>12}{'counted':>12}")
            lines += [_row(residual) for residual in self.traffic]
        lines += [f"not in the figures: {what}" for what in self.unmodelled]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes the comparison as JSON.

        Raises:
            DloError: The file cannot be written.
        """
        write_atomic(path, json.dumps(self.to_json(), indent=1) + "\n")


def _row(residual: Residual) -> str:
    shown = [_shown(residual.name, value) for value in (residual.predicted, residual.measured)]
    error = "" if residual.error is None else f"{residual.error:+9.1%}"
    return f"{residual.name:<24}{shown[0]:>12}{shown[1]:>12}{error}"


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g} s" if name.endswith("seconds") else format_bytes(value)


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns the summary of a finished run.

    Raises:
        DloError: The folder has no run, or the run has not finished.
    """
    if not (folder / "config.yaml").is_file():
        found = [*runs.versions(folder), *(run for below in sorted(folder.glob("*/")) for run in runs.versions(below))]
        others = ", ".join(str(run) for run in found[:3])
        fix = f"set one of {others}" if others else "set a folder such as runs/x/version_0"
        raise DloError(f"plan: --check must be the folder of a run, got {folder} without config.yaml; {fix}")
    summary = runs.current_summary(folder)
    if summary is None or summary.get("status") != "finished":
        status = "no summary.json" if summary is None else str(summary.get("status"))
        raise DloError(f"plan: --check must be a run that has finished, got {folder}: {status}; resume it to its end")
    return summary


def check_run(
    folder: Path, config: dict[str, Any], model: Any, datamodule: Any, machine_name: str,
    frozen: Sequence[tuple[FrozenModel, Task]] = (),
) -> RunCheck:  # fmt: skip
    """Returns the prediction of a run beside its measurement.

    Args:
        folder: Folder of the run.
        config: Config of the run.
        model: Task or LightningModule of the config, without recomputation.
        datamodule: Datamodule of the config.
        machine_name: Name or file of the machine that it ran on.
        frozen: Second models, each with its task on the meta device.

    Raises:
        DloError: The run has not finished, ran on another kind of device, or has a strategy that is not predicted.
    """
    summary = read_summary(folder)
    ranks = int(summary["world_size"])
    layout, budget = read_layout(config, ranks), rotor_budget(config)
    machine = load_machine(machine_name)
    device = "cpu" if str(summary.get("accelerator", "")).startswith("CPU") else "cuda"
    if machine.device != device:
        raise DloError(
            f"plan: --machine must be the one that the run was on, a {device} machine, got {machine.name}"
            f" ({machine.device}); set --machine to its file"
        )
    nodes = int((config.get("trainer") or {}).get("num_nodes") or 1)
    machine = replace(machine, ranks_per_node=max(1, ranks // nodes), host=given_host(config) or machine.host)
    state, optimizer = run_state(config, model, *read_dtypes(config, device))
    profile = profile_run(model, datamodule, state, machine.device)
    times = TimeModel(profile, machine, state)
    profiles = profile_frozen(frozen, model, datamodule, state, machine.device)
    second = SecondModels(profiles, machine, state) if profiles else None
    memory, plan = MemoryModel(times, second), None
    if layout.offload and machine.host is None:
        raise DloError(
            f"plan: --machine must have links.host for a run that offloads, got {machine.name} without; add links:"
            " {host: {bandwidth: {value: 25.0e+9, source: ...}, memory: {value: 64.0e+9, source: ...}}} to its file"
        )
    if budget is not None:
        rotor = RotorModel(times, memory)
        layout = replace(layout, budget=budget.bytes or int((budget.share or 0.0) * rotor.kept_bytes(layout)))
        plan = rotor.plan(layout)
        if plan is None:
            raise DloError(
                f"plan: --check must have a run whose Rotor is predicted to fit its budget, got {budget}, in which no"
                " schedule fits by the predicted bytes of its blocks; check a run with a larger budget"
            )
    time = times.step(layout, repeated=plan.repeated if plan else (), waits=plan.waits if plan else ())
    if second is not None:
        time = replace(time, second_model=second.seconds(layout))
    largest = memory.largest(layout, plan.activations if plan else None)
    found = _compare(folder, summary, layout, machine, times, time, largest)
    counted = recorded_traffic(summary, layout)
    if counted is None and isinstance(model, Task):
        counted = count_traffic(config, model, datamodule, layout)
    traffic = compare_traffic(predict_traffic(times, layout), counted)
    return replace(found, traffic=traffic, unmodelled=tuple(find_unmodelled(config, optimizer)))


def compare_traffic(predicted: StepTraffic, counted: StepTraffic | None) -> tuple[Residual, ...]:
    """Returns the parts of a step's communication that either has."""
    known = counted.parts if counted is not None else dict.fromkeys(predicted.parts)
    return tuple(
        Residual(f"{name}_bytes", size, known[name]) for name, size in predicted.parts.items() if size or known[name]
    )


def _compare(
    folder: Path,
    summary: dict[str, Any],
    layout: Layout,
    machine: Machine,
    times: TimeModel,
    time: StepTime,
    memory: RankMemory,
) -> RunCheck:
    state = summary.get("state_bytes") or {}
    trained = sum(part.trained.total for part in times.profile.parts)
    gradients = trained / layout.mesh.tp / layout.mesh.pp * times.state.gradient
    # A run measures gradients before the optimizer's step, and activations of one micro-batch before its backward.
    gradients /= layout.sharers if layout.zero >= 2 else 1
    gradients *= not times.state.steps_in_backward
    residuals = (
        Residual("step_seconds", time.total, summary.get("step_seconds")),
        Residual("peak_bytes", _peak(memory, machine), summary.get("peak_memory_bytes")),
        Residual("parameters_bytes", memory.parameters, state.get("parameters")),
        Residual("gradients_bytes", gradients, state.get("gradients")),
        Residual("optimizer_bytes", memory.optimizer, state.get("optimizer")),
    )
    return RunCheck(folder, machine.name, layout, residuals, time, memory)


def _peak(memory: RankMemory, machine: Machine) -> float:
    """Returns the predicted peak as a run measures it: of a process on a CPU, of allocated tensors on a GPU."""
    return memory.total if machine.device == "cpu" else memory.total - memory.overhead
