"""Callback `Profile`: profiles some steps of a run, and reports where their time and memory go."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, schedule

from dlo_framework.atomic_file import write_atomic
from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.costs import is_compiled
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.rehearsal import run_folder
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import draw_figure, log_figure, log_text
from dlo_framework.watch.monitor import RunMonitor, StepClock
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.profile.device_waits import WaitRecorder
from dlo_plugins.profile.module_ranges import mark, nvtx_ranges, trace_ranges
from dlo_plugins.profile.rank_profile import (
    MachinePeaks,
    RankProfile,
    analyse,
    find_straggler,
    measure_peaks,
    read_peaks,
    rewrite_trace,
)
from dlo_plugins.profile.report import ProfileReport
from dlo_plugins.profile.step_breakdown import read_events

Format = Literal["chrome", "tensorboard", "memory", "nvtx"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Folder of the profiles in the run's folder.
FOLDER = "profile"
_NEVER = 1 << 62


class Profile(PluginCallback):
    """Profiles some steps of a run: time by kind of work and by module, memory, roofline, waits, and slow ranks.

    After `wait` optimizer steps it warms torch's profiler up for `warmup` steps, and records `active` ones. The parts
    of the table add up to the step. One more step is searched for lines that wait for the device. The report goes to
    `profile/` in the run's folder, to the loggers and to the terminal. Outside these steps it does nothing.

    Args:
        wait: Number of optimizer steps before a window; the first ones of a run are slow.
        warmup: Number of steps in which the profiler runs and nothing is recorded.
        active: Number of steps that are recorded.
        repeat: Number of windows.
        ranks: Ranks that are profiled; None for all, which the comparison of ranks needs.
        formats: Outputs beside the report: `chrome` keeps each rank's trace, which Perfetto and TensorBoard's profiler
            plug-in read; `tensorboard` logs the tables and plots; `memory` records memory; `nvtx`, alone, gives modules
            and phases NVTX ranges for Nsight Systems in place of all others. None for all but `nvtx`.
        waits: Whether to search a step for lines that wait for the device.
        machine: Machine of `dlo plan`, by name or file, for the roofline; None to measure this one.

    Raises:
        DloError: If a number or name is invalid, a rank does not exist, or `nvtx` is set without an NVIDIA GPU.
    """

    example = "{wait: 1, warmup: 1, active: 2, formats: [memory]}"

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it observes steps and changes nothing in them"

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(
        self, wait: int = 5, warmup: int = 2, active: int = 3, repeat: int = 1, ranks: list[int] | None = None,
        formats: list[Format] | None = None, waits: bool = True, machine: str | None = None,
    ) -> None:  # fmt: skip
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 1),
        ):
            check_number(f"Profile: {name}", value, f"at least {least}", f"set {least}")
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.ranks = ranks
        self.formats: list[Format] = ["chrome", "tensorboard", "memory"] if formats is None else list(formats)
        for name in self.formats:
            check_choice("Profile: formats", name, FORMATS, "set chrome")
        if "nvtx" in self.formats and len(self.formats) > 1:
            raise DloError(
                f"Profile: formats must be [nvtx] alone, since one profiler can use the GPU's counters, got"
                f" {self.formats}; run twice"
            )
        if ranks is not None and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
            raise DloError(f"Profile: ranks must be different numbers from 0, got {ranks}; set [0]")
        self.waits = waits
        self.machine = machine
        self.peaks: MachinePeaks | None = read_peaks(machine) if machine is not None else None
        self.report: ProfileReport | None = None
        self._window: _Window | None = None
        self._searching: WaitRecorder | None = None
        self._entered: WaitRecorder | None = None
        self._late: WaitRecorder | None = None
        self._marks = False
        self._due = _NEVER
        self._windows = 0
        self._usual: float | None = None
        self._folder: Path | None = None

    # --- checks ------------------------------------------------------------------------------------------------

    def check_run(self, trainer: Any, module: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Checks the ranks and the device."""
        if self.ranks is not None and max(self.ranks) >= trainer.world_size:
            raise DloError(
                f"Profile: ranks must be below {trainer.world_size}, the number of ranks, got {self.ranks}; set [0]"
            )
        if "nvtx" in self.formats and not isinstance(trainer.accelerator, CUDAAccelerator):
            raise DloError(
                "Profile: formats must be of chrome, tensorboard and memory without an NVIDIA GPU, got nvtx; set"
                " formats: [chrome]"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run, for a Trainer that is used from Python."""
        if stage == "fit":
            self.check_run(trainer, pl_module)

    # --- hooks -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plans the first window."""
        control_group(trainer)  # Created here, at the same point on all ranks.
        self._folder = run_folder(trainer) / FOLDER
        self._windows, self.report = 0, None
        self._due = trainer.global_step + self.wait
        if self.wait == 0:
            self._open(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Marks the phase; starts the search for waits in its step."""
        if self._marks:
            self._mark("forward")
        elif self._late is not None:
            self._leave_search()
        elif self._searching is not None and self._entered is None:
            self._searching.__enter__()
            self._entered = self._searching

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Marks the phase."""
        self._mark("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks the phase."""
        self._mark("between")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Marks the phase."""
        self._mark("optimizer")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves a validation out of the steps."""
        if self._marks and self._window is not None:
            self._window.pause(True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues after a validation."""
        if self._marks and self._window is not None:
            self._window.pause(False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Goes from step to step of the window."""
        if trainer.global_step < self._due:
            return
        if self._window is None:
            self._open(trainer, pl_module)
            return
        self._due = trainer.global_step + 1
        if self._searching is not None:
            self._end_search(trainer)
            self._finish(trainer, pl_module)
        elif self._window.advance():
            self._end_recording(trainer, pl_module)
        self._marks = self._window is not None and self._window.records

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports the steps of a window that training has ended in."""
        if self._window is None:
            self._leave_search()
            if self._windows == 0:
                rank_zero_warn(f"Profile: training ended before wait={self.wait} steps; set a smaller wait")
            return
        window = self._window
        self._leave_search()
        if self._searching is None:
            rank_zero_warn(
                f"Profile: training ended inside a window of {self.warmup + self.active} steps, after {window.recorded}"
                " recorded ones; set a smaller wait, or train longer"
            )
            window.stop(trainer)
        else:
            self._searching = None
        if window.recorded:
            self._finish(trainer, pl_module)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes hooks and modes after an error."""
        self._leave_search()
        if self._window is not None:
            self._window.stop(trainer, exports=False)
        self._close()

    def summary_facts(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the last profile's figures for ``summary.json``; nothing before the first."""
        if self.report is None:
            return {}
        own = self.report.own
        return {
            "profile": {
                "folder": FOLDER,
                "steps": list(self.report.steps),
                "step_seconds": own.measured,
                "kinds": {kind: seconds for kind in own.breakdown.work | own.breakdown.steps[0].kinds
                          if (seconds := own.breakdown.kind(kind))},
                "straggler": self.report.stragglers.text,
            }
        }  # fmt: skip

    # --- a window ----------------------------------------------------------------------------------------------

    def _mark(self, label: str) -> None:
        if self._marks and self._window is not None:
            self._window.mark(label)

    def _open(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts a window."""
        assert self._folder is not None
        monitor = _find(trainer, RunMonitor)
        self._usual = monitor.step_seconds if monitor is not None else None
        own = self.ranks is None or trainer.global_rank in self.ranks
        self._window = _Window(
            module, trainer.strategy.root_device, trainer.global_step, self.warmup, self.active, self.formats,
            self._folder / f"rank_{trainer.global_rank}.{self._windows}.pt.trace.json.gz", own,
        )  # fmt: skip
        clock = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(clock, StepClock) and own:
            clock.on_fetch = self._window.mark_fetch
        self._window.start()
        self._marks = self._window.records
        self._due = trainer.global_step + 1

    def _end_recording(self, trainer: Trainer, module: LightningModule) -> None:
        """Goes on to the step that is searched for waits, or to the report."""
        assert self._window is not None
        self._window.stop(trainer)
        self._marks = False
        if self.waits and not self._window.is_nvtx and not is_compiled(module):
            self._searching = WaitRecorder(trainer.strategy.root_device)
            return
        self._finish(trainer, module)

    def _end_search(self, trainer: Trainer) -> None:
        """Ends the search. Where a count of FLOPs has begun inside it, its mode is left after that one's."""
        monitor = _find(trainer, RunMonitor)
        if self._entered is not None and monitor is not None and monitor.flops is not None and monitor.flops.running:
            self._entered.stopped = True
            self._late, self._entered = self._entered, None
            return
        self._leave_search()

    def _leave_search(self) -> None:
        mode = self._entered or self._late
        self._entered = self._late = None
        if mode is not None:
            mode.__exit__(None, None, None)

    def _close(self) -> None:
        self._window = self._searching = None
        self._marks = False
        self._due = _NEVER

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        """Analyses this rank's steps, gathers those of all, and reports them."""
        window, searching = self._window, self._searching
        assert window is not None
        self._close()
        self._windows += 1
        if self._windows < self.repeat:
            self._due = trainer.global_step + max(1, self.wait)
        monitor = _find(trainer, RunMonitor)
        if monitor is not None:
            monitor.pause()
        if window.is_nvtx:
            rank_zero_info("Profile: the NVTX ranges of the window have ended")
            return
        own = self._analyse(trainer, window, searching, module)
        profiles = _gather(trainer, own)
        if not trainer.is_global_zero or not profiles:
            return
        steps = [step.number for step in profiles[0].breakdown.steps]
        self.report = ProfileReport(
            (min(steps), max(steps)), trainer.world_size, profiles,
            find_straggler({each.rank: each.breakdown.steps for each in profiles}),
            self._find_peaks(trainer, profiles), self._usual,
        )  # fmt: skip
        self._show(trainer, self.report)

    def _analyse(
        self, trainer: Trainer, window: _Window, searching: WaitRecorder | None, module: LightningModule
    ) -> RankProfile | None:
        if not window.own:
            return None
        own = window.analyse(trainer.global_rank, keep="chrome" in self.formats)
        own.waits = searching.waits() if searching is not None else None
        if searching is None and self.waits and is_compiled(module):
            own.note = "waits were not looked for: operators of a compiled model cannot be seen"
        state = _find(trainer, StateReport)
        if state is not None and state.found is not None:
            own.state = {
                name: float(value)
                for name in ("parameters", "gradients", "optimizer")
                if (value := getattr(state.found, name)) is not None
            }
        return own

    def _find_peaks(self, trainer: Trainer, profiles: Sequence[RankProfile]) -> MachinePeaks:
        """Returns the machine's peaks, which are measured once."""
        if self.peaks is None:
            dtypes = sorted({work.dtype for each in profiles for work in each.breakdown.work.values() if work.dtype})
            self.peaks = measure_peaks(trainer.strategy.root_device, dtypes or ["float32"])
        return self.peaks

    def _show(self, trainer: Trainer, report: ProfileReport) -> None:
        """Writes and logs the report."""
        assert self._folder is not None
        number = self._windows - 1
        text = report.text()
        write_atomic(self._folder / f"report.{number}.txt", text + "\n")
        write_atomic(self._folder / f"report.{number}.json", json.dumps(report.to_json(), indent=1) + "\n")
        figures = {
            "time": draw_figure("Profile", report.figure),
            "memory": draw_figure("Profile", report.memory_figure),
        }
        for name, figure in figures.items():
            if figure is not None:
                figure.savefig(self._folder / f"{name}.{number}.png", dpi=120)
                if "tensorboard" in self.formats:
                    log_figure(trainer, f"profile/{name}", figure)
        if "tensorboard" in self.formats:
            log_text(trainer, "profile/report", lambda: f"```text\n{text}\n```")
        print(f"\n{text}\n\nprofile in {self._folder}", flush=True)


class _Window:
    """Steps that are profiled on one rank.

    Args:
        module: Module of the run.
        device: Device of the run.
        step: Number of optimizer steps before the window.
        warmup: Number of steps in which the profiler only warms up.
        active: Number of steps that are recorded.
        formats: Outputs.
        trace: Path of the trace.
        own: Whether this rank is profiled.

    Attributes:
        walls: Seconds of each recorded step.
        records: Whether the current step is recorded.
    """

    def __init__(
        self, module: LightningModule, device: torch.device, step: int, warmup: int, active: int,
        formats: Sequence[str], trace: Path, own: bool,
    ) -> None:  # fmt: skip
        self.own, self.is_nvtx = own, "nvtx" in formats
        self.walls: list[float] = []
        self.records = False
        self._module, self._device, self._step = module, device, step
        self._warmup, self._active, self._done = warmup, active, 0
        self._memory = "memory" in formats
        self._trace = trace
        self._began = self._paused = 0.0
        self._profiler: Any = None
        self._ranges: Any = None
        self._phase: Any = None
        self._snapshot = False

    @property
    def recorded(self) -> int:
        """Number of steps that the profiled ranks have recorded; the same on all ranks."""
        return max(0, self._done - self._warmup)

    def start(self) -> None:
        """Starts to warm up, or to record."""
        if not self.own:
            self._enter_step()
            return
        if self.is_nvtx:
            self._ranges = nvtx_ranges(self._module)
        else:
            self._ranges = trace_ranges(self._module)
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto prints its progress otherwise.
            self._profiler = profile(
                activities=activities, record_shapes=True, profile_memory=self._memory,
                schedule=schedule(wait=0, warmup=self._warmup, active=self._active, repeat=1),
                on_trace_ready=self._export,
            )  # fmt: skip
            self._profiler.start()
        self._ranges.start()
        self._enter_step()

    def _export(self, profiler: Any) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))

    def _enter_step(self) -> None:
        """Begins the next step."""
        if self._done < self._warmup:
            return
        first = not self.records
        self.records = self.own
        if not self.own:
            return
        if first and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if first and self.is_nvtx:
            torch.cuda.profiler.start()
        if first and self._memory and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history()
            self._snapshot = True
        self.mark(f"step {self._step + self._done}")
        self._began, self._paused = time.perf_counter(), 0.0

    def advance(self) -> bool:
        """Ends a step; returns whether it was the last one."""
        last = self._done + 1 == self._warmup + self._active
        if self.records:
            if last and self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self.walls.append(time.perf_counter() - self._began - self._paused)
            self.mark(f"end {self._step + self._done}")
        self._done += 1
        if self._profiler is not None and not last:
            self._profiler.step()
        if not last:
            self._enter_step()
        return last

    def mark(self, label: str) -> None:
        """Marks a phase in the trace, or as an NVTX range."""
        if not self.is_nvtx:
            mark(label)
            return
        if self._phase is not None:
            torch.cuda.nvtx.range_end(self._phase)
        self._phase = torch.cuda.nvtx.range_start(label)
        if label == "between":
            self._ranges.end_backward()

    def mark_fetch(self, begins: bool) -> None:
        """Marks the begin or the end of a batch's fetch."""
        if self.records:
            self.mark("data" if begins else "between")

    def pause(self, begins: bool) -> None:
        """Begins or ends the time that is left out of the step."""
        if not self.is_nvtx:
            mark("pause" if begins else "resume")
        self._paused += -time.perf_counter() if begins else time.perf_counter()

    def stop(self, trainer: Trainer, exports: bool = True) -> None:
        """Removes the hooks, and stops the profiler.

        Args:
            trainer: Trainer.
            exports: Whether the profiler writes its trace and its snapshot of memory.
        """
        self.records = False
        clock = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(clock, StepClock):
            clock.on_fetch = None
        if self._ranges is not None:
            self._ranges.stop()
        if self._snapshot:
            path = self._trace.with_name(self._trace.name.partition(".pt.")[0] + ".memory.pickle")
            if exports:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.is_nvtx and self.own:
            if self._phase is not None:
                torch.cuda.nvtx.range_end(self._phase)
            torch.cuda.profiler.stop()
        if self._profiler is not None:
            if exports:
                # A collective of gloo that ends after the profiler would write into what the profiler has freed.
                contract_of(trainer.strategy).finish_step()
            else:
                self._profiler.on_trace_ready = None
            self._profiler.stop()  # Exports the trace.
        self._ranges = self._phase = self._profiler = None
        self._snapshot = False

    def analyse(self, rank: int, keep: bool) -> RankProfile:
        """Returns the profile of the recorded steps.

        Args:
            rank: Global rank.
            keep: Whether to keep the trace.
        """
        events = read_events(self._trace)
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        rank_profile = analyse(events, rank, platform.node(), device, self.walls)
        if keep:
            rewrite_trace(self._trace, events)
            rank_profile.trace = self._trace.name
        else:
            self._trace.unlink()
        return rank_profile


def _gather(trainer: Trainer, own: RankProfile | None) -> list[RankProfile]:
    """Returns the profiles of all ranks on rank 0; all ranks must call it."""
    group = control_group(trainer)
    if group is None:
        return [own] if own is not None else []
    profiles: list[Any] | None = [None] * trainer.world_size if trainer.global_rank == 0 else None
    dist.gather_object(own, profiles, dst=0, group=group)
    return [each for each in profiles or [] if each is not None]


def _find(trainer: Trainer, kind: type[Any]) -> Any:
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, kind)), None)
