"""How fast does data at scale open, mix and arrive: 100 GB of tokens, mixtures on 1 to 8 ranks, local and slow files?

* Opening: a Megatron-LM corpus of 100 GB, a sparse file with a real index, from a new process to the first batch of a
  global shuffle; time and memory beyond the imports, each over its bar (1 s, 100 MB).
* Proportions: the largest difference between a source's share of an epoch and its weight, over 0.1%.
* Reading: tokens of a local file per second, as windows in order, over reading the file's bytes in pieces of 8 MiB.
  The file's pages are dropped from the page cache before each measurement, so that both read from the disk. Then the
  same for batches of int64 tensors, also over the time of making such tensors from tokens in memory.
* Latency: the time of training steps from a file system that answers after 100 ms, over that from local files. A step
  computes for a fixed time.

Run: ``python benchmarks/data_scale.py [--tables reading latency] [--rounds 7] [--gigabytes 100] [--megabytes 512]
[--steps 40]``
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, all_ratios, pause, take_turns

from dlo_framework.data import GlobalShuffle, Mixture, MixtureOrder, MixturePoint, ResumableBatchSampler
from dlo_framework.data.loader import ResumableLoader
from dlo_framework.data.remote import BlockCache
from dlo_tasks.llm.streams.token_sources import Storage, TokenFiles, open_tokens
from dlo_tasks.llm.streams.token_windows import JoinedWindows, TokenWindows

LATENCY, COMPUTE = 0.1, 0.1  # seconds: of the file system's answer, and of a step's work
SEQ_LEN, BATCH = 2048, 8
AHEAD = 4  # batches, the default of TextData
TABLES = ["opening", "proportions", "reading", "latency"]
BLOCK = 1 << 16
OPENING = """
import sys, time
from pathlib import Path
import numpy, torch
from dlo_framework.data.mix_options import MixOptions
from dlo_framework.data.remote import BlockCache
from dlo_tasks.llm.step_tokens import AccumulationPlan, StreamBatchSampler
from dlo_tasks.llm.streams.token_sources import Storage, TokenFiles, open_tokens
from dlo_tasks.llm.streams.token_windows import JoinedWindows, TokenWindows
def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forgets the peak of the imports
before = kilobytes("VmRSS")
begin = time.perf_counter()
storage = Storage(BlockCache(Path(sys.argv[2], "cache"), 1 << 30), Path(sys.argv[2], "indices"), {})
windows = TokenWindows(open_tokens(TokenFiles("large", sys.argv[1]), storage), 2048, 65536, "large")
data = JoinedWindows([windows])
order = MixOptions(None, "step", "global", 256, 8192, None).order(["large"], [len(windows)], 0)
sampler = StreamBatchSampler(order.size, batch_size=8, shuffle=True, drop_last=True, order=order,
    count_targets=data.count_targets, accumulation=lambda: AccumulationPlan(1, float("inf")))
data.fetch(next(sampler.batches_from(len(windows) // 2)))
print(time.perf_counter() - begin, (kilobytes("VmHWM") - before) / 1000)
"""


def write_corpus(prefix: Path, size: int, document: int = 1024, sparse: bool = False) -> None:
    """Writes a Megatron-LM corpus of ``size`` bytes of uint16 tokens, in documents of equal length."""
    import struct

    count = size // (2 * document)
    with open(f"{prefix}.bin", "wb") as file:
        if sparse:
            file.truncate(count * document * 2)
        else:
            generator = np.random.default_rng(0)
            left = count * document
            while left:
                some = min(left, 1 << 24)
                file.write(generator.integers(0, 30_000, some, dtype=np.uint16).tobytes())
                left -= some
            file.flush()
            os.fsync(file.fileno())
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        np.full(count, document, "<i4").tofile(file)
        (np.arange(count, dtype="<i8") * (document * 2)).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)


def opening_table(folder: Path, gigabytes: float, rounds: int) -> Table:
    """Opens the corpus in new processes; the index stays in the page cache after the first."""
    prefix = folder / "large"
    write_corpus(prefix, int(gigabytes * 1e9), 4096, sparse=True)
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-c", OPENING, str(prefix), str(folder)]
        found.append([float(word) for word in subprocess.check_output(command, text=True).split()])
    for suffix in ("bin", "idx"):
        Path(f"{prefix}.{suffix}").unlink()
    table = Table(f"opening {gigabytes:g} GB", "1 s, or 100 MB", ELAPSED)
    table.add("dlo, seconds to the first batch", [seconds for seconds, _ in found], bar=1.0, ours=True)
    table.add("dlo, memory beyond the imports", [megabytes / 100 for _, megabytes in found], bar=1.0, ours=True)
    return table


def proportions_table(samples: int) -> Table:
    """Counts the samples of an epoch on 1 to 8 ranks, with weights that differ a hundredfold."""
    weights = {"web": 0.62, "code": 0.3, "books": 0.0737, "notes": 0.0063}
    sizes = [10**9, 10**8, 10**7, 5000]
    bounds = np.cumsum([0, *sizes])
    table = Table("proportions", "0.1% of the epoch's samples", "a count")
    mixture = Mixture(list(weights), [MixturePoint(0, weights)])
    order = MixtureOrder(mixture, [GlobalShuffle(size, 0) for size in sizes], samples)
    for ranks in (1, 2, 4, 8):
        counts = np.zeros(len(sizes))
        for rank in range(ranks):
            sampler = ResumableBatchSampler(
                samples,
                batch_size=1024 // ranks,
                shuffle=True,
                rank=rank,
                world_size=ranks,
                drop_last=True,
                order=order,
            )
            for batch in sampler:
                counts += np.histogram([draw.index for draw in batch], bounds)[0]
        error = np.abs(counts / counts.sum() - list(weights.values())).max()
        table.add(f"dlo, {ranks} rank{'s' if ranks > 1 else ''}", [error / 0.001], bar=1.0, ours=True)
    table.notes.append(f"{samples} samples of four sources with weights {weights}.")
    return table


def drop_pages(path: Path) -> None:
    """Drops a file's pages from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def read_plainly(path: Path) -> int:
    """Reads a file in pieces; returns the bytes."""
    total = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(8 << 20):
            total += len(piece)
    return total


def reading_table(folder: Path, megabytes: int, rounds: int) -> tuple[Table, Table]:
    """Reads a local corpus as stored, as batches, and plainly; and compares batches with widening alone."""
    prefix, size = folder / "local", megabytes << 20
    write_corpus(prefix, size)
    path = Path(f"{prefix}.bin")
    storage = Storage(BlockCache(folder / "cache", 1 << 30), folder / "indices", {})
    windows = TokenWindows(open_tokens(TokenFiles("local", str(prefix)), storage), SEQ_LEN, 1 << 16, "local")
    data = JoinedWindows([windows], AHEAD)
    tokens = np.fromfile(path, np.uint16, 64 * SEQ_LEN + 1)
    out = torch.zeros(3, 64, SEQ_LEN, dtype=torch.int64)

    def batches(workers: int) -> Callable[[], object]:
        options = {"batch_size": 64, "shuffle": False, "drop_last": True, "persistent_workers": False}
        return lambda: sum(
            batch["input_ids"].numel() for batch in ResumableLoader(data, num_workers=workers, **options)
        )

    def stored() -> int:
        return sum(len(windows.read(np.arange(first, first + 64))) for first in range(0, len(windows) - 63, 64))

    def widen() -> None:
        ids, places = torch.from_numpy(tokens), torch.arange(SEQ_LEN)
        for _ in range(len(windows) // 64):
            out[0].copy_(ids[:-1].view(64, SEQ_LEN))
            out[1].copy_(ids[1:].view(64, SEQ_LEN))
            out[2].copy_(places)

    def cold(run: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            drop_pages(path)
            return ELAPSED.seconds(run)

        return measure

    def plain() -> int:
        return read_plainly(path)

    stages = {
        "dlo, tokens as stored": stored,
        "dlo, batches in this process": batches(0),
        "dlo, batches from a worker": batches(1),
        "dlo, batches from two workers": batches(2),
    }
    runs = {"plain read": plain, "plain read again": plain, "widening alone": widen, **stages}
    seconds = take_turns({name: cold(run) for name, run in runs.items()}, rounds)
    rates = {name: [size / one for one in taken] for name, taken in seconds.items()}
    found = []
    for title, base, unit in (
        ("reading", "plain read", "the bytes a second of a plain read"),
        ("batches", "widening alone", "the tokens a second of widening to int64 in memory"),
    ):
        table = Table(title, unit, ELAPSED, better="higher")
        for name, values in all_ratios(rates, base).items():
            if base == "widening alone" and name.startswith(("plain", "dlo, tokens as stored")):
                continue
            table.add(
                name,
                values,
                bar=0.9 if base == "plain read" and name.startswith("dlo, tokens as stored") else None,
                ours=name.startswith("dlo"),
                control=name.endswith("again"),
                MB_a_second=float(np.median(rates[name])) / 1e6,
            )
        found.append(table)
    found[0].notes.append(f"{megabytes} MiB of uint16 tokens in windows of {SEQ_LEN}, 64 at once.")
    found[1].notes.append(
        "A batch has int64 ids, labels and positions, 12 times the bytes of its tokens. Widening alone writes them over"
        " those of the batch before, from tokens in the processor's cache."
    )
    path.unlink()
    return found[0], found[1]


class Distant(LocalFileSystem):
    """Local files that answer after a delay, as a remote store does."""

    protocol = "distant"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("distant://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        """Returns bytes after a delay."""
        pause(LATENCY)
        return bytes(super().cat_file(path, start=start, end=end, **options))


def latency_table(folder: Path, steps: int, rounds: int) -> Table:
    """Times steps whose windows come from a distant file system, with an empty cache each time."""
    fsspec.register_implementation("distant", Distant, clobber=True)
    prefix = folder / "distant"
    write_corpus(prefix, steps * BATCH * SEQ_LEN * 8)

    def batches(path: str, ahead: int, cache: Path) -> Iterator[object]:
        storage = Storage(BlockCache(cache, 1 << 30, BLOCK), folder / "indices", {})
        windows = TokenWindows(open_tokens(TokenFiles("far", path, "megatron"), storage), SEQ_LEN, 1 << 16, "far")
        data = JoinedWindows([windows], ahead)
        order = GlobalShuffle(len(data), 0)
        sampler = ResumableBatchSampler(order.size, batch_size=BATCH, shuffle=True, drop_last=True, order=order)
        return iter(
            ResumableLoader(data, batch_size=BATCH, shuffle=True, drop_last=True, batch_sampler=sampler, num_workers=0)
        )

    def measure(path: str, ahead: int) -> Callable[[], float]:
        def run() -> float:
            with tempfile.TemporaryDirectory() as cache:
                coming = batches(path, ahead, Path(cache))
                next(coming)  # the first one is waited for
                begin = ELAPSED.now()
                for _ in range(steps):
                    pause(COMPUTE)
                    next(coming)
                return ELAPSED.now() - begin

        return run

    far = f"distant://{prefix}.bin"
    runs = {
        "local files": measure(str(prefix), 0),
        "local files again": measure(str(prefix), 0),
        "dlo, distant files": measure(far, 4),
        "dlo, distant files, nothing ahead": measure(far, 0),
    }
    seconds = take_turns(runs, rounds)
    table = Table("latency", "the time of steps from local files", ELAPSED)
    for name, values in all_ratios(seconds, "local files").items():
        table.add(
            name,
            values,
            bar=1.05 if name == "dlo, distant files" else None,
            ours=name.startswith("dlo"),
            control=name.endswith("again"),
            ms_a_step=float(np.median(seconds[name])) / steps * 1000,
        )
    table.notes.append(
        f"{BATCH} windows a step from random places, in blocks of {BLOCK >> 10} KiB that were never fetched before;"
        f" each answer takes {LATENCY * 1000:g} ms, and a step computes for {COMPUTE * 1000:g} ms."
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=100)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    torch.set_num_threads(1)  # as in a loading process
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "opening" in options.tables:
            if Path("/proc/self/clear_refs").exists():
                record.add(opening_table(root, options.gigabytes, options.rounds))
            else:
                record.without("opening", "this system has no peak of memory to read")
        if "proportions" in options.tables:
            record.add(proportions_table(options.samples))
        if "reading" in options.tables:
            if hasattr(os, "posix_fadvise"):
                for table in reading_table(root, options.megabytes, options.rounds):
                    record.add(table)
            else:
                record.without("reading from the disk", "this system cannot drop pages from the page cache")
        if "latency" in options.tables:
            record.add(latency_table(root, options.steps, options.rounds))
    record.finish()


if __name__ == "__main__":
    main()
