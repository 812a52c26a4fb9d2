"""Small modules that are odd in what they do, as people write them: what every strategy must train as one process does.

:data:`MODULES` has them by name: tasks whose net is four blocks of an MLP between a stem and a head, with a difference.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from dlo_framework import ParallelPlan, Task
from dlo_framework.plan import tied_groups

ROWS, INPUTS, WIDTH, CLASSES = 16, 6, 8, 3
DATA = ("ddp", "zero1", "zero2", "zero3", "fsdp", "deepspeed1", "deepspeed2", "deepspeed3")
PIPELINES = ("1F1B", "Interleaved1F1B", "ZBV", "Varuna")
#: Without those that run neither a training step nor a whole loss.
STEPS = (*DATA, "tp")


def batches(steps: int = 4) -> list[Any]:
    """Returns global batches: inputs [ROWS, INPUTS] in double precision, and classes [ROWS]."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(steps)
    ]


class Block(nn.Module):
    """Residual block of an MLP, as `docs/write/task.md` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.more()

    def more(self) -> Any:
        """Adds what the oddity needs."""

    def act(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Stem, four blocks, head."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.more()

    def more(self) -> Any:
        """Adds what the oddity needs."""

    def body(self, x: Tensor, order: Any = range(4), run: Callable[..., Tensor] = lambda block, x: block(x)) -> Tensor:
        for number in order:
            x = run(self.blocks[number], x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.stem(x)))


class Odd(Task):
    """The common task.

    Attributes:
        strategies: Strategies under which it is meant to run.
        per_forward: Whether each forward changes something, so that one process must see a pipeline's micro-batches.
        trainer_options: Further options of the trainer.
    """

    block: type[nn.Module] = Block
    net: type[Net] = Net
    strategies: tuple[str, ...] = (*STEPS, *PIPELINES)
    per_forward = False
    trainer_options: Any = None
    rules = ("fc1", "fc2")

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(2)
            self.model = self.net(self.block)
            self.change(self.model)

    def change(self, net: Any) -> Any:
        """Changes the net."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-3, weight_decay=0.1)

    def parallel_plan(self) -> ParallelPlan:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        tops = dict.fromkeys(name.partition(".")[0] for name, _ in tensors)
        return ParallelPlan(
            blocks=("blocks.*",),
            stem=tuple(name for name in tops if name not in ("blocks", "head")),
            head=("head",),
            tensor=dict(zip((f"blocks.*.{name}" for name in self.rules), ("column", "row"), strict=True)),
            tied=tied_groups(self.model),
        )


class Manual(Odd):
    """Optimizes by hand; `before` does what people do between backward and step."""

    strategies = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def before(self) -> Any:
        """Does nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(self(batch[0]), batch)
        self.manual_backward(loss)
        self.before()
        optimizer.step()
        return {"loss": loss.detach()}


def block(forward: Any = None, more: Any = None, act: Any = None) -> type[nn.Module]:
    given = {"forward": forward, "more": more, "act": act}
    return type("Block", (Block,), {name: value for name, value in given.items() if value is not None})


def net(forward: Any = None, more: Any = None) -> type[Net]:
    given = {"forward": forward, "more": more}
    return type("Net", (Net,), {name: value for name, value in given.items() if value is not None})


def odd(base: type[Odd] = Odd, **members: Any) -> type[Odd]:
    return type("Odd", (base,), members)


def put(target: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def each(function: Callable[[Any], Any]) -> Callable[..., None]:
    """Returns a `change` that calls a function with each block."""

    def change(_: Any, model: Any) -> None:
        for one in model.blocks:
            function(one)

    return change


def gained(gain: Any, more: Any) -> type[Odd]:
    """Returns a task whose blocks multiply their input by something made of odd parameters."""
    return odd(block=block(lambda self, x: Block.forward(self, x * gain(self)), more))


def on_tokens(more: Any, mix: Any) -> type[Odd]:
    """Returns a task whose blocks mix four tokens of two features each."""
    return odd(block=block(lambda self, x: Block.forward(self, x + mix(self, x.view(-1, 4, 2)).flatten(1)), more))


def penalised(penalty: Any, strategies: tuple[str, ...] = STEPS) -> type[Odd]:
    return odd(strategies=strategies, loss=lambda self, out, batch: Odd.loss(self, out, batch) + 0.05 * penalty(self))


def hooked(function: Callable[[Any, Any], Any], names: str = "", **members: Any) -> type[Odd]:
    """Returns a task of which a hook is set on each parameter whose name has a part."""
    change = lambda _, model: [function(name, p) for name, p in model.named_parameters() if names in name]
    return odd(change=change, **members)


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def clipped(grad: Tensor) -> Tensor:
    return grad * (0.01 / grad.norm()).clamp(max=1)


@dataclasses.dataclass
class Found:
    logits: Tensor
    norm: Tensor


def lazily(self: Any, x: Tensor, register: Any) -> Tensor:
    if getattr(self, "table", None) is None:
        register(self, torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype, device=x.device))
    return Block.forward(self, x * self.table)


def lerped(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.average.lerp_(self.norm.weight.norm(), 0.1)
    return Block.forward(self, x) / self.average.clone()


def branched(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return Block.forward(self, x) + (self.other(x) if self.calls % 2 else 0 * self.other(x))


def carried(self: Any, x: Tensor) -> Tensor:
    x = self.cell(self.stem(x), self.state)
    self.state = x.detach()
    return self.head(self.body(x))


def embedded(self: Any, x: Tensor) -> Tensor:
    words = (x[:, :2].abs() * 2).long().clamp(max=4)
    return self.head(self.body(self.stem(x) + self.table(words[:, 0]) + self.bag(words)))


def two_views() -> dict[str, Tensor]:
    both = torch.ones(2 * WIDTH)
    return {"one": both[:WIDTH], "two": both[WIDTH:]}


def with_stem(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    stem = self.stem(x)
    return self.head(self.body(stem)), stem


def initialised(self: Any, x: Tensor) -> Tensor:
    if self.training and not self.done:
        self.done = True
        with torch.no_grad():
            self.gain.copy_(torch.linspace(0.5, 1.5, WIDTH))
    return Block.forward(self, x * self.gain)


def reassigned(self: Any, hidden: Tensor) -> Tensor:
    self.scale = self.scale * 0.95
    return F.gelu(hidden) * self.scale


class GradientPenalty(Odd):
    strategies = STEPS

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        outputs = self(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return {"loss": self.loss(outputs, batch) + 0.1 * slope.square().mean()}


class TwoGroups(Odd):
    def configure_optimizers(self) -> Any:
        decayed, others = ([p for p in self.parameters() if (p.ndim == 2) == flag] for flag in (True, False))
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 1.0])]


class Adversarial(Manual):
    def change(self, net: Any) -> Any:
        net.critic = nn.Sequential(nn.Linear(CLASSES, 4), nn.ReLU(), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        named = [("critic" in name, p) for name, p in self.model.named_parameters()]
        parts = ([p for of_critic, p in named if of_critic == flag] for flag in (False, True))
        return [torch.optim.AdamW(part, lr=0.02, eps=1e-3) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (made, judged), critic, outputs = self.optimizers(), self.model.critic, self(batch[0])  # type: ignore[misc]
        losses: list[Any] = []
        for optimizer, loss in (
            (judged, lambda: critic(outputs.detach()).square().mean() + critic(batch[0][:, :3]).mean()),
            (made, lambda: self.loss(outputs, batch) + 0.1 * critic(outputs).mean()),
        ):
            self.toggle_optimizer(optimizer)
            losses.append(loss())
            optimizer.zero_grad()
            self.manual_backward(losses[-1])
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return {"loss": losses[-1].detach()}


class Sharpness(Manual):
    """SAM's two passes, with a step along the gradient."""

    def before(self) -> Any:
        with torch.no_grad():
            moved = [(p, 0.01 * p.grad) for p in self.parameters() if p.grad is not None]
            for parameter, step in moved:
                parameter.add_(step)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(self(self.batch[0]), self.batch))
        with torch.no_grad():
            for parameter, step in moved:
                parameter.sub_(step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch
        return super().training_step(batch, batch_idx)


class MomentumEncoder(Odd):
    strategies = STEPS

    def change(self, net: Any) -> Any:
        net.slow = copy.deepcopy(net.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        model: Any = self.model
        with torch.no_grad():
            for slow, fast in zip(model.slow.parameters(), model.head.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        hidden = model.body(model.stem(batch[0]))
        outputs, target = model.head(hidden), model.slow(hidden.detach())
        return {"loss": self.loss(outputs, batch) + 0.1 * F.mse_loss(outputs, target)}


class NormBetweenSteps(Odd):
    """Reads all weights and averages of them in hooks, and computes a loss with the norms."""

    strategies = STEPS
    size = 0.0

    def on_train_start(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        torch._foreach_lerp_(self.averages, [parameter.detach() for parameter in self.parameters()], 0.1)
        self.size = float(sum(one.detach().norm() for one in (*self.averages, *self.parameters())))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) * (1 + 0.1 * self.size)


class NormOfGradients(Odd):
    """Computes a loss with the gradients' norm, by Lightning's function."""

    size = 0.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.size = float(grad_norm(self, 2)["grad_2.0_norm_total"])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) * (1 + round(self.size, 4))


class NormAfterStep(NormOfGradients):
    """The same with the norm that a hook after the step computes."""

    strategies = ("ddp", "tp", *PIPELINES)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Does nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.size = float(sum(p.grad.norm() for p in self.model.blocks.parameters() if p.grad is not None))


class SwappedForValidation(Odd):
    """Validates other weights, and restores those of training."""

    strategies = STEPS

    def val_dataloader(self) -> Any:
        x, y = batches()[0]
        return torch.utils.data.DataLoader([(x.to(self.model.head.weight.dtype), y)], batch_size=None)  # type: ignore[arg-type, union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(self(batch[0]), batch), sync_dist=True)

    @torch.no_grad()
    def on_validation_start(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.mul_(0.5)

    @torch.no_grad()
    def on_validation_end(self) -> None:
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.copy_(kept)


class HeldWeights(Odd):
    """Keeps weights in a list from before the strategy cuts the model."""

    def __init__(self) -> None:
        super().__init__()
        self.configure_model()
        self.penalised = [*self.model.blocks.parameters()]  # type: ignore[union-attr]

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) + 0.1 * sum(one.square().sum() for one in self.penalised)


class InOptimizerStep(Odd):
    """Decays weights around the step that an overridden ``optimizer_step`` takes."""

    strategies = STEPS

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.decay()
        super().optimizer_step(*args, **kwargs)
        self.decay()

    @torch.no_grad()
    def decay(self) -> None:
        for parameter in self.model.blocks.parameters():
            parameter.mul_(1 - 0.01 * parameter.norm())


class StateInStep(Odd):
    """Copies a head into another in the step, by ``state_dict``."""

    strategies = STEPS
    net = net(lambda self, x: Net.forward(self, x) + self.other(self.body(self.stem(x))))

    def change(self, net: Any) -> Any:
        net.other = copy.deepcopy(net.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model.other.load_state_dict(self.model.head.state_dict())
        return super().training_step(batch, batch_idx)


class BuiltInSetup(Odd):
    def setup(self, stage: str) -> None:
        torch.manual_seed(11)
        self.extra = nn.Linear(CLASSES, CLASSES)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(self.extra(outputs), batch)


class WeightOfTheLoss(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.weight_of_loss = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs, batch) * torch.exp(-self.weight_of_loss) + self.weight_of_loss


def assigns(self: Any, *_: Any) -> None:
    for parameter in self.model.blocks.parameters():
        parameter.data = parameter.data * 0.9


def clips(self: Any, *_: Any) -> None:
    nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def scales(self: Any) -> None:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def decays(self: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in self.model.blocks.parameters():
            parameter.mul_(0.9)


class Clamps(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.model.blocks.parameters():
            parameter.data.clamp_(-0.2, 0.2)


TABLE = torch.linspace(0.5, 1.5, WIDTH)
MODULES: dict[str, type[Odd]] = {
    "plain": odd(),
    # Tied, shared, reused.
    "head of the stem": odd(
        net=net(lambda s, x: Net.forward(s, x) + F.linear(s.body(s.stem(x)), s.stem.weight.t())[:, :CLASSES])
    ),
    "tied blocks": odd(change=lambda s, net: put(net.blocks[2].fc1, weight=net.blocks[0].fc1.weight)),
    "one norm object": odd(change=lambda s, net: [put(one, norm=net.blocks[0].norm) for one in net.blocks]),
    "one batch norm object": odd(
        block=block(more=lambda s: put(s, norm=nn.BatchNorm1d(WIDTH))),
        change=lambda s, net: [put(one, norm=net.blocks[0].norm) for one in net.blocks],
        strategies=PIPELINES,
        per_forward=True,
    ),
    "same block twice": odd(change=lambda s, net: net.blocks.__setitem__(1, net.blocks[0])),
    "tied transposed": odd(
        block=block(lambda s, x: x + F.linear(F.gelu(s.fc1(s.norm(x))), s.fc1.weight.t(), s.fc2.bias)),
        change=each(lambda one: one.fc2.weight.requires_grad_(False)),
    ),
    "recurrent depth": odd(net=net(lambda s, x: s.head(0.5 * s.body(0.5 * s.body(s.stem(x)))))),
    "forward without hooks": odd(
        net=net(lambda s, x: s.head(s.body(s.stem(x), run=lambda one, x: one.forward(x)))), strategies=STEPS
    ),
    "out of order": odd(net=net(lambda s, x: s.head(s.body(s.stem(x), (2, 0, 3, 1))))),
    "stem at the end": odd(net=net(lambda s, x: s.head(s.body(s.stem(x)) + s.stem(x)))),
    # Buffers.
    "reassigned buffer": odd(
        block=block(act=reassigned, more=lambda s: s.register_buffer("scale", torch.ones(1))), per_forward=True
    ),
    "lazy buffer": odd(
        block=block(lambda s, x: lazily(s, x, lambda s, t: s.register_buffer("table", t, persistent=False)))
    ),
    "view of a buffer": gained(
        lambda s: s.first,
        lambda s: [s.register_buffer("all", torch.cat([TABLE, TABLE])), s.register_buffer("first", s.all[:WIDTH])],
    ),
    "running norm of weights": odd(
        block=block(lerped, lambda s: s.register_buffer("average", torch.ones(()))), per_forward=True
    ),
    "buffer set by the task": odd(
        net=net(
            lambda s, x: Net.forward(s, x) / s.temperature, lambda s: s.register_buffer("temperature", torch.ones(()))
        ),
        on_train_batch_start=lambda s, batch, number: put(
            s.model, temperature=torch.full_like(s.model.temperature, 1.0 + 0.2 * number)
        ),
    ),
    "frozen statistics": odd(block=block(more=lambda s: put(s, norm=nn.BatchNorm1d(WIDTH).eval()))),
    # Parametrisations.
    "weight norm": odd(change=each(lambda one: parametrizations.weight_norm(one.fc1))),
    "spectral norm": odd(change=each(lambda one: parametrizations.spectral_norm(one.fc1)), per_forward=True),
    "pruned": odd(change=each(lambda one: prune.l1_unstructured(one.fc1, "weight", 0.5))),
    # Kinds of parameters.
    "scalar": gained(lambda s: s.scale, lambda s: put(s, scale=nn.Parameter(torch.tensor(1.1)))),
    "complex": gained(
        lambda s: 1 + 0.1 * (s.phase * s.phase.conj()).real.to(s.norm.weight.dtype),
        lambda s: put(s, phase=nn.Parameter(torch.randn(WIDTH, dtype=torch.cdouble))),
    ),
    "empty": gained(lambda s: 1 + s.none.sum(), lambda s: put(s, none=nn.Parameter(torch.zeros(0)))),
    "integer": gained(
        lambda s: 1 + 0.1 * s.order, lambda s: put(s, order=nn.Parameter(torch.arange(WIDTH), requires_grad=False))
    ),
    "strided": odd(
        block=block(more=lambda s: put(s.fc2, weight=nn.Parameter(s.fc2.weight.detach().t().contiguous().t())))
    ),
    "views of one tensor": gained(
        lambda s: s.one * s.two, lambda s: put(s, **{n: nn.Parameter(p) for n, p in two_views().items()})
    ),
    "weight of the loss": WeightOfTheLoss,
    "frozen middle": odd(
        change=lambda s, net: [net.blocks[1].requires_grad_(False), net.blocks[2].fc1.weight.requires_grad_(False)]
    ),
    "unfrozen later": odd(
        change=lambda s, net: net.head.bias.requires_grad_(False),
        configure_optimizers=lambda s: torch.optim.AdamW(s.parameters(), lr=0.02, eps=1e-3),
        on_train_batch_start=lambda s, batch, number: [None, s.model.head.bias.requires_grad_(number >= 2)][0],
    ),
    # What a forward does.
    "branch by step": odd(
        block=block(branched, lambda s: put(s, other=nn.Linear(WIDTH, WIDTH), calls=0)), per_forward=True
    ),
    "dataclass of outputs": odd(
        net=net(lambda s, x: (lambda out: Found(out, out.square().mean(1)))(Net.forward(s, x))),
        loss=lambda s, out, batch: F.cross_entropy(out.logits, batch[1]) + 0.1 * out.norm.mean(),
    ),
    "stem in the loss": odd(
        net=net(with_stem),
        loss=lambda s, out, batch: F.cross_entropy(out[0], batch[1]) + 0.1 * out[1].square().mean(),
    ),
    "loss in an attribute": odd(
        block=block(lambda s, x: [put(s, penalty=x.square().mean()), Block.forward(s, x)][1]),
        loss=lambda s, out, batch: Odd.loss(s, out, batch) + 0.1 * sum(one.penalty for one in s.model.blocks),
    ),
    "loss of what hooks collect": odd(
        change=lambda s, net: [
            put(s, found=[]),
            *(one.register_forward_hook(lambda one, x, y: s.found.append(y.square().mean())) for one in net.blocks),
        ],
        loss=lambda s, out, batch: Odd.loss(s, out, batch) + 0.1 * sum(s.found.pop() for _ in range(len(s.found))),
    ),
    "number that blocks share": odd(
        change=lambda s, net: [
            put(one, shared=net.blocks[0].__dict__.setdefault("shared", {"calls": 0})) for one in net.blocks
        ],
        block=block(
            lambda s, x: [
                s.shared.update(calls=s.shared["calls"] + 1),
                Block.forward(s, x * (1 + 0.01 * s.shared["calls"])),
            ][1]
        ),
        per_forward=True,
    ),
    "writes to its input": odd(block=block(lambda s, x: Block.forward(s, x.mul_(0.9)))),
    "checkpointed by the net": odd(
        net=net(lambda s, x: s.head(s.body(s.stem(x), run=lambda one, x: checkpoint(one, x, use_reentrant=False))))
    ),
    "functional call": odd(
        block=block(lambda s, x: x + functional_call(s.fc2, {"bias": 2 * s.fc2.bias}, F.gelu(s.fc1(s.norm(x)))))
    ),
    "attention": on_tokens(
        lambda s: put(s, mix=nn.MultiheadAttention(2, 2, batch_first=True)), lambda s, x: s.mix(x, x, x)[0]
    ),
    "state between steps": odd(
        net=net(carried, lambda s: put(s, cell=nn.GRUCell(WIDTH, WIDTH), state=None)), strategies=STEPS
    ),
    "sparse gradients": odd(
        net=net(
            lambda s, x: s.head(s.body(s.stem(x) + s.table((x[:, 0].abs() * 2).long().clamp(max=4)))),
            lambda s: put(s, table=nn.Embedding(5, WIDTH, sparse=True)),
        ),
        configure_optimizers=lambda s: torch.optim.SGD(s.parameters(), lr=0.1),
        strategies=("ddp", "zero1", "zero2", "zero3"),
    ),
    "embedded": odd(
        net=net(
            embedded,
            lambda s: put(s, table=nn.Embedding(5, WIDTH, padding_idx=1), bag=nn.EmbeddingBag(5, WIDTH, mode="sum")),
        )
    ),
    # Hooks.
    "hook on weights": hooked(lambda name, p: p.register_hook(lambda grad: 0.5 * grad)),
    # Ranks of other samples clip their own gradients, as under torch's DDP.
    "hook that clips by norm": hooked(
        lambda name, p: p.register_hook(clipped), "fc", strategies=("tp", *PIPELINES), per_forward=True
    ),
    "hook after accumulation": hooked(
        lambda name, p: p.register_post_accumulate_grad_hook(halve), "blocks", strategies=STEPS
    ),
    "hook before forward": odd(change=each(lambda one: one.fc1.register_forward_pre_hook(lambda m, a: (2 * a[0],)))),
    # Losses.
    "L2": penalised(lambda s: sum(p.square().sum() for p in s.parameters()), (*STEPS, *PIPELINES)),
    "norms of weights": penalised(lambda s: sum(one.fc1.weight.norm() for one in s.model.blocks), (*STEPS, *PIPELINES)),
    "orthogonal weights": penalised(
        lambda s: (s.model.blocks[0].fc2.weight @ s.model.blocks[0].fc2.weight.t() - torch.eye(WIDTH)).square().sum()
    ),
    "gradient penalty": GradientPenalty,
    "evaluated block": odd(net=net(lambda s, x: [s.blocks[0].eval(), Net.forward(s, x)][1])),
    # Optimization.
    "two groups": TwoGroups,
    "clipped by value": odd(trainer_options={"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}),
    "clips by itself": odd(on_before_optimizer_step=clips),
    "clips by itself by hand": odd(Manual, before=clips),
    "scales gradients": odd(on_after_backward=scales),
    "by hand": odd(Manual),
    "adversarial": Adversarial,
    "sharpness": Sharpness,
    "callback that clamps weights": odd(configure_callbacks=lambda s: [Clamps()]),
    "norm between steps": NormBetweenSteps,
    "held weights": HeldWeights,
    "norm of gradients": NormOfGradients,
    "norm after the step": NormAfterStep,
    "swapped for validation": odd(SwappedForValidation, trainer_options={"limit_val_batches": 1, "max_epochs": 2}),
    "in optimizer_step": InOptimizerStep,
    "state in the step": StateInStep,
    "assigned between steps": odd(on_train_batch_end=assigns),
    "assigned before the first step": odd(on_train_start=assigns),
    "decays before the step": odd(on_before_optimizer_step=decays),
    "momentum encoder": MomentumEncoder,
    "prototypes of data": odd(
        net=net(
            lambda s, x: [
                s.head.weight.data.div_(s.head.weight.data.norm(dim=1, keepdim=True)),
                Net.forward(s, x),
            ][1]
        ),
        strategies=("ddp", "fsdp"),
    ),
    "largest norm": odd(
        net=net(
            lambda s, x: s.head(s.body(s.stem(x) + s.table(torch.arange(5)).mean(0))),
            lambda s: put(s, table=nn.Embedding(5, WIDTH, max_norm=1.0)),
        )
    ),
    "initialised by use": odd(
        block=block(initialised, lambda s: put(s, gain=nn.Parameter(torch.ones(WIDTH)), done=False))
    ),
    "built in setup": BuiltInSetup,
}
