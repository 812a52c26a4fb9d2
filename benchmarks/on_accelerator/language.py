"""Language models as users train them: 7B and 8B by LoRA, 1B in full on packed documents; and the loss by itself.

Rows are packed with documents of log-normal lengths, gradients are clipped, and blocks are compiled in a contestant of
its own. A loop by hand is transformers and peft with `sdpa`, whose packed documents have a dense mask, as written by
most; dlo has it too in a contestant. What is 7B large is built on the device in each turn, since one alone fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from measuring.record import Table
from measuring.rounds import Clock, all_ratios, clock_of, take_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework.task import Task
from dlo_plugins.compile.callback import Compile
from dlo_tasks.language import batches
from on_accelerator.subjects import BATCHES, Size, Subject, blocks_of, draw_weights_on, pinned
from on_accelerator.throughput import BASE, rates_table
from on_accelerator.training import Trained, Work, by_dlo, by_hand

CLIP = 1.0
#: Tokens of a document: the median of a log-normal distribution, and its sigma. Of instruction data, in which a row of
#: 4,096 has about fifteen.
MEDIAN, SIGMA = 200, 0.8
#: Projections that adapters are put beside, `*_proj`.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        title: Title of the model.
        kind: Name of the family in transformers.
        config: Settings of that family.
        rank: Rank of the adapters; None trains all weights.
        rows: Rows of a batch.
        length: Tokens of a row.
        others: Results that others report.
        large: Whether one copy alone fits a device.
    """

    title: str
    kind: str
    config: dict[str, Any]
    rank: int | None
    rows: int = 2
    length: int = 4096
    others: str = ""
    large: bool = True

    def at(self, size: str) -> Model:
        """Returns the model at a size: itself at `large`, four blocks of it at `small`, next to nothing at `tiny`."""
        if size == "large":
            return self
        config = {**self.config, **({"num_hidden_layers": 4} if size == "small" else _TINY)}
        rows, length = (self.rows, self.length) if size == "small" else (2, 64)
        rank = self.rank and (self.rank if size == "small" else 2)
        return Model(f"{self.title}, size {size}", self.kind, config, rank, rows, length, large=False)


def _sizes(width: int, inner: int, depth: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocabulary}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 8192}


MODELS = {
    "llama_lora": Model(
        "Llama 3 8B by LoRA", "llama",
        {**_sizes(4096, 14336, 32, 32, 8, 128_256), "tie_word_embeddings": False}, 16,
        others="12,473 tokens/s on one H100 (NeMo AutoModel, mock data)",
    ),
    "qwen_lora": Model(
        "Qwen2.5 7B by LoRA", "qwen2",
        {**_sizes(3584, 18944, 28, 28, 4, 152_064), "tie_word_embeddings": False}, 16,
        others="14,110 tokens/s on one H100 (NeMo AutoModel, mock data)",
    ),
    "llama_full": Model(
        "Llama 3.2 1B in full", "llama",
        {**_sizes(2048, 8192, 16, 32, 8, 128_256), "tie_word_embeddings": True}, None,
    ),
}  # fmt: skip


@dataclass
class Packed(LightningDataModule):
    """Batches whose documents and targets are counted before they are moved, as TextData's are."""

    loader: DataLoader
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader:
        return self.loader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.counts = batches.count_rows(batch)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batches.attach_counts(batch, self.counts)
        return batch


def packed_batch(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Returns rows that are full of documents: `input_ids`, `labels` and `position_ids`, `[rows, length]`."""
    positions = torch.stack([_positions(length) for _ in range(rows)])
    tokens = torch.randint(vocabulary, (rows, length + 1))
    ends = torch.ones(rows, length, dtype=torch.bool)
    ends[:, :-1] = positions[:, 1:] == 0  # What follows is another document's.
    labels = tokens[:, 1:].masked_fill(ends, -100)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": labels,
        "position_ids": positions,
        "tokens_in_step": (labels != -100).sum(),
    }


def _positions(length: int) -> Tensor:
    found: list[Tensor] = []
    left = length
    median = min(MEDIAN, length / 4)
    while left:
        drawn = int((torch.randn(()) * SIGMA).exp() * median)
        found.append(torch.arange(min(left, max(2, drawn))))
        left -= len(found[-1])
    return torch.cat(found)


def subject_of(model: Model, attention: str | None, fused: bool) -> Subject:
    """Returns what is trained.

    Args:
        model: Sizes of the model.
        attention: Implementation of attention in dlo; None for the default.
        fused: Whether the optimizer is one kernel.
    """
    import transformers

    from dlo_tasks.language.adapters import Lora
    from dlo_tasks.language.causal_lm import CausalLM

    def task() -> Task:
        lora = None if model.rank is None else Lora(rank=model.rank, alpha=2 * model.rank, targets=TARGETS)
        return CausalLM(
            config={"model_type": model.kind, **model.config}, attention=attention, schedule="constant",
            dtype="bfloat16" if lora else None, lora=lora,
            optimizer_args={"fused": True} if fused else None,
        )  # fmt: skip

    def net() -> nn.Module:
        adapted = model.rank is not None
        config = transformers.AutoConfig.for_model(model.kind, **model.config)
        dtype = torch.bfloat16 if adapted else torch.float32
        found = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not adapted:
            return found
        import peft

        options = peft.LoraConfig(r=model.rank, lora_alpha=2 * model.rank, target_modules=TARGETS)
        return peft.get_peft_model(found, options)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        logits = net(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    tokens = model.rows * model.length
    return Subject(
        title=f"{model.title}, {model.rows} x {model.length} tokens, packed, clipped",
        net=net,
        loss=loss,
        task=task,
        batch=lambda: packed_batch(model.rows, model.length, model.config["vocab_size"]),
        samples=model.rows,
        items=tokens,
        item="tokens",
        scope="blocks",
        clip=CLIP,
        data=Packed,
    )


def language_table(part: str, name: str, size: Size, device: torch.device, rounds: int, backend: str) -> Table:
    """Measures one of :data:`MODELS`.

    Args:
        part: Name of the part.
        name: Name of the size.
        size: Says for how many steps.
        device: Device of the run.
        rounds: Rounds.
        backend: Backend of torch.compile.
    """
    torch.manual_seed(0)
    on_gpu = device.type != "cpu"
    model = MODELS[part].at(name)
    subject = subject_of(model, None if on_gpu else "dlo_varlen", fused=on_gpu)
    dense = subject_of(model, "sdpa", fused=on_gpu)
    clock = clock_of(device)
    work = Work(device, clock, [pinned(subject.batch(), device) for _ in range(BATCHES)], size.warm, size.steps)

    def looped(compiled: bool) -> Trained:
        with device:
            net = subject.net()
        if compiled:
            for block in blocks_of(net):
                block.compile(backend=backend)
        return by_hand(subject, net, work)

    def fitted(subject: Subject, compiled: bool) -> Trained:
        callbacks = [Compile(scope="blocks", backend=backend)] if compiled else []
        return by_dlo(subject, draw_weights_on(device, subject.task()), work, callbacks)  # type: ignore[arg-type]

    runs: dict[str, Callable[[], Trained]] = {
        BASE: lambda: looped(False),
        "loop again": lambda: looped(False),
        "loop, compiled": lambda: looped(True),
        "dlo fit": lambda: fitted(subject, False),
        "dlo fit, compiled": lambda: fitted(subject, True),
        "dlo fit, dense mask": lambda: fitted(dense, False),
    }
    # Each turn makes its model, compiles it and takes its own first steps: no round only for these.
    turns = take_turns(runs, rounds, warm_up=0, may_fail=torch.OutOfMemoryError)
    table = rates_table(subject, turns, clock)
    if model.others:
        table.notes.append(f"Others report {model.others}.")
    return table


#: Tokens, width and vocabulary of the loss on Liger Kernel's page, and of a CPU's.
LOSSES = {"large": (2048, 4096, 131_072), "small": (2048, 4096, 131_072), "tiny": (64, 32, 256)}


def loss_tables(name: str, device: torch.device, rounds: int) -> list[Table]:
    """Measures the head's product and the loss together: forward alone, and with both gradients."""
    import vocabulary_loss

    tokens, width, vocabulary = LOSSES[name]
    options = argparse.Namespace(tokens=tokens, width=width, device=str(device), dtype="bfloat16")
    clock: Clock = clock_of(device)
    losses = vocabulary_loss.contestants(device.type)
    head, hidden, targets = vocabulary_loss.inputs(options, vocabulary)

    def forward(loss: Any) -> None:
        with torch.no_grad():
            loss(head, hidden, targets)

    what = f"{tokens} tokens, width {width}, vocabulary {vocabulary:,}, bf16"
    parts: dict[str, Callable[[Any], Any]] = {
        "forward": forward,
        "forward and backward": lambda loss: vocabulary_loss.call(loss, head, hidden, targets),
    }
    tables = []
    for part, run in parts.items():
        table = Table(f"linear and loss, {part}: {what}", "the time of plain cross-entropy", clock)
        turns = {key: (lambda loss=loss, run=run: clock.seconds(lambda: run(loss))) for key, loss in losses.items()}
        seconds = take_turns(turns, rounds)
        for key, values in all_ratios(seconds, "plain").items():
            milliseconds = sorted(seconds[key])[len(seconds[key]) // 2] * 1e3
            table.add(key, values, ours=key.startswith("dlo"), control=key.endswith("again"), ms=milliseconds)
        tables.append(table)
    tables[0].notes.append("Liger Kernel's page has 3.12 ms for its forward on an H100, 11.36 for chunks in torch.")
    return tables
