"""Mixtures of experts of the tasks: they start as the dense model, train, and come back from a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from timm.layers.mlp import SwiGLU

from dlo_framework import load_from_checkpoint
from dlo_framework.errors import DloError
from dlo_framework.models.experts import MixtureOptions, find_mixtures
from dlo_framework.models.experts.layer import MixtureLayer
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, complete_ids
from support.token_batches import FAMILIES
from support.trainers import quiet_trainer

VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
LLAMA = {"model_type": "llama", **FAMILIES["llama"], "num_hidden_layers": 4}


def vit(experts: MixtureOptions | None, model: str = "vit_tiny_patch16_224", **more: Any) -> ImageClassifier:
    seed_everything(0, verbose=False)
    args = more.pop("model_args", VIT)
    task = ImageClassifier(model, model_args=args, num_classes=10, image_size=16, experts=experts, **more)
    task.configure_model()
    return task


def llama(experts: MixtureOptions | None, **more: Any) -> CausalLM:
    seed_everything(0, verbose=False)
    task = CausalLM(config={**LLAMA, **more}, experts=experts)
    task.configure_model()
    return task


mixtral = partial(llama, model_type="mixtral", num_local_experts=4)


@pytest.mark.parametrize("options", [{}, {"every": 1, "top_k": 3}, {"shared": True}, {"router": "sigmoid"}])
@pytest.mark.parametrize("gated", [False, True])
def test_a_vit_starts_as_the_dense_one(options: dict[str, Any], gated: bool) -> None:
    args = {**VIT, "mlp_layer": SwiGLU} if gated else VIT
    dense, mixed = (vit(experts, model_args=args) for experts in (None, MixtureOptions(count=4, **options)))
    assert mixed.model.blocks[1].mlp.experts.gated == gated
    count = 4 if options.get("every") == 1 else 2
    assert [isinstance(block.mlp, MixtureLayer) for block in mixed.model.blocks].count(True) == count
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(mixed.model(images), dense.model(images))
    mixed.parallel_plan().validate(mixed.model)
    assert len(find_mixtures(mixed.model)) == count


def test_a_llama_starts_as_the_dense_one_and_its_plan_fits() -> None:
    dense, mixed = llama(None), llama(MixtureOptions(count=4))
    ids = torch.randint(96, (2, 12))
    torch.testing.assert_close(mixed(input_ids=ids), dense(input_ids=ids))
    plan = mixed.parallel_plan()
    plan.validate(mixed.model)
    assert plan.experts
    llama(MixtureOptions(count=4, every=1)).parallel_plan()


def test_a_run_trains_experts_moves_biases_and_loads_again(tmp_path: Path) -> None:
    task = vit(MixtureOptions(count=4, bias_rate=0.01, capacity_factor=1.0), lr=1e-2)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trainer = quiet_trainer(max_steps=3, default_root_dir=tmp_path, limit_val_batches=0, accumulate_grad_batches=2)
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=8))
    after = task.state_dict()
    for name in ("gate.weight", "gate.e_score_correction_bias", "experts.up_proj", "experts.down_proj_bias"):
        assert not torch.equal(before[f"model.blocks.1.mlp.{name}"], after[f"model.blocks.1.mlp.{name}"]), name
    bias = after["model.blocks.1.mlp.gate.e_score_correction_bias"] / 0.01
    torch.testing.assert_close(bias, bias.round())  # Three steps of the rate, up or down.
    assert bias.abs().max() <= 3
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = load_from_checkpoint(ImageClassifier, tmp_path / "one.ckpt")
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(loaded.model.eval()(images), task.model.eval()(images))


def test_weight_decay_leaves_out_the_biases_of_experts() -> None:
    task = vit(MixtureOptions(count=4))
    groups = task._optimizer(task.model).param_groups
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    experts = task.model.blocks[1].mlp.experts
    assert id(experts.up_proj) in decayed
    assert id(experts.up_proj_bias) not in decayed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vit(MixtureOptions(count=4, every=9)), "experts.every must be at most 4"),
        (lambda: vit(MixtureOptions(count=4), "resnet18", model_args={}), "whose blocks have MLPs, got ResNet"),
        (lambda: llama(MixtureOptions(count=4, router="expert_choice")), "must be softmax or sigmoid for a causal"),
        (lambda: llama(MixtureOptions()), "must have a mixture of experts, got LlamaForCausalLM"),
        (lambda: mixtral(MixtureOptions(count=4)), "must be unset for a model with mixtures"),
        (lambda: mixtral(MixtureOptions(bias_rate=0.1)), "must be 0 for routers without e_score_correction_bias"),
        (lambda: mixtral(MixtureOptions(), output_router_logits=True), "must be 0 with config.output_router_logits"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(DloError, match=message):
        make()


def test_a_mixture_with_transformers_loss_completes_prompts() -> None:
    task = mixtral(None, output_router_logits=True)
    ids = torch.randint(96, (2, 5))
    found = complete_ids(task.model, ids, torch.ones_like(ids), Sampling(max_new_tokens=3), None, False)  # type: ignore[arg-type]
    assert found.shape == (2, 3)
    assert task.model.config.output_router_logits
