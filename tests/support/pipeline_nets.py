"""Small models of real architectures with batches, and their gradients in one process: what pipelines must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES, Action, ActionKind, flushes


@dataclass
class Case:
    model: nn.Module
    plan: ParallelPlan
    micro_batches: list[Any]
    forward: Callable[[nn.Module, Any], Any]
    loss: Callable[[nn.Module, Any, Any], Tensor]

    def step(self, pipeline: Any, weights: list[float] | None = None, **options: Any) -> Tensor:
        return pipeline.train_step(
            self.micro_batches,
            lambda batch: self.forward(self.model, batch),
            lambda outputs, batch: self.loss(self.model, outputs, batch),
            weights,
            **options,
        )

    def double(self) -> Case:
        """Returns the case in float64."""
        self.model.double()
        self.micro_batches = [
            tuple(item.double() if item.is_floating_point() else item for item in batch) for batch in self.micro_batches
        ]
        return self

    def alone(self, model: nn.Module, weights: list[float], seed: float = 1.0) -> float:
        """Adds the gradients of a step in one process to a copy of the model, and returns its loss."""
        total = 0.0
        for weight, batch in zip(weights, self.micro_batches, strict=True):
            loss = self.loss(model, self.forward(model, batch), batch)
            (loss * weight * seed).backward()
            total += weight * loss.item()
        return total


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden: Tensor, scale: Tensor, mask: dict[str, Tensor] | None = None) -> tuple[Tensor, None]:
        grown = F.gelu(self.up(self.norm(hidden)))
        return hidden + scale * (self.down(grown) if mask is None else mask["of"] * self.down(grown)), None


class Noisy(nn.Module):
    """Block with dropout, a batch norm, and a buffer that the forward changes and uses; it may write to its input."""

    def __init__(self, block: nn.Module, writes: bool) -> None:
        super().__init__()
        self.block, self.norm, self.drop, self.writes = block, nn.BatchNorm1d(12), nn.Dropout(0.3), writes
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        self.scale.mul_(1.1)  # type: ignore[operator]
        if self.writes:
            hidden.mul_(0.9)
        found, _ = self.block(self.norm(self.drop(hidden)), **kwargs)
        return found * self.scale.clone() + hidden, None  # type: ignore[operator]


class Plain(nn.Module):
    """A user's module: blocks in a ModuleList that take more than the hidden state and return tuples."""

    def __init__(self, width: int = 12, depth: int = 6) -> None:
        super().__init__()
        self.inward = nn.Linear(5, width)
        self.shift = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.final = nn.LayerNorm(width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = (self.inward(x) + self.shift).relu_()
        mask = {"of": (scale > 0).to(x.dtype)}
        for layer in self.layers:
            hidden = layer(hidden=hidden, scale=scale, mask=mask)[0]
            hidden = hidden * 1.5  # Code between two blocks, which runs where the earlier of them does.
        return self.out(self.final(hidden))


def plain(micro_batches: int, depth: int = 6, rows: int = 4) -> Case:
    model = Plain(depth=depth)
    plan = ParallelPlan(blocks=("layers.*",), stem=("inward", "shift"), head=("final", "out"))
    batches = [
        {"x": torch.randn(rows, 5), "scale": torch.rand(rows, 1) - 0.2, "y": torch.randint(3, (rows,))}
        for _ in range(micro_batches)
    ]
    return Case(
        model,
        plan,
        batches,
        lambda model, batch: model(batch["x"], batch["scale"]),
        lambda model, outputs, batch: F.cross_entropy(outputs, batch["y"]),
    )


def sequential(micro_batches: int) -> Case:
    blocks = [nn.Sequential(nn.Linear(8, 8, bias=n % 2 == 0), nn.Tanh()) for n in range(6)]
    model = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 2))
    batches = [(torch.randn(3, 5), torch.randn(3, 2)) for _ in range(micro_batches)]
    return Case(
        model,
        ParallelPlan.infer(model),
        batches,
        lambda model, batch: model(batch[0]),
        lambda model, outputs, batch: F.mse_loss(outputs, batch[1]),
    )


def picture(name: str, micro_batches: int, size: int = 32, **options: Any) -> Case:
    import timm

    from dlo_tasks.imagenet.timm_models import plan_for

    model = timm.create_model(name, num_classes=7, **options)
    batches = [(torch.randn(3, 3, size, size), torch.randint(7, (3,))) for _ in range(micro_batches)]
    return Case(
        model,
        plan_for(model),
        batches,
        lambda model, batch: model(batch[0]),
        lambda model, outputs, batch: F.cross_entropy(outputs, batch[1]),
    )


def vit(micro_batches: int, **options: Any) -> Case:
    return picture(
        "vit_tiny_patch16_224", micro_batches, img_size=32, patch_size=8, depth=6, embed_dim=24, num_heads=4, **options
    )


def coatnet(micro_batches: int) -> Case:
    sizes = {"embed_dim": (32, 32, 32, 64), "depths": (1, 1, 2, 2), "stem_width": (8, 8)}
    return picture("coatnet_pico_rw_224", micro_batches, 64, img_size=64, **sizes).double()


def resnet(micro_batches: int) -> Case:
    return picture("resnet10t", micro_batches, stem_width=8, channels=(8, 16, 24, 32)).double()


def language(model_type: str, micro_batches: int, packed: bool = False, **options: Any) -> Case:
    from dlo_tasks.language.language_models import hidden_states
    from dlo_tasks.language.language_plans import plan_for
    from support.causal_types import tiny
    from support.token_batches import built_model

    model = built_model(tiny(model_type, dropout=False, **options))
    batches = []
    for _ in range(micro_batches):
        batch = {"input_ids": torch.randint(3, 61, (2, 9)), "labels": torch.randint(3, 61, (2, 9))}
        if packed:
            batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
        else:
            batch["attention_mask"] = torch.ones(2, 9, dtype=torch.int64)
            batch["attention_mask"][1, :3] = 0
        batches.append(batch)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return hidden_states(model, **{name: value for name, value in batch.items() if name != "labels"})

    def loss(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
        logits = model.get_output_embeddings()(outputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    return Case(model, plan_for(model), batches, forward, loss)


#: Schedules whose step computes the gradients of its own batch.
FLUSHING = tuple(name for name in SCHEDULES.loaded() if flushes(name))
#: By name: the models that each schedule must train as one process does.
CASES: dict[str, Callable[[int], Case]] = {
    "plain": plain,
    "sequential": sequential,
    "vit": vit,
    "vit without class token": lambda n: vit(n, class_token=False, global_pool="avg", reg_tokens=2, init_values=0.1),
    "coatnet": coatnet,
    "resnet": resnet,
    "llama": lambda n: language("llama", n, packed=True),
    "llama, tied": lambda n: language("llama", n, tie_word_embeddings=True),
    "gpt2": lambda n: language("gpt2", n, tie_word_embeddings=True),
    "gemma2": lambda n: language("gemma2", n, sliding_window=4),
}


def most_in_flight(order: Iterable[Action]) -> int:
    """Returns the most micro-batches, counted once a stage, of which a rank keeps activations at one time.

    Full backwards and weight gradients free them. A stage that recomputes keeps its inputs only, until it does.
    """
    order = list(order)
    recomputed = {action.stage for action in order if action.kind is ActionKind.RECOMPUTE}
    held, most = 0, 0
    for action in order:
        if action.kind is (ActionKind.RECOMPUTE if action.stage in recomputed else ActionKind.FORWARD):
            held += 1
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            held -= 1
        most = max(most, held)
    return most
