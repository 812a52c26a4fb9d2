"""FSDPStrategy on one accelerator: streams, page-locked shards and gathered halves lose nothing."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "32-true"),
    "offload": ({"offload": True}, "32-true"),
    "offload, all gathered ahead": ({"offload": True, "forward_prefetch": 2, "backward_prefetch": 2}, "32-true"),
    "recompute": ({"recompute": True, "reshard_after_forward": True}, "32-true"),
    "autocast": ({"param_dtype": "float32"}, "bf16-mixed"),  # As the plain loop; the default gathers in bf16.
    "loss scale": ({}, "16-mixed"),
    "loss scale, offload": ({"offload": True}, "16-mixed"),  # The scalar's gradient stays on the device.
}
STEPS = 8


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
        self.net = nn.Sequential(nn.Linear(64, 512), *blocks, nn.Linear(512, 10))
        self.scale = nn.Parameter(torch.tensor(0.9))

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) * self.scale).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch.device == self.device != torch.device("cpu")
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 64, generator=generator) for _ in range(2 * STEPS)]


def _train(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, (options, precision) in CASES.items():
        trainer = Trainer(
            accelerator="gpu",
            devices=world,
            strategy=FSDPStrategy(**options),
            precision=precision,
            max_epochs=1,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=None))
        stepped = next(tensor for tensor in trainer.strategy.optimizers[0].state if tensor.ndim)  # Not the scalar.
        found[name] = gather_full_weights(trainer), stepped.device.type
    return found


def reference(precision: str) -> dict[str, Tensor]:
    module = Module().cuda()
    optimizer = module.configure_optimizers()
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    for number, x in enumerate(data()):
        with torch.autocast("cuda", half, enabled=half is not None):
            loss = module.loss(x.cuda()) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {name: value.cpu() for name, value in module.state_dict().items()}


def test_one_device_trains_as_the_plain_loop() -> None:
    (found,) = run_distributed(_train, 1, backend=None)
    for name, (options, precision) in CASES.items():
        weights, home = found[name]
        assert home == ("cpu" if options.get("offload") else "cuda"), name
        for key, value in reference(precision).items():
            atol = 1e-5 if precision == "32-true" else 5e-5
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=atol, msg=f"{name}: {key}")
