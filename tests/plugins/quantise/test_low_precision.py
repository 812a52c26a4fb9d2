"""Products in 8 bits are those of rounded factors; layers are chosen by the plan; strategies learn as one process."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.quantise.callback import Quantise
from dlo_plugins.quantise.low_precision import (
    SCHEMES,
    LowPrecision,
    LowPrecisionForward,
    multiply,
    multiply_rows,
    round_rows,
)
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.on_ranks import on_ranks
from support.runs import Losses
from support.token_batches import FAMILIES, Tokens
from support.trainers import quiet_trainer

CONFIG = {"model_type": "llama", **FAMILIES["llama"]}


def task(**options: Any) -> CausalLM:
    return CausalLM(config=dict(CONFIG), lr=3e-3, **options)


def test_a_product_is_that_of_the_rounded_factors() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 24), torch.randn(7, 24)
    a[3] = 0
    (rounded_a, scales_a), (rounded_b, scales_b) = round_rows(a), round_rows(b)
    assert (rounded_a.dtype, int(rounded_a.abs().amax())) == (torch.int8, 127)
    expected = (rounded_a.double() * scales_a) @ (rounded_b.double() * scales_b).t()
    torch.testing.assert_close(multiply_rows(a, b), expected.float())
    assert float((multiply_rows(a, b) - a @ b.t()).norm() / (a @ b.t()).norm()) < 0.02


def _float8_rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * scale).to(dtype).float() / scale


@pytest.mark.parametrize("scheme", ["fp8", "fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("roles", [("input", "weight"), ("gradient", "weight"), ("gradient", "input")])
def test_a_float8_product_is_that_of_factors_rounded_by_definition(scheme: str, roles: Any) -> None:
    torch.manual_seed(0)
    # 40 columns are no multiple of the 32 elements of an MX block; rows have magnitudes that differ by far.
    a, b = torch.randn(5, 40) * torch.logspace(-4, 4, 5)[:, None], torch.randn(7, 40)
    a[3] = 0
    factors = []
    for x, role in ((a, roles[0]), (b, roles[1])):
        kind = torch.float8_e5m2 if scheme == "fp8" and role == "gradient" else torch.float8_e4m3fn
        most = torch.finfo(kind).max
        if scheme == "fp8":
            scale = most / x.abs().amax()
        elif scheme == "fp8_rowwise":
            scale = 2 ** (most / x.abs().amax(1, keepdim=True).clamp(min=1e-12)).log2().floor()
        else:
            padded = nn.functional.pad(x, (0, 24)).unflatten(1, (2, 32))
            scale = 2 ** -(padded.abs().amax(2, keepdim=True).clamp(min=1e-30) / most).log2().ceil()
            scale = scale.expand(padded.shape).flatten(1)[:, :40]
        factors.append(_float8_rounded(x, scale, kind))
        assert float((factors[-1] - x).abs().sum()) > 0
    found = multiply(a, b, roles, scheme, True)
    torch.testing.assert_close(found, factors[0] @ factors[1].t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scheme", "weight_gradient"), [*((scheme, True) for scheme in SCHEMES), ("int8", False)])
def test_outputs_and_gradients_are_near_those_of_the_layer_also_compiled(scheme: str, weight_gradient: bool) -> None:
    torch.manual_seed(0)
    layer, plain = nn.Linear(64, 48), nn.Linear(64, 48)
    plain.load_state_dict(layer.state_dict())
    LowPrecisionForward(scheme, weight_gradient, emulate=scheme != "int8").install(layer)
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)
    found = []
    for module in (layer, plain, compiled):
        layer.zero_grad()
        x = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        of = plain if module is plain else layer
        assert x.grad is not None
        found.append([one.detach().clone() for one in (y, x.grad, of.weight.grad, of.bias.grad)])  # type: ignore[arg-type, union-attr]
    bound = 0.02 if scheme == "int8" else 0.09
    for mine, theirs, traced in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).norm() / theirs.norm()) < bound
        assert torch.equal(mine, traced)
    assert not torch.equal(found[0][0], found[1][0])
    exact = float((found[0][2] - found[1][2]).norm() / found[1][2].norm()) < 1e-6
    assert exact == (not weight_gradient)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_the_layers_are_those_of_blocks_that_are_large_enough() -> None:
    twin: Any = task(lora=Lora(rank=4)).on_meta()
    plan = twin.parallel_plan()
    names = LowPrecision(min_features=32).choose_layers(twin.model, plan)
    assert len(names) == 2 * 5  # Keys and values have 16 features.
    assert not any("lm_head" in name or ".lora_" in name or "k_proj" in name for name in names)
    names = LowPrecision(min_features=1, skip=["model.layers.0", "*.*.*.*.down_proj"]).choose_layers(twin.model, plan)
    assert len(names) == 6
    names = LowPrecision("mxfp8", min_features=1, emulate=True).choose_layers(twin.model, plan)
    assert len(names) == 2 * 2  # Only queries and outputs have 32 by 32.
    with pytest.raises(DloError, match=r"skip must match linear layers in blocks, got 'model.layer.0'.*did you mean"):
        LowPrecision(skip=["model.layer.0"]).choose_layers(twin.model, plan)
    with pytest.raises(DloError, match=r"of at least 64 features in multiples of 16 in its blocks, outside skip, got"):
        LowPrecision("fp8", emulate=True).choose_layers(twin.model, plan)


@pytest.mark.parametrize(
    ("scheme", "capability", "message"),
    [
        ("fp8", None, r"fp8 must have a cuda device \(CUDA of .* 8.9 or more\), got cpu, .*; set scheme: int8, or"),
        ("mxfp8", (9, 0), r"10.0 or more\), got compute capability 9.0; set scheme: fp8_rowwise"),
        ("fp8_rowwise", (8, 9), r"got compute capability 8.9; set scheme: fp8,"),
        ("fp8", (8, 0), r"got compute capability 8.0; set scheme: int8,"),
        ("int8", (7, 0), r"a cuda or cpu device .* 7.5 or more\), got .* 7.0; leave the callback out$"),
        ("fp8", (9, 0), None),
        ("mxfp8", (10, 0), None),
    ],
)
def test_a_device_without_the_kernels_is_refused(scheme: str, capability: Any, message: str | None) -> None:
    trainer: Any = mock.Mock(callbacks=[])
    trainer.strategy.root_device = torch.device("cpu" if capability is None else "cuda")
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        if message is None:
            LowPrecision(scheme, min_features=8).check_run(trainer, task())
            return
        with pytest.raises(DloError, match=message):
            LowPrecision(scheme).check_run(trainer, task())
        if SCHEMES[scheme].emulated:
            LowPrecision(scheme, emulate=True, min_features=8).check_run(trainer, task())


def test_what_does_not_fit_is_refused_before_ranks_start() -> None:
    trainer: Any = mock.Mock()
    trainer.strategy.root_device = torch.device("cpu")
    trainer.callbacks = [LowPrecision(), Quantise("int8", when="aware", report=False)]
    with pytest.raises(DloError, match="the only callback that replaces the layers' products, got Quantise too"):
        trainer.callbacks[0].check_run(trainer, task())
    trainer.callbacks = []
    with pytest.raises(DloError, match="skip must match"):
        LowPrecision(skip=["layers"], min_features=8).check_run(trainer, task())


#: Largest relative difference of a loss; without a weight's gradient, losses fall by 4e-3 less.
NEAR = {"int8": 5e-4, "fp8": 2e-3, "fp8_rowwise": 2e-3, "mxfp8": 2e-3}
Run = tuple[Any, str, list[Any]]  # Strategy, scheme and further callbacks.
ONE: dict[str, Run] = {
    "one, int8": ("auto", "int8", []),
    "one, fp8": ("auto", "fp8", []),
    "compiled": ("auto", "int8", [lambda: Compile(scope="blocks", backend="aot_eager")]),
}
#: What no column of tests/composition has.
TWO: dict[str, Run] = {
    "tp, fp8": (lambda: MeshStrategy(tp=2, dp_shard=1), "fp8", []),
    "tp, fp8_rowwise": (lambda: MeshStrategy(tp=2, dp_shard=1), "fp8_rowwise", []),
    "tp, sequence": (lambda: MeshStrategy(tp=2, dp_shard=1, sequence_parallel=True), "int8", []),
    "dp, compiled": (lambda: MeshStrategy(appliers=[CompileBlocks(backend="aot_eager")]), "int8", []),
    "zero3, fp8": (lambda: ZeroStrategy(3), "fp8_rowwise", []),
    "fsdp, mxfp8": (lambda: FSDPStrategy(), "mxfp8", []),
}


def _train(rank: int, world_size: int, names: list[str], rounds: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        (strategy, scheme, others), losses = (ONE | TWO)[name], Losses()
        found[name] = losses.found
        seed_everything(1, verbose=False)
        low = LowPrecision(scheme, min_features=8, emulate=scheme != "int8")
        options = {"callbacks": [losses, *([low] if rounds else []), *(make() for make in others)], "max_steps": 4}
        made = strategy if isinstance(strategy, str) else strategy()
        trainer = quiet_trainer(devices=world_size, strategy=made, log_every_n_steps=1, **options)
        trained = task()
        trainer.fit(trained, datamodule=Tokens(1))
        if rank == 0:
            assert not any("forward" in vars(part) and isinstance(part, nn.Linear) for part in trained.modules())
        if others:
            (compile_callback,) = (one for one in trainer.callbacks if isinstance(one, Compile))  # type: ignore[attr-defined]
            found[f"{name}, breaks"] = compile_callback.tally.breaks
    return found


@pytest.mark.parametrize(
    "names",
    [["tp, fp8"], pytest.param(list(TWO), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_strategies_learn_as_one_process_in_full_precision(names: list[str]) -> None:
    alone, plain = _train(0, 1, list(ONE), True), _train(0, 1, ["one, int8"], False)["one, int8"]
    ranks = run_distributed(_train, 2, names, True, timeout=280)
    for name, losses in alone.items():
        if "breaks" not in name:
            assert losses != plain, name
            assert losses == pytest.approx(plain, rel=NEAR[ONE[name][1]]), name
    assert alone["compiled"] == pytest.approx(alone["one, int8"], rel=1e-3)
    assert not alone["compiled, breaks"]
    for name in names:
        found = [sum(pair) / 2 for pair in zip(*(rank[name] for rank in ranks), strict=True)]
        assert found != plain, name
        assert found == pytest.approx(plain, rel=NEAR[TWO[name][1]]), name


def _step(layer: nn.Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of input and weight."""
    given = x.clone().requires_grad_()
    y = layer(given)
    y.backward(gradient)
    assert given.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), given.grad, layer.weight.grad]


def _layer(scheme: str, weight: Tensor, sliced: Any = None, group: str = "") -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    LowPrecisionForward(scheme, emulate=scheme != "int8").install(layer, sliced, group)
    return layer


@on_ranks(2)
def test_slices_round_as_one_process(rank: int, world_size: int) -> None:
    """The slices of a layer compute what the full layer does, but not with scales of their own."""
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(48, 64) * torch.logspace(-1, 1, 64), torch.randn(9, 64), torch.randn(9, 48)
    gradient = gradient * torch.logspace(-1, 1, 48)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for scheme, dim, shared in itertools.product(("int8", "fp8", "fp8_rowwise"), (0, 1), (True, False)):
        half, own = weight.shape[dim] // 2, [slice(None), slice(None)]
        own[dim] = slice(rank * half, (rank + 1) * half)
        rows, columns = own
        full = _step(_layer(scheme, weight), x, gradient)
        expected = [full[0][:, rows], full[1][:, columns], full[2][rows, columns]]
        cut: Any = (dim, name) if shared else (None, "")
        mine = _step(_layer(scheme, weight[rows, columns], *cut), x[:, columns], gradient[:, rows])
        dist.all_reduce(mine[1 - dim])  # Partial sums: of the input's gradient, or of the output.
        apart = [float((one - other).norm() / other.norm()) for one, other in zip(mine, expected, strict=True)]
        if shared:
            assert max(apart) < 1e-6, (scheme, dim, apart)
        elif scheme != "fp8_rowwise":  # Its scales are powers of two, which change the rounding of tiny values alone.
            assert max(apart) > 1e-4, (scheme, dim, apart)
