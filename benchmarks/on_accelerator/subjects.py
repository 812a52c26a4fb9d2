"""What is trained: a ViT and a Llama of a few sizes, on random batches that lie in page-locked memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dlo_framework.local_memory import reset_memory_peak
from dlo_framework.task import Task

#: Batches that take turns, so that no step finds its inputs in a cache.
BATCHES = 4
CLASSES = 1000


@dataclass(frozen=True)
class Size:
    """How large all of it is.

    Attributes:
        vit: Name in timm, and arguments; a batch has ``images`` of ``side`` pixels.
        llama: Config of the model for one process; a batch has ``rows`` of ``length`` tokens.
        divided: Config of the model for strategies, with a quarter of the rows per rank in a batch.
        steps: Timed steps per round, after ``warm`` steps.
        checkpoint: Size of the checkpoint, in bytes.
    """

    vit: str
    vit_args: dict[str, Any]
    images: int
    side: int
    llama: dict[str, Any]
    divided: dict[str, Any]
    rows: int
    length: int
    warm: int
    steps: int
    checkpoint: int


def _llama(width: int, depth: int, heads: int, vocabulary: int, length: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": depth}
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    return {**sizes, **attention, "vocab_size": vocabulary, "max_position_embeddings": length}


_TINY_VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_TINY_LLAMA = _llama(32, 2, 4, 128, 32)
SIZES = {
    # For tests, on a CPU too.
    "tiny": Size("vit_tiny_patch16_224", _TINY_VIT, 4, 32, _TINY_LLAMA, _TINY_LLAMA, 4, 32, 3, 2, 2_000_000),
    # For 16 GB.
    "small": Size(
        "vit_small_patch16_224", {}, 128, 224, _llama(1024, 12, 16, 32_768, 1024), _llama(1024, 8, 16, 32_768, 1024),
        8, 1024, 5, 20, 1_000_000_000,
    ),
    # For 80 GB.
    "large": Size(
        "vit_base_patch16_224", {}, 256, 224, _llama(2048, 16, 16, 32_768, 2048), _llama(2048, 8, 16, 32_768, 2048),
        8, 2048, 5, 20, 8_000_000_000,
    ),
}  # fmt: skip


def size_for(device: torch.device) -> str:
    """Returns the name of the size that a device has the memory for."""
    if device.type != "cuda":
        return "small" if device.type != "cpu" else "tiny"
    return "large" if torch.cuda.get_device_properties(device).total_memory > 70e9 else "small"


@dataclass(frozen=True)
class Subject:
    """Something to train, by hand and by dlo.

    Attributes:
        title: Title of the subject.
        net: Function that returns the network of a hand-written loop.
        loss: Function that returns the loss of a batch.
        task: Function that returns the same as a task of dlo.
        batch: Function that returns a random batch in host memory.
        samples: Samples per batch.
        items: Images or tokens per batch.
        item: Name of an item.
        scope: Scope of dlo's Compile, according to the module that the task calls.
        clip: Norm to which gradients are clipped; None for none.
        data: Makes what dlo fits on of a loader.
    """

    title: str
    net: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    task: Callable[[], Task]
    batch: Callable[[], Any]
    samples: int
    items: int
    item: str
    scope: str
    clip: float | None = None
    data: Callable[[Any], Any] = lambda loader: loader


def vit(size: Size, fused: bool) -> Subject:
    """Returns the ViT; ``fused`` is for the optimizer."""
    import timm

    from dlo_tasks.imagenet.classifier import ImageClassifier

    def task() -> Task:
        return ImageClassifier(
            size.vit, size.vit_args, num_classes=CLASSES, image_size=size.side, schedule="constant", log_images=0,
            optimizer_args={"fused": True} if fused else None,
        )  # fmt: skip

    def net() -> nn.Module:
        return timm.create_model(size.vit, img_size=size.side, num_classes=CLASSES, **size.vit_args)

    def batch() -> Any:
        return torch.randn(size.images, 3, size.side, size.side), torch.randint(CLASSES, (size.images,))

    return Subject(
        title=f"ViT: {size.vit}, {size.images} images of {size.side} pixels",
        net=net,
        loss=lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        task=task,
        batch=batch,
        samples=size.images,
        items=size.images,
        item="images",
        scope="model",
    )


def llama(size: Size, fused: bool, *, divided: bool = False) -> Subject:
    """Returns the Llama; ``divided`` for the one of the strategies."""
    import transformers

    from dlo_tasks.language.causal_lm import CausalLM

    config = size.divided if divided else size.llama
    rows = max(1, size.rows // 4) if divided else size.rows

    def task() -> Task:
        given = {"model_type": "llama", **config, "tie_word_embeddings": False}
        return CausalLM(config=given, schedule="constant", optimizer_args={"fused": True} if fused else None)

    def net() -> nn.Module:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, tie_word_embeddings=False))

    def batch() -> Any:
        tokens = torch.randint(config["vocab_size"], (rows, size.length + 1))
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def loss(net: nn.Module, batch: Any) -> Tensor:
        logits = net(input_ids=batch["input_ids"], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    with torch.device("meta"):
        count = sum(p.numel() for p in net().parameters())
    words = f"{count / 1e6:,.0f} million parameters" if count > 1e6 else f"{count:,} parameters"
    return Subject(
        title=f"Llama: {words}, {rows} x {size.length} tokens",
        net=net,
        loss=loss,
        task=task,
        batch=batch,
        samples=rows,
        items=rows * size.length,
        item="tokens",
        scope="blocks",
    )


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """Returns a model's blocks, whatever has been put around it."""
    return list(max((m for m in net.modules() if isinstance(m, nn.ModuleList)), key=len))


def build_network(device: torch.device, make: Callable[[], nn.Module]) -> nn.Module:
    """Returns a network whose random weights were drawn on a device, in CPU memory: a CPU draws one after another."""
    with device:
        net = make()
    return net.cpu()


def draw_weights_on(device: torch.device, task: Task) -> Task:
    """Makes a task's fit draw random weights on a device; the model is in CPU memory then, as any. Returns the task."""

    def configure_model(self: Task) -> None:
        if self.has_model or torch.get_default_device().type == "meta":
            type(self).configure_model(self)
            return
        with device:
            type(self).configure_model(self)
        self.cpu()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            reset_memory_peak(device)  # The turn's peak is that of its steps.

    # A method: one of a copy, such as that on the meta device, builds the copy's model.
    task.configure_model = MethodType(configure_model, task)  # type: ignore[method-assign]
    return task


def pinned(batch: Any, device: torch.device) -> Any:
    """Returns a batch in page-locked memory, which copies asynchronously; unchanged on a CPU."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: pinned(value, device) for key, value in batch.items()}
    return tuple(pinned(item, device) for item in batch)


class Batches(Dataset):
    """A few batches that take turns.

    Args:
        batches: Batches in host memory.
        count: Total number of batches.
    """

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]
