"""Ranks that watch each other: who has failed, who has died, who is silent.

Rank 0 keeps a connection to each other rank. What passes are lines of JSON: a beat now and then, a failure, and a
word of farewell. A connection that ends without one is a process that has died; ranks that stop beating are frozen,
or cut off. Whatever is first is told to all, so that all end for the same reason and can name it. Collectives do not
tell: some wait for minutes, others say that a connection was closed and not by whom.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
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

from dlo_framework.distributed.descriptors import lacking
from dlo_framework.distributed.failure import Failure
from dlo_framework.distributed.grace import Grace
from dlo_framework.distributed.stacks import Position, Sampler

#: Seconds from one look at the connections to the next.
_TICK = 0.2
#: A peer that sends more than this without an end of line is none of ours.
_LONGEST_LINE = 1 << 18
#: Seconds that the first failure may take to come back to the rank that reports its own.
_ANSWER = 3.0
#: Seconds that whoever connects has to say who it is.
_GREETING = 30.0
#: What accepting a connection answers where no more files may be open, and the seconds until it is tried again.
_FULL, _PAUSE = (errno.EMFILE, errno.ENFILE), 1.0
#: Seconds that ranks have to say that they have waited in vain, before those that do not say so are to blame.
_ALSO_WAITED = 1.0
#: Seconds that ranks have to wait for each other, in different hooks, before that is taken for an error.
_STILL = 5.0
#: Beats over which it has to be so: one may tell of a moment that has passed.
_BEATS = 2


#: The connections of this process, which a loader's workers must not keep open when it has died.
_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_FORKS: list[bool] = []  # not empty once forks have been taken care of


class Address(NamedTuple):
    """Where rank 0 listens, and the word by which it knows its ranks."""

    hosts: tuple[str, ...]
    port: int
    token: str


@dataclass
class _Peer:
    """The other end of a connection."""

    connection: socket.socket
    rank: int | None  # None until it has said who it is
    received: bytes = b""
    quiet: float = 0.0  # seconds since it was last heard
    heard: bool = False  # whether it ever was
    left: bool = False  # whether it has said farewell
    place: int = 0
    moves: int = 0
    still: float = 0.0  # seconds that it has waited for other ranks at one place
    position: Position = field(default_factory=Position)
    call: tuple[int, str] = (0, "")  # the last call that it is to make together with the others


@dataclass
class _Shared:
    """What the watching thread and the others both touch, under the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    first: Failure | None = None
    over: bool = False


class Watch:
    """This rank's part of it. One a run; a thread of its own from :meth:`serve` or :meth:`join` to :meth:`end`.

    Args:
        rank: this process's.
        world_size: how many there are.
        limit: seconds of silence after which a rank is given up.
        on_failure: called once, in the watching thread, with the first failure, if it is not this rank that told it.
        exit_code: returns the exit code of a rank's process where this one knows it, else None; asked on rank 0.
        place: returns how far this rank has come: twice the batches it has done, plus 1 within one.
        moves: Returns a number that changes as long as this rank gets on.
        sampler: Looks where this rank's main thread is; None for no look.
        grace: Seconds that a run which was asked to stop may go on without a move.
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
        sampler: Sampler | None = None,
        grace: Grace | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._moves, self._sampler, self._grace = moves, sampler, grace or Grace()
        self._still, self._stuck, self._lonely = 0.0, 0.0, 0.0
        self._call = (0, "")  # the number of calls made together so far, and the last
        self._meeting = threading.Lock()
        self._answered = threading.Condition()
        self._answer: tuple[int, str] = (0, "")
        self._on_failure, self._exit_code, self._place = on_failure, exit_code, place
        self._limit, self._interval = limit, min(1.0, limit / 5)
        self._peers: list[_Peer] = []
        self._left: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._paused = 0.0  # seconds until connections are accepted again
        self._token = ""
        self._shared = _Shared()
        self._known = threading.Event()
        self._waited: dict[int, Failure] = {}  # on rank 0: who has waited for others in vain
        self._told = False  # whether this rank has told of a failure
        self._thread: threading.Thread | None = None

    # --- beginning and end ---------------------------------------------------------------------------------

    def serve(self, *, one_host: bool, name: str) -> Address | str:
        """Begins on rank 0, unless that may not have so many files open.

        Args:
            one_host: whether all ranks are on this host; else other hosts may connect too.
            name: under which other hosts know this one.

        Returns:
            Where the others :meth:`join`; in words, why they cannot, and what would help.
        """
        # Twice: a group of gloo's, over which checkpoints are agreed on, has a connection to each rank too.
        short = lacking(2 * self.world_size)
        if short is not None:
            return (
                f"rank 0 may have {short[0]} files open and needs {short[1]} to watch {self.world_size - 1} others;"
                f" allow them before the run starts: ulimit -n {short[1]}"
            )
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=self.world_size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._start()
        hosts = ("127.0.0.1",) if one_host else tuple(dict.fromkeys((name, socket.getfqdn(), socket.gethostname())))
        return Address(hosts, self._listener.getsockname()[1], self._token)

    def join(self, address: Address) -> bool:
        """Begins on another rank; returns whether rank 0 could be reached."""
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
        """Stops watching. After an orderly end the others do not miss this rank."""
        with self._shared.lock:
            self._shared.over = True
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

    @property
    def first(self) -> Failure | None:
        """The first failure of any rank, as far as it is known here."""
        return self._shared.first

    def fail(self, failure: Failure, *, waited: bool = False) -> Failure:
        """Tells the others of a failure; returns the first one, which may be another's.

        Args:
            failure: this rank's own, or that of a rank that cannot tell.
            waited: whether it is that others were waited for in vain, so that one of those is to blame.
        """
        self._told = True
        if self.rank == 0 and waited:
            self._waited.setdefault(0, failure)
        elif self.rank == 0:
            return self._decide(failure)
        else:
            for peer in list(self._peers):
                self._send(peer, {"failed": failure.to_text(), "waited": waited})
        self._known.wait(_ANSWER)
        return self._shared.first or failure

    def wait_for_first(self, seconds: float) -> Failure | None:
        """Returns the first failure of any rank, waiting for it to become known."""
        self._known.wait(seconds)
        return self._shared.first

    def has_left(self, rank: int) -> bool:
        """Returns whether a rank has said farewell (rank 0 knows)."""
        return rank in self._left

    def set_grace(self, seconds: float) -> None:
        """Sets how long a run that was asked to stop may go on without a move; rank 0's counts."""
        self._grace.seconds = seconds

    def ask(self, signum: int) -> None:
        """Tells that this rank was asked to stop: from here on the run has to get on, or is ended where it is."""
        if self.rank == 0:
            self._grace.ask(signum)
        for peer in list(self._peers) if self.rank != 0 else []:
            self._send(peer, {"asked": signum})

    def meet(self, call: str) -> str:
        """Waits until all ranks have come to a call that they have to make together.

        Args:
            call: Call in words that are the same on all ranks.

        Returns:
            An empty text once all are there; else where the ranks are that do not come.
        """
        number = self._call[0] + 1
        if self.rank == 0:
            with self._meeting:
                self._call = (number, call)
            self._check_call(0.0)
        else:
            self._call = (number, call)
            for peer in list(self._peers):
                self._send(peer, {"meets": number, "call": call})
        with self._answered:
            while self._answer[0] < number and self._shared.first is None and not self._shared.over and self._peers:
                self._answered.wait(0.5)
            return self._answer[1] if self._answer[0] == number else ""

    def _check_call(self, passed: float) -> None:
        """On rank 0: answers ranks that wait in :meth:`meet`, once all are there or some will not come."""
        with self._meeting:
            peers = [peer for peer in self._peers if peer.rank is not None]
            calls = {self.rank: self._call} | {peer.rank: peer.call for peer in peers if peer.rank is not None}
            number = max(called for called, _ in calls.values())
            if number <= self._answer[0]:
                return
            here = {rank: words for rank, (called, words) in calls.items() if called == number}
            absent = [rank for rank in range(self.world_size) if rank not in here]
            if not absent:
                missing = "; ".join(f"rank {rank} is in {words}" for rank, words in here.items())
                missing = missing if len(set(here.values())) > 1 else ""
            else:
                missing = self._not_coming(absent, passed)
                if not missing:
                    return
            answer = {"met": number, "missing": missing}
            for peer in peers:
                if peer.rank in here:
                    self._send(peer, answer)
            self._take_answer(answer)

    def _not_coming(self, absent: list[int], passed: float) -> str:
        """Returns where ranks are that will not come: they wait for others elsewhere, or have left; else nothing."""
        places = {peer.rank: str(peer.position) for peer in self._peers if peer.rank is not None and self._waits(peer)}
        if self._still >= _STILL / 2:
            places[self.rank] = str(self._sampler.position) if self._sampler is not None else ""
        places |= dict.fromkeys(self._left, "at the run's end")
        self._lonely = self._lonely + passed if all(rank in places for rank in absent) else 0.0
        if self._lonely < _BEATS * self._interval:
            return ""
        return "; ".join(f"rank {rank} is {places[rank]}" for rank in absent)

    def _waits(self, peer: _Peer) -> bool:
        """Returns whether a rank waits for others now, as far as is known."""
        return peer.still >= _STILL / 2 and peer.quiet < 3 * self._interval

    def _take_answer(self, answer: dict[str, Any]) -> None:
        with self._answered:
            self._answer = (int(answer["met"]), str(answer["missing"]))
            self._answered.notify_all()

    def _blamed(self) -> Failure:
        """Returns the failure of the rank that the others have waited for in vain; asked on rank 0.

        It is the one that has come least far; of several, one that has not waited itself.
        """
        places = {self.rank: self._place()} | {p.rank: p.place for p in self._peers if p.rank is not None}
        last = min(places, key=lambda rank: (places[rank], rank in self._waited))
        if last in self._waited and places[last] == max(places.values()):
            return next(iter(self._waited.values()))  # All wait for all: their collectives do not match.
        text = f"it is still in batch {(places[last] + 1) // 2}; others have waited for it for {self._limit:g} s"
        return Failure(last, self.world_size, text, stacks=True)

    # --- the watching thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        looked, since_beat, since_waited = time.monotonic(), 0.0, 0.0
        while not self._shared.over:
            for key, _ in self._selector.select(_TICK):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            # A job that was suspended as a whole misses nobody: what this thread slept through counts for little.
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
            if self._waited and self._shared.first is None:
                since_waited += passed
                if since_waited >= _ALSO_WAITED:
                    self._decide(self._blamed())

    def _beat(self, passed: float) -> None:
        """Tells the others where this rank is; on rank 0, looks whether all wait for each other."""
        message: dict[str, Any] = {"at": self._place(), "moves": self._moves()}
        if self._sampler is not None:
            self._still = self._sampler.look(passed)
            message |= {"still": self._still, "in": self._sampler.position}
        for peer in list(self._peers):
            self._send(peer, message)
        if self.rank == 0:
            self._check_deadlock(passed)

    def _all_wait(self) -> float:
        """Returns the seconds that every rank has waited for others at one place; 0 if one of them does not."""
        peers = [peer for peer in self._peers if peer.rank is not None]
        if len(peers) < self.world_size - 1 or any(peer.quiet >= 3 * self._interval for peer in peers):
            return 0.0
        return min([self._still, *(peer.still for peer in peers)])

    def _check_deadlock(self, passed: float) -> None:
        """Ends the run if all ranks wait for others, and not in the same hook: none of them will ever go on."""
        if self._sampler is None:
            return
        positions = {self.rank: self._sampler.position}
        positions |= {peer.rank: peer.position for peer in self._peers if peer.rank is not None}
        hooks = [position.hook for position in positions.values()]
        deadlock = self._all_wait() >= _STILL and len(set(hooks)) > 1
        self._stuck = self._stuck + passed if deadlock else 0.0
        if self._stuck < _BEATS * self._interval or self._shared.first is not None:
            return
        # The one to blame is in a hook of its own; of two, in one of the user's rather than in a step.
        alone = min(
            positions, key=lambda rank: (hooks.count(positions[rank].hook), not _is_aside(positions[rank].hook))
        )
        others = "; ".join(f"rank {rank} is {position}" for rank, position in positions.items() if rank != alone)
        text = (
            f"it is {positions[alone]}, while {others}: they wait for each other. What needs all ranks (a forward of a"
            " divided model, saving, reducing) must be called on all of them; take it out of a condition on the rank"
        )
        self._decide(Failure(alone, self.world_size, text, stacks=True))

    def _check_request(self, passed: float) -> None:
        """Ends a run that was asked to stop and has not moved for too long."""
        moves = self._moves() + sum(peer.moves for peer in self._peers)
        if self._grace.is_over(passed, moves, self._all_wait()) and self._shared.first is None:
            name = signal.Signals(self._grace.signum).name
            code = 128 + (signal.SIGINT if self._grace.signum == signal.SIGINT else signal.SIGTERM)
            text = f"{name} asked the run to stop, and no rank has finished a batch or saved since; ended where it was"
            self._decide(Failure(self._grace.rank, self.world_size, text, exit_code=code, stacks=True))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                # Whoever waits goes on waiting, so that the selector would answer at once again and again.
                self._selector.unregister(self._listener)
                self._paused = _PAUSE
            return  # Or it has gone before it was heard.
        self._add(connection, rank=None)

    def _accept_again(self, passed: float) -> None:
        """Goes on accepting connections, some time after no more files could be opened."""
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
            self._lost(peer)
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
                    raise ValueError("no message")
                self._hear(peer, message)
            except (ValueError, KeyError, TypeError):
                self._drop(peer)
                return

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            if not hmac.compare_digest(str(message.get("token")), self._token):
                self._drop(peer)
                return
            peer.rank = int(message["rank"])
            self._send(peer, {"at": self._place(), "moves": self._moves()})  # Accepted: it may miss this rank now.
            if self._shared.first is not None:
                self._send(peer, {"first": self._shared.first.to_text()})
        elif "bye" in message:
            peer.left = True
            if peer.rank is not None and "runs" not in message:
                self._left.add(peer.rank)
        elif "failed" in message and self.rank == 0:
            failure = Failure.from_text(message["failed"])
            if message["waited"]:
                self._waited.setdefault(peer.rank, failure)
            else:
                self._decide(failure)
        elif "first" in message and self.rank != 0:
            self._learn(Failure.from_text(message["first"]))
        elif "asked" in message and self.rank == 0:
            self._grace.ask(int(message["asked"]), peer.rank)
        elif "meets" in message and self.rank == 0:
            with self._meeting:
                peer.call = (int(message["meets"]), str(message["call"]))
            self._check_call(0.0)
        elif "met" in message and self.rank != 0:
            self._take_answer(message)
        elif "at" in message:
            peer.place, peer.moves = int(message["at"]), int(message["moves"])
            if "still" in message:
                peer.still, peer.position = float(message["still"]), Position(*map(str, message["in"]))

    def _lost(self, peer: _Peer) -> None:
        self._drop(peer)
        if peer.rank is None or peer.left or self._shared.over:
            return
        code = self._exit_code(peer.rank) if self.rank == 0 else None
        self._found(Failure.ended(peer.rank, self.world_size, code))

    def _count_silence(self, passed: float) -> None:
        """Gives up ranks that have been silent too long."""
        for peer in list(self._peers):
            peer.quiet += passed
            if peer.quiet <= (self._limit if peer.rank is not None else min(self._limit, _GREETING)):
                continue
            if self.rank != 0 and not peer.heard:
                # Rank 0 has not accepted this one: it has no room, and may yet be well. Should it do so later, it is
                # not to take the end of the connection for this rank's.
                self._send(peer, {"bye": True, "runs": True})
                self._drop(peer)
                continue
            self._drop(peer)
            if peer.rank is not None and not peer.left:
                text = f"nothing was heard of it for {self._limit:g} s (stopped? its host or its network down?)"
                self._found(Failure(peer.rank, self.world_size, text, stacks=True, silent=True))

    def _found(self, failure: Failure) -> None:
        if self.rank == 0:
            self._decide(failure)
        else:
            self._learn(failure)

    def _decide(self, failure: Failure) -> Failure:
        """On rank 0: the first failure to come is the one that counts; all are told."""
        with self._shared.lock:
            new = self._shared.first is None
            first = self._shared.first = self._shared.first or failure
        if new:
            for peer in list(self._peers):
                if peer.rank is not None:
                    self._send(peer, {"first": first.to_text()})
            self._tell_here(first)
        return first

    def _learn(self, first: Failure) -> None:
        with self._shared.lock:
            new = self._shared.first is None
            self._shared.first = self._shared.first or first
        if new:
            self._tell_here(first)

    def _tell_here(self, first: Failure) -> None:
        self._known.set()
        with self._answered:
            self._answered.notify_all()
        if not self._shared.over and (first.rank != self.rank or not self._told):
            self._on_failure(first)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.connection.fileno() < 0:
            return
        line = json.dumps(message).encode() + b"\n"
        with self._shared.lock:
            try:
                peer.connection.sendall(line)
            except OSError:
                peer.received = b""  # Reading from it will tell, or its silence.

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._selector.unregister(peer.connection)
            self._peers.remove(peer)
        peer.connection.close()


def _is_aside(hook: str) -> bool:
    """Returns whether a hook is one beside the steps, which users write: ``on_...``."""
    return hook.startswith("on_") and not hook.partition(" of ")[2].endswith("Strategy")


def _close_in_forks() -> None:
    """Makes processes that are forked from this one close their copies of its connections."""

    def close_all() -> None:
        for connection in _OPEN:
            connection.close()

    if not _FORKS and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close_all)
        _FORKS.append(True)
