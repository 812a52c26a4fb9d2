"""Profiles on fake tensors: parameters, products, saved bytes, and the work of operations, by papers and by torch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, device_autocast, profile_model
from dlo_plugins.plan.operation_recorder import Operation, Record, Recorder, summarise
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import profile_formats
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.planner_models import gpt, llama


def test_saved_bytes_are_those_of_korthikanti() -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, section 4: 34 sbh + 5 as^2 b bytes a layer, 10 sbh undivided."""
    width, heads, length = 1024, 16, 512
    block = gpt(width, 2, heads, length, 1024).blocks[0]
    kept = block.modes["none"].saved.plus(block.output)
    assert kept.total == pytest.approx(34 * length * width + 5 * heads * length**2, rel=0.01)
    assert kept.outside == pytest.approx(10 * length * width, rel=0.02)
    selective = block.modes["attention"].saved.plus(block.output)
    assert selective.total == pytest.approx(34 * length * width, rel=0.01)
    assert block.modes["full"].saved.total == 0
    assert block.modes["full"].repeated.flops == block.forward.flops


def test_products_and_parameters_of_a_llama() -> None:
    width, hidden, length, vocabulary = 512, 1536, 256, 1000
    found = llama(width, hidden, 3, 8, 4, length, vocabulary)
    block_size = 2 * width * width + 2 * width * (width // 2) + 3 * width * hidden + 2 * width
    assert found.parameters == 3 * block_size + 2 * vocabulary * width + width
    assert (found.tp, found.pp, found.cp, found.length) == ((1, 2, 4), 3, True, length)
    assert found.blocks[0] is found.blocks[2]
    block = found.blocks[0]
    weights = 2 * length * (block_size - 2 * width)
    attention = 2 * 2 * 8 * length**2 * (width // 8) / 2
    assert block.forward.flops == pytest.approx(weights + attention)
    assert block.backward.flops == pytest.approx(2 * weights + 2.5 * attention)
    assert found.head.forward.flops == 2 * length * width * vocabulary
    assert block.parameters.inside == block_size - 2 * width
    assert block.parameters.outside == 2 * width
    assert block.collectives == 2


def test_selective_recomputation_keeps_products_and_compiled_code_keeps_less() -> None:
    block = llama(512, 1536, 3, 8, 4, 256, 1000).blocks[0]
    none, selective, alternate = (block.modes[name] for name in ("none", "selective", "alternate"))
    assert none.saved.total > none.fused.total > selective.saved.total > alternate.saved.total > 0
    # Eager code keeps the last product's result, which is only added to the residual; compiled code does not.
    assert selective.saved.total - selective.fused.total == block.output.total
    assert selective.repeated.flops == 0 < alternate.repeated.flops < block.forward.flops / 2
    assert block.forward.eager.moved.total > block.forward.compiled.moved.total
    assert block.forward.eager.number > block.forward.compiled.number > 0


def test_images_are_profiled_too() -> None:
    task = ImageClassifier(model="vit_tiny_patch16_224", num_classes=10).on_meta()
    profile = profile_model(task, task.example_batch(None) or _images(), task.parallel_plan(), dtype=torch.float32)
    assert profile.parameters == sum(p.numel() for p in task.model.parameters())
    assert len(profile.blocks) == 12
    assert profile.length is None
    assert not profile.cp
    assert profile.flops == pytest.approx(3 * 2 * 1.26e9, rel=0.1)  # 1.26 billion multiply-adds


def _images() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 3, 224, 224), torch.zeros(1, dtype=torch.long)


class _Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_plain_module_has_data_parallelism_alone() -> None:
    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    profile = profile_model(_Plain(), batch, None, dtype=torch.float32)
    assert (profile.tp, profile.pp, profile.cp, profile.blocks) == ((1,), 1, False, ())
    assert profile.parameters == 8 * 16 + 16 + 16 * 4 + 4
    # Forward, gradients of both weights, and of the second layer's input alone.
    assert profile.flops == 2 * (2 * (8 * 16 + 16 * 4) + 16 * 4)


class _Detached(_Plain):
    def training_step(self, batch: Any, _: int) -> Tensor:
        return super().training_step(batch, 0).detach()


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(DloError, match="must return a loss with a gradient"):
        profile_model(_Detached(), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), ParallelPlan())


# adapters, frozen and 4-bit weights: only what trains has gradients and optimizer state, and backward is shorter


CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}
MIXED = StateFormat("bfloat16", 4, 2, 4, 4, 8.0, autocasts=True)


class _Windows:
    seq_len = 64


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": Lora(rank=4), "dtype": "bfloat16"},
    "qlora": {"lora": Lora(rank=4, base="nf4"), "dtype": "bfloat16"},
    "freeze": {"freeze": ["model.embed_tokens", "model.layers.0", "model.layers.1"]},
}


@functools.cache
def _profile(name: str = "plain") -> tuple[ModelProfile, Any]:
    task = CausalLM(config=dict(CONFIG), **OPTIONS[name]).on_meta()
    batch = task.example_batch(_Windows())  # type: ignore[arg-type]
    return profile_formats(task, batch, task.parallel_plan(), MIXED, "cuda"), task


def _memory(profile: ModelProfile, layout: Layout) -> RankMemory:
    return MemoryModel(TimeModel(profile, load_machine("h100"), MIXED)).largest(layout)


@pytest.mark.parametrize("name", ["qlora", "freeze"])
def test_state_is_that_of_the_parameters_that_a_run_has(name: str) -> None:
    profile, task = _profile(name)
    parameters = list(task.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert profile.parameters == sum(p.numel() for p in parameters)
    for ranks in (1, 4):
        found = _memory(profile, Layout(MeshSpec(dp_shard=ranks), zero=3 if ranks > 1 else 0))
        assert found.parameters == pytest.approx(sum(p.nbytes for p in parameters) / ranks)
        assert found.optimizer == 8 * trained / ranks
        assert ranks > 1 or found.gradients == 4 * trained


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    full, _ = _profile()
    adapted, _ = _profile("lora")
    first, last = (sum(one.backward.flops for one in (p.blocks[0], p.blocks[-1])) for p in (full, adapted))
    assert 0.5 < last / first < 0.75  # Gradients of inputs and of adapters; attention has both.


def test_backward_ends_at_the_first_trained_block() -> None:
    profile, _ = _profile("freeze")
    assert [block.backward.flops > 0 for block in profile.blocks] == [False, False, True, True]
    assert [block.modes["none"].saved.total > 0 for block in profile.blocks] == [False, False, True, True]
    full, _ = _profile()
    assert profile.blocks[3].backward.flops == full.blocks[3].backward.flops
    # Norms come first in a block, so that products need the gradients of their inputs, and the block does not.
    assert profile.blocks[2].backward.flops == profile.blocks[3].backward.flops
    assert profile.blocks[2].backward.eager.moved.total < profile.blocks[3].backward.eager.moved.total
    assert len({block.gathered for block in profile.blocks}) == 1


def test_autocast_keeps_casts_where_nothing_gathers_half_precision() -> None:
    profile, _ = _profile()
    alone, gathered = (_memory(profile, Layout(MeshSpec(dp_shard=n), zero=3 if n > 1 else 0)) for n in (1, 4))
    uncast = [512 * 128, *[128] * 9]  # The table of embeddings and the norms' weights stay in single precision.
    assert alone.gathered == 2 * (profile.parameters - sum(uncast))
    assert gathered.gathered < alone.gathered
    # Hidden states have twice the bytes, and rows as many.
    assert 1.1 * gathered.activations < alone.activations < 2 * gathered.activations


# --- work of operations: bytes that each moves, and the kernels of compiled code -------------------------------------


X = torch.ones(4, 8, 16)
WEIGHT, BIAS = torch.ones(16), torch.zeros(16)


def _recorded(run: Callable[[], object]) -> list[Operation]:
    recorder = Recorder(lambda _: ("", False))
    with recorder:
        recorder.record = record = Record()
        run()
    return record.operations


def test_parts_of_one_tensor_are_read_each_and_the_same_part_once() -> None:
    (joined,) = _recorded(lambda: torch.cat(X.chunk(2, dim=-1)[::-1], dim=-1))
    (squared,) = _recorded(lambda: X * X)
    assert joined.moved == squared.moved == 2 * X.nbytes


def test_a_compiled_kernel_reads_and_writes_once() -> None:
    first, last = torch.ones(32, 64), torch.ones(64, 8)

    def run() -> Tensor:
        x = nn.functional.gelu(torch.mm(first, first.T))
        return torch.mm(torch.cat([x, x + 1], dim=-1), last)

    work = summarise(_recorded(run), set())
    assert work.compiled.number == 1
    assert work.compiled.moved.total == 4 * (32 * 32 + 32 * 64)  # It reads the product, and writes the joined tensors.
    assert work.eager.number == 3
    assert work.eager.moved.total == 4 * (2 + 2 + 2 + 2) * 32 * 32


def test_a_compiled_normalisation_writes_the_dtype_of_the_product_alone() -> None:
    weight = torch.ones(16, 4, dtype=torch.bfloat16)
    work = summarise(
        _recorded(lambda: nn.functional.layer_norm(X, [16], WEIGHT, BIAS).bfloat16().reshape(32, 16) @ weight), set()
    )
    assert work.compiled.number == 1
    assert work.compiled.moved.total == X.numel() * (4 + 2) + 4 * (16 + 16)


# --- autocast of a GPU on fake tensors of a CPU is that of torch on fake tensors of a GPU ----------------------------


_WIDTH = 8
#: Functions of models, with operands `[4, 8]` in half precision. `rms_norm` is left out: torch 2.11 does not cast it.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x.T,
    "layer_norm": lambda x: F.layer_norm(x, (_WIDTH,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "exp": torch.exp,
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.norm(x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, x),
    "gelu": F.gelu,
    "mean": lambda x: x.mean(),
    "add": lambda x: x + x,
}


def test_dtypes_are_those_of_a_gpu() -> None:
    def dtypes(device: str) -> dict[str, torch.dtype]:
        operand = torch.empty(4, _WIDTH, dtype=torch.bfloat16, device=device)
        return {name: function(operand).dtype for name, function in FUNCTIONS.items()}

    with FakeTensorMode():
        with device_autocast("cuda", torch.bfloat16):
            found = dtypes("cpu")
        torch.set_autocast_enabled("cuda", True)  # torch.autocast turns itself off without a GPU.
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            wanted = dtypes("cuda")
        finally:
            torch.autocast_decrement_nesting()
            torch.set_autocast_enabled("cuda", False)
    assert found == wanted


def test_nothing_changes_without_a_dtype_and_by_the_rules_of_a_cpu() -> None:
    value = torch.ones(4, _WIDTH, dtype=torch.bfloat16)
    for device, dtype in (("cuda", None), ("cpu", torch.bfloat16)):
        with device_autocast(device, dtype):
            assert F.layer_norm(value, (_WIDTH,)).dtype == torch.bfloat16
