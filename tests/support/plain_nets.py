"""A plain LightningModule with what strategies must keep: tied and frozen weights, groups, a scheduler, a buffer."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from dlo_tasks.imagenet.digits import DigitsData


class Orthogonal(torch.optim.Optimizer):
    """Muon's update, its Newton-Schulz iteration in double precision.

    torch's own iterates in bfloat16, which makes of a gradient's last bit, that depends on the order of sums, a
    change of 4e-3: two runs of it agree as well as that allows, whatever the strategy does.
    """

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                x = momentum.double() / momentum.double().norm()
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.add_(x.to(p.dtype), alpha=-group["lr"])
        return loss


class Plain(LightningModule):
    """Knows nothing of dlo. Tied weights, a frozen part, two parameter groups, a scheduler, a buffer."""

    def __init__(self, optimizer: str = "adamw", unused: bool = False, sizes: tuple[int, int] = (24, 48)) -> None:
        super().__init__()
        self.optimizer, (width, inner) = optimizer, sizes
        self.inward = nn.Linear(8 * 8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(3)
        )
        self.tied = nn.Linear(width, inner)
        self.tied.weight = self.blocks[0][0].weight
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.1))
        if unused:
            self.forgotten = nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.inward(images.to(self.dtype).mean(1)[:, ::2, ::2].flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x + self.frozen(x) * self.scale + self.tied(x)[:, : x.shape[1]]))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], ignore_index=-1, reduction="sum")
        self.log("val_loss", loss, sync_dist=True, reduce_fx="sum")  # Ranks share the last batch unevenly.

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
        if self.optimizer == "adamw":
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
        elif self.optimizer == "sgd":
            optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9, nesterov=True)
        elif self.optimizer == "lamb":
            from timm.optim import Lamb

            optimizer = Lamb(trained, lr=5e-3)
        elif self.optimizer == "lookahead":
            from timm.optim import Lookahead

            optimizer = Lookahead(torch.optim.AdamW(trained, lr=1e-3), k=2)  # Every second step is its own.
        elif self.optimizer == "orthogonal":
            optimizer = Orthogonal(matrices, lr=5e-3)
        else:
            optimizer = torch.optim.Muon(matrices, lr=5e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def plain(**arguments):
    return Plain(**arguments), DigitsData(image_size=16, batch_size=32, val_fraction=0.02)
