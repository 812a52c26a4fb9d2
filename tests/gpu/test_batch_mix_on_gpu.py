"""BatchMix on an accelerator: `pytest -m gpu` on a machine that has one."""

import numpy as np
import pytest
import torch

from dlo_plugins.images.batch_mix import (
    MODES,
    MixRecipe,
    draw_plan,
    join_plans,
    mix_images,
    mix_pairs_,
    mix_targets,
    soft_targets,
    to_device,
)

CONFIG = """
seed_everything: 3
trainer:
  max_epochs: 3
  log_every_n_steps: 1
  accelerator: gpu
  devices: 1
  precision: bf16-mixed
  deterministic: warn  # Else each process measures cuDNN's algorithms, and may take others than before the stop.
  callbacks:
    - {class_path: BatchMix, init_args: {mode: elem, label_smoothing: 0.1}}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 4, embed_dim: 96, depth: 4, num_heads: 3}
    schedule: constant
    channels_last: true
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 64, channels_last: true}}
"""


def plan_of(mode: str, size: int = 16):
    """Of two groups, the second one odd."""
    random = np.random.default_rng(0)
    return join_plans(
        [draw_plan(MixRecipe(mode=mode), part, 24, 32, random) for part in (size // 2 + 1, size - size // 2 - 1)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", MODES)
def test_it_mixes_as_a_cpu_does_and_keeps_precision_and_memory_format(mode, layout, dtype):
    images = torch.randn(16, 3, 24, 32).contiguous(memory_format=layout)
    plan = plan_of(mode)
    on_gpu = images.to("cuda", dtype)
    before = on_gpu.clone()
    mixed = mix_images(on_gpu, plan, to_device(plan, on_gpu.device), in_place=True)
    assert mixed.dtype == dtype
    assert mixed.stride() == on_gpu.stride()
    assert torch.equal(on_gpu, before)
    expected = mix_pairs_(images.to(dtype).double(), plan)
    torch.testing.assert_close(mixed.double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    targets = torch.arange(16) % 5
    found = mix_targets(soft_targets(targets.cuda(), 5, 0.1), to_device(plan, on_gpu.device))
    on_cpu = mix_targets(soft_targets(targets, 5, 0.1), to_device(plan, targets.device))
    torch.testing.assert_close(found.cpu(), on_cpu)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_device(mode):
    images, targets = torch.randn(16, 3, 24, 32, device="cuda"), torch.arange(16, device="cuda") % 5

    def mix():
        plan = plan_of(mode)
        on_device = to_device(plan, images.device)
        mix_images(images, plan, on_device, in_place=True)
        mix_targets(soft_targets(targets, 5, 0.1), on_device)

    mix()  # The first call may wait for memory.
    torch.cuda.set_sync_debug_mode("error")
    try:
        mix()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_run_learns_and_goes_on_where_it_was_cut(dlo, curve):
    (dlo.folder / "mix.yaml").write_text(CONFIG)
    dlo("fit", "--config", "mix.yaml", "--run.name", "whole")
    dlo("fit", "--config", "mix.yaml", "--run.name", "cut", "--trainer.max_steps", "30")
    dlo("fit", "--config", "mix.yaml", "--run.name", "cut", "--ckpt_path", "last")
    whole, cut = (curve(dlo.folder / "runs" / name / "version_0") for name in ("whole", "cut"))
    assert whole[max(whole)] < whole[min(whole)]
    assert cut == pytest.approx(whole, rel=1e-4)
