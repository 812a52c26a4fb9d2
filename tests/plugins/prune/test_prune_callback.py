"""Prune in one process: schedules, exact zeros, patterns, SR-STE, resuming, averages, and what is refused."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP
from matplotlib.figure import Figure
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_plugins.prune import callback
from dlo_plugins.prune.callback import Prune, TicketStart, kept_fraction, next_masks, read_masks, save_masks
from dlo_plugins.prune.layers import NMPattern, follows_pattern
from dlo_plugins.weights.start_from import StartFrom
from support.pruned_nets import masks_of, weights_of
from support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing but in the test of the report: that takes as long as a run."""
    if request.node.name != "test_the_report_is_in_the_run_folder":
        monkeypatch.setattr(callback, "draw_training", lambda *_: Figure())


class Net(LightningModule):
    def __init__(self, optimizer: str = "adamw", seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.kind = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch), batch.argmax(1) % 4)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        if self.kind == "muon":
            return create_optimizer_v2(self, opt="muon", lr=0.01, weight_decay=0.1)
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        if self.kind == "two":
            return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, 2)]
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> DataLoader:
    return DataLoader(torch.randn(160, 8, generator=torch.Generator().manual_seed(0)), batch_size=16)


def trainer_of(tmp_path, *callbacks: Callback, epochs: int = 4, **options: Any) -> Trainer:
    options |= {"max_epochs": epochs, "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    trainer = quiet_trainer(callbacks=list(callbacks), **options)
    use_canonical_checkpoints(trainer)
    return trainer


class Watch(Callback):
    """What the run looks like after each step."""

    def __init__(self) -> None:
        self.sparsity: list[float] = []
        self.masks: list[dict[str, Tensor]] = []
        self.momentum: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        (prune,) = (one for one in trainer.callbacks if isinstance(one, Prune))
        weights = [pl_module.net[0].weight, pl_module.net[2].weight]
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        self.sparsity.append(zeros / sum(weight.numel() for weight in weights))
        self.masks.append({item.name: item.pruned.clone() for item in prune.shards.items})
        state = trainer.optimizers[0].state
        self.momentum.append(
            sum(
                int(value[item.pruned].count_nonzero())
                for item in prune.shards.items
                for value in state[item.tensor].values()
                if isinstance(value, Tensor) and value.shape == item.pruned.shape
            )
        )


def fit(tmp_path, *, optimizer: str = "adamw", epochs: int = 4, **settings: Any) -> tuple[Net, Watch, Prune]:
    net, watch, prune = Net(optimizer), Watch(), Prune(**settings)
    trainer = trainer_of(tmp_path, prune, watch, epochs=epochs)
    trainer.fit(net, loader(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return net, watch, prune


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow), "muon"])
def test_it_follows_the_schedule_with_exact_zeros_and_no_momentum(tmp_path, optimizer):
    _, watch, prune = fit(tmp_path, optimizer=optimizer, amount=0.75, begin="25%", end="75%", every=1)
    assert len(watch.sparsity) == 40
    for step, found in enumerate(watch.sparsity, start=1):
        wanted = 0.0 if step < 10 else callback.cubic_sparsity((step / 40 - 0.25) / 0.5, 0.75)
        assert found == pytest.approx(round(wanted * 384) / 384, abs=1e-6), step
    assert watch.momentum == [0] * 40
    final = watch.masks[-1]
    assert all(torch.equal(watch.masks[29][name], final[name]) for name in final)  # From 75% on they are final.
    for before, after in zip(watch.masks, watch.masks[1:], strict=False):
        assert not any((before[name] & ~after[name]).any() for name in before)  # What is pruned stays so.
    assert [layer.name for layer in prune.layers] == ["net.0.weight", "net.2.weight"]


def test_movement_scores_are_the_sum_of_gradient_times_weight(tmp_path):
    """By the definition of Sanh et al., with weights of full precision kept aside."""
    sums: dict[str, Tensor] = {}
    compared = 0

    class Follow(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            nonlocal compared
            assert prune.shards is not None
            for item in prune.shards.items if trainer.global_step <= 17 else ():
                assert item.scores is not None
                torch.testing.assert_close(item.scores, sums[item.name])
                compared += 1

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            for name in ("net.0.weight", "net.2.weight"):
                weight = pl_module.get_parameter(name)
                sums[name] = sums.get(name, 0) - (weight.grad * weight).detach().clone()

    prune = Prune(method="movement", amount=0.5, begin="90%", end="95%", every=1)
    net = Net("sgd")
    trainer_of(tmp_path, Follow(), prune, epochs=2).fit(net, loader())
    assert compared == 34


def test_sr_ste_is_the_papers_step(tmp_path):
    """W <- W - lr (g(W * M) + decay (1 - M) W), with M of the dense W; equation 9 of arXiv 2102.04010."""
    reference, net = Net("sgd"), Net("sgd")
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)  # type: ignore[method-assign]
    prune = Prune(pattern="2:4", begin="0%", end="100%", decay=0.05)
    dense = [reference.net[0].weight.detach().clone(), reference.net[2].weight.detach().clone()]

    def mask(weight: Tensor) -> Tensor:
        groups = weight.abs().view(-1, 4)
        rank = groups.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < 2).view(weight.shape)

    batches = list(loader())[:6]
    masked = False
    for batch in batches:
        with torch.no_grad():
            for place, weight in zip((0, 2), dense, strict=True):
                reference.net[place].weight.copy_(weight * mask(weight) if masked else weight)
        reference.zero_grad()
        reference.training_step(batch, 0).backward()
        with torch.no_grad():
            for place, weight in zip((0, 2), dense, strict=True):
                pull = 0.05 * weight * ~mask(weight) if masked else 0
                weight -= 0.1 * (reference.net[place].weight.grad + pull)
            for name, parameter in reference.named_parameters():
                if name not in ("net.0.weight", "net.2.weight"):
                    parameter -= 0.1 * parameter.grad
        masked = True
    trainer_of(tmp_path, prune, epochs=1, limit_train_batches=7, max_steps=6).fit(net, loader())
    for place, weight in zip((0, 2), dense, strict=True):
        torch.testing.assert_close(net.net[place].weight.detach(), weight * mask(weight))


@pytest.mark.parametrize(("pattern", "schedule"), [("2:4", "gradual"), ("3:8", "one_shot")])
def test_a_pattern_is_exact_in_every_layer(tmp_path, pattern, schedule):
    net, watch, prune = fit(tmp_path, pattern=pattern, schedule=schedule)
    found = NMPattern.parse(pattern)
    assert found is not None
    for layer in prune.layers:
        weight = net.get_parameter(layer.name).detach()
        assert follows_pattern(weight, found, layer.input_dim)
        assert int((weight == 0).sum()) == round(found.sparsity * weight.numel())
    assert watch.momentum[-1] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"amount": 0.75, "every": 3},
        pytest.param({"method": "movement", "amount": 0.5, "every": 2}, marks=pytest.mark.slow),
        {"pattern": "2:4", "begin": "0%", "end": "100%"},
    ],
)
def test_a_resumed_run_is_the_run(tmp_path, settings):
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 23:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, again = Net(), Net(seed=5)
    first, second = trainer_of(tmp_path, Prune(**settings), Stop()), trainer_of(tmp_path, Prune(**settings))
    # Every batch is the same, so that where in an epoch a run resumes shows only in its state.
    same = DataLoader([next(iter(loader()))] * 10, batch_size=None)
    first.fit(whole, same)
    first.save_checkpoint(tmp_path / "one.ckpt")
    second.fit(again, same, ckpt_path=tmp_path / "middle.ckpt", weights_only=False)
    second.save_checkpoint(tmp_path / "two.ckpt")
    one, two = masks_of(tmp_path / "one.ckpt"), masks_of(tmp_path / "two.ckpt")
    assert all(torch.equal(one[name], two[name]) for name in one)
    before, after = weights_of(tmp_path / "one.ckpt"), weights_of(tmp_path / "two.ckpt")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_masks_of_a_checkpoint_are_kept_by_the_next_run(tmp_path):
    home = tmp_path / "tickets"
    first = trainer_of(tmp_path, TicketStart(str(home), 0), epochs=2)
    dense = Net()
    initial = {name: value.detach().clone() for name, value in dense.named_parameters()}
    first.fit(dense, loader())
    first.save_checkpoint(tmp_path / "round_0.ckpt")
    masks = next_masks(tmp_path / "round_0.ckpt", ["net.0.weight", "net.2.weight"], 0.8, "global")
    save_masks(masks, home / "masks_1.ckpt")
    assert kept_fraction(read_masks(home / "masks_1.ckpt")) == pytest.approx(0.2, abs=0.002)

    class Start(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == 0:
                self.weights = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    start, watch = Start(), Watch()
    second = trainer_of(tmp_path, Prune(masks=str(home / "masks_1.ckpt")), start, watch, epochs=2)
    ticket = Net(seed=9)
    second.fit(ticket, loader(), ckpt_path=home / "start.ckpt", weights_only=False)
    second.save_checkpoint(tmp_path / "round_1.ckpt")
    for name, value in initial.items():
        assert torch.equal(start.weights[name], value * masks[name] if name in masks else value)
    assert all(torch.equal(masks[name], found) for name, found in masks_of(tmp_path / "round_1.ckpt").items())
    assert set(watch.sparsity) == {round(0.8 * 384) / 384}
    (prune,) = (one for one in second.callbacks if isinstance(one, Prune))
    assert prune.shards is not None
    assert prune.shards.target == pytest.approx(watch.sparsity[0])


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    first = trainer_of(tmp_path, epochs=1)
    trained = Net()
    first.fit(trained, loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer_of(tmp_path, StartFrom(str(tmp_path / "one.ckpt")), epochs=1, max_steps=0)
    fresh = Net(seed=4)
    second.fit(fresh, loader())
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), trained.parameters(), strict=True))


def test_the_report_is_in_the_run_folder(tmp_path):
    fit(tmp_path, amount=0.75)
    found = json.loads((tmp_path / "pruning.json").read_text())
    assert found["sparsity"] == pytest.approx(0.75)
    assert found["layers"].keys() == {"net.0.weight", "net.2.weight"}
    assert [point["metric"] for point in found["curve"]] == ["val_loss"] * 4
    assert [point["sparsity"] for point in found["curve"]] == sorted(point["sparsity"] for point in found["curve"])
    assert (tmp_path / "pruning.png").stat().st_size > 1000


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"amount": 0.5, "begin": 9, "end": 10}, {}, r"begin must be before the end of training, got 9 epochs of 4"),
        ({"amount": 0.5, "begin": 1, "end": 10}, {}, "end must be after begin and within the run, got 10 epochs"),
        ({"amount": 0.5, "begin": 1}, {"max_steps": 5, "epochs": -1}, "max_epochs must be set for begin in epochs"),
        ({"amount": 0.5, "skip": ["net.7"]}, {}, r"each pattern of skip must match .*, got 'net.7'; did you mean 'net"),
        ({"amount": 0.5, "skip": ["net"]}, {}, "got 3 of which none is left; shorten skip"),
        ({"pattern": "2:3"}, {}, r"divisible by 3 for pattern '2:3', got net.0 with 8, .*; add to skip: net"),
        ({"masks": "nowhere.ckpt"}, {}, "no checkpoint nowhere.ckpt"),
        ({"pattern": "2:4", "kernels": "semi_structured"}, {}, "must have an NVIDIA GPU, .* got a cpu device"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(tmp_path, settings, options, message):
    prune = Prune(**settings)
    with pytest.raises(DloError, match=message):
        prune.check_run(trainer_of(tmp_path, prune, **options), Net())


def test_two_optimizers_are_refused(tmp_path):
    net = Net("two")
    net.automatic_optimization = False
    with pytest.raises(DloError, match="must return one optimizer, got 2"):
        trainer_of(tmp_path, Prune(amount=0.5)).fit(net, loader())


def test_lightnings_fsdp_is_refused():
    prune = Prune(amount=0.5)
    run: Any = SimpleNamespace(strategy=LightningFSDP())
    with pytest.raises(DloError, match="Prune does not support FSDPStrategy: it joins parameters"):
        prune._check_strategy(run)
