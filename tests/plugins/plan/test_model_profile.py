"""Profiles on fake tensors, by papers and by torch: parameters, products, saved bytes; and the memory of ranks."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.errors import DloError
from dlo_framework.mesh import Coordinates, MeshSpec
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import Layout, Request, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile, device_autocast, profile_model
from dlo_plugins.plan.operation_recorder import Operation, Record, Recorder, summarise
from dlo_plugins.plan.plan_config import read_dtypes
from dlo_plugins.plan.plan_report import RankVerification
from dlo_plugins.plan.plan_search import Candidate, PlanSearch, Rejection
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import measure_optimizer, profile_formats, profile_run, state_format
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.planner_models import gpt, llama
from support.token_batches import GROUPED
from support.trainers import Squares


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


def test_a_plain_module_has_data_parallelism_alone() -> None:
    module = Squares(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    profile = profile_model(module, (torch.zeros(4, 8),), None, dtype=torch.float32)
    assert (profile.tp, profile.pp, profile.cp, profile.blocks) == ((1,), 1, False, ())
    assert profile.parameters == 8 * 16 + 16 + 16 * 4 + 4
    # Forward, gradients of both weights, and of the second layer's input alone.
    assert profile.flops == 2 * (2 * (8 * 16 + 16 * 4) + 16 * 4)


class _Detached(Squares):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(DloError, match="must return a loss with a gradient"):
        profile_model(_Detached(nn.Linear(8, 4)), (torch.zeros(4, 8),), ParallelPlan())


# adapters, frozen and 4-bit weights: only what trains has gradients and optimizer state, and backward is shorter


CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}
#: Data of short windows.
SHORT: Any = SimpleNamespace(seq_len=16)
MIXED = StateFormat("bfloat16", 4, 2, 4, 4, 8.0, autocasts=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": Lora(rank=4), "dtype": "bfloat16"},
    "qlora": {"lora": Lora(rank=4, base="nf4"), "dtype": "bfloat16"},
    "freeze": {"freeze": ["model.embed_tokens", "model.layers.0", "model.layers.1"]},
}


@functools.cache
def _profile(name: str = "plain") -> tuple[ModelProfile, Any]:
    task = CausalLM(config=dict(CONFIG), **OPTIONS[name]).on_meta()
    batch = task.example_batch(SimpleNamespace(seq_len=64))  # type: ignore[arg-type]
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


# --- memory and state of a rank: predictions by formulas, by an optimizer's step, and on simulated ranks ------------


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_activations_are_what_forward_keeps() -> None:
    profile = llama(512, 1536, 8, 8, 4, 256, 1000, "cpu")
    kept = sum(block.modes["none"].saved.total + block.output.total for block in profile.blocks)
    machine, state = replace(load_machine("h100"), device="cpu"), StateFormat("bfloat16", 4, 4, 4, 4, 8.0)
    times = TimeModel(replace(profile, max_logits=256_000), machine, state)
    found = MemoryModel(times).largest(Layout(MeshSpec(dp_shard=1), 4, zero=0))
    assert found.activations == pytest.approx(4 * (kept + profile.blocks[0].output.total))  # And the first's input.
    assert found.parameters == 4 * profile.parameters
    assert found.optimizer == 8 * profile.parameters
    assert found.gradients == 4 * profile.parameters  # Those of the last step, in forward.


def test_a_v100_is_planned_in_float16_whose_loss_scale_costs_a_pass_over_the_gradients() -> None:
    profile, machine = llama(512, 1536, 8, 8, 4, 256, 1000), load_machine("v100")
    layout = Layout(MeshSpec(dp_shard=4), 4, zero=3)
    half, brain = (state_format(f"{name}-mixed", fused=False) for name in ("16", "bf16"))
    with pytest.raises(DloError, match=r"got float16, float32, float64; set trainer\.precision to 16-mixed"):
        TimeModel(profile, machine, brain).step(layout)
    both = replace(machine, peak={**machine.peak, "bfloat16": machine.rate("float16")})
    models = [TimeModel(profile, both, state) for state in (half, brain)]
    times, (memory, other) = [model.step(layout) for model in models], [MemoryModel(m).largest(layout) for m in models]
    assert memory == other
    assert times[0].optimizer == pytest.approx(times[1].optimizer * (2.5 * 16 + 8) / (2.5 * 16))
    assert replace(times[0], optimizer=times[1].optimizer) == times[1]
    for precision, gathered in ((16, "float32"), ("bf16", "bfloat16"), ("16-true", None)):  # In a run; a plan sets it.
        assert read_dtypes({"trainer": {"precision": precision}}, "cuda") == (gathered, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_delayed_weights_have_the_gathered_dtype_beside_master_weights(dtype: str) -> None:
    task = CausalLM(config={"model_type": "llama", **GROUPED}).on_meta()
    state = state_format("bf16-mixed", fused=False, gather=dtype)
    mesh = MeshSpec(pp=2, dp_shard=2)
    layout = Layout(mesh, 1, 4, "PipeDream2BW", zero=1)
    predicted = MemoryModel(TimeModel(profile_run(task, SHORT, state), load_machine("h100"), state)).ranks(layout)
    strategy = MeshStrategy(
        **mesh.sizes, schedule="PipeDream2BW", micro_batches=4, appliers=[FullyShard(param_dtype=dtype)]
    )
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    strategy.parallel_devices = [torch.device("cpu")] * 4
    counted = strategy.describe(task, SHORT).ranks
    for stage, rank in enumerate(predicted):
        own = counted[mesh.rank(Coordinates(stage, 0, 0, 0, 0))].state_bytes
        assert rank.parameters == pytest.approx(own.parameters, rel=2e-3)
        assert rank.optimizer == pytest.approx(own.optimizer, rel=2e-3)
    assert state.casts(layout) == (0 if dtype == "bfloat16" else 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_are_near_measured_peaks() -> None:
    """Peaks of three layouts on one rank and three on two; benchmarks/results has them all."""
    words = ["--only", "memory", "--ranks", "1", "2", "--cases", "3"]
    command = [sys.executable, str(BENCHMARKS / "planner_measured.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (table,) = json.loads(done.stdout.splitlines()[-1])["tables"]
    errors = [abs(row["median"] - 1) for row in table["rows"].values()]
    assert len(errors) == 6
    assert max(errors) < 0.1
    assert sum(errors) / 6 < 0.03


# --- state of a task's own optimizer: its bytes follow from a step, for plain, quantised and factored states ---------


def _task(optimizer: str) -> Any:
    return CausalLM(config=CONFIG | {"num_hidden_layers": 1}, optimizer=optimizer, schedule="constant").on_meta()


@pytest.mark.parametrize(
    ("optimizer", "moments", "kind"),
    [("adamw", 2.0, "elementwise"), ("lion", 1.0, "elementwise"), ("adamw8bit", 2 * (1 + 4 / 256) / 4, "tensor")],
)
def test_bytes_follow_from_a_step(optimizer: str, moments: float, kind: str) -> None:
    found = measure_optimizer(_task(optimizer), torch.float32)
    assert found.moments == pytest.approx(moments, rel=0.02)  # Norms keep single precision under 8 bits.
    assert (found.kind, found.error) == (kind, "")


def test_a_factored_state_has_the_shapes_of_rows_and_columns() -> None:
    found = measure_optimizer(_task("adafactor"), torch.float32)
    assert 0 < found.moments < 0.05


class _NeedsTrainer(Squares):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_steps)


def test_an_optimizer_that_needs_a_trainer_is_taken_as_adam_and_says_so() -> None:
    found = measure_optimizer(_NeedsTrainer(nn.Linear(2, 2)), torch.float32)
    assert found.moments == 2.0
    assert "not attached to a `Trainer`" in found.error


# --- plans on simulated ranks: their shards are counted, refused ones give their place to others ---------------------


FULL = StateFormat("float32", 4, 4, 4, 4, 8.0)


def _planned(layout: Layout, **changes: Any) -> tuple[Candidate, list[RankMemory], RankVerification]:
    task: Any = CausalLM(config={"model_type": "llama", **GROUPED, **changes}).on_meta()
    profile: ModelProfile = profile_model(task, task.example_batch(SHORT), task.parallel_plan())
    times = TimeModel(profile, replace(load_machine("cpu"), ranks_per_node=64), FULL)
    memory = MemoryModel(times)
    found = Candidate(layout, times.split(layout), times.step(layout), memory.largest(layout), 1.0, 1.0, 1)
    verify = RankVerification(task, SHORT, {}, 1, FULL, found.memory.total * 1.05)
    return found, memory.ranks(layout), verify


@pytest.mark.parametrize(
    "mesh", [pytest.param(MeshSpec(pp=2, dp_shard=2), marks=pytest.mark.slow), MeshSpec(dp_shard=2, tp=2)]
)
def test_even_shards_are_as_predicted(mesh: MeshSpec) -> None:
    found, ranks, verify = _planned(Layout(mesh, 1, 4))
    verified = verify(found, ranks)
    assert isinstance(verified, Candidate)
    assert verified.is_verified
    assert verified.memory.total == pytest.approx(found.memory.total, rel=1e-3)


def test_shards_of_rows_that_ranks_do_not_divide_are_counted() -> None:
    """Of 33 rows, the first of 32 ranks gets two."""
    layout = Layout(MeshSpec(dp_shard=32), 1, 1)
    found, ranks, verify = _planned(layout, vocab_size=33)
    verified = with_limit(verify, 10.0)(found, ranks)
    assert isinstance(verified, Candidate)
    embeddings = 3 * 2 * 4 * GROUPED["hidden_size"]  # Parameters and two moments, of embeddings and head.
    more = verified.memory.parameters - found.memory.parameters
    assert more >= embeddings * (2 - 33 / 32) * 0.9
    refused = with_limit(verify, found.memory.total / 1e9)(found, ranks)
    assert isinstance(refused, Rejection)
    assert refused.kind == "memory"
    assert refused.value > refused.limit == found.memory.total


def with_limit(verify: RankVerification, gigabytes: float) -> RankVerification:
    verify._memory = gigabytes * 1e9
    return verify


def test_what_a_rank_cannot_run_is_refused_with_its_message() -> None:
    found, ranks, verify = _planned(Layout(MeshSpec(dp_shard=2, tp=2), 1, 4))
    impossible = replace(found, layout=replace(found.layout, mesh=MeshSpec(dp_shard=1, tp=4)))
    refused = verify(impossible, ranks)
    assert isinstance(refused, Rejection)
    assert refused.kind == "refused"
    assert "tp must divide" in str(refused)


def _search() -> PlanSearch:
    machine = replace(load_machine("h100"), reserved=1e6, ranks_per_node=4)
    return PlanSearch(llama(1024, 2816, 8, 8, 8, 1024, 8192), machine, StateFormat(), Request(4, 4e9, 8, top=3))


def test_others_take_the_place_of_refused_plans() -> None:
    plain = _search().run()
    first = plain.candidates[0].layout.mesh

    def verify(candidate: Candidate, ranks: list[RankMemory]) -> Candidate | Rejection:
        assert max(rank.total for rank in ranks) == pytest.approx(candidate.memory.total)
        if candidate.layout.mesh == first:
            return Rejection(candidate.layout, "refused", 1.0, 1.0, "rank 0 cannot")
        return replace(candidate, is_verified=True)

    found = _search().run(verify)
    assert len(found.candidates) == 3
    assert all(candidate.is_verified and candidate.layout.mesh != first for candidate in found.candidates)
    assert any(rejection.kind == "refused" for rejection in found.rejections)
    assert len(found.rejections) + 3 == found.count == plain.count


def test_if_no_plan_can_run_the_error_is_that_of_the_first() -> None:
    def refuse(candidate: Candidate, _: list[RankMemory]) -> Rejection:
        return Rejection(candidate.layout, "refused", 1.0, 1.0, "the model must return a tensor, got None; return it")

    with pytest.raises(DloError, match="the model must return a tensor"):
        _search().run(refuse)
