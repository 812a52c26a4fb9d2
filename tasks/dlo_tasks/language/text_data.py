"""Datamodule with text for causal language models: `TextData`."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.config_only import skip_missing
from dlo_framework.data import InOrder, ResumableDataModule, ResumableLoader
from dlo_framework.data.description import ModuleDescription
from dlo_framework.data.mixture import MixOptions, Ramp, ShuffleName
from dlo_framework.data.remote import BlockCache, Storage, cache_folder
from dlo_framework.data.sampler import InOrderBatchSampler
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, check_number, did_you_mean
from dlo_framework.units import parse_bytes
from dlo_tasks.language import batches
from dlo_tasks.language.batches import PackingName, Prompts, find_val_fraction, lay_out_samples, split_documents
from dlo_tasks.language.chat import find_chat_template, read_prompts, warn_of_plain_prompts
from dlo_tasks.language.packing import LongSamples
from dlo_tasks.language.records import expand_patterns, read_records
from dlo_tasks.language.step_tokens import AccumulationPlan, InOrderTextBatchSampler, TextBatchSampler
from dlo_tasks.language.token_cache import TokenStore
from dlo_tasks.language.token_sources import (
    SourceStatistics,
    TextSource,
    hold_out,
    list_token_files,
    open_tokens,
    read_sources,
)
from dlo_tasks.language.token_windows import JoinedWindows, TokenWindows
from dlo_tasks.language.tokenization import cached_tokens
from dlo_tasks.language.tokenizer import (
    PLAIN_CHAT_TEMPLATE,
    embedded_tokenizer,
    find_filler_id,
    load_tokenizer,
    set_chat_template,
    standard_library,
    vocabulary_size,
)


class TextData(ResumableDataModule):
    """Loads text for a causal language model: chats, prompts with completions, or plain text, packed into windows.

    ```yaml
    data:
      class_path: TextData
      init_args: {train_files: "chats/*.jsonl", seq_len: 2048, batch_size: 16}
    ```

    Files are JSON lines or Parquet whose records have `messages` (a list of `role` and `content`; targets are the
    assistant's tokens), `prompt` and `completion` (targets are the completion), or `text`. Any other file is one text.
    Without files, the data is the source code of Python's standard library, and the tokenizer is a byte-level BPE
    trained on it.

    With `sources`, the data is a mixture of text and of tokenised shards (Megatron-LM, WebDataset, dlo's own), local
    or remote, by weights that may change during the run.

    One process tokenises the documents once for all nodes, into a memory-mapped file in the user's cache folder. Its
    name is a hash of the files' contents and the tokenizer. Documents are packed into windows by best fit, without
    attention between documents; or padded, in batches of similar length. Statistics of the packing are printed.

    Batches are dicts of int64 tensors `[batch, length]`: `input_ids`; `labels`, the id of the next token, or -100
    where it is not a target; `position_ids`, which restart at 0 with each document. Training batches also have
    `tokens_in_step`, a scalar: the number of targets in the whole optimizer step, over all ranks and micro-batches.
    Division by it makes the loss the mean over tokens under any strategy. Batches for prediction have `input_ids` and
    `attention_mask`, padded on the left, and `index`, the numbers of the prompts.

    Args:
        train_files: Path or glob, or a list of them. Default: the sources of Python's standard library.
        val_files: Path or glob, or a list of them. Default: `val_fraction` of the training documents.
        sources: Sources by name, in place of `train_files`. Each has `files`, text as in `train_files`; or `path`,
            tokenised shards: a file, folder or glob, local or a URL of fsspec, with optional `format` (`megatron`,
            `webdataset`, `dlo`) and `column`. Documents of shards are cut into windows of `seq_len` without packing.
        mix: Weights by source, such as `{code: 0.3, web: 0.7}`; or a list of moments,
            `[{samples: 0, weights: {...}}, {samples: 100000, weights: {...}}]`, counted in samples of the run. Default:
            in proportion to the number of windows.
        mix_ramp: Change between two moments of `mix`: `step` or `linear`.
        shuffle: Shuffle of each source: `global`, any window at any time; or `buffer`, for remote shards: chunks of
            neighbouring windows in random order, shuffled in a buffer.
        shuffle_chunk: Windows of a chunk, under `shuffle: buffer`.
        shuffle_buffer: Windows of the buffer, under `shuffle: buffer`.
        epoch_samples: Windows per epoch of the mixture. Default: those of all sources together.
        storage_options: Options of the remote file system, such as `{anon: true}`.
        remote_cache: Folder on a local disk for blocks of remote files. Default: `~/.cache/dlo/remote`.
        cache_bytes: Maximum size of that folder, such as `20GB`; the least recently used blocks are removed.
        batches_ahead: Batches whose windows are fetched ahead of the loader, of remote shards; 0 for none.
        tokenize_processes: Processes that tokenise. Default: all cores for more than 64 MiB of text, and one, with the
            tokenizer's threads, for less.
        predict_files: Files of prompts for `dlo predict`: text with one prompt per line, or JSON lines or Parquet with
            a `prompt`, or with `messages` and `tools`.
        tokenizer: Folder or hub name. Default: the model's own tokenizer; for a model without one, the byte-level BPE
            of the standard library's sources.
        chat_template: File with a Jinja template that replaces the tokenizer's own. The tokenizer that dlo trains has a
            plain one, of roles and texts.
        columns: Other names of the columns, such as `{text: content}`.
        seq_len: Positions per window: the context length in training.
        batch_size: Windows (or padded samples) per micro-step, summed over all data-parallel ranks, so that the
            number of ranks does not change the loss curve. Must be divisible by the ranks.
        eval_batch_size: Batch size of validation, test and prediction. Changes no metric. Default: `batch_size`.
        packing: `best_fit` fills each window with full documents; `none` pads each document to the longest of its
            batch, and groups documents of similar length into batches. A model that cannot keep packed documents apart
            gets `none`, with a line that says so.
        long_samples: Policy for documents that do not fit a window: `truncate` keeps their start, `split` cuts them
            into several, `drop` removes them, `error` ends the run with the file and line. Default: `split` for plain
            text, `truncate` for data with untargeted tokens, such as chats.
        val_fraction: Fraction of the documents to hold out, chosen by a hash of their contents; 0 for none. Of plain
            text in too few documents, the end of each is held out.
        vocab_size: Vocabulary size of the byte-level BPE; other tokenizers ignore it.
        corpus_bytes: Maximum size of the standard library's sources, in bytes.
        cache_dir: Folder for tokens and the trained tokenizer. Default: `~/.cache/dlo/llm`.
        num_workers: Loading processes per rank. 0 suffices: a batch is a copy from a memory-mapped file.
        prefetch_factor: Batches that each worker prepares ahead; default 2.
        pin_memory: Whether to load into page-locked memory. Default: true in a run on an accelerator.
        persistent_workers: Whether to keep the workers between epochs.
        seed: Seed of the sample order.

    Raises:
        DloError: If arguments are out of range; by :meth:`check`, if files are missing or empty, or a first record has
            no known column; later, for a broken line (with its number), a missing tokenizer or chat template, a
            document that is too long under `error`, or data without any target.
    """

    #: Batches own their memory, so callbacks may write to them.
    makes_new_batches = True
    #: A callback's new shapes are applied before targets and documents are counted.
    shapes_batches = True
    #: Columns of records, which `columns` may rename.
    column_names: tuple[str, ...] = ("messages", "tools", "prompt", "completion", "text")
    #: Kind of the language models that the batches are for.
    model_kind = "causal"
    #: Whether `sources` are possible.
    mixes_sources = True
    #: Whether `packing: none` has one document per row, which models need that cannot keep documents apart.
    pads_documents = True

    def __init__(
        self,
        train_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        predict_files: str | list[str] | None = None,
        sources: dict[str, Any] | None = None,
        mix: dict[str, float] | list[dict[str, Any]] | None = None,
        mix_ramp: Ramp = "step",
        shuffle: ShuffleName = "global",
        shuffle_chunk: int = 256,
        shuffle_buffer: int = 8192,
        epoch_samples: int | None = None,
        storage_options: dict[str, Any] | None = None,
        remote_cache: str | None = None,
        cache_bytes: str | int = "20GB",
        batches_ahead: int = 4,
        tokenize_processes: int | None = None,
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
        check_number("val_fraction", val_fraction, "at least 0 and below 1")
        unknown = sorted(set(columns or {}) - set(self.column_names))
        if unknown:
            raise DloError(
                f"columns must rename {', '.join(self.column_names)}, got {', '.join(unknown)}"
                f"{did_you_mean(unknown[0], self.column_names) or '; remove it'}"
            )
        for name, number, least in (("batches_ahead", batches_ahead, 0), ("tokenize_processes", tokenize_processes, 1)):
            check_number(name, number, f"at least {least}")
        self.sources: list[TextSource] = []
        self.mix_options = MixOptions(mix, mix_ramp, shuffle, shuffle_chunk, shuffle_buffer, epoch_samples)
        if sources is not None:
            self.sources = self._check_sources(sources, train_files, packing)
        elif self.mix_options != MixOptions(None, "step", "global", 256, 8192, None) or storage_options:
            raise DloError(
                "mix, mix_ramp, shuffle, shuffle_chunk, shuffle_buffer, epoch_samples and storage_options must be set"
                " with sources, got no sources; name them under sources, such as {web: {files: web/*.jsonl}}"
            )
        self._cache_bytes, self._storage_options = parse_bytes(cache_bytes, "cache_bytes"), storage_options or {}
        self._remote_cache, self.batches_ahead = remote_cache, batches_ahead
        self.tokenize_processes = tokenize_processes
        self.train_files, self.val_files, self.predict_files = train_files, val_files, predict_files
        self.chat_template, self.columns = chat_template, dict(columns or {})
        self.seq_len, self.packing, self.long_samples = seq_len, packing, long_samples
        self.val_fraction, self.vocab_size, self.corpus_bytes = val_fraction, vocab_size, corpus_bytes
        self.cache_dir = cache_folder(cache_dir, "llm")
        #: The transformers tokenizer; None before `setup`.
        self.tokenizer: Any = None
        #: Prompts to complete, as read from `predict_files`; empty before `setup` for prediction.
        self.prompts: list[Any] = []
        #: Packing statistics of `train` and `val`.
        self.statistics: dict[str, Any] = {}
        self._source = tokenizer
        self._loaded_from: str | None = None
        self._names: dict[str, str] | None = None  # of the caches, by split
        self._datasets: dict[str, Any] = {}
        self._counts: dict[str, batches.Rows] = {}  # of the batch that is being moved

    def _check_sources(self, sources: dict[str, Any], train_files: Any, packing: str) -> list[TextSource]:
        if not self.mixes_sources:
            raise DloError(f"sources must not be set for {type(self).__name__}, got {len(sources)}; set train_files")
        if train_files is not None:
            raise DloError(
                f"train_files must not be set with sources, got {train_files}; add it as a source with files"
            )
        if packing != "best_fit":
            raise DloError(f"packing must be best_fit with sources, got {packing}; remove it")
        text_sources = read_sources(sources)
        self.mix_options.check([source.name for source in text_sources])
        return text_sources

    # --- before the run -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks the files before a run: raises DloError if they are missing, or the first record is invalid."""
        if self.predict_files is not None:
            expand_patterns(self.predict_files, "predict_files")
        list(self._first_records("train_files", "val_files"))
        for source in self.sources:
            if source.tokens is not None:
                list_token_files(source.tokens, self._storage())
        if self.train_files is None and not self.sources:
            assert self._library  # finding none is an error
        if self._source is not None:
            self.check_template(self._source)

    def check_predict(self) -> None:
        """Raises DloError without `predict_files`; the command line calls this before it predicts."""
        if self.predict_files is None:
            raise DloError(
                "predict_files must be set for prediction, got None; set data.init_args.predict_files to a file with"
                " one prompt per line"
            )

    @skip_missing()
    def check_template(self, source: str) -> None:
        """Checks that the tokenizer has a chat template, if the first record of the files is a conversation.

        Args:
            source: Folder or hub name of the model's own tokenizer; `tokenizer` overrides it.

        Raises:
            DloError: If the tokenizer has no chat template.
        """
        for file, first in self._first_records("train_files", "val_files"):
            if first.kind == "messages":
                find_chat_template(load_tokenizer(self._source or source, self.chat_template), f"{file}:{first.row}")

    def _first_records(self, *options: str) -> Iterator[tuple[Path, Any]]:
        """Yields the first file and record of each of these options and of each source of text."""
        texts = {option: getattr(self, option) for option in options}
        texts |= {f"sources.{source.name}.files": source.files for source in self.sources}
        for option, patterns in texts.items():
            files = expand_patterns(patterns, option) if patterns is not None else []
            first = next(self.read(files), None) if files else None
            if first is not None:
                yield files[0], first

    @property
    def trains_on_chats(self) -> bool:
        """Whether all training text, by its first records, is conversations."""
        kinds = {first.kind for _, first in self._first_records("train_files")}
        return kinds == {"messages"} and all(source.tokens is None for source in self.sources)

    def read(self, files: Sequence[Path]) -> Iterator[Any]:
        """Yields the records of some files; each has a `kind`, such as `messages`, and a `row`."""
        return read_records(files, self.columns)

    def tokenize(self, files: Sequence[Path], tokenizer: Any) -> str:
        """Tokenises some files, unless they are cached; returns the name of the cache file."""
        return cached_tokens(files, tokenizer, self.cache_dir, self.columns, self.tokenize_processes)

    def lay_out(self, split: str, store: TokenStore, documents: np.ndarray, files: Sequence[Path]) -> tuple[Any, Any]:
        """Returns the dataset of some documents of a store, and its statistics.

        Args:
            split: Name of the split, `train` or `val`.
            store: Token store.
            documents: Indices of the documents, int64 [D].
            files: Source files, for error messages.
        """
        return lay_out_samples(
            store,
            documents,
            files,
            seq_len=self.seq_len,
            packing=self.packing,
            long_samples=self.long_samples,
            filler=find_filler_id(self.tokenizer),
            by_length=split == "val",
        )

    def lay_out_prompts(self, files: Sequence[Path]) -> Any:
        """Returns the dataset of the prompts of some files, and sets :attr:`prompts`."""
        self.prompts, ids = read_prompts(files, self.tokenizer, self.columns)
        if self.trains_on_chats:
            warn_of_plain_prompts("predict_files", self.prompts)
        return Prompts(ids, find_filler_id(self.tokenizer))

    def train_tokenizer(self) -> Any:
        """Returns the tokenizer of data whose model has none, trained on the standard library's sources."""
        return embedded_tokenizer(self._library, self.vocab_size, self.cache_dir)

    def _files(self, split: str) -> list[Path]:
        if split == "val":
            return expand_patterns(self.val_files or [], "val_files")
        source = next((source for source in self.sources if split == _split_of(source)), None)
        if source is not None:
            return expand_patterns(source.files or [], f"sources.{source.name}.files")
        if self.train_files is None:
            return self._library
        return expand_patterns(self.train_files, "train_files")

    def _splits(self, stage: str | None) -> list[str]:
        """Returns the splits whose files a stage reads."""
        if stage == "predict":
            return []
        if stage in ("validate", "test") and self.val_files is not None:
            return ["val"]
        texts = [_split_of(source) for source in self.sources if source.files is not None]
        return [*(texts if self.sources else ["train"]), *([] if self.val_files is None else ["val"])]

    def prepare_data(self) -> None:
        """Trains the tokenizer, tokenises the files and indexes the shards, unless that was done.

        It runs in one process per node. Of the nodes that share `cache_dir`, one works and the others wait.
        """
        state = self.trainer.state.fn if self.trainer is not None else None
        stages = {TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
        tokenizer = self._load_tokenizer()
        splits = self._splits(stages.get(state) if state is not None else None)
        self._names = {split: self.tokenize(self._files(split), tokenizer) for split in splits}
        if state != TrainerFn.PREDICTING:
            for source in self.sources:
                if source.tokens is not None:
                    open_tokens(source.tokens, self._storage())

    def _storage(self) -> Storage:
        """Returns the places for remote files and indices."""
        cache = BlockCache(cache_folder(self._remote_cache, "remote"), self._cache_bytes)
        return Storage(cache, self.cache_dir / "token-indices", self._storage_options)

    def _load_tokenizer(self) -> Any:
        """Returns the tokenizer, loaded once; clears everything that was made with another one."""
        source = self._source
        if source is None and self.trainer is not None:
            source = ModuleDescription(self.trainer.lightning_module).tokenizer_source
        if self.tokenizer is None or source != self._loaded_from:
            self._names, self._datasets, self.statistics = None, {}, {}
            self._loaded_from = source
            if source is not None:
                self.tokenizer = load_tokenizer(source, self.chat_template)
            else:
                trained = self.train_tokenizer()
                if any(first.kind == "messages" for _, first in self._first_records("train_files", "val_files")):
                    trained.chat_template = PLAIN_CHAT_TEMPLATE
                self.tokenizer = set_chat_template(trained, self.chat_template)
        return self.tokenizer

    @cached_property
    def _library(self) -> list[Path]:
        return standard_library(self.corpus_bytes)

    # --- the data -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Opens the token caches of :meth:`prepare_data`, and lays them out as samples."""
        self._load_tokenizer()
        if stage == "predict":
            self.check_predict()
            self._datasets["predict"] = self.lay_out_prompts(expand_patterns(self.predict_files or [], "predict_files"))
            return
        names = self._agreed_names()
        self._pad_if_needed()
        for split in ("train", "val") if stage == "fit" else ("val",):
            is_missing = split == "val" and self.val_files is None and not self.val_fraction
            if split in self._datasets or is_missing:
                continue
            if self.sources and (split == "train" or self.val_files is None):
                dataset, statistics = self._lay_out_sources(split, names)
            else:
                dataset, statistics = self._lay_out_text(split, split if split in names else "train", names)
            self._datasets[split], self.statistics[split] = dataset, statistics
            if self.trainer is None or self.trainer.is_global_zero:
                print(f"{split}: {statistics}", flush=True)

    def _pad_if_needed(self) -> None:
        """Sets `packing: none` for a model that cannot keep packed documents apart, and says so once."""
        if self.packing == "none" or self.sources or not self.pads_documents or self.trainer is None:
            return
        task = ModuleDescription(self.trainer.lightning_module)
        if task.isolates_documents is not False:
            return
        self.packing = "none"
        if self.trainer.is_global_zero:
            family = type(self.trainer.lightning_module).__name__ if task.config is None else task.config.model_type
            print(
                f"packing: none in place of best_fit: a model of {family} cannot"
                " keep the documents of a packed row apart; rows are padded documents, so batch_size counts documents",
                flush=True,
            )

    def _agreed_names(self) -> dict[str, str]:
        """Returns the names of the caches, broadcast from rank 0."""
        trainer = self.trainer
        group = control_group(trainer) if trainer is not None else None
        if group is None:
            if self._names is None:
                self.prepare_data()
            assert self._names is not None
            return self._names
        said = [self._names]
        dist.broadcast_object_list(said, src=0, group=group)
        (self._names,) = said
        assert self._names is not None, "prepare_data runs before setup"
        return self._names

    def _lay_out_sources(self, split: str, names: dict[str, str]) -> tuple[JoinedWindows, SourceStatistics]:
        """Returns the windows of all sources, of which ``val_fraction`` is held out, and their statistics."""
        parts: list[Any] = []
        for source in self.sources:
            if source.tokens is None:
                parts.append(self._lay_out_text(split, _split_of(source), names)[0])
                continue
            shards = open_tokens(source.tokens, self._storage())
            windows = TokenWindows(shards, self.seq_len, vocabulary_size(self.tokenizer), source.name)
            fraction = self.val_fraction if self.val_files is None else 0.0
            parts.append(hold_out(windows, fraction)[split == "val"])
        sizes = dict(zip((source.name for source in self.sources), map(len, parts), strict=True))
        return JoinedWindows(parts, self.batches_ahead), SourceStatistics(sizes, self.seq_len)

    def _lay_out_text(self, split: str, origin: str, names: dict[str, str]) -> tuple[Any, Any]:
        path = self.cache_dir / names[origin]
        if not path.is_file():
            raise DloError(
                f"{path} does not exist: this node's files or tokenizer differ from those of rank 0; give all nodes the"
                " same files (the same Python if train_files is not set), or set cache_dir to a shared folder"
            )
        store = TokenStore(path)
        documents = np.arange(len(store))
        if self.val_files is None and self.val_fraction:
            store, documents = self._split(store, split)
        dataset, statistics = self.lay_out(split, store, documents, self._files(origin))
        return dataset, statistics

    def _split(self, store: TokenStore, split: str) -> tuple[TokenStore, np.ndarray]:
        """Returns the documents of a split; of plain text in too few documents, the beginning or end of each.

        Raises:
            DloError: If documents that cannot be cut, such as conversations, are too few.
        """
        parts = split_documents(store.hashes, self.val_fraction)
        if all(map(len, parts)):
            return store, parts[split == "val"]
        if store.all_learned and self.long_samples in (None, "split"):
            store = TokenStore(store.path, self.val_fraction)
            return store, np.arange(split == "val", len(store), 2)
        works = find_val_fraction(store.hashes)
        raise DloError(
            f"val_fraction must leave documents for training and for validation, got {self.val_fraction} of"
            f" {len(store)} documents; set " + (f"{works:g}, or val_files" if works else "val_files, or 0 for none")
        )

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader of the training windows, in random order."""
        dataset = self._datasets["train"]
        options: dict[str, Any] = {}
        if isinstance(dataset, JoinedWindows):
            names = [source.name for source in self.sources]
            options["order"] = self.mix_options.order(names, list(map(len, dataset.parts)), self.seed)
        make_sampler = partial(
            InOrderTextBatchSampler if self.overfits else TextBatchSampler,
            options["order"].size if options else len(dataset),
            count_targets=dataset.count_targets,
            lengths=dataset.lengths,
            pairs=dataset.pairs,
            accumulation=_accumulation_of(self),
            **options,
        )
        return self.train_loader(dataset, make_sampler=make_sampler)

    def val_dataloader(self) -> Any:
        """Returns the loader of the held-out windows, or [] without any."""
        return self._held_out("val")

    def test_dataloader(self) -> Any:
        """Returns a loader of the same windows as in validation."""
        return self._held_out("test")

    def predict_dataloader(self) -> ResumableLoader:
        """Returns the loader of the prompts of `predict_files`."""
        return self.eval_loader(self._datasets["predict"], name="predict")

    def prediction_rows(self, outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows of a table of completions: `{index, prompt, completion}`, in the order of the prompts.

        Args:
            outputs: Outputs of `predict_step`, one for each prompt. A row's prompt is that of the file: a text or a
                conversation.
        """
        completions = {row["index"]: row["completion"] for row in outputs}
        return [
            {"index": index, "prompt": self.prompts[index], "completion": completions[index]}
            for index in sorted(completions)
        ]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Shapes a training batch, and counts targets and documents; see :mod:`dlo_tasks.language.batches`."""
        if self.shape_batch is not None and self.trainer is not None and self.trainer.training:
            batch = self.shape_batch(batch)
        self._counts = batches.count_rows(batch)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Attaches the counts to the batch's tensors."""
        counts, self._counts = self._counts, {}
        batches.attach_counts(batch, counts)
        return batch

    def _held_out(self, name: str) -> Any:
        dataset = self._datasets.get("val")
        if dataset is None:
            return []
        if not isinstance(dataset, JoinedWindows):
            return self.eval_loader(batches.FixedDraws(dataset), name=name)
        size = len(dataset)
        make_sampler = partial(InOrderBatchSampler, size, shuffle=False, drop_last=False, order=InOrder(size))
        return self.eval_loader(dataset, name=name, make_sampler=make_sampler)

    # --- resuming -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training data, and a hash of what the data was made from."""
        state = super().state_dict()
        return {**state, "data": self._made_of()} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position in the training data; warns in mid-epoch if the order of the epoch has changed.

        Raises:
            DloError: In the middle of an epoch of padded samples, if ``batch_size`` has changed: it decides which
                samples share a batch.
        """
        fitting = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if fitting and state_dict.get("samples"):
            before = state_dict.get("batch_size", self.batch_size)
            if self.packing == "none" and before != self.batch_size:
                raise DloError(
                    f"batch_size must be {before}, as in the interrupted epoch, got {self.batch_size}; under packing:"
                    f" none it decides the order of the epoch: set batch_size to {before}"
                )
            if self._names is not None and state_dict.get("data", self._made_of()) != self._made_of():
                rank_zero_warn(
                    "the files, the tokenizer, seq_len, packing, long_samples or the split differ from those of the"
                    " interrupted run: in the rest of this epoch some samples repeat and some are missing"
                )
        super().load_state_dict(state_dict)

    def _made_of(self) -> str:
        parts: list[Any] = [self._names, self.seq_len, self.packing, self.long_samples]
        parts.append(self.val_fraction if self.val_files is None else None)
        if self.sources:
            parts += [self.sources, self.mix_options]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _split_of(source: TextSource) -> str:
    """Returns the key of a source's token cache."""
    return f"sources.{source.name}"


def _accumulation_of(module: LightningDataModule) -> Callable[[], AccumulationPlan]:
    """Returns a function that reads the trainer's accumulation; it holds only a weak reference to the datamodule."""
    reference = weakref.ref(module)

    def read() -> AccumulationPlan:
        owner = reference()
        trainer: Trainer | None = owner.trainer if owner is not None else None
        if trainer is None:
            return AccumulationPlan(1, float("inf"))
        batches = trainer.num_training_batches
        return AccumulationPlan(int(trainer.accumulate_grad_batches), batches or float("inf"))

    return read
