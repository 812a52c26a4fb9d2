"""ExpertBalance in one process and on two ranks: the load of all ranks' tokens, by each strategy."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.experts.expert_balance import ExpertBalance, balance_scalars
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}


def fit(folder: Path, strategy: Any, devices: int, task: Any = None, data: Any = None, **more: Any) -> ExpertBalance:
    seed_everything(0, verbose=False)
    if task is None:
        options = MixtureOptions(count=5, aux_loss=0.1, capacity_factor=0.8)
        task = ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, experts=options, lr=1e-3)
        data = DigitsData(image_size=16, batch_size=4)
    callback = ExpertBalance(**more)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_steps": 4, "log_every_n_steps": 2},  # type: ignore[arg-type]
        **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0},  # type: ignore[arg-type]
        **{"enable_checkpointing": False, "default_root_dir": folder, "callbacks": [callback]},  # type: ignore[arg-type]
        use_distributed_sampler=False,
    )
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
