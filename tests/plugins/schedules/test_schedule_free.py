"""ScheduleFree: the average is validated, saved and left in the module, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.prune.callback import Prune
from dlo_plugins.schedules.schedule_free import AdamWScheduleFree, ScheduleFree
from support.fsdp_nets import Module, mine, trainer

BETA = 0.9


class Free(Module):
    def configure_optimizers(self) -> Any:
        return AdamWScheduleFree(self.net.parameters(), lr=0.05, betas=(BETA, 0.99), warmup_steps=2)


class Watch(Callback):
    """Keeps the weights that the module holds in training and in validation, and saves during validation."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.validated, self.averages = path, [], []

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.append([p.detach().clone() for p in pl_module.parameters()])
        if self.path is not None:
            trainer.save_checkpoint(self.path)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.optimizers[0].state
        self.averages.append([p.detach().lerp(state[p]["z"], 1 - 1 / BETA) for p in pl_module.parameters()])


def run(*callbacks: Any, strategy: Any = "auto", resume: Path | None = None, **options: Any) -> Any:
    made = trainer(1, strategy, callbacks=[ScheduleFree(), ExactResume(), *callbacks], **options)
    use_canonical_checkpoints(made)
    module = Free()
    made.fit(module, mine(0, 1), mine(0, 1, steps=1), ckpt_path=resume)
    return made, module


def test_the_average_is_validated_and_left_and_the_run_is_that_without_validation(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "in validation.ckpt")
    made, module = run(watch, max_epochs=3, limit_val_batches=1)
    assert len(watch.validated) == 3
    for seen, average in zip(watch.validated, watch.averages, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen, average, strict=True))
    assert made.optimizers[0].holds_average
    _, plain = run(max_epochs=3, limit_val_batches=1, num_sanity_val_steps=1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    # The checkpoint that was saved while the average was in the module resumes the trained weights.
    saved = load(tmp_path / "in validation.ckpt")
    trained = saved["current_model_state"]
    name = "net.stem.weight"
    assert torch.equal(saved["state_dict"][name], watch.validated[-1][0])
    assert not torch.equal(trained[name], saved["state_dict"][name])


@pytest.mark.parametrize(
    "options", [{"amount": 0.5, "scope": "layer"}, {"pattern": "1:2"}], ids=["magnitude", "pattern"]
)
def test_an_average_of_pruned_weights_is_pruned_and_the_run_is_that_without_validation(
    tmp_path: Path, options: Any
) -> None:
    def made() -> Prune:
        return Prune(begin=0.0, end=2.0, skip=["net.blocks.*.two"], **options)

    watch, prune = Watch(), made()
    _, module = run(watch, prune, max_epochs=3, limit_val_batches=1, default_root_dir=tmp_path)
    _, plain = run(made(), max_epochs=3, limit_val_batches=0, default_root_dir=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    masks = {item.name: item.pruned for item in prune.shards.items}
    assert len(masks) == 4
    assert all(0.4 < mask.float().mean() < 0.6 for mask in masks.values())
    for name, value in zip(dict(module.named_parameters()), watch.validated[-1], strict=True):
        assert name not in masks or not value[masks[name]].any()


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_a_run_resumes_to_the_bit_from_a_checkpoint_amid_validation_or_training(tmp_path: Path, strategy: str) -> None:
    make = {"auto": lambda: "auto", "zero3": lambda: ZeroStrategy(3)}[strategy]
    path = tmp_path / "one.ckpt"
    _, full = run(strategy=make(), max_epochs=2)
    first, _ = run(Watch(path) if strategy == "auto" else ExactResume(), strategy=make(), limit_val_batches=1)
    if strategy != "auto":
        first.save_checkpoint(path)  # The module holds the average.
    checked = {"limit_val_batches": 1, "num_sanity_val_steps": 1}  # The average is validated before the first step.
    _, again = run(strategy=make(), max_epochs=2, resume=path, **checked)
    assert all(torch.equal(a, b) for a, b in zip(full.parameters(), again.parameters(), strict=True))


def test_what_it_cannot_average_is_refused() -> None:
    with pytest.raises(DloError, match="must have a schedule-free optimizer, got AdamW"):
        trainer(1, "auto", callbacks=[ScheduleFree()]).fit(Module(), mine(0, 1))
    with pytest.raises(DloError, match="one average of the weights, got WeightEMA too"):
        run(WeightEMA(0.9))
    with pytest.raises(DloError, match="must have ScheduleFree with AdamWScheduleFree"):
        trainer(1, "auto").fit(Free(), mine(0, 1))
