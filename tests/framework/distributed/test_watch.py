"""Ranks that watch each other: each kind of end reaches all, once, and names the rank."""

import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.call import _call_callback_hooks

from dlo_framework.distributed import heartbeat
from dlo_framework.distributed.failure import Failure
from dlo_framework.distributed.heartbeat import Address, RankMonitor
from dlo_framework.distributed.launcher import LAUNCHER, RankLauncher
from dlo_framework.distributed.signals import GracePeriod, SignalListener
from dlo_framework.distributed.stacks import Position, StackSampler, position_of, print_stack
from dlo_framework.stop import GracefulStop
from support.launchers import wait_until

LIMIT = 1.0


@contextmanager
def ranks(world_size: int, limit: float = 60.0, places: list[int] | None = None):
    """Yields the watches of all ranks, as threads of this process, and what each was told."""
    told: list[list[Failure]] = [[] for _ in range(world_size)]
    places = places or [0] * world_size
    watches = [
        RankMonitor(rank, world_size, limit=limit, on_failure=told[rank].append, place=lambda rank=rank: places[rank])
        for rank in range(world_size)
    ]
    address = watches[0].serve(one_host=True, name="localhost")
    assert all(watch.join(address) for watch in watches[1:])
    wait_until(lambda: sorted(str(peer.rank) for peer in watches[0]._peers) == [*map(str, range(1, world_size))])
    try:
        yield watches, told, address
    finally:
        for watch in reversed(watches):
            watch.end(orderly=True)


def test_the_first_failure_reaches_all_and_counts_for_all():
    with ranks(3) as (watches, told, _):
        own = Failure(2, 3, "ValueError: boom", "Traceback ...")
        assert watches[2].fail(own) == own
        wait_until(lambda: watches[1].first == own)
        assert watches[1].fail(Failure(1, 3, "KeyError: 'x'")) == own
        assert watches[0].fail(Failure(0, 3, "late")) == own
        assert told == [[own], [own], []]


def test_a_silent_rank_is_named_and_one_that_beats_is_not():
    with ranks(2, limit=LIMIT) as (_, told, address):
        time.sleep(2 * LIMIT)
        assert told == [[], []]
        frozen = socket.create_connection((address.hosts[0], address.port))
        frozen.sendall(b'{"rank": 2, "token": "%s"}\n' % address.token.encode())
        wait_until(lambda: told[0] and told[1])
        assert [failures[0].rank for failures in told] == [2, 2]
        assert "sent no heartbeat" in told[0][0].summary
        frozen.close()


def test_strangers_are_sent_away():
    with ranks(2) as (watches, told, address):
        for line in (b'{"rank": 1, "token": "guess"}\n', b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"token": "\\u0000"}\n'):
            stranger = socket.create_connection((address.hosts[0], address.port))
            stranger.sendall(line)
            stranger.settimeout(20)
            assert stranger.recv(100) == b""
            stranger.close()
        flood = socket.create_connection((address.hosts[0], address.port))
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            flood.sendall(b"x" * 10_000_000)
        flood.close()
        assert told == [[], []]
        assert watches[1].fail(Failure(1, 2, "still listens")).summary == "still listens"


@pytest.mark.parametrize(("places", "waiting", "to_blame"), [([9, 7, 9], (0, 2), 1), ([7, 7, 7], (0, 1), 2)])
def test_of_ranks_that_wait_in_vain_the_one_waited_for_is_to_blame(places, waiting, to_blame):
    with ranks(3, limit=2.0, places=places) as (watches, _, _):
        wait_until(lambda: [peer.place for peer in watches[0]._peers] == places[1:])
        for rank in reversed(waiting):  # Rank 0 last: it waits for the verdict.
            watches[rank]._has_reported = True
            watches[0]._waited.setdefault(rank, Failure(rank, 3, "RuntimeError: Timed out"))
        first = watches[0].wait_for_first(20)
        assert first is not None
        assert first.rank == to_blame
        assert "still in batch 4" in first.summary


def test_more_ranks_than_files_are_allowed_are_not_watched_and_the_run_says_so(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(heartbeat.resource, "setrlimit", lambda _, limits: None)
    monkeypatch.setattr(heartbeat, "_open_files", lambda: 44)
    launcher = RankLauncher.__new__(RankLauncher)
    launcher.monitor, launcher._trainer, launcher.grace, told = None, None, 60.0, []
    strategy = SimpleNamespace(
        global_rank=0,
        world_size=1000,
        num_nodes=1,
        cluster_environment=SimpleNamespace(main_address="localhost"),
        _timeout=timedelta(minutes=30),
        broadcast=lambda served: told.append(served) or served,
    )
    gc.collect()
    opened = os.listdir("/dev/fd")
    launcher.watch(strategy)
    assert os.listdir("/dev/fd") == opened  # Else they would be closed some time later, by garbage collection.
    assert capsys.readouterr().err == (
        "dlo: rank 0 must be allowed 2300 open files to monitor 999 other ranks, got 1024; raise the limit before the"
        " run starts: ulimit -n 2300; if a rank fails, the others notice after 1800 s (timeout_minutes)\n"
    )
    strategy.global_rank, strategy.broadcast = 7, lambda _: told[0]
    launcher.watch(strategy)
    assert launcher.monitor is None
    assert capsys.readouterr().err == ""


def test_a_launcher_leaves_nothing_behind_that_other_processes_take_for_a_rank_s(monkeypatch):
    launcher = RankLauncher.__new__(RankLauncher)
    launcher.procs, seen = [], []
    monkeypatch.delenv(LAUNCHER, raising=False)
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: seen.append(os.environ[LAUNCHER]))
    before = threading.enumerate()
    launcher._start_children()
    assert seen == [str(os.getpid())]
    assert LAUNCHER not in os.environ
    assert threading.enumerate() == before


def open_one() -> int | None:
    """Opens a file; returns None where no more may be open."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


def test_where_no_more_files_may_be_open_ranks_are_accepted_later_and_nothing_spins(monkeypatch):
    tries = []
    accept = RankMonitor._accept
    monkeypatch.setattr(RankMonitor, "_accept", lambda self: (tries.append(1), accept(self)))
    watch = RankMonitor(0, 2, limit=60, on_failure=lambda failure: None)
    address = watch.serve(one_host=True, name="localhost")
    late = socket.socket()
    gc.collect()  # What other tests have left open would be closed meanwhile, and make room.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 10, limits[1]))
    try:
        filler = list(iter(open_one, None))
        late.connect((address.hosts[0], address.port))
        late.sendall(b'{"rank": 1, "token": "%s"}\n' % address.token.encode())
        wait_until(lambda: tries)
        time.sleep(1.5)
        assert len(tries) <= 3  # It waits, rather than try thousands of times.
        assert watch._peers == []
        for descriptor in filler:
            os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: [peer.rank for peer in watch._peers] == [1])
    watch.end(orderly=True)
    late.close()


def test_a_rank_that_rank_0_never_accepted_ends_no_run():
    told = []
    with socket.create_server(("127.0.0.1", 0)) as full:
        watch = RankMonitor(1, 2, limit=LIMIT, on_failure=told.append)
        assert watch.join(Address(("127.0.0.1",), full.getsockname()[1], "token"))
        wait_until(lambda: not watch._peers)
        waiting = full.accept()[0]
        waiting.settimeout(20)
        lines = b"".join(iter(lambda: waiting.recv(1000), b"")).splitlines()
        waiting.close()
    watch.end(orderly=True)
    assert told == []
    assert b"bye" in lines[-1]


# --- where ranks are -------------------------------------------------------------------------------------------


class Waiting(StackSampler):
    """A rank that has waited in a hook for that many seconds."""

    def __init__(self, hook: str, seconds: float = 9.0) -> None:
        super().__init__()
        self.position, self.seconds = Position(hook, "all_reduce at net.py:7"), seconds

    def sample(self, passed: float) -> float:
        return self.seconds


@contextmanager
def waiting(*samplers: Waiting):
    """Yields watches of ranks that wait at these places, which tell of it ten times a second."""
    with ranks(len(samplers)) as (watches, told, _):
        for watch, sampler in zip(watches, samplers, strict=True):
            watch._sampler, watch._interval = sampler, 0.1
        yield watches, told


def test_ranks_that_wait_for_each_other_in_different_hooks_are_ended_and_the_odd_one_is_named():
    step = "training_step of ZeroStrategy"
    with waiting(Waiting(step), Waiting("on_train_epoch_end of ImageSampler"), Waiting(step)) as (watches, told):
        first = watches[0].wait_for_first(20)
        assert first is not None
        assert first.rank == 1
        assert first.stacks
        assert first.summary.startswith(
            "it is in on_train_epoch_end of ImageSampler, waiting in all_reduce at net.py:7, while rank 0 is in"
            f" {step}, waiting in all_reduce at net.py:7; rank 2 is in {step}"
        )
        wait_until(lambda: all(told))


def test_ranks_that_wait_in_one_hook_or_of_which_one_works_are_left_alone():
    for second in (Waiting("b", seconds=0.0), Waiting("a"), Waiting("b", seconds=2.0)):
        with waiting(Waiting("a"), second) as (watches, _):
            time.sleep(0.8)
            assert watches[0].first is None


def at_once(ask: Callable, watches: list[RankMonitor], given: dict[int, Any]) -> dict[int, Any]:
    """Lets ranks ask at once; returns what each is answered."""
    with ThreadPoolExecutor(len(given)) as pool:
        return dict(zip(given, pool.map(lambda rank: ask(watches[rank], given[rank]), given), strict=True))


def test_a_call_that_takes_all_ranks_waits_for_them_and_names_those_that_do_not_come():
    with waiting(Waiting("a"), Waiting("b", seconds=0.0), Waiting("b", seconds=0.0)) as (watches, _):
        for _ in range(3):
            assert at_once(RankMonitor.meet, watches, {0: "x", 1: "x", 2: "x"}) == {0: "", 1: "", 2: ""}
        assert "rank 2 is in y" in at_once(RankMonitor.meet, watches, {0: "x", 1: "x", 2: "y"})[0]
        alone = threading.Thread(target=lambda: answers.append(watches[1].meet("x")))
        answers: list[str] = []
        alone.start()
        time.sleep(1.0)
        assert answers == []  # Rank 2 may yet come: it does not wait for anybody.
        watches[2]._sampler = Waiting("training_step of ZeroStrategy")
        alone.join(20)
        assert len(answers) == 1
        assert "rank 2 is in training_step of ZeroStrategy, waiting in all_reduce" in answers[0]


@pytest.mark.parametrize(
    ("moments", "together"),
    [
        (["step 3", "step 3", "step 3"], True),
        (["step 3", "step 3", "step 4"], False),  # It has gone further.
        (["step 3", "", "step 3"], False),  # Its weights have changed in part.
        (["step 3", "step 3", None], False),  # It does not raise.
    ],
)
def test_ranks_raise_together_if_all_do_at_one_moment(monkeypatch, moments, together):
    monkeypatch.setattr(heartbeat, "_ANSWER", 1.0)
    with ranks(3) as (watches, *_):
        began, raising = time.monotonic(), {rank: at for rank, at in enumerate(moments) if at is not None}
        assert at_once(RankMonitor.raises_together, watches, raising) == dict.fromkeys(raising, together)
        if None in moments:  # One that raises later gets the same answer, and one without an answer does not wait long.
            assert not watches[moments.index(None)].raises_together("step 3")
            assert time.monotonic() - began < 10
            watches[0].end(orderly=False)
            watches[1]._together = None
            assert not watches[1].raises_together("step 3")


def test_a_run_that_was_asked_to_stop_is_ended_once_it_does_not_move():
    grace = GracePeriod(10)
    assert not any(grace.is_over(1.0, 0) for _ in range(100))  # Nobody asked.
    grace = GracePeriod(10)
    assert not any(grace.is_over(1.0, moves) for moves in range(30))
    grace.ask(signal.SIGTERM, 3)
    grace.ask(signal.SIGINT, 1)
    assert (grace.signum, grace.rank) == (signal.SIGTERM, 3)
    assert not any(grace.is_over(1.0, 30 + moves) for moves in range(30))  # It saves, or validates.
    assert [grace.is_over(1.0, 60) for _ in range(11)] == [False] * 9 + [True] * 2
    slow = GracePeriod(10)
    assert not any(slow.is_over(1.0, moves // 30) for moves in range(90))
    slow.ask(signal.SIGTERM)
    assert [slow.is_over(20.0, 3) for _ in range(4)] == [False, False, True, True]  # Twice its longest batch.
    started = GracePeriod(10)
    assert not any(started.is_over(1.0, moves // 50) for moves in range(99))
    assert started.limit == 10  # The time until the first batch does not count.
    stuck = GracePeriod(1000)
    stuck.ask(signal.SIGTERM)
    assert [stuck.is_over(5.0, 0, waiting=20.0) for _ in range(3)] == [False, True, True]


def test_whoever_was_told_of_signals_before_goes_on_to_be_told():
    heard: list[int] = []
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    stop = GracefulStop("checkpoints")
    before = signal.getsignal(signal.SIGUSR1)
    first = signal.set_wakeup_fd(writer.fileno())
    listener = SignalListener(heard.append)
    try:
        listener.start()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.raise_signal(signal.SIGUSR1)
        assert reader.recv(10) == bytes([signal.SIGUSR1])
        assert heard == []
        signal.signal(signal.SIGUSR1, stop._request)
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: heard == [signal.SIGUSR1])
        pid = os.fork()
        if pid == 0:  # As a loader's worker.
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.3)
        assert heard == [signal.SIGUSR1]
    finally:
        listener.stop()
        signal.signal(signal.SIGUSR1, before)
        assert signal.set_wakeup_fd(first) == writer.fileno()
    reader.close()
    writer.close()


def test_a_thread_that_computes_or_sleeps_does_not_wait_for_ranks():
    found = []
    done = threading.Event()
    sampler = StackSampler()

    def sample():
        time.sleep(0.2)
        found.extend(sampler.sample(1.0) for _ in range(2))
        done.set()

    threading.Thread(target=sample).start()
    done.wait(20)
    assert found == [0.0, 0.0]
    assert position_of(None) == Position()


class Waits(Callback):
    """A callback whose wait for other ranks fails."""

    def on_train_start(self, trainer, pl_module):
        raise RuntimeError("Timed out waiting 12000ms for recv operation to complete")


def test_the_stack_of_an_error_has_the_hook_in_which_it_was_raised(capsys):
    """The frames of an error have returned: they no longer know the functions that have called them."""
    run = SimpleNamespace(
        callbacks=[Waits()],
        lightning_module=SimpleNamespace(_current_fx_name=None),
        profiler=PassThroughProfiler(),
    )
    try:
        _call_callback_hooks(run, "on_train_start")  # type: ignore[arg-type]
    except RuntimeError as error:
        print_stack(1, 2, error)
    found = capsys.readouterr().err
    assert found.startswith("dlo: rank 1 of 2 (pid ")
    assert ") was in on_train_start of Waits:\n" in found
