"""DeepSpeed on one accelerator trains as the plain loop does, offloaded too, and its checkpoints are everybody's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import check_same
from support.deepspeed_nets import CUT_ALL, Model, ds
from support.runs import Watch

BRIDGES: dict[str, Any] = {
    "0": ds(0),
    "1": ds(1),
    "2": ds(2, overlap_comm=True),
    "3": ds(3, config=CUT_ALL),
    "2 offloaded": ds(2, offload_optimizer="cpu"),
    "3 offloaded": ds(3, offload_optimizer="cpu", offload_parameters="cpu"),
}


def _train(strategy: Any, save: Path, resume: Path | None, **options: Any) -> tuple[list[float], LightningModule]:
    seed_everything(7, workers=True, verbose=False)
    watch, module = Watch(save if resume is None else None, batch=4), Model()
    made = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        max_steps=8,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[watch, ExactResume()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    use_canonical_checkpoints(made)
    made.fit(module, datamodule=DigitsData(image_size=16, batch_size=48), ckpt_path=resume)
    made.save_checkpoint(save.with_name(f"{save.name}-end"))
    return watch.losses, module


def _all(rank: int, world_size: int, folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        options: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        expected, _ = _train("auto", folder / f"plain-{precision}", None, **options)
        for name, bridge in BRIDGES.items():
            path = folder / f"{name}-{precision}"
            found, _ = _train(bridge(), path, None, **options)
            close = 1e-4 if precision == "32-true" else 3e-2
            assert found == pytest.approx(expected, rel=close), (name, precision)
            again, _ = _train(bridge(), folder / f"{name}-{precision}-again", path, **options)
            assert again == found[4:], (name, precision)
            check_same(folder / f"{name}-{precision}-end", folder / f"{name}-{precision}-again-end")


@pytest.mark.timeout(1000)  # Above what the ranks are given.
def test_each_stage_is_the_plain_loop_and_resumes_bit_equal(tmp_path: Path) -> None:
    run_distributed(_all, 1, tmp_path, backend=None, timeout=900)
