"""Text for causal language models: the datamodule `TextData`."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.data import ResumableDataModule, ResumableLoader
from dlo_framework.distributed.control import control_group
from dlo_framework.errors import DloError
from dlo_tasks.llm import counted
from dlo_tasks.llm.batches import PackedWindows, PaddedSamples, Prompts
from dlo_tasks.llm.build import cached_tokens
from dlo_tasks.llm.cache_folder import cache_folder
from dlo_tasks.llm.chat import template_of
from dlo_tasks.llm.corpus import embedded_tokenizer, standard_library
from dlo_tasks.llm.layout import PackingName, Statistics, lay_out, split_documents
from dlo_tasks.llm.packing import LongSamples
from dlo_tasks.llm.prompts import read_prompts
from dlo_tasks.llm.records import expand, read_records
from dlo_tasks.llm.step_tokens import Accumulation, InOrderTextBatchSampler, TextBatchSampler
from dlo_tasks.llm.token_cache import TokenStore
from dlo_tasks.llm.tokenizer import filler_id, load_tokenizer, with_template

_COLUMNS = ("messages", "tools", "prompt", "completion", "text")


class TextData(ResumableDataModule):
    """Text for a causal language model: chats, prompts with completions, or plain text, packed into windows.

    ```yaml
    data:
      class_path: TextData
      init_args: {train_files: "chats/*.jsonl", seq_len: 2048, batch_size: 16}
    ```

    Files are JSON lines or Parquet whose records have `messages` (a list of `role` and `content`; the loss counts
    what the assistant wrote), `prompt` and `completion` (the loss counts the completion), or `text`. Any other file is
    one text. Without files, the data is the source code of Python's standard library, and its tokenizer a byte-level
    BPE trained on it.

    Documents are tokenised once, by one process a node, into a memory-mapped file in the user's cache folder, which is
    found again by the contents of the files and the tokenizer. They are packed into windows by best fit, where no
    document sees another; or padded, in batches of like length. What that left is printed.

    Batches are dicts of int64 tensors `[batch, length]`: `input_ids`; `labels`, the token that follows each, -100
    where none counts; `position_ids`, which begin again with each document. Training batches also have
    `tokens_in_step`, a scalar: the labels that count in the whole optimizer step, over all ranks and micro-batches;
    dividing by it makes the loss the mean over tokens under any strategy. Prediction's are `input_ids` and
    `attention_mask`, padded on the left, and `index`, the numbers of the prompts.

    Args:
        train_files: paths and globs, one or a list. None for the standard library's sources.
        val_files: likewise. None holds out `val_fraction` of the training documents.
        predict_files: prompts for `dlo predict`: text with one a line, or JSON lines or Parquet with a `prompt`, or
            `messages` and `tools`.
        tokenizer: a folder or hub name. None for the model's own, where it has one, else for the byte-level BPE of
            the standard library's sources.
        chat_template: a file with a Jinja template that takes the place of the tokenizer's own.
        columns: other names of the columns, such as `{text: content}`.
        seq_len: positions of a window: the most tokens that the model sees at once.
        batch_size: windows (or padded samples) per micro-step over all data-parallel ranks together, so that the
            number of ranks does not change the loss curve. Must be divisible by the ranks.
        eval_batch_size: the same in validation, test and prediction. Changes no metric.
        packing: `best_fit` fills each window with whole documents; `none` pads each to the longest of its batch,
            and puts samples of like length into a batch.
        long_samples: what becomes of documents that do not fit a window: `truncate` keeps their start, `split` makes
            several of them, `drop` leaves them out, `error` ends the run with the file and line. None splits plain
            text and truncates data in which only a part counts.
        val_fraction: part of the documents to hold out, chosen by a hash of their contents; 0 for none.
        vocab_size: of the byte-level BPE; no other tokenizer minds.
        corpus_bytes: most bytes of the standard library's sources to use.
        cache_dir: where tokens and the trained tokenizer are kept; None for `~/.cache/dlo/llm`.
        num_workers: loading processes on each rank. 0 suits, for a batch is a copy out of a mapped file.
        prefetch_factor: batches that each worker prepares ahead; default 2.
        pin_memory: load into page-locked memory. Default: where the run has an accelerator.
        persistent_workers: keep the workers between epochs.
        seed: of the order.

    Raises:
        DloError: for arguments out of range; by :meth:`check`, for files that are missing or empty, and a first record
            without a known column; later, for a broken line (with its number), a missing tokenizer or chat template,
            a document too long under `error`, and data in which nothing is to be learned.
    """

    #: Batches lie in memory of their own: callbacks may write to them.
    makes_new_batches = True

    def __init__(
        self,
        train_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        predict_files: str | list[str] | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        columns: dict[str, str] | None = None,
        seq_len: int = 512,
        batch_size: int = 16,
        eval_batch_size: int | None = None,
        packing: PackingName = "best_fit",
        long_samples: LongSamples | None = None,
        val_fraction: float = 0.05,
        vocab_size: int = 4096,
        corpus_bytes: int = 8_000_000,
        cache_dir: str | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
        )
        if seq_len < 1 or corpus_bytes < 1:
            raise DloError(f"seq_len and corpus_bytes must be at least 1, got {seq_len} and {corpus_bytes}")
        if not 0 <= val_fraction < 1:
            raise DloError(f"val_fraction must be at least 0 and below 1, got {val_fraction}")
        unknown = sorted(set(columns or {}) - set(_COLUMNS))
        if unknown:
            raise DloError(f"columns renames {', '.join(_COLUMNS)}, and knows no {', '.join(unknown)}")
        self.train_files, self.val_files, self.predict_files = train_files, val_files, predict_files
        self.chat_template, self.columns = chat_template, dict(columns or {})
        self.seq_len, self.packing, self.long_samples = seq_len, packing, long_samples
        self.val_fraction, self.vocab_size, self.corpus_bytes = val_fraction, vocab_size, corpus_bytes
        self.cache_dir = cache_folder(cache_dir)
        #: The transformers tokenizer; None before `setup`.
        self.tokenizer: Any = None
        #: The prompts to complete, as they stand in `predict_files`; empty before `setup` for prediction.
        self.prompts: list[Any] = []
        #: What became of the documents of `train` and `val`.
        self.statistics: dict[str, Statistics] = {}
        self._source = tokenizer
        self._loaded_from: str | None = None
        self._names: dict[str, str] | None = None  # of the caches, by split
        self._datasets: dict[str, Any] = {}
        self._counts: dict[str, counted.Rows] = {}  # of the batch that is being moved

    # --- before the run -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises DloError for what a run would stumble over later; reads the first record of each list of files."""
        for option in ("train_files", "val_files", "predict_files"):
            patterns = getattr(self, option)
            if patterns is None:
                continue
            files = expand(patterns, option)
            if option != "predict_files":
                next(read_records(files, self.columns), None)
        if self.train_files is None:
            assert self._library  # finding none is an error
        if self._source is not None:
            self.check_template(self._source)

    def check_predict(self) -> None:
        """Raises DloError if there are no prompts to complete; the command line asks before it predicts."""
        if self.predict_files is None:
            raise DloError(
                "prediction completes the prompts of predict_files, which is not set; set"
                " data.init_args.predict_files to a file with a prompt a line"
            )

    def check_template(self, source: str) -> None:
        """Checks that conversations, if the first record of the files is one, can be written as text.

        Args:
            source: the model's own tokenizer, a folder or a hub's name; where `tokenizer` is given, that one counts.

        Raises:
            DloError: if the tokenizer has no chat template.
        """
        for option in ("train_files", "val_files"):
            patterns = getattr(self, option)
            files = expand(patterns, option) if patterns is not None else []
            first = next(read_records(files, self.columns), None) if files else None
            if first is not None and first.kind == "messages":
                template_of(load_tokenizer(self._source or source, self.chat_template), f"{files[0]}:{first.row}")

    def _files(self, split: str) -> list[Path]:
        if split == "val":
            return expand(self.val_files or [], "val_files")
        if self.train_files is None:
            return self._library
        return expand(self.train_files, "train_files")

    def _splits(self, stage: str | None) -> list[str]:
        """The lists of files that a stage reads."""
        if stage == "predict":
            return []
        if stage in ("validate", "test") and self.val_files is not None:
            return ["val"]
        return ["train"] if self.val_files is None else ["train", "val"]

    def prepare_data(self) -> None:
        """Trains the tokenizer and tokenises the files, where that is not done yet; one process a node does."""
        state = self.trainer.state.fn if self.trainer is not None else None
        stages = {TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
        tokenizer = self._load_tokenizer()
        splits = self._splits(stages.get(state) if state is not None else None)
        self._names = {
            split: cached_tokens(self._files(split), tokenizer, self.cache_dir, self.columns) for split in splits
        }

    def _load_tokenizer(self) -> Any:
        """Returns the tokenizer, loaded once; forgets all that was made with another one."""
        source = self._source
        if source is None and self.trainer is not None:
            source = getattr(self.trainer.lightning_module, "tokenizer_source", None)
        if self.tokenizer is None or source != self._loaded_from:
            self._names, self._datasets, self.statistics = None, {}, {}
            self._loaded_from = source
            if source is not None:
                self.tokenizer = load_tokenizer(source, self.chat_template)
            else:
                trained = embedded_tokenizer(self._library, self.vocab_size, self.cache_dir)
                self.tokenizer = with_template(trained, self.chat_template)
        return self.tokenizer

    @cached_property
    def _library(self) -> list[Path]:
        return standard_library(self.corpus_bytes)

    # --- the data -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Opens the tokens that :meth:`prepare_data` has made, and lays them out as samples."""
        self._load_tokenizer()
        if stage == "predict":
            self.check_predict()
            files = expand(self.predict_files or [], "predict_files")
            self.prompts, ids = read_prompts(files, self.tokenizer, self.columns)
            self._datasets["predict"] = Prompts(ids, filler_id(self.tokenizer))
            return
        names = self._agreed_names()
        wanted = ("train", "val") if stage == "fit" else ("val",)
        for split in wanted:
            if split not in self._datasets and (split == "train" or self.val_files is not None or self.val_fraction):
                self._lay_out(split, names)

    def _agreed_names(self) -> dict[str, str]:
        """Returns the names of the caches, which the first rank knows."""
        trainer = self.trainer
        group = control_group(trainer) if trainer is not None else None
        if group is None:
            if self._names is None:
                self.prepare_data()
            assert self._names is not None
            return self._names
        said = [self._names]
        dist.broadcast_object_list(said, src=0, group=group)
        assert said[0] is not None, "prepare_data runs before setup"
        self._names = said[0]
        return self._names

    def _lay_out(self, split: str, names: dict[str, str]) -> None:
        origin = split if split in names else "train"
        path = self.cache_dir / names[origin]
        if not path.is_file():
            raise DloError(
                f"{path} is not there: this node's files or tokenizer differ from those of rank 0; give all nodes the"
                " same files, and the same Python where train_files is not set, or a cache_dir that they share"
            )
        store = TokenStore(path)
        documents = np.arange(len(store))
        if self.val_files is None and self.val_fraction:
            documents = split_documents(store.hashes, self.val_fraction)[split == "val"]
            if not len(documents):
                raise DloError(
                    f"val_fraction {self.val_fraction} of {len(store)} documents leaves none for"
                    f" {'validation' if split == 'val' else 'training'}; change it, or give val_files"
                )
        dataset, statistics = lay_out(
            store,
            documents,
            self._files(origin),
            seq_len=self.seq_len,
            packing=self.packing,
            long_samples=self.long_samples,
            filler=filler_id(self.tokenizer),
            by_length=split == "val",
        )
        self._datasets[split], self.statistics[split] = dataset, statistics
        if self.trainer is None or self.trainer.is_global_zero:
            print(f"{split}: {statistics}", flush=True)

    def train_dataloader(self) -> ResumableLoader:
        """The training windows in random order."""
        dataset: PackedWindows | PaddedSamples = self._datasets["train"]
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        make_sampler = partial(
            InOrderTextBatchSampler if overfit else TextBatchSampler,
            len(dataset),
            targets=dataset.targets,
            lengths=dataset.lengths,
            accumulation=_accumulation_of(self),
        )
        return self.train_loader(dataset, make_sampler=make_sampler)

    def val_dataloader(self) -> Any:
        """The held-out windows; no loader where nothing is held out."""
        return self._held_out("val")

    def test_dataloader(self) -> Any:
        """The same windows as in validation."""
        return self._held_out("test")

    def predict_dataloader(self) -> ResumableLoader:
        """The prompts of `predict_files`."""
        return self.eval_loader(self._datasets["predict"], name="predict")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts what a step has to know on the host; see :mod:`dlo_tasks.llm.counted`."""
        self._counts = counted.count(batch)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Leaves the counts with the batch."""
        counts, self._counts = self._counts, {}
        counted.leave(batch, counts)
        return batch

    def _held_out(self, name: str) -> Any:
        return self.eval_loader(self._datasets["val"], name=name) if "val" in self._datasets else []

    # --- the place in it ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the training data, and what the data was made of."""
        state = super().state_dict()
        return {**state, "data": self._made_of()} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the place up again; warns in the middle of an epoch whose order is another one now.

        Raises:
            DloError: in the middle of an epoch of padded samples, if ``batch_size`` is another: it decides which
                samples come together.
        """
        fitting = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state_dict.get("samples"):
            before = state_dict.get("batch_size", self.batch_size)
            if self.packing == "none" and before != self.batch_size:
                raise DloError(
                    f"batch_size was {before} when the epoch was interrupted and is {self.batch_size} now; under"
                    f" packing: none it decides the order of the epoch. Resume with batch_size {before}"
                )
            if self._names is not None and state_dict.get("data", self._made_of()) != self._made_of():
                rank_zero_warn(
                    "the files, the tokenizer, seq_len, packing, long_samples or the split are not those of the run"
                    " that was interrupted: the rest of this epoch comes from other samples, so that some repeat and"
                    " some are missing"
                )
        super().load_state_dict(state_dict)

    def _made_of(self) -> str:
        parts: list[Any] = [self._names, self.seq_len, self.packing, self.long_samples]
        parts.append(self.val_fraction if self.val_files is None else None)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _accumulation_of(module: LightningDataModule) -> Callable[[], Accumulation]:
    """Returns a function that reads how the trainer accumulates, and does not keep the datamodule alive."""
    reference = weakref.ref(module)

    def read() -> Accumulation:
        owner = reference()
        trainer: Trainer | None = owner.trainer if owner is not None else None
        if trainer is None:
            return Accumulation(1, float("inf"))
        batches = trainer.num_training_batches
        return Accumulation(int(trainer.accumulate_grad_batches), batches or float("inf"))

    return read
