"""Tokenises records in many processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from dlo_framework.data import ignore_stop_signals
from dlo_framework.errors import DloError
from dlo_tasks.llm.token_cache import Document

#: Function that tokenises records, in order.
Tokenize = Callable[[Iterable[Any]], Iterable[Document]]

#: Number of records that a process tokenises at once, and tasks per process that wait.
_AT_ONCE, _WAITING = 256, 2
#: Size of the files from which several processes are the default: each takes a second to start.
_LARGE = 64 << 20


def choose_processes(processes: int | None, total_bytes: int) -> int:
    """Returns the number of processes: the option's, or all cores for more than 64 MiB and one for less."""
    if processes is not None:
        return processes
    if total_bytes < _LARGE:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenize_in_processes(records: Iterable[Any], tokenize: Tokenize, processes: int) -> Iterator[Document]:
    """Yields the tokenised records, in order; memory holds a few hundred per process.

    Args:
        records: Records, which this process reads.
        tokenize: Function that tokenises some of them; it depends on each record alone.
        processes: Number of processes; 1 tokenises in this one, whose tokenizer uses threads.

    Raises:
        DloError: If a record cannot be tokenised, or a process is killed.
    """
    if processes == 1:
        yield from tokenize(records)
        return
    coming = iter(records)
    forks = "fork" in multiprocessing.get_all_start_methods()  # A spawned process would import transformers again.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork" if forks else "spawn"),
        initializer=_start_process,
        initargs=(tokenize,),
    )
    waiting: deque[Future[list[Document]]] = deque()
    try:
        while some := list(islice(coming, _AT_ONCE)):
            waiting.append(pool.submit(_tokenize_some, some))
            if len(waiting) > _WAITING * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DloError(
            f"{processes} processes must tokenise to the end, got one that was killed, perhaps for want of memory; set"
            " tokenize_processes to a smaller number"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenize: list[Tokenize] = []


def _start_process(tokenize: Tokenize) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One thread per process; a fork must not use its parent's threads.
    ignore_stop_signals()
    _tokenize[:] = [tokenize]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_some(records: list[Any]) -> list[Document]:
    return list(_tokenize[0](records))
