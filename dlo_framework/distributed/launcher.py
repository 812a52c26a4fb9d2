"""Launcher of a run's ranks: starts their processes, and ends them all when one of them fails.

Lightning's own launcher checks the processes it has started every five seconds, kills the main process without a
message when another has failed, and leaves the others running when the main process has. Here every rank learns of
the first failure within a second (:mod:`dlo_framework.distributed.heartbeat`), also where torchrun or SLURM has started
the ranks, and the process that the user sees ends last, with the first error and its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch.multiprocessing.spawn import ProcessRaisedException

from dlo_framework.callback import callbacks_of, traits_of
from dlo_framework.checkpoint import load, save
from dlo_framework.data.evaluation import without_repeats
from dlo_framework.distributed.failure import (
    Failure,
    RankFailed,
    RunEnd,
    exit_process,
    is_lost_connection,
    print_run_end,
    record_for_torchrun,
)
from dlo_framework.distributed.groups import control_group, forget_groups
from dlo_framework.distributed.heartbeat import Address, RankMonitor
from dlo_framework.distributed.signals import GRACE, GracePeriod, ProgressCounter, SignalListener
from dlo_framework.distributed.stacks import StackSampler, print_stack
from dlo_framework.errors import DloError, is_agreed, mark_agreed
from dlo_framework.random_streams import random_state, restore_random_state, seed_generators
from dlo_framework.strategy_contract import data_share

#: Seconds that a rank has to raise an error by itself, such as from a collective, after another rank's failure.
_GRACE = 2.0
#: The same for a rank that the launcher has started, for whose end the launcher waits.
_CHILDS_GRACE = 1.0
#: The same where ranks are ended where they wait: those that can raise do so at the same time.
_AT_ONCE = 0.2
#: Seconds that the main thread has to leave the run after a second Ctrl-C, and then its callbacks.
_INTERRUPTED = 0.5
#: Seconds that callbacks have for their ``on_exception``, where they may wait for dead ranks.
_FAREWELL = 5.0
#: The same where all ranks have raised and save together; only a rank that has died or hangs since takes so long.
_SAVING = 600.0
#: Seconds to wait, after a connection error, for the failure that caused it.
_CAUSE = 2.0
#: Time limit for ranks to find each other, however short the time limit of a collective is.
_START = timedelta(minutes=10)
#: Environment variable in which the launcher passes its process id to the ranks that it starts.
LAUNCHER = "DLO_LAUNCHER"
#: Seconds within which all ranks of a host notice that a rank is silent.
_APART = 0.5
#: Seconds to wait, after a rank's end, for the report of its cause.
_TOLD = 0.5
#: Seconds that the main process waits at its end for the other ranks.
_LAST = 60.0


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process a device, with ranks that monitor each other; see the module's docstring.

    Lightning (2.6) has no hook for the observer thread that it starts in ``launch``, so this class overrides
    ``launch``.
    """

    #: Processes that this process has started, over all runs of the script.
    children: ClassVar[list[subprocess.Popen[Any]]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.monitor: RankMonitor | None = None
        self._trainer: Trainer | None = None
        self._rank, self._world = 0, 1
        self._raised = threading.Event()  # set once the main thread has left the run
        self.handled = threading.Event()  # set once Lightning has called the callbacks' on_exception
        self._leaving = threading.Lock()
        self._running = False
        self._interrupts = 0
        self.grace = GRACE

    def __deepcopy__(self, memo: dict[int, Any]) -> RankLauncher:
        """Returns a launcher without processes and monitor, for the copy of a Trainer."""
        return type(self)(self.cluster_environment, self.num_processes, self.num_nodes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the other ranks, unless torchrun or SLURM has, and calls the function on this one.

        Raises:
            DloError: if the job's tasks are not the Trainer's ranks.
            RankFailed: if another rank failed first; else the function's own error.
        """
        try:
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        except ValueError as error:
            raise DloError(
                f"trainer.devices and trainer.num_nodes must be the job's tasks per node and nodes, got"
                f" {self.num_processes} and {self.num_nodes}; {error}"
            ) from error
        self._trainer = trainer
        RunEnd.last = None
        # New events: a thread of the last run may be about to look at its own.
        self._raised, self.handled = threading.Event(), threading.Event()
        self._running = True
        self._interrupts = 0
        signals = SignalListener(self._on_signal)
        if self.num_processes * self.num_nodes > 1:
            signals.start()
        if not self.cluster_environment.creates_processes_externally:
            self._start_children()
        elif _launcher_pid() is not None:
            _end_with_parent()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._running = False
            forget_groups()
            agreed = isinstance(error, _TunerExitException) or is_agreed(error)
            if agreed or self.num_processes * self.num_nodes == 1:
                raise
            shown = self._handle_error(error)
            if shown is error:
                raise
            raise shown from None
        finally:
            self._running = False
            self._end_watch(orderly=True)
            signals.stop()

    # --- monitoring ----------------------------------------------------------------------------------------

    def watch(self, strategy: WatchedRanks) -> None:
        """Makes the ranks monitor each other; called on all of them once the process group is there."""
        self._rank, self._world = strategy.global_rank, strategy.world_size
        if self._world == 1:
            return
        assert strategy.cluster_environment is not None
        limit = strategy._timeout.total_seconds() if strategy._timeout is not None else float("inf")
        watch = RankMonitor(
            self._rank,
            self._world,
            limit=limit,
            on_failure=self._on_failure,
            exit_code=self._exit_code,
            place=self._place,
            moves=ProgressCounter(self._trainer).moves,
            sampler=StackSampler(),
            grace=GracePeriod(self.grace),
        )
        served: Address | str | None = None
        if self._rank == 0:
            served = watch.serve(one_host=strategy.num_nodes == 1, name=strategy.cluster_environment.main_address)
        address = strategy.broadcast(served)
        problem = address if isinstance(address, str) and self._rank == 0 else None
        if isinstance(address, Address) and self._rank != 0 and not watch.join(address):
            hosts = " or ".join(address.hosts)
            problem = f"rank {self._rank} could not connect to rank 0 on port {address.port} of {hosts}"
        if problem is not None:
            fix = f"if a rank fails, the others notice after {limit:g} s (timeout_minutes)"
            print(f"dlo: {problem}; {fix}", file=sys.stderr)
        if problem is None and isinstance(address, Address):
            self.monitor = watch
        else:
            watch.end(orderly=True)  # Closes its socket.

    def _end_watch(self, *, orderly: bool) -> None:
        watch, self.monitor = self.monitor, None
        if watch is not None:
            watch.end(orderly=orderly)

    def _place(self) -> int:
        if self._trainer is None:
            return 0
        done = self._trainer.fit_loop.epoch_loop.batch_progress.total
        return done.ready + done.completed

    def _exit_code(self, rank: int) -> int | None:
        """Returns the exit code of a rank that this process has started, once it has ended."""
        local = rank - self._rank
        if not 1 <= local <= len(self.children):
            return None
        try:
            return self.children[local - 1].wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None

    def _on_signal(self, signum: int) -> None:
        """Handles a stop signal in the listener's thread, because the main thread may be waiting in a collective."""
        self._interrupts += signum == signal.SIGINT
        watch = self.monitor
        if self._interrupts < 2 or signum != signal.SIGINT:
            if watch is not None:
                watch.ask(signum)
            return
        if self._raised.wait(_INTERRUPTED) or not self._running:
            return
        world = self.num_processes * self.num_nodes
        failure = Failure(self._rank, world, "ended by a second Ctrl-C", exit_code=128 + signal.SIGINT, stacks=True)
        if watch is not None:
            failure = watch.fail(failure)
        self._abandon_unless(self._raised, 0.0, failure)

    def _on_failure(self, failure: Failure) -> None:
        """Handles another rank's failure: this rank has a moment to raise by itself, and is then ended."""
        grace = _GRACE if _launcher_pid() is None else _CHILDS_GRACE
        grace = _AT_ONCE if failure.stacks else grace
        threading.Thread(target=self._abandon_unless, args=(self._raised, grace, failure), daemon=True).start()

    def _abandon_unless(self, done: threading.Event, seconds: float, failure: Failure) -> None:
        done.wait(seconds)
        with self._leaving:
            if done.is_set():
                return
            if failure.stacks and done is self._raised:
                print_stack(self._rank, failure.world_size)
            # Each of them prints its stack too.
            self._end_children(_CHILDS_GRACE if failure.stacks else 0.0)
            print_run_end(self._make_end(failure))
            self._end_silent_parent(failure)
            exit_process(failure.exit_code)

    def _end_silent_parent(self, failure: Failure) -> None:
        """Kills the process that has started this one, if that is the silent rank: a stopped one ends no other way."""
        parent = _launcher_pid()
        if failure.silent and failure.rank == self._node_start() and parent is not None:
            time.sleep(_APART)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)

    def _make_end(self, failure: Failure) -> RunEnd:
        # The process that has started this one prints the failure, unless it was not told, was killed or hangs.
        can_tell = self.monitor is not None and (failure.rank != self._node_start() or failure.is_reported)
        started = bool(self.children) or _launcher_pid() is not None
        return RunEnd(failure, self._rank, _launcher_pid() is not None and can_tell, by_launcher=started)

    # --- failing -------------------------------------------------------------------------------------------

    def _handle_error(self, error: BaseException) -> BaseException:
        """Reports this rank's error to all ranks, or finds that another's came first; returns the error to raise."""
        own = Failure.from_error(
            error, self._rank, self._world if self.monitor else self.num_processes * self.num_nodes
        )
        first = self._find_first(error, own)
        with self._leaving:
            self._raised.set()
        if first == own:
            record_for_torchrun(error)
        if first.stacks and first != own:
            print_stack(self._rank, first.world_size, error)
        interrupted = isinstance(error, KeyboardInterrupt)
        farewell = _INTERRUPTED if interrupted else _FAREWELL
        if self._raises_together(error):
            mark_agreed(error)
            self._end_watch(orderly=True)
            farewell = _SAVING
        else:
            # Time does not help a rank that was stopped or hangs to leave, but lets it print its stack.
            self._end_children(
                _CHILDS_GRACE if first.stacks or interrupted else 2 * _CHILDS_GRACE if first.is_reported else 0.0
            )
            RunEnd.last = self._make_end(first)
            self._end_silent_parent(first)
            self._end_watch(orderly=False)
            # All ranks must take part in a save, and some are dead: Lightning's checkpoints on exceptions are off.
            for callback in self._trainer.checkpoint_callbacks if self._trainer is not None else []:
                callback.save_on_exception = False  # type: ignore[attr-defined]
        threading.Thread(target=self._abandon_unless, args=(self.handled, farewell, first), daemon=True).start()
        return error if first == own or not is_lost_connection(error) else RankFailed(first)

    def _find_first(self, error: BaseException, own: Failure) -> Failure:
        watch = self.monitor
        if watch is None:
            return self._failed_child() or own if is_lost_connection(error) else own
        if is_lost_connection(error):
            first = watch.wait_for_first(_CAUSE)
            if first is not None:
                return first
        return watch.fail(own, waited=is_lost_connection(error))

    def _raises_together(self, error: BaseException) -> TypeGuard[Exception]:
        """Returns whether all ranks raise at the same moment, each with its state whole, so that they can save it."""
        if self.monitor is None or self._trainer is None:
            return False
        may_save = isinstance(error, Exception) and not is_lost_connection(error)
        able = callbacks_of(self._trainer) if may_save else []
        return self.monitor.raises_together("".join(traits_of(each).moment_of_error(self._trainer) for each in able))

    # --- the processes that this one has started -----------------------------------------------------------

    def _start_children(self) -> None:
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            self._call_children_scripts()
        finally:
            del os.environ[LAUNCHER]  # Other processes that this one starts are not its ranks.
        self.children[:] = self.procs
        if not self.children:
            return
        atexit.register(self._wait_for_children)
        threading.Thread(target=self._observe, name="rank-observer", daemon=True).start()

    def _observe(self) -> None:
        """Notices ranks that end before they are monitored, or whose connection another process keeps open."""
        failure = None
        while self._running and failure is None:
            time.sleep(0.2)
            failure = self._failed_child()
        watch = self.monitor
        if failure is None or not self._running:
            return
        if watch is None:
            self._on_failure(failure)
        elif watch.wait_for_first(_TOLD) is None:
            watch.fail(failure)

    def _failed_child(self) -> Failure | None:
        """Returns the failure of a child rank that has ended with an error before the end of its run."""
        watch = self.monitor
        for rank, child in enumerate(self.children, start=self._node_start() + 1):
            if child.poll() and not (watch is not None and watch.has_left(rank)):
                return Failure.from_exit_code(rank, self.num_processes * self.num_nodes, child.returncode)
        return None

    def _node_start(self) -> int:
        return self.cluster_environment.node_rank() * self.num_processes

    def _end_children(self, seconds: float) -> None:
        """Kills the ranks that this process has started, after a number of seconds, and waits for their end."""
        if _launcher_pid() is not None:
            return
        for child in self._wait_children(seconds):
            child.kill()  # Not SIGTERM: a rank that hangs in a collective would not handle it.
        for child in self.children:
            child.wait()

    def _wait_children(self, seconds: float) -> list[subprocess.Popen[Any]]:
        """Returns the children that still run after a number of seconds; sooner if all have ended."""
        until = time.monotonic() + seconds
        while any(child.poll() is None for child in self.children) and time.monotonic() < until:
            time.sleep(0.05)
        return [child for child in self.children if child.poll() is None]

    def _wait_for_children(self) -> None:
        """Waits for the other ranks at the end of the script, and kills those that do not end."""
        late = self._wait_children(_LAST)
        for child in late:
            child.kill()
        if late:
            print(f"dlo: killed {len(late)} ranks that ran {_LAST:g} s longer than rank 0", file=sys.stderr)


class ForkedLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked ranks, for strategies that shard weights too.

    A notebook has no script that ranks could run, so that its process is forked, as under Lightning's `ddp_notebook`.
    All ranks are copies; the notebook's own process waits, and gets their results. Its objects must not have used CUDA
    before.

    Lightning's (2.6.6) saves rank 0's ``state_dict``, which under a sharding strategy is not the model's. This one
    saves a canonical checkpoint on all ranks, from which the notebook's module gets its weights. It overrides the two
    private methods that collect and restore results.

    Args:
        strategy: Strategy of the run.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")
        self._folder = ""

    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the ranks, calls the function on each, and returns rank 0's result once all have ended.

        Raises:
            DloError: Torch refuses backward in forked ranks, for what an earlier cell has done.
        """
        self._folder = tempfile.mkdtemp(prefix="dlo-notebook-")
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as error:
            if "autograd's threading" not in str(error):
                raise
            raise DloError(
                "ranks of a notebook must be forked before its process starts autograd's threads for devices, which an"
                " earlier cell has started (a plan, a prediction of memory, or a backward on a GPU); restart the kernel"
                " and train on several ranks first, or write a script (%%writefile train.py) and run it"
            ) from error
        finally:
            shutil.rmtree(self._folder)

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        """Saves the trained weights on all ranks, and returns rank 0's results."""
        path = None
        if trainer.state.fn == TrainerFn.FITTING:
            path = str(Path(self._folder) / "weights.ckpt")
            save({"state_dict": trainer.strategy.lightning_module_state_dict()}, path, group=control_group(trainer))
        if not trainer.is_global_zero:
            return None
        saver = trainer.checkpoint_callback
        best = saver.best_model_path if isinstance(saver, ModelCheckpoint) else None
        extra = {**self.get_extra_results(trainer), "seed": torch.initial_seed()}
        return _WorkerOutput(best, path, trainer.state, results, extra)

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: Trainer) -> None:
        """Gives the notebook's trainer, module and random numbers what rank 0 and the trained weights have."""
        saver: Any = trainer.checkpoint_callback
        if worker_output.best_model_path is not None and saver is not None:
            saver.best_model_path = str(worker_output.best_model_path)
        if worker_output.weights_path is not None:
            module = trainer.strategy.lightning_module
            assert module is not None
            module.configure_model()  # The ranks have built their own.
            module.load_state_dict(load(worker_output.weights_path)["state_dict"], strict=False)
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)
        seed_generators(worker_output.extra["seed"])


class WatchedRanks(DDPStrategy):
    """Lightning's DDPStrategy with processes that all end when one of them fails; the base of dlo's strategies."""

    def process_dataloader(self, dataloader: object) -> object:
        """Returns a loader that, in evaluation, repeats no sample on any rank.

        Where workers are seeded by rank, as Lightning (2.6) does, ranks of the same samples get the same seeds.
        """
        module = self.lightning_module
        _auto_add_worker_init_fn(dataloader, data_share(self)[0])
        return dataloader if module is None else without_repeats(dataloader, module.trainer)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "fork" or (self._start_method == "popen" and _IS_INTERACTIVE):
            # A notebook has no script that ranks could run; torchrun's ranks are none of a notebook.
            self._launcher = ForkedLauncher(self)
        elif self._start_method == "popen":
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            raise DloError(
                f"a strategy's start_method must be popen or fork, got {self._start_method}, whose ranks cannot monitor"
                " each other; use --trainer.strategy ddp, in a notebook ddp_notebook"
            )

    def setup_distributed(self) -> None:
        """Joins the process group, with a time limit long enough for slow ranks to start."""
        limit = self._timeout
        if limit is not None and limit < _START:
            self._timeout = _START
        try:
            self.set_world_ranks()
            join_group(self)
            joined, state = dist.is_initialized(), random_state()
            super().setup_distributed()
            # Lightning (2.6) has reset the seed, and ranks of an unseeded run have seeds of their own.
            restore_random_state(self.broadcast(state))
            backend = str(dist.get_backend())
            if not joined and "nccl" in backend and backend != "nccl":
                atexit.register(dist.destroy_process_group)  # Lightning does so for NCCL alone only.
        finally:
            self._timeout = limit
        if limit is not None and limit < _START and dist.is_initialized():
            set_collective_timeout(limit)

    def setup_environment(self) -> None:
        """Joins the process group, and makes the ranks monitor each other."""
        super().setup_environment()
        if isinstance(self._launcher, RankLauncher) and dist.is_initialized():
            self._launcher.watch(self)

    def set_stop_grace(self, seconds: float) -> None:
        """Sets the seconds without progress after which a run that got a stop signal is ended where it waits."""
        if isinstance(self._launcher, RankLauncher):
            self._launcher.grace = seconds
            if self._launcher.monitor is not None:
                self._launcher.monitor.grace.seconds = seconds

    def meet(self, call: str) -> str:
        """Waits until all ranks have made a call that needs all of them.

        Args:
            call: Name of the call, the same on all ranks.

        Returns:
            Positions of the ranks that do not come; empty where all have come.
        """
        monitor = self._launcher.monitor if isinstance(self._launcher, RankLauncher) else None
        return monitor.meet(call) if monitor is not None else ""

    def teardown(self) -> None:
        """Ends the run on this rank."""
        super().teardown()
        self.handled()

    def handled(self) -> None:
        """Tells the launcher that callbacks have handled an exception, if there was one; called in ``teardown``."""
        if isinstance(self._launcher, RankLauncher):
            self._launcher.handled.set()


def set_collective_timeout(limit: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Sets the time limit of a group's collectives; of the default group's where ``group`` is None.

    The function is public as ``set_timeout`` since torch 2.15; before, it was private.
    """
    functions = dist.distributed_c10d
    set_timeout = getattr(functions, "set_timeout", None) or functions._set_pg_timeout
    set_timeout(limit, group)


def join_group(strategy: WatchedRanks) -> None:
    """Joins the process group, unless torchrun's agent serves the store of a first start: then Lightning does.

    The server of torch's store (2.15) listens on all interfaces. Rank 0's listens on the address that the other ranks
    use: the loopback's where all are on this host, else that of ``MASTER_ADDR``. For a run that torchrun has restarted,
    the store's keys are those of this attempt: the agent's store still has the keys of killed ranks, so that the first
    rank would try to connect to one of them until its time limit.

    Raises:
        DloError: if another process listens on the port.
    """
    environment, attempt = strategy.cluster_environment, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized() or environment is None or (agents_store and attempt == 0):
        return
    host, port, ranks = environment.main_address, environment.main_port, strategy.world_size
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    if strategy.num_nodes == 1 and not agents_store:
        host = "127.0.0.1"
    serves = strategy.global_rank == 0 and not agents_store
    options: dict[str, Any] = {"multi_tenant": True, "master_listen_fd": _listen(host, port)} if serves else {}
    try:
        store: Any = dist.TCPStore(host, port, ranks, serves, _START, **options)  # type: ignore[attr-defined]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise DloError(
            f"MASTER_PORT must be a free port of the first host, got {port}, on which another process listens; unset"
            " it for a free one, or set another"
        ) from error
    device = strategy.root_device
    dist.init_process_group(
        strategy._get_process_group_backend(),
        store=dist.PrefixStore(f"attempt_{attempt}", store) if agents_store else store,  # type: ignore[attr-defined]
        rank=strategy.global_rank,
        world_size=ranks,
        timeout=strategy._timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if device.type == "cuda":
        atexit.register(dist.destroy_process_group)  # As Lightning does where it makes the group.


def _listen(host: str, port: int) -> int | None:
    """Returns a socket that listens on one address; None for all of them, where it is not clear which one is meant.

    That is where the name of a host with other hosts' ranks is the loopback's here, or an address is not this host's.
    """
    with contextlib.suppress(OSError):  # Also if a store of this process serves the port: torch shares it.
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if host == "127.0.0.1" or not ipaddress.ip_address(address[0]).is_loopback:
            return socket.create_server(address[:2], family=family).detach()
    return None


def _launcher_pid() -> int | None:
    """Returns the process id of dlo's launcher if it has started this process as a rank, else None."""
    pid = int(os.environ.get(LAUNCHER, os.getpid()))
    return pid if pid != os.getpid() else None


def _end_with_parent() -> None:
    """Ends this rank when the process that started it is gone, which no signal announces."""
    parent = _launcher_pid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        time.sleep(_GRACE)  # Where the ranks monitor each other, this one ends sooner by that.
        print(f"dlo: the process that started this rank ({parent}) ended without a message", file=sys.stderr)
        exit_process(1)

    if not any(thread.name == "parent-watch" for thread in threading.enumerate()):
        threading.Thread(target=look, name="parent-watch", daemon=True).start()
