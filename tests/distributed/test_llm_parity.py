"""Language models of six families train on two ranks as one process does, whatever tokens each rank happens to have."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dlo_framework.data import ResumableDataModule, data_parallel_coordinates
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from dlo_tasks.llm.adapters import Lora
from dlo_tasks.llm.causal_lm import CausalLM

VOCABULARY, LENGTH, ROWS = 96, 24, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma2": {
        **GROUPED,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 5.0,
    },
    "gpt_neox": SIZES,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy,
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
}


def cases(names: Iterable[str] = STRATEGIES, trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    text = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return [Case(STRATEGIES[name], arguments, trainer or {}, f"{name}, {text}") for name in names]


class Batches(IterableDataset):
    """Batches that are there already; no map-style dataset, whose order Lightning would change."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class Tokens(ResumableDataModule):
    """Random tokens: rows of documents packed together, of which very different numbers are to be predicted."""

    def __init__(self, micro_batches: int, with_count: bool, silent: bool) -> None:
        super().__init__(batch_size=ROWS)
        self.micro_batches, self.with_count, self.silent = micro_batches, with_count, silent

    def train_dataloader(self) -> DataLoader:
        rank, world_size = data_parallel_coordinates(self.trainer)
        mine = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
        draw = torch.Generator().manual_seed(5)
        batches = []
        for _ in range(8):
            step = [rows(draw) for _ in range(self.micro_batches)]
            if self.silent:  # The last rank has nothing to predict.
                for batch in step:
                    batch["labels"][ROWS // 2 :] = -100
            total = torch.stack([(batch["labels"] != -100).sum() for batch in step]).sum()
            for batch in step:
                part = {name: value[mine] for name, value in batch.items()}
                batches.append(part | ({"tokens_in_step": total} if self.with_count else {}))
        return DataLoader(Batches(batches), batch_size=None)


def rows(draw: torch.Generator) -> dict[str, Tensor]:
    """A micro-batch of all ranks: each row has two documents, and a prompt of its own length without targets."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    cuts = torch.randint(2, LENGTH - 2, (ROWS, 1), generator=draw)
    prompts = torch.randint(0, LENGTH, (ROWS, 1), generator=draw)
    place = torch.arange(LENGTH).expand(ROWS, LENGTH)
    labels = ids[:, 1:].masked_fill((place < prompts) | (place == cuts - 1), -100)
    return {
        "input_ids": ids[:, :-1].clone(),
        "labels": labels,
        "position_ids": torch.where(place < cuts, place, place - cuts),
    }


def build(
    family: str = "llama",
    micro_batches: int = 1,
    with_count: bool = True,
    silent: bool = False,
    lora: int = 0,
    **options: Any,
) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    # Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = CausalLM(config=config, lora=Lora(rank=lora) if lora else None, **more)
    return task, Tokens(micro_batches, with_count, silent)


def test_every_family_trains_under_every_strategy_as_one_process() -> None:
    assert_parity(build, [case for family in FAMILIES for case in cases(family=family)], steps=4, rtol=1e-5)


def test_uneven_tokens_of_ranks_and_micro_batches_adapters_and_recomputation_are_one_process() -> None:
    found = cases(trainer={"accumulate_grad_batches": 2}, micro_batches=2)
    found += cases(["ddp", "fsdp"], with_count=False)
    found += cases(silent=True)
    found += cases(family="qwen3", lora=4)
    found += cases(["ddp", "fsdp", "zero3"], recompute=True)
    found += cases(["fsdp", "zero3"], freeze=["model.embed_tokens", "model.layers.0"])
    # A head that is gathered when it is called, and not with the rest of the step.
    for number, gathering in enumerate(
        (
            partial(FSDPStrategy, units=["model.model.layers.*", "model.lm_head"]),
            partial(ZeroStrategy, 3, units=["model.lm_head", "model.model.layers.0"]),
        )
    ):
        found += [Case(gathering, {"silent": silent}, name=f"head a unit, {number}") for silent in (False, True)]
    assert_parity(build, found, steps=4, rtol=1e-5)
