"""Under tensor parallelism products round as in one process; FSDP gathers weights in float8 for the same products."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.callbacks.low_precision import LowPrecision
from dlo_plugins.quantisation.float8_gather import Float8Gather
from dlo_plugins.quantisation.low_precision_linear import LowPrecisionForward
from dlo_plugins.quantisation.shared_scales import shares_maximum
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from dlo_tasks.llm.causal_lm import CausalLM
from support.token_batches import FAMILIES, Tokens


class OnDevice(ZeroStrategy):
    """ZeRO whose ranks' device is not the memory that it offloads to."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


CONFIG = {"model_type": "llama", **FAMILIES["llama"]}
STEPS = 4
SCHEMES = ("int8", "fp8", "fp8_rowwise")
#: Strategy, precision, and further options of the callback.
GATHERS: dict[str, Any] = {
    "fsdp": (FSDPStrategy, "32-true", {}),
    "fsdp, bf16": (lambda: FSDPStrategy(param_dtype="bfloat16"), "bf16-mixed", {"skip": ["*.*.*.*.down_proj"]}),
    "fsdp, kept": (lambda: FSDPStrategy(reshard_after_forward=False), "32-true", {}),
    "fsdp, offload": (lambda: FSDPStrategy(offload=True), "32-true", {}),
    "zero3": (lambda: ZeroStrategy(3), "32-true", {}),
    "zero3, offload": (lambda: OnDevice(3, offload="both"), "32-true", {}),
    # On a CPU it gathers single precision under bf16-mixed too.
    "zero3, autocast": (lambda: ZeroStrategy(3, offload="optimizer"), "bf16-mixed", {"skip": ["*.*.*.*.down_proj"]}),
}


def fit(world_size: int, strategy: Any, low: LowPrecision, precision: str = "32-true") -> tuple[list[float], Any]:
    from lightning.pytorch import Callback, Trainer, seed_everything

    losses: list[float] = []

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    seed_everything(1, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[Note(), low],
        **quiet,
    )
    task = CausalLM(config=dict(CONFIG), lr=3e-3, optimizer_args={"eps": 1e-4})
    trainer.fit(task, datamodule=Tokens(1))
    return losses, trainer


def low(scheme: str, **options: Any) -> LowPrecision:
    return LowPrecision(scheme, min_features=8, emulate=scheme != "int8", **options)


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


def _slices(rank: int, world_size: int) -> None:
    """Checks that the slices of a layer compute what the full layer does, but not with scales of their own."""
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(48, 64) * torch.logspace(-1, 1, 64), torch.randn(9, 64), torch.randn(9, 48)
    gradient = gradient * torch.logspace(-1, 1, 48)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for scheme, dim, shared in itertools.product(SCHEMES, (0, 1), (True, False)):
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


def _alone(rank: int, world_size: int) -> list[float]:
    silence_lightning()
    return fit(1, "auto", low("int8"))[0]


def _on_two(rank: int, world_size: int) -> dict[str, Any]:
    _slices(rank, world_size)
    silence_lightning()
    found: dict[str, Any] = {"tp": fit(2, MeshStrategy(tp=2, dp_shard=1), low("int8"))[0]}
    for name, (make, precision, options) in GATHERS.items():
        for gathers in (False, True):
            sent: list[int] = []
            callback = low("fp8", float8_all_gather=gathers, **options)
            with mock.patch.object(Communicator, "all_gather", _counting(sent)):
                losses, trainer = fit(2, make(), callback, precision)
            weights = gather_full_weights(trainer)
            found[name, gathers] = losses, sum(sent), {key: value.double() for key, value in weights.items()}
            task: Any = trainer.lightning_module
            layers = callback.choose_layers(task.model, task.parallel_plan())
            weights_of_layers = [task.model.get_submodule(one).weight for one in layers]
            found[name, "elements"] = sum(weight.numel() for weight in weights_of_layers) // world_size
            if isinstance(trainer.strategy, ZeroStrategy):
                assert all(group.encoding is None for group in trainer.strategy.engine.groups)
            else:
                assert not any(hasattr(p.to_local(), "fsdp_pre_all_gather") for p in task.parameters())
    leave_group()
    return found


def _counting(sent: list[int]) -> Any:
    plain = Communicator.all_gather

    def gather(self: Any, buffer: Tensor) -> Any:
        sent.append(buffer.nbytes // self.size)
        return plain(self, buffer)

    return gather


def test_slices_round_as_one_process_and_bytes_are_gathered_for_the_same_products() -> None:
    alone = run_distributed(_alone, 1, backend=None)[0]
    found = run_distributed(_on_two, 2, timeout=280)[0]
    # Partial sums differ in their last bits, by which the next layer rounds a few elements to other integers.
    assert found["tp"][0] == pytest.approx(alone[0], rel=2e-5)
    assert found["tp"] == pytest.approx(alone, rel=1e-3)
    for name, (_, precision, _) in GATHERS.items():
        (plain, bytes_plain, weights), (losses, bytes_float8, others) = found[name, False], found[name, True]
        assert losses == pytest.approx(plain, rel=1e-6 if precision == "32-true" else 2e-3), name
        apart = max(float((value - others[key]).abs().max()) for key, value in weights.items())
        assert apart < (1e-5 if precision == "32-true" else 4e-3), name
        # A byte in place of four or two, in each of four steps: once, or in forward and in backward.
        saved = found[name, "elements"] * (1 if name == "fsdp, bf16" else 3)
        times = (bytes_plain - bytes_float8) / saved
        assert (times == STEPS) if name == "fsdp, kept" else (STEPS < times <= 2 * STEPS), (name, times)


def test_the_copy_of_an_offloaded_shard_has_the_extension() -> None:
    """As FSDP2 copies it to the device: here to another dtype, because there is no other device."""
    local = torch.randn(4, 6)
    policy = SimpleNamespace(param_dtype=torch.float32)
    param: Any = SimpleNamespace(
        sharded_param=SimpleNamespace(_local_tensor=local), mp_policy=policy, offload_to_cpu=True
    )
    param.padded_sharded_param_size = local.shape
    Float8Gather._attach(mock.Mock(), param, torch.tensor(3.0), torch.float8_e4m3fn)
    copied: Any = local.to(torch.float64)
    assert copied.dtype == torch.float64
    (rounded,), _ = copied.fsdp_pre_all_gather(None, None, None, None, None)
    assert torch.equal(rounded.view(torch.float8_e4m3fn).float(), (local * 3).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("auto", {}, "must have FSDP or stage 3 of ZeRO, whose all-gathers it changes, got Single"),
        (ZeroStrategy(2), {}, "must have parameters that ranks shard, got stage 2 of ZeRO.*; set stage 3"),
        (FSDPStrategy(replicate=4, shard=1), {}, "must have parameters that ranks shard, got"),
        (FSDPStrategy(reshard_after_forward=2), {}, "gathers over all ranks, got reshard_after_forward: 2"),
        (FSDPStrategy(), {"scheme": "fp8_rowwise"}, "scheme must be fp8 for float8_all_gather.*got fp8_rowwise"),
    ],
)
def test_gathers_that_cannot_be_are_refused(strategy: Any, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"scheme": "fp8", "emulate": True, "float8_all_gather": True, "min_features": 8}
    with pytest.raises(DloError, match=message):
        _check(strategy, given | options)


def _check(strategy: Any, options: dict[str, Any]) -> None:
    from lightning.pytorch import Trainer

    callback, devices = LowPrecision(**options), 1 if strategy == "auto" else 4
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)
    callback.check_run(trainer, CausalLM(config=dict(CONFIG)))


def test_factors_that_are_sliced_share_their_largest_value() -> None:
    assert not shares_maximum(("input", "weight"), "input", None, True)
    # Of a column projection, which slices N: rows of the output's gradient and of the weight's transpose are sliced.
    assert [shares_maximum(("input", "weight"), role, 0, False) for role in ("input", "weight")] == [False, True]
    assert shares_maximum(("gradient", "weight"), "weight", 0, True)
    assert not shares_maximum(("input", "weight"), "weight", 0, True)
    # Of a row projection, which slices K.
    assert shares_maximum(("input", "weight"), "input", 1, True)
    assert not shares_maximum(("gradient", "weight"), "gradient", 1, True)
