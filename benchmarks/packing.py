"""What packing brings: useful tokens a second of a small Llama's training step, beside padding and TRL's packing.

Documents have log-normal lengths as instruction data do (median 110 tokens, sigma 0.8; cut off at the window of 512),
so that padding to the window leaves 72% of it empty. A useful token is one that the loss counts. Every contestant
trains the same random Llama of 3.7 million parameters (AdamW, float32, SDPA attention, which is what transformers uses
on a CPU) on batches of four rows, made beforehand:

* ``padded to the window``: each document fills a row, with the attention mask that transformers' collators give; the
  unit. ``padded to the window again`` is the A/A control.
* ``padded to the window, no mask``: the same without it. A causal model needs none for padding on the right.
* ``padded to the longest``: of each batch. ``sorted by length``: the same, documents sorted first.
* ``dlo, packing: none``: TextData's padded batches, of like length but in random order, without a mask.
* ``dlo, packing: best_fit``: TextData's windows.
* ``TRL``: ``trl.pack_dataset`` (bfd) and its collator, which makes one long row of four windows; and ``TRL, a window a
  batch``, where attention is over one window at a time as in dlo's rows. Left out if it is not installed.
* ``packed, documents see each other``: TextData's windows without positions that begin again: a causal mask alone,
  which is wrong, and the roofline.

A speed is the positions a second in the round, times the useful part of all of a contestant's batches. Time is that of
the process, with one thread.

Then, for a million documents, the time of packing: dlo's ``pack_best_fit`` of the lengths, and TRL's
``pack_dataset``, with its defaults (each thousand documents by themselves) and over all documents at once. TRL's
also moves the tokens, one byte each here, into their places, where dlo's leaves them in the file; ``dlo with an
index`` is the time until windows can be read.

Run: ``python benchmarks/packing.py [--rounds 11] [--documents 1000000]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, all_ratios, take_turns
from torch import Tensor
from torch.nn import functional as F

from dlo_framework.data import ResumableBatchSampler
from dlo_tasks.language.batches import IGNORE_INDEX, PackedSamples, lay_out_samples
from dlo_tasks.language.packing import cut_documents, pack_best_fit
from dlo_tasks.language.step_tokens import AccumulationPlan, TextBatchSampler
from dlo_tasks.language.token_cache import Document, TokenStore, write_store

WINDOW, ROWS, VOCABULARY = 512, 4, 4096
MEDIAN, SIGMA = 110, 0.8
UNIT, OURS = "padded to the window", "dlo, packing: best_fit"
BAR = 3.0  # of dlo's packing, over the unit

Batch = dict[str, Tensor]


def lengths_of(count: int, seed: int) -> np.ndarray:
    """Tokens of documents, int64 [count]; one more than the positions that they take."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn, 2, WINDOW + 1).astype(np.int64)


def store_of(lengths: np.ndarray, folder: Path) -> TokenStore:
    generator = np.random.default_rng(1)
    ids = (generator.integers(0, VOCABULARY, length) for length in lengths.tolist())
    documents = (Document(some, np.ones(len(some), dtype=bool), n, 0, n) for n, some in enumerate(ids))
    write_store(folder / "tokens.bin", documents, VOCABULARY)
    return TokenStore(folder / "tokens.bin")


def ours(store: TokenStore, packing: Any) -> tuple[list[Batch], str]:
    """TextData's batches, and what it says of them."""
    dataset, found = lay_out_samples(
        store, np.arange(len(store)), [], seq_len=WINDOW, packing=packing, long_samples="error", filler=0
    )
    sampler: ResumableBatchSampler = TextBatchSampler(
        len(dataset),
        count_targets=dataset.count_targets,
        lengths=dataset.lengths,
        accumulation=lambda: AccumulationPlan(1, float("inf")),
        batch_size=ROWS,
        shuffle=True,
        drop_last=True,
    )
    keys = ("input_ids", "labels", "position_ids")
    batches = [{key: batch[key] for key in keys} for batch in map(dataset.fetch, sampler)]
    return batches, f"dlo, packing: {packing}: {found}"


def padded(store: TokenStore, *, to_window: bool, by_length: bool, mask: bool = True) -> list[Batch]:
    """Batches as the usual collators make them, on shifted labels."""
    order = np.random.default_rng(2).permutation(len(store))
    if by_length:
        order = order[np.argsort(np.diff(store.bounds)[order], kind="stable")]
    batches = []
    for first in range(0, len(order) - ROWS + 1, ROWS):
        rows = [store.read(np.arange(*store.bounds[n : n + 2]))[0] for n in order[first : first + ROWS]]
        width = WINDOW if to_window else max(len(row) - 1 for row in rows)
        ids, labels = torch.zeros(ROWS, width, dtype=torch.int64), torch.full((ROWS, width), IGNORE_INDEX)
        seen = torch.zeros(ROWS, width, dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens, past = torch.from_numpy(row), len(row) - 1
            ids[number, :past], labels[number, :past], seen[number, :past] = tokens[:-1], tokens[1:], 1
        batches.append({"input_ids": ids, "labels": labels, **({"attention_mask": seen} if mask else {})})
    random.Random(0).shuffle(batches)
    return batches


def trl_batches(store: TokenStore, rows: int) -> list[Batch] | None:
    """TRL's windows and its collator; labels are shifted here, as the loss does there."""
    try:
        from trl.data_utils import pack_dataset
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError:
        return None
    import datasets

    datasets.disable_progress_bars()
    documents = [store.read(np.arange(*store.bounds[n : n + 2]))[0][:WINDOW] for n in range(len(store))]
    packed = pack_dataset(datasets.Dataset.from_dict({"input_ids": documents}), WINDOW, "bfd").shuffle(seed=0)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batches = []
    for first in range(0, len(packed) - rows + 1, rows):
        made = collate([packed[n] for n in range(first, first + rows)])
        labels = F.pad(made["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        batches.append({"input_ids": made["input_ids"], "labels": labels, "position_ids": made["position_ids"]})
    return batches


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX).backward()
    optimizer.step()
    optimizer.zero_grad()


def useful_part(batches: list[Batch]) -> float:
    """The part of all positions that the loss counts; single batches differ too much in it to be timed by it."""
    return sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches) / sum(
        b["labels"].numel() for b in batches
    )


def forever(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def measure(contestants: dict[str, list[Batch]], rounds: int, positions: int, seed: int) -> dict[str, list[float]]:
    """Useful tokens a second of each, by round; a round trains on about ``positions`` positions."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    coming = {name: forever(batches) for name, batches in contestants.items()}
    useful = {name: useful_part(batches) for name, batches in contestants.items()}

    def speed(name: str) -> float:
        done = 0
        start = PROCESS.now()
        while done < positions:
            batch = next(coming[name])
            train_step(model, optimizer, batch)
            done += batch["input_ids"].numel()
        return useful[name] * done / (PROCESS.now() - start)

    runs = {name: (lambda name=name: speed(name)) for name in contestants}
    return take_turns(runs, rounds, order=random.Random(seed))


def contestants_of(store: TokenStore, record: Record) -> tuple[dict[str, list[Batch]], list[str]]:
    """Returns everybody's batches, and what is to be said of them; the record hears who is not there."""
    found = {UNIT: padded(store, to_window=True, by_length=False)}
    found[f"{UNIT} again"] = found[UNIT]
    found[f"{UNIT}, no mask"] = padded(store, to_window=True, by_length=False, mask=False)
    found["padded to the longest"] = padded(store, to_window=False, by_length=False)
    found["sorted by length"] = padded(store, to_window=False, by_length=True)
    found["dlo, packing: none"], said = ours(store, "none")
    found[OURS], said_of_windows = ours(store, "best_fit")
    for name, rows in (("TRL", ROWS), ("TRL, a window a batch", 1)):
        packed = trl_batches(store, rows)
        if packed is None:
            record.without(f"{name}: its packing", "trl is not installed")
        else:
            found[name] = packed
    seeing = [{key: batch[key] for key in ("input_ids", "labels")} for batch in found[OURS]]
    found["packed, documents see each other"] = seeing
    return found, [said, said_of_windows]


def speeds_table(record: Record, options: argparse.Namespace) -> Table:
    """Measures useful tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        contestants, notes = contestants_of(store_of(lengths_of(3000, 0), Path(folder)), record)
        speeds = measure(contestants, options.rounds, options.positions, options.seed)
    table = Table("useful tokens a second", f"those of {UNIT}", PROCESS, better="higher", notes=notes)
    for name, values in all_ratios(speeds, UNIT).items():
        table.add(
            name,
            values,
            bar=BAR if name == OURS else None,
            ours=name.startswith("dlo"),
            control=name.endswith("again"),
            tokens_a_second=round(statistics.median(speeds[name])),
        )
    return table


def packing_table(count: int, record: Record) -> Table:
    """Times the packing of ``count`` documents, and records the fill of the windows."""
    lengths = np.minimum(lengths_of(count, 3), WINDOW)
    times: list[float] = []
    table = Table(f"packing {count:,} documents", "the time of dlo's best_fit", PROCESS)

    def note(name: str, seconds: list[float], windows: int, ours: bool = False) -> None:
        base = statistics.median(times)
        fill = f"{float(lengths.sum()) / (windows * WINDOW):.2%}"
        table.add(name, [one / base for one in seconds], ours=ours, s=statistics.median(seconds), fill=fill)

    for _ in range(3):
        start = PROCESS.now()
        packed = pack_best_fit(lengths, WINDOW)
        times.append(PROCESS.now() - start)
    note("dlo", times, packed.windows, ours=True)
    bounds = np.concatenate([[0], np.cumsum(lengths + 1)])
    start = PROCESS.now()
    pieces = cut_documents(bounds, np.arange(count), WINDOW, "error")
    windows = PackedSamples(None, pieces, pack_best_fit(pieces.length, WINDOW), WINDOW, 0, pieces.length)  # type: ignore[arg-type]
    note("dlo with an index", [PROCESS.now() - start], len(windows), ours=True)
    try:
        import datasets
        import pyarrow as pa
        from trl.data_utils import pack_dataset
    except ImportError:
        record.without(f"TRL: packing {count:,} documents", "trl is not installed")
        return table
    datasets.disable_progress_bars()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    tokens = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(int(lengths.sum()), dtype=np.int8)))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    for name, size in (("TRL", 1000), ("TRL, all at once", count)):
        start = PROCESS.now()
        with tempfile.TemporaryDirectory() as folder:
            options = {"batch_size": size, "cache_file_name": f"{folder}/packed.arrow"}
            packed_dataset = pack_dataset(dataset, WINDOW, "bfd", options)
            note(name, [PROCESS.now() - start], len(packed_dataset))
            del packed_dataset
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--positions", type=int, default=ROWS * WINDOW, help="of each contestant in a round")
    parser.add_argument("--documents", type=int, default=1_000_000, help="to pack; 0 leaves that part out")
    parser.add_argument("--seed", type=int, default=0, help="of the order in a round")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    if options.rounds:
        record.add(speeds_table(record, options))
    if options.documents:
        record.add(packing_table(options.documents, record))
    record.finish()


if __name__ == "__main__":
    main()
