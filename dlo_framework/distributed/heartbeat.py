"""Monitor of ranks by heartbeats: finds the first rank that fails, dies or goes silent, and reports it to all.

Rank 0 keeps a connection to each other rank. Messages are lines of JSON: a heartbeat now and then, a failure, and a
goodbye. A connection that ends without a goodbye means that the process has died; a rank whose heartbeats stop is
frozen, or cut off. Rank 0 sends the first failure to all ranks, so that all end for the same reason and can name it.
Errors of collectives do not name it: some come after minutes, others say that a connection was closed and not by whom.
"""

from __future__ import annotations

import errno
import functools
import hmac
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlo_framework.distributed.failure import Failure
from dlo_framework.distributed.signals import GracePeriod
from dlo_framework.distributed.stacks import Position, StackSampler

#: Seconds between two polls of the connections.
_TICK = 0.2
#: Most bytes of a line; a peer that sends a longer one is not a rank of this run.
_LONGEST_LINE = 1 << 18
#: Seconds that a rank which reports its failure waits for the answer, the first failure.
_ANSWER = 3.0
#: Seconds that a new connection has to send its rank and token.
_GREETING = 30.0
#: Errors of accepting a connection where no more files may be open, and the seconds until the next try.
_FULL, _PAUSE = (errno.EMFILE, errno.ENFILE), 1.0
#: Seconds that ranks have to report that they waited in vain, before those that do not report it are blamed.
_ALSO_WAITED = 1.0
#: Seconds that all ranks must wait for each other, in different hooks, before that counts as a deadlock.
_STILL = 5.0
#: Most seconds between the first and the last rank that raise at the same moment.
_TOGETHER = 1.0
#: Heartbeats over which they must wait: a single one may report a moment that has passed.
_BEATS = 2
#: Number of open files to leave for later: checkpoints, data, logs, libraries.
RESERVE = 256


#: Connections of this process, which a loader's workers must not keep open when it has died.
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Address(NamedTuple):
    """Address where rank 0 listens, and the token by which it recognises its ranks."""

    hosts: tuple[str, ...]
    port: int
    token: str


@dataclass
class _Peer:
    """State of a rank: this one, or the other end of a connection."""

    connection: Any  # socket; None for this rank
    rank: int | None  # None until it has sent its rank
    received: bytes = b""
    quiet: float = 0.0  # seconds since its last message
    heard: bool = False  # whether it has sent any message
    left: bool = False  # whether it has sent a goodbye
    place: int = 0
    moves: int = 0
    still: float = 0.0  # seconds that it has waited for other ranks at one place
    position: Position = field(default_factory=Position)
    call: tuple[int, str] = (0, "")  # number and name of its last call of `meet`


class RankMonitor:
    """Monitor of the other ranks, one a run, with a thread from :meth:`serve` or :meth:`join` to :meth:`end`.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        limit: Seconds of silence after which a rank counts as failed.
        on_failure: Function that gets the first failure, unless this rank has reported it; called once, in the
            monitor's thread.
        exit_code: Function that returns the exit code of a rank's process, None where it is not known; called on
            rank 0.
        place: Function that returns the progress of this rank: twice the batches it has done, plus 1 within a batch.
        moves: Function that returns a number which changes as long as this rank makes progress.
        sampler: Sampler of the main thread's position; None to not sample it.
        grace: Time that a run may go on without progress after a stop signal; rank 0's counts.

    Attributes:
        first: First failure of any rank, as far as this rank knows.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        limit: float,
        on_failure: Callable[[Failure], None],
        exit_code: Callable[[int], int | None] = lambda rank: None,
        place: Callable[[], int] = lambda: 0,
        moves: Callable[[], int] = lambda: 0,
        sampler: StackSampler | None = None,
        grace: GracePeriod | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.grace = grace or GracePeriod()
        self.first: Failure | None = None
        self._on_failure, self._exit_code = on_failure, exit_code
        self._place, self._moves, self._sampler = place, moves, sampler
        self._limit, self._interval = limit, min(1.0, limit / 5)
        self._own = _Peer(None, rank)
        self._peers: list[_Peer] = []
        self._left: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._paused = 0.0  # seconds until connections are accepted again
        self._token = ""
        self._thread: threading.Thread | None = None
        self._over = False
        self._has_reported = False  # whether this rank has reported a failure
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # with the lock of the state below, which several threads change
        self._answer: tuple[int, str] = (0, "")  # number of the last call of `meet` that rank 0 has answered, and how
        self._together: bool | None = None  # whether all ranks have raised at the same moment, once it is decided
        # On rank 0 alone:
        self._waited: dict[int, Failure] = {}  # failures of ranks that waited for others in vain
        self._moments: dict[int, str] = {}  # moments at which ranks have raised
        self._first_moment = 0.0
        self._stuck = self._lonely = 0.0  # seconds of a deadlock, and of waiting for ranks that do not come

    # --- start and end -------------------------------------------------------------------------------------

    def serve(self, *, one_host: bool, name: str) -> Address | str:
        """Starts the monitor on rank 0, unless too few files may be open there.

        Args:
            one_host: Whether all ranks are on this host; else other hosts may connect too.
            name: Name under which other hosts reach this one.

        Returns:
            Address for the other ranks' :meth:`join`; where they cannot join, a text with the reason and the fix.
        """
        # Twice: the gloo group that plans checkpoints has a connection to each rank too.
        short = raise_open_files_limit(2 * self.world_size)
        if short is not None:
            return (
                f"rank 0 must be allowed {short[1]} open files to monitor {self.world_size - 1} other ranks, got"
                f" {short[0]}; raise the limit before the run starts: ulimit -n {short[1]}"
            )
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=self.world_size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._start()
        hosts = ("127.0.0.1",) if one_host else tuple(dict.fromkeys((name, socket.getfqdn(), socket.gethostname())))
        return Address(hosts, self._listener.getsockname()[1], self._token)

    def join(self, address: Address) -> bool:
        """Starts the monitor on another rank; returns whether it could connect to rank 0."""
        for host in address.hosts:
            try:
                connection = socket.create_connection((host, address.port), timeout=10)
            except OSError:
                continue
            self._add(connection, rank=0)
            self._send(self._peers[0], {"rank": self.rank, "token": address.token})
            self._start()
            return True
        return False

    def end(self, *, orderly: bool) -> None:
        """Stops the monitor; after an orderly end the other ranks do not count this one as failed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if orderly:
            for peer in list(self._peers):
                self._send(peer, {"bye": True})
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5 * _TICK)
        for peer in self._peers:
            peer.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _start(self) -> None:
        _close_in_forks()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    # --- for the main thread -------------------------------------------------------------------------------

    def fail(self, failure: Failure, *, waited: bool = False) -> Failure:
        """Reports a failure to all ranks; returns the run's first failure, which may be another rank's.

        Args:
            failure: Failure of this rank, or of a rank that cannot report it.
            waited: Whether the failure is that this rank waited for others in vain, so that one of those is to blame.
        """
        self._has_reported = True
        self._report({"failed": failure.to_text(), "waited": waited})
        return self.wait_for_first(_ANSWER) or failure

    def wait_for_first(self, seconds: float) -> Failure | None:
        """Waits for the first failure of any rank, and returns it; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.first is not None, seconds)
        return self.first

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has sent its goodbye; known on rank 0."""
        return rank in self._left

    def ask(self, signum: int) -> None:
        """Reports that this rank got a stop signal: a run without progress is ended from now on."""
        self._report({"asked": signum})

    def meet(self, call: str) -> str:
        """Waits until all ranks have made a call that they must make together.

        Args:
            call: Name of the call, the same on all ranks.

        Returns:
            Positions of the ranks that do not come; empty where all have come.
        """
        number = self._own.call[0] + 1
        self._own.call = (number, call)
        self._report({"meets": number, "call": call})
        self._wait_for_decision(lambda: self._answer[0] >= number or self.first is not None or self._over)
        return self._answer[1] if self._answer[0] == number else ""

    def raises_together(self, moment: str) -> bool:
        """Reports an error of this rank, once a run; returns whether all ranks raise at the same moment.

        Rank 0 decides, within a second of the first error, and all get its answer. One that gets none takes it for no:
        then rank 0 has ended, or hangs.

        Args:
            moment: Counters of this rank's loops and collectives; empty where it cannot go on together with the others.
        """
        self._report({"raises": moment})
        self._wait_for_decision(lambda: self._together is not None, _TOGETHER + _ANSWER)
        return bool(self._together)

    def _wait_for_decision(self, known: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: known() or not self._peers, seconds)

    # --- decisions of rank 0 -------------------------------------------------------------------------------

    def _report(self, message: dict[str, Any]) -> None:
        """Sends a message to rank 0, or handles it there."""
        if self.rank == 0:
            self._handle_report(self._own, message)
        else:
            self._send_all(message)

    def _handle_report(self, peer: _Peer, message: dict[str, Any]) -> None:
        assert peer.rank is not None
        if "failed" in message:
            failure = Failure.from_text(message["failed"])
            if message["waited"]:
                self._waited.setdefault(peer.rank, failure)
            else:
                self._decide_failure(failure)
        elif "asked" in message:
            self.grace.ask(int(message["asked"]), peer.rank)
        elif "meets" in message:
            with self._changed:
                peer.call = (int(message["meets"]), str(message["call"]))
            self._check_call(0.0)
        elif "raises" in message:
            with self._changed:
                self._first_moment = self._first_moment or time.monotonic()
                self._moments[peer.rank] = str(message["raises"])
            self._compare_moments()

    def _decide(self, message: dict[str, Any]) -> None:
        """Sends a decision of rank 0 to all ranks."""
        self._send_all(message)
        self._take_decision(message)

    def _take_decision(self, message: dict[str, Any]) -> None:
        first = None
        with self._changed:
            if "first" in message and self.first is None:
                first = self.first = Failure.from_text(message["first"])
            elif "met" in message:
                self._answer = (int(message["met"]), str(message["missing"]))
            elif "together" in message:
                self._together = bool(message["together"])
            self._changed.notify_all()
        if first is not None and not self._over and (first.rank != self.rank or not self._has_reported):
            self._on_failure(first)

    def _decide_failure(self, failure: Failure) -> None:
        """Makes a failure the first, unless there is one: on rank 0 that of all ranks, else of this rank alone."""
        message = {"first": failure.to_text()}
        with self._changed:
            if self.first is None:
                if self.rank == 0:
                    self._send_all(message)
                self._take_decision(message)

    @property
    def _ranks(self) -> list[_Peer]:
        """States of the ranks that have joined, this one's first."""
        return [self._own, *(peer for peer in list(self._peers) if peer.rank is not None)]

    def _compare_moments(self) -> None:
        """Decides whether all ranks raise together, once that is known."""
        with self._changed:
            moments = set(self._moments.values())
            if not moments or self._together is not None:
                return
            same = len(moments) == 1 and "" not in moments
            late = time.monotonic() - self._first_moment > _TOGETHER
            complete = len(self._moments) == self.world_size
            if not same or late or complete:
                self._decide({"together": same and complete and not late})

    def _check_call(self, passed: float) -> None:
        """Answers the ranks that wait in :meth:`meet`, once all have come or some will not come."""
        with self._changed:
            number = max(peer.call[0] for peer in self._ranks)
            if number <= self._answer[0]:
                return
            here = {peer.rank: peer.call[1] for peer in self._ranks if peer.call[0] == number}
            absent = [rank for rank in range(self.world_size) if rank not in here]
            places = here if len(set(here.values())) > 1 else {}
            if absent:
                waiting = {peer.rank: f"{peer.position}" for peer in self._ranks if self._waits(peer, _STILL / 2)}
                waiting |= dict.fromkeys(self._left, "at the end of the run")
                self._lonely = self._lonely + passed if all(rank in waiting for rank in absent) else 0.0
                if self._lonely < _BEATS * self._interval:
                    return  # One may still come.
                places = {rank: waiting[rank] for rank in absent}
            missing = "; ".join(f"rank {rank} is {'' if absent else 'in '}{place}" for rank, place in places.items())
            self._decide({"met": number, "missing": missing})

    def _waits(self, peer: _Peer, seconds: float) -> bool:
        """Returns whether a rank has waited for others for some seconds, by its last heartbeats."""
        return peer.still >= seconds and peer.quiet < 3 * self._interval

    def _blame_rank(self) -> Failure:
        """Returns the failure of the rank that the others have waited for in vain.

        It is the rank with the least progress; of several, one that has not waited itself.
        """
        places = {peer.rank: peer.place for peer in self._ranks}
        last = min(places, key=lambda rank: (places[rank], rank in self._waited))
        assert last is not None
        if last in self._waited and places[last] == max(places.values()):
            return next(iter(self._waited.values()))  # All ranks wait: their collectives do not match.
        text = f"it is still in batch {(places[last] + 1) // 2}; others have waited for it for {self._limit:g} s"
        return Failure(last, self.world_size, text, stacks=True)

    def _all_wait(self) -> float:
        """Returns the seconds that every rank has waited for others in one place; 0 if a rank does not wait."""
        complete = len(self._ranks) == self.world_size and all(self._waits(peer, 0.0) for peer in self._ranks)
        return min(peer.still for peer in self._ranks) if complete else 0.0

    def _check_deadlock(self, passed: float) -> None:
        """Ends the run if all ranks wait for others in different hooks: none of them can go on."""
        positions = {peer.rank: peer.position for peer in self._ranks}
        hooks = [position.hook for position in positions.values()]
        deadlock = self._all_wait() >= _STILL and len(set(hooks)) > 1
        self._stuck = self._stuck + passed if deadlock else 0.0
        if self._stuck < _BEATS * self._interval:
            return
        # Blame the rank that is alone in its hook; of two ranks, the one in a user's hook rather than in a step.
        alone = min(
            positions, key=lambda rank: (hooks.count(positions[rank].hook), not _is_aside(positions[rank].hook))
        )
        assert alone is not None
        others = "; ".join(f"rank {rank} is {position}" for rank, position in positions.items() if rank != alone)
        text = (
            f"it is {positions[alone]}, while {others}: they wait for each other. Calls that need all ranks (forward of"
            " a sharded model, save, reduce) must be made on all of them; take them out of conditions on the rank"
        )
        self._decide_failure(Failure(alone, self.world_size, text, stacks=True))

    def _check_request(self, passed: float) -> None:
        """Ends a run that got a stop signal and has made no progress for too long."""
        if self.grace.is_over(passed, sum(peer.moves for peer in self._ranks), self._all_wait()):
            name = signal.Signals(self.grace.signum).name
            code = 128 + (signal.SIGINT if self.grace.signum == signal.SIGINT else signal.SIGTERM)
            text = f"{name} asked the run to stop, and no rank has finished a batch or saved since; ended where it was"
            self._decide_failure(Failure(self.grace.rank, self.world_size, text, exit_code=code, stacks=True))

    # --- the monitor's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        looked, since_beat, since_waited = time.monotonic(), 0.0, 0.0
        while not self._over:
            for key, _ in self._selector.select(_TICK):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            # Capped: after a suspension of the whole job, the time asleep must not count as the others' silence.
            passed = min(time.monotonic() - looked, 2 * _TICK)
            looked, since_beat = time.monotonic(), since_beat + passed
            self._accept_again(passed)
            if since_beat >= self._interval:
                self._beat(since_beat)
                since_beat = 0.0
            self._count_silence(passed)
            if self.rank == 0:
                self._check_call(passed)
                self._check_request(passed)
                self._compare_moments()
            if self._waited and self.first is None:
                since_waited += passed
                if since_waited >= _ALSO_WAITED:
                    self._decide_failure(self._blame_rank())

    def _beat(self, passed: float) -> None:
        """Sends this rank's progress and position to the others; on rank 0, checks for a deadlock."""
        own = self._own
        own.place, own.moves = self._place(), self._moves()
        if self._sampler is not None:
            own.still, own.position = self._sampler.sample(passed), self._sampler.position
        for peer in list(self._peers):
            self._send(peer, {"at": own.place, "moves": own.moves, "still": own.still, "in": own.position})
        if self.rank == 0:
            self._check_deadlock(passed)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                # The connection stays in the queue, so that the selector would report it at once, again and again.
                self._selector.unregister(self._listener)
                self._paused = _PAUSE
            return  # Another error: the other end has gone already.
        self._add(connection, rank=None)

    def _accept_again(self, passed: float) -> None:
        """Accepts connections again, some time after too many files were open."""
        if self._paused > 0 and self._listener is not None:
            self._paused -= passed
            if self._paused <= 0:
                self._selector.register(self._listener, selectors.EVENT_READ)

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        connection.settimeout(1.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _OPEN.add(connection)
        peer = _Peer(connection, rank)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._handle_lost(peer)
            return
        peer.quiet, peer.heard = 0, True
        *lines, peer.received = (peer.received + data).split(b"\n")
        if len(peer.received) > _LONGEST_LINE:
            self._drop(peer)
            return
        for line in lines:
            try:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError("not a message")
                self._handle_message(peer, message)
            except (ValueError, KeyError, TypeError):
                self._drop(peer)
                return

    def _handle_message(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            if not hmac.compare_digest(str(message.get("token")), self._token):
                self._drop(peer)
                return
            peer.rank = int(message["rank"])
            self._send(peer, {"accepted": True})  # It monitors rank 0 from now.
            if self.first is not None:
                self._send(peer, {"first": self.first.to_text()})
        elif "bye" in message:
            peer.left = True
            if "runs" not in message:
                self._left.add(peer.rank)
        elif "at" in message:
            peer.place, peer.moves, peer.still = int(message["at"]), int(message["moves"]), float(message["still"])
            peer.position = Position(*map(str, message["in"]))
        elif self.rank == 0:
            self._handle_report(peer, message)
        else:
            self._take_decision(message)

    def _handle_lost(self, peer: _Peer) -> None:
        self._drop(peer)
        if peer.rank is None or peer.left or self._over:
            return
        code = self._exit_code(peer.rank) if self.rank == 0 else None
        self._decide_failure(Failure.from_exit_code(peer.rank, self.world_size, code))

    def _count_silence(self, passed: float) -> None:
        """Reports ranks that have been silent for too long as failed."""
        for peer in list(self._peers):
            peer.quiet += passed
            if peer.quiet <= (self._limit if peer.rank is not None else min(self._limit, _GREETING)):
                continue
            is_unknown = self.rank != 0 and not peer.heard
            if is_unknown:
                # Rank 0 has not accepted this rank, for lack of open files, and may be well. If it accepts later, it
                # must not take the end of the connection for the end of this rank.
                self._send(peer, {"bye": True, "runs": True})
            self._drop(peer)
            if peer.rank is not None and not peer.left and not is_unknown:
                text = f"it sent no heartbeat for {self._limit:g} s (stopped? host or network down?)"
                self._decide_failure(Failure(peer.rank, self.world_size, text, stacks=True, silent=True))

    def _send_all(self, message: dict[str, Any]) -> None:
        """Sends a message to all ranks that have a connection to this one, and have joined."""
        for peer in self._ranks[1:]:
            self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.connection.fileno() < 0:
            return
        with self._sending:
            try:
                peer.connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                peer.received = b""  # The next read, or the silence, shows that it is gone.

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._selector.unregister(peer.connection)
            with self._changed:
                self._peers.remove(peer)
                self._changed.notify_all()
        peer.connection.close()


def _is_aside(hook: str) -> bool:
    """Returns whether a hook is one outside of the steps, such as users write: ``on_...``."""
    return hook.startswith("on_") and not hook.partition(" of ")[2].endswith("Strategy")


@functools.cache
def _close_in_forks() -> None:
    """Makes processes forked from this one close their copies of its connections."""

    def close_all() -> None:
        for connection in _OPEN:
            connection.close()

    os.register_at_fork(after_in_child=close_all)


def raise_open_files_limit(connections: int) -> tuple[int, int] | None:
    """Raises the soft limit of open files to the hard one where it is too low for a number of connections.

    Nothing is reserved: other files of the process count against the same limit, so that :data:`RESERVE` more are
    required.

    Args:
        connections: Number of files and connections that will be opened.

    Returns:
        None if the limit is high enough; else the limit and the number that is needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _open_files() + connections + RESERVE
    if soft == resource.RLIM_INFINITY or soft >= need:
        return None
    aim = hard if hard != resource.RLIM_INFINITY else need
    if aim > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
            soft = aim
        except (ValueError, OSError):  # The system has a limit of its own below the hard one, as macOS has.
            pass
    return None if soft >= need else (soft, need)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0
