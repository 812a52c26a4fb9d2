"""Tokens that travel to the ranks with their experts: outputs and gradients of one process, and the load of each."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.models.experts import MixtureOptions, find_mixtures
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.experts.expert_balance import ExpertBalance, balance_scalars
from dlo_plugins.parallel.experts.expert_parallel import DividedExperts, divide_experts
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.mesh_description import MeshDescription, describe_mesh
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.on_ranks import on_ranks
from support.simulated_ranks import simulate_ranks
from support.token_batches import FAMILIES
from support.trainers import quiet_trainer

EXPERTS, TOP_K, WIDTH, TOKENS = 4, 2, 6, 10


class Experts(nn.Module):
    """Experts in the form of transformers."""

    def __init__(self, has_bias: bool = True) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=draw, dtype=torch.double))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=draw, dtype=torch.double)) if has_bias else None

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            rows, choice = torch.where(index == expert)
            made = tokens[rows] @ self.up[expert]
            made = torch.tanh(made if self.bias is None else made + self.bias[expert]) * weights[rows, choice, None]
            out = out.index_add(0, rows, made.to(out.dtype))
        return out


class DenseExperts(Experts):
    """Experts in the form of Llama 4."""

    def __init__(self) -> None:
        super().__init__(has_bias=False)
        self.down = nn.Parameter(self.up.detach() + 1)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        by_expert = tokens.view(self.up.shape[0], -1, WIDTH)
        return torch.bmm(torch.tanh(torch.bmm(by_expert, self.up)), self.down).view(-1, WIDTH)


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.double)
        self.gate.top_k = TOP_K  # type: ignore[assignment]
        self.experts = experts


def routed(only: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights of all ranks; one choice is of no expert, and all may be of the same experts."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randn(2 * TOKENS, WIDTH, generator=draw, dtype=torch.double)
    index = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(2 * TOKENS)])
    index = index if only is None else index % 2 + only
    index[3, 1] = EXPERTS
    return tokens, index, torch.rand(2 * TOKENS, TOP_K, generator=draw, dtype=torch.double)


def run(module: nn.Module, part: slice, only: int | None) -> dict[str, Tensor]:
    tokens, index, weights = (tensor[part] for tensor in routed(only))
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    if isinstance(module, DenseExperts):
        scores = torch.zeros(len(tokens), EXPERTS + 1, dtype=torch.double).scatter(1, index, weights)[:, :EXPERTS]
        out = module(tokens.repeat(EXPERTS, 1) * scores.T.reshape(-1, 1)).view(EXPERTS, -1, WIDTH).sum(0)
    else:
        out = module(tokens, index, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}  # type: ignore[return-value]


def divided(experts: nn.Module) -> Any:
    """Returns the mixture, the ranks that share its experts, and those of this rank."""
    model = nn.ModuleDict({"mlp": Mixture(experts)})
    (mixture,) = find_mixtures(model)
    ranks = divide_experts(model, mixture, dist.group.WORLD)
    return mixture, ranks, model.mlp.experts  # type: ignore[union-attr]


@on_ranks(2)
def test_outputs_and_gradients_are_those_of_one_process(rank: int, world_size: int) -> None:
    part, own = slice(rank * TOKENS, (rank + 1) * TOKENS), slice(rank * 2, rank * 2 + 2)
    for kind, only in ((Experts, None), (Experts, 2), (DenseExperts, None), (DenseExperts, 2)):
        # The last experts alone: the first rank gets no token.
        whole = run(kind(), slice(None), only)
        _, ranks, experts = divided(kind())
        assert experts.num_experts == EXPERTS // world_size
        mine = run(experts, part, only)
        for name in ("out", "tokens", "weights"):
            torch.testing.assert_close(mine[name], whole[name][part])
        for name in {"up", "bias", "down"} & whole.keys():
            # A strategy averages over all ranks, and so halves the gradient of one process too.
            torch.testing.assert_close(mine[name], whole[name][own] / 2)
        assert ranks.sent >= int((routed(only)[1][part] // 2 == 1 - rank).sum()) * WIDTH


class Wide(DividedExperts):
    @staticmethod
    def sent_dtype(tokens: Tensor) -> torch.dtype:
        return tokens.dtype


def in_autocast(has_bias: bool, only: int, kind: type[DividedExperts], rank: int) -> tuple[dict[str, Tensor], int]:
    """Outputs and gradients under bf16 autocast, and bytes sent."""
    mixture, ranks, experts = divided(Experts(has_bias).float())
    forward = kind(experts, type(experts).forward.__get__(experts), ranks, mixture)
    tokens, index, weights = (tensor[rank * TOKENS : (rank + 1) * TOKENS] for tensor in routed(only))
    tokens, weights = tokens.float().requires_grad_(), weights.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = forward(tokens, index, weights)
    out.square().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return found, ranks.sent_bytes  # type: ignore[return-value]


@on_ranks(2)
def test_tokens_under_autocast_are_sent_in_half_the_bytes_with_the_same_values(rank: int, world_size: int) -> None:
    for has_bias, only in itertools.product((False, True), (1, 2)):
        # The last experts alone: the first rank gets no token.
        narrow, few = in_autocast(has_bias, only, DividedExperts, rank)
        wide, many = in_autocast(has_bias, only, Wide, rank)
        for name, value in wide.items():
            assert value.dtype == torch.float32
            assert torch.equal(narrow[name], value), name
        assert few == many * (0.75 if has_bias else 0.5)


# --- expertBalance in one process and on two ranks: the load of all ranks' tokens, by each strategy ------------------


VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}


def fit(folder: Path, strategy: Any, devices: int, task: Any = None, data: Any = None, **more: Any) -> ExpertBalance:
    seed_everything(0, verbose=False)
    if task is None:
        options = MixtureOptions(count=5, aux_loss=0.1, capacity_factor=0.8)
        task = ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, experts=options, lr=1e-3)
        data = DigitsData(image_size=16, batch_size=4)
    callback = ExpertBalance(**more)
    options = {"max_steps": 4, "log_every_n_steps": 2, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = quiet_trainer(devices=devices, strategy=strategy, callbacks=[callback], **options)
    trainer.fit(task, datamodule=data)
    return callback


class Rows(LightningDataModule):
    """Random tokens."""

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(1)
        ids = [torch.randint(96, (2, 12), generator=draw) for _ in range(4)]
        return DataLoader([{"input_ids": part, "labels": part} for part in ids], batch_size=None)  # type: ignore[arg-type]


def test_it_logs_and_plots_the_load_of_a_mixture_of_transformers(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", **FAMILIES["llama"], "num_local_experts": 4}
    found = fit(tmp_path, "auto", 1, CausalLM(config=config), Rows(), every=3, log_experts=True)
    assert [step for step, _ in found.history] == [3, 4]  # The rest of the run at its end.
    for _, layers in found.history:
        assert list(layers) == [f"model.model.layers.{number}.mlp.gate" for number in range(2)]
        for balance in layers.values():
            assert float(balance.load.sum()) == pytest.approx(1)
            assert balance.dropped == 0
            assert 0.5 < balance.entropy <= 1
    scalars = balance_scalars(found.history[-1][1], True)
    assert scalars["experts/peak"] >= 1
    assert len(scalars) == 4 + 2 * 4 + 2 * 4
    assert (tmp_path / "expert_balance.png").stat().st_size > 10_000


def test_a_model_without_experts_is_refused_before_ranks_start() -> None:
    task = ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10)
    with pytest.raises(DloError, match="must have a mixture of experts, got ImageClassifier"):
        ExpertBalance().check_run(Trainer(logger=False), task)
    with pytest.raises(DloError, match="every must be at least 1, got 0"):
        ExpertBalance(every=0)


STRATEGIES: dict[str, Any] = {
    "fsdp": FSDPStrategy,
    "zero3": partial(ZeroStrategy, 3),
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=2),
}


def on_ranks(rank: int, world_size: int, folder: Path, names: list[str]) -> list[Any]:
    return [fit(folder, STRATEGIES[name](), world_size).history for name in names]


@pytest.mark.parametrize("names", [["pp"], pytest.param([*STRATEGIES], marks=pytest.mark.slow)])
def test_ranks_log_the_load_of_one_process(tmp_path: Path, names: list[str]) -> None:
    alone = fit(tmp_path, "auto", 1).history
    assert any(balance.dropped > 0 for _, layers in alone for balance in layers.values())
    for name, history in zip(names, run_distributed(on_ranks, 2, tmp_path, names, backend=None)[0], strict=True):
        assert [step for step, _ in history] == [2, 4], name
        # A pipeline's load-balancing loss is that of its micro-batches: only its first log is that of one process.
        for (_, mine), (_, theirs) in list(zip(alone, history, strict=True))[: 1 if name == "pp" else None]:
            assert mine.keys() == theirs.keys(), name
            for router, balance in mine.items():
                torch.testing.assert_close(theirs[router].load, balance.load, rtol=0, atol=0.02)
                assert theirs[router].dropped == pytest.approx(balance.dropped, abs=0.02), name
                assert theirs[router].entropy == pytest.approx(balance.entropy, rel=1e-3), name


# experts on simulated ranks: each holds its share of the state, and sends as many tokens as the formula says


ROWS, LENGTH = 2, 16
SPEC = MeshSpec(dp_replicate=2, dp_shard=3, cp=2, ep=2)


def task(config: dict[str, Any]) -> Any:
    return CausalLM(config=config).on_meta()


def described(task: Any, spec: MeshSpec) -> MeshDescription:
    return describe_mesh(task, task.parallel_plan(), spec)


def batch(length: int = LENGTH, rows: int = ROWS) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def exchanged(found: Any) -> int:
    return sum(row.elements for row in found.traffic if row.kind == "all_to_all" and row.axis == "ep")


def test_each_rank_has_its_experts_and_sends_what_the_formula_says() -> None:
    config = tiny("qwen3_moe", num_hidden_layers=3, vocab_size=97)
    model = task(config)
    drawn = described(model, SPEC)
    experts = 4
    for found in simulate_ranks(model, MeshStrategy(), SPEC, [11], batch()):
        assert found.state_bytes == drawn.ranks[found.rank].state_bytes
        # A rank's tokens go to k experts and come back, in forward and in backward, with its own share of them.
        tokens = ROWS * LENGTH // SPEC.cp
        assert exchanged(found) == 4 * 2 * tokens * 32 * 3
    assert drawn.groups["ep"][:3] == ((0, 1), (2, 3), (4, 5))
    assert drawn.mixtures is not None
    assert (drawn.mixtures.experts, drawn.mixtures.local, drawn.mixtures.mixtures) == (experts, 2, 3)
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert drawn.mixtures.parameters == stacked
    assert drawn.mixtures.active == drawn.parameters - stacked // 2
    text = drawn.text()
    assert "3 mixtures of 4 experts, 2 for a token" in text
    assert "each rank has 2" in text
    # All copies of the state together: each element once in each.
    assert sum(rank.state_bytes.parameters for rank in drawn.ranks) == 2 * drawn.unsharded.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec", "rank"),
    [
        ("gpt_oss", MeshSpec(dp_replicate=2, dp_shard=8, ep=2), 7),  # 4 ranks share 2 experts.
        ("gpt_oss", MeshSpec(dp_shard=8), 7),  # 8 ranks share 4 experts, and their biases unevenly.
        ("qwen3_moe", MeshSpec(dp_shard=8, tp=2, ep=2), 7),  # 4 ranks share the halves of 2 experts.
    ],
)
def test_more_ranks_than_experts_have_equal_shares(family: str, spec: MeshSpec, rank: int) -> None:
    model = task(tiny(family, vocab_size=96))
    drawn = described(model, spec)
    for found in simulate_ranks(model, MeshStrategy(), spec, [rank], batch()):
        assert found.state_bytes == drawn.ranks[rank].state_bytes
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    # Of what is not in experts, tp leaves some in full.
    least = stacked / (8 * spec.tp) + (drawn.parameters - stacked) / 8
    assert drawn.largest.state_bytes.total <= 1.03 * 16 * least


def test_ranks_that_cannot_share_experts_are_refused() -> None:
    strategy = MeshStrategy(dp_shard=3, ep=3)
    strategy.num_nodes, strategy.parallel_devices = 1, [torch.device("cpu")] * 3
    with pytest.raises(DloError, match=r"ep must divide the 4 experts of 'model.layers.0.mlp', got 3; set ep=2"):
        strategy.check_model(task(tiny("mixtral")))
    with pytest.raises(DloError, match=r"ep must have mixtures of experts to divide, got 3 for LlamaForCausalLM"):
        strategy.check_model(task(tiny("llama")))
    for family in ("jetmoe", "longcat_flash"):
        with pytest.raises(DloError, match=r"ep must have mixtures of experts to divide"):
            strategy.check_model(task(tiny(family)))
    with pytest.raises(DloError, match=r"ep must divide the 4 ranks of dp_shard x cp, .* got 3; set ep=2"):
        MeshSpec(dp_shard=-1, cp=2, ep=3).resolve(4)
    with pytest.raises(DloError, match=r"ep must be at least 1, got 0"):
        MeshSpec(ep=0)
