"""Models that tests cut, and what tells whether a cut model is the whole one."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.plan import ParallelPlan
from dlo_framework.shards import get_layout
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.imagenet.timm_models import plan_for as plan_for_images
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.language_models import find_head, hidden_states
from dlo_tasks.language.language_plans import plan_for as plan_for_text
from dlo_tasks.language.vocabulary_loss import summed_loss

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}


def language_model(family: str, **more: Any) -> Any:
    """Returns a small model of a family of transformers, with noise where it starts from zeros and ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **more}))
    return noisy(model)


def image_model(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return noisy(timm.create_model(name, **more)).double()


@torch.no_grad()
def noisy(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.add_(0.05 * torch.randn(parameter.shape))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def plan_of(model: Any) -> ParallelPlan:
    return plan_for_text(model) if hasattr(model, "config") else plan_for_images(model)


def tokens(length: int = 9, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=generator)
    ids[0, 1] = SIZES["pad_token_id"]  # Its embedding gets no gradient.
    labels = ids.roll(-1, dims=1)
    labels[:, ::4] = IGNORE_INDEX
    return ids, labels


def text_loss(model: Any, length: int = 9) -> Tensor:
    ids, labels = tokens(length)
    hidden = hidden_states(model, input_ids=ids)
    return summed_loss(find_head(model), hidden.flatten(0, 1), labels.flatten(), chunk=5)


def image_loss(model: Any, size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
    outputs = model(pictures)
    return (outputs * torch.randn(outputs.shape, generator=generator)).sum()


def cut(model: nn.Module, sequence_parallel: bool = False, async_tp: bool | int = False) -> TensorParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    applier = TensorParallel(sequence_parallel, async_tp)
    applier.apply(model, mesh, plan_of(model))
    return applier


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of a cut model's parameters, put together and summed as its layout says."""
    return {name: whole(model, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(model, name, p.detach(), partial=False) for name, p in model.named_parameters()}


def whole(
    model: nn.Module, name: str, part: Tensor, partial: bool = True, group: dist.ProcessGroup | None = None
) -> Tensor:
    layout = get_layout(model)
    if name in layout.slices:
        found = torch.zeros(layout.slices[name].full_shape(part.shape), dtype=part.dtype)
        made = layout.slices[name]
        for at, of_whole, count in made.overlaps(0, made.length):
            found.narrow(made.dim, of_whole, count).copy_(part.narrow(made.dim, at, count))
    elif partial and name in layout.partial:
        found = part.clone()
    else:
        return part
    dist.all_reduce(found, group=group)
    return found


def sum_partial(model: nn.Module) -> None:
    """Does what a strategy does before a step."""
    for name, parameter in model.named_parameters():
        if name in get_layout(model).partial and parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: str) -> None:
    """Compares each tensor with what it should be, by the largest of its entries."""
    assert found.keys() == expected.keys(), what
    highest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, f"{what}: {name}"
        scale = max(float(tensor.abs().max()), 1e-2 * highest)
        error = float((found[name] - tensor).abs().max()) / scale
        assert error <= tolerance, f"{what}: {name} is off by {error:.1e}"


def compare(
    make: Callable[[], Any], loss: Callable[[Any], Tensor], sequence_parallel: bool, what: str, steps: int = 3
) -> None:
    """Checks that a cut model has the loss, the gradients and the steps of the whole one."""
    alone, shared = make(), make()
    names = list(alone.state_dict())
    cut(shared, sequence_parallel)
    assert list(shared.state_dict()) == names, what
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3) for model in (alone, shared)]
    for step in range(steps):
        expected, found = loss(alone), loss(shared)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
        expected.backward()
        found.backward()
        if step == 0:
            wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
            assert_close(whole_gradients(shared), wanted, 1e-5, what)
        sum_partial(shared)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach() for name, p in alone.named_parameters()}
    assert_close(whole_weights(shared), weights, 5e-5, what)
    for model in (alone, shared):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss(shared), loss(alone), rtol=1e-4, atol=1e-4, msg=lambda m: f"{what}: eval {m}")
