"""Asynchronous tensor parallelism: values of the plain one, the bytes that it hides, and torch's fused operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.tensor import overlap, tensor_parallel
from dlo_plugins.parallel.tensor.projections import REGION
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.quantise.low_precision import LowPrecisionForward
from support.on_ranks import on_ranks
from support.tensor_models import SIZES, VIT, cut, image_loss, image_model, language_model, text_loss

CHUNKS, LAYERS = 4, SIZES["num_hidden_layers"]


def _is_asynchronous(model: nn.Module) -> bool:
    regions = [part.__dict__[REGION] for part in model.modules() if REGION in part.__dict__]
    return any(getattr(region, "products", None) is not None for region in regions)


def _gradients(model: nn.Module, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    found = loss(model)
    found.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients, "nothing has trained"
    return {"loss": found.detach(), **gradients}


def _check(make: Any, loss: Any, sequence: bool, what: str, limit: float, change: Any = lambda model: None) -> None:
    plain, overlapped = make(), make()
    cut(plain, sequence)
    cut(overlapped, sequence, CHUNKS)
    assert _is_asynchronous(overlapped)
    assert not _is_asynchronous(plain)
    for model in (plain, overlapped):
        change(model)
    expected, found = _gradients(plain, loss), _gradients(overlapped, loss)
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        assert error <= limit, f"{what}: {name} is off by {error:.1e}"
    trained = torch.tensor([float(tensor.any()) for tensor in expected.values()])
    dist.all_reduce(trained, dist.ReduceOp.MAX)  # The last of four ranks has none of nine tokens.
    assert float(trained.sum()) > 0.7 * len(expected), what
    for model in (plain, overlapped):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss(overlapped), loss(plain), rtol=1e-6, atol=1e-6)


def _double(family: str, **more: Any) -> nn.Module:
    return language_model(family, **more).double()


def _recomputed(family: str) -> nn.Module:
    model = _double(family)
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _frozen(family: str) -> nn.Module:
    model = _double(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" not in name and "down_proj" not in name
    return model


def _with_adapters(family: str) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    model = language_model(family)
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora" in name
    return model.double()


def _quantise(model: nn.Module) -> None:
    """Replaces products of some columns and rows, as LowPrecision does after the cut."""
    products = LowPrecisionForward("int8")
    for name in ("q_proj", "k_proj", "v_proj", "down_proj"):
        for part in model.modules():
            if hasattr(part, name):
                products.install(getattr(part, name))


def _cases(rank: int, world_size: int, names: tuple[str, ...], sequences: tuple[bool, ...]) -> None:
    for sequence in sequences:
        for name in names:
            _check(functools.partial(_double, name), text_loss, sequence, f"{name}, {sequence}", 1e-6)
        for make in (_recomputed, _frozen, _with_adapters):
            _check(functools.partial(make, "llama"), text_loss, sequence, f"{make.__name__}, {sequence}", 1e-6)
        vit = functools.partial(image_model, "vit_tiny_patch16_224", **VIT)
        _check(vit, image_loss, sequence, f"vit, {sequence}", 1e-6)
    for length in (2, 3):  # Fewer tokens than chunks, and than ranks.
        loss = functools.partial(text_loss, length=length)
        _check(functools.partial(_double, "llama"), loss, True, f"{length} tokens", 1e-6)
    _check(functools.partial(_double, "llama"), text_loss, True, "int8", 1e-6, _quantise)
    with torch.autocast("cpu", torch.bfloat16):
        _check(functools.partial(language_model, "llama"), text_loss, True, "autocast", 2e-2)
    _check(functools.partial(language_model, "llama"), text_loss, True, "single precision", 2e-5)


class _Watch(TorchDispatchMode):
    """Counts the bytes of collectives during which no matrix product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.exposed: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))

    def wrap(self, name: str) -> Any:
        original, watch = getattr(Communicator, name), self

        def start(communicator: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
            wait, before = original(communicator, tensor), watch.products
            size = tensor.nbytes * (communicator.size if "gather" in name else 1)

            def finish() -> Tensor:
                if watch.products == before:
                    watch.exposed[name] = watch.exposed.get(name, 0) + size
                return wait()

            return finish

        return mock.patch.object(Communicator, name, start)


@on_ranks(2)
def test_all_but_one_chunk_is_hidden(rank: int, world_size: int) -> None:
    unit = 2 * 16 * SIZES["hidden_size"] * 4  # Bytes of the activations of all tokens, of two rows.
    #: Two regions a layer: forward gathers and scatters, and backward gathers the gradient of the output.
    regions = {"start_all_gather_parts": 2 * 2, "start_reduce_scatter_parts": 2}
    for sequence, expected in ((True, regions), (False, {"start_all_reduce": 2})):
        exposed = []
        for chunks in (False, CHUNKS):
            model, watch = language_model("llama"), _Watch()
            cut(model, sequence, chunks)
            with ExitStack() as stack:
                for name in expected:
                    stack.enter_context(watch.wrap(name))
                stack.enter_context(watch)
                text_loss(model, length=16).backward()
            exposed.append(watch.exposed)
        hidden = {name: exposed[0][name] - exposed[1][name] for name in expected}
        assert hidden == {name: LAYERS * count * unit * 3 // 4 for name, count in expected.items()}


@on_ranks(2)
def test_torchs_fused_operators_take_the_place_of_chunks_where_memory_is_symmetric(rank: int, world_size: int) -> None:
    """By torch's own reference of them, beside the plain form."""
    called: list[str] = []

    def gather(part: Tensor, matrices: list[Tensor], dim: int, name: str) -> Any:
        called.append("gather")
        return _symmetric_memory._fused_all_gather_matmul_fallback(part, matrices, dim, name)

    def scatter(x: Tensor, matrix: Tensor, op: str, dim: int, name: str) -> Tensor:
        called.append("scatter")
        return _symmetric_memory._fused_matmul_reduce_scatter_fallback(x, matrix, op, dim, name)

    ops = mock.Mock(fused_all_gather_matmul=gather, fused_matmul_reduce_scatter=scatter)
    with (
        mock.patch.object(tensor_parallel, "reaches_peers", return_value=True),
        mock.patch.object(overlap, "_enabled_group", lambda c: c._name),
        mock.patch.object(torch.ops, "symm_mem", ops),
    ):
        loss = functools.partial(text_loss, length=8)
        _check(functools.partial(_double, "llama"), loss, True, "fused", 1e-6)
        before = len(called)
        _check(functools.partial(_double, "llama"), text_loss, True, "fused, padded", 1e-6)  # By chunks.
    assert len(called) == before
    # Forward of two regions a layer, and the gradients of their rows' outputs; one column in none of them.
    assert called.count("gather") == 2 * 2 * LAYERS + 2 * LAYERS  # Forward twice: training and evaluation.
    assert called.count("scatter") == 2 * 2 * LAYERS


@pytest.mark.parametrize(
    ("ranks", "names", "sequences"),
    [
        (2, ("gpt_neox",), (True,)),
        pytest.param(4, ("llama", "qwen2", "qwen3", "phi3", "gpt2"), (False, True), marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_plain_tensor_parallelism(ranks: int, names: Any, sequences: Any) -> None:
    run_distributed(_cases, ranks, names, sequences, timeout=280)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks_have_the_gradients_of_plain_tensor_parallelism(rank: int, world_size: int) -> None:
    for sequence in (True, False):
        torch._dynamo.reset()
        plain, compiled = (_double("llama", num_hidden_layers=1) for _ in range(2))
        cut(plain, sequence)
        cut(compiled, sequence, CHUNKS)
        for layer in compiled.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        loss = functools.partial(text_loss, length=16)
        expected, gradients = _gradients(plain, loss), _gradients(compiled, loss)
        for name, tensor in expected.items():
            assert float((gradients[name] - tensor).abs().max()) < 1e-12, name


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(DloError, match="async_tp must be true, false or at least 2 chunks, got 1"):
        TensorParallel(async_tp=1)
