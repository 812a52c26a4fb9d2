"""Records side by side: differences, limits, verdicts; full tensors of ranks; and what is random in training."""

import math
import random

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchvision.ops import StochasticDepth

from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.shards import FlatShard
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import record, run_distributed
from dlo_framework.testing.compare import (
    RTOL_BF16,
    compare,
    first_group,
    report,
    tensor_differences,
    without_gradient,
)
from dlo_framework.testing.parity import verdict
from dlo_framework.testing.record import (
    Record,
    Step,
    checksum,
    gather_full_tensors,
    gather_full_weights,
    merge_records,
    outline,
    switch_off_dropout,
)
from dlo_framework.testing.training import GlobalBatches, SeededDataset, Setting, prepare_loaders, record_training


def run(losses, norms=None, weights=None, **more) -> Record:
    norms = norms or [(1.0,)] * len(losses)
    steps = [Step(loss, norm, 8, 100 + i) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))]
    return Record(steps, weights=weights or {"w": torch.ones(2)}, initial={"w": 1}, **more)


def test_tensor_differences_are_relative_to_how_far_training_moved_them():
    one = Record(
        weights={"a": torch.tensor([4.0, 3.0]), "still": torch.ones(4), "gone": torch.ones(1), "n": torch.tensor(5)},
        moved={"a": 0.5, "still": 0.0, "gone": 1.0, "n": 5.0},
        optimizer={"m of a": torch.tensor([3.0, 4.0]), "own of a": torch.ones(1)},
    )
    other = Record(
        weights={"a": torch.tensor([4.0, 3.1]), "still": torch.ones(4), "new": torch.ones(1), "n": torch.tensor(4)},
        optimizer={"m of a": torch.tensor([3.0, 3.0])},
    )
    found = tensor_differences(one, other, {})
    expected = {"a": 0.2, "still": 0.0, "gone": math.inf, "new": math.inf, "n": 0.2, "m of a": 0.2}
    assert found == pytest.approx(expected), "and state that one side alone keeps is left out"
    other.weights["still"] = torch.tensor([1.0, 1.0, 1.0, 1.001])
    assert tensor_differences(one, other, {})["still"] > 0.1, "what does not train must not change"
    other.weights["a"] = torch.tensor([math.nan, 3.0])
    assert tensor_differences(one, other, {})["a"] == math.inf
    other.weights["a"] = torch.ones(3)
    assert tensor_differences(one, other, {})["a"] == math.inf


def test_elements_whose_gradient_is_rounding_in_every_run_are_left_out():
    def trained(squares: list[float], weights: list[float]) -> Record:
        state = {"exp_avg_sq of bias": torch.tensor(squares), "exp_avg_sq of w": torch.ones(6)}
        return Record(weights={"bias": torch.tensor(weights), "w": torch.ones(6)}, moved={"bias": 1.0}, optimizer=state)

    one = trained([1.0, 1e-14, 1e-14, 0.0], [1.0, 1.0, 1.0, 1.0])
    noise = without_gradient(one, [trained([1.0, 1e-14, 1.0, 0.0], [1.0] * 4)])
    assert {name: mask.tolist() for name, mask in noise.items()} == {"bias": [False, True, False, False]}
    moved = trained([1.0, 1e-14, 1e-14, 0.0], [1.0, 5.0, 1.0, 1.0])
    assert tensor_differences(one, moved, {})["bias"] == 4.0
    assert tensor_differences(one, moved, noise)["bias"] == 0.0
    moved.weights["bias"][1] = 9.0
    assert tensor_differences(one, moved, noise)["bias"] == 8.0, "no rounding moves one element 16 times as far"
    assert without_gradient(one, [Record()]) == {}, "nothing is known of the other"


def test_a_verdict_takes_losses_norms_of_every_rank_and_weights():
    same = compare("same", run([1.0, 2.0]), run([1.0, 2.0 + 1e-5]))
    assert same.ok
    assert same.hints == []
    assert "PARITY: same: 2 steps within 1e-05" in report(same)
    loss = compare("x", run([1.0, 2.0]), run([1.0, 2.0001]))
    assert [row.ok for row in loss.rows] == [True, False]
    assert "NO PARITY: x: differs from step 1 on" in report(loss)
    norm = compare("x", run([1.0]), run([1.0], [(1.0, 1.1)]))
    assert not norm.ok
    assert norm.rows[0].norm.ranks == 1.1, "the rank that is farthest off"
    weights = compare("x", run([1.0]), run([1.0], weights={"w": torch.tensor([1.0, 1.1])}))
    assert weights.culprits == ["w"]
    assert "differs in the final weights or optimizer state" in report(weights)
    assert not compare("x", run([1.0]), run([1.0, 1.0])).ok, "one run is longer"
    assert not compare("x", run([]), run([])).ok, "nothing was compared"
    assert not compare("x", run([None], [()]), run([None], [()])).ok, "nothing was measured"
    assert not compare("x", run([math.nan]), run([math.nan])).ok
    assert compare("x", run([1.0], [(math.inf,)]), run([1.0], [(math.inf, math.inf)])).ok, "a loss scale that overflows"
    assert not compare("x", run([1.0], [(math.inf,)]), run([1.0], [(math.inf, 1.0)])).ok


def test_controls_widen_limits_and_never_narrow_them():
    one = run([1.0, 1.0, 2.0], weights={"bias": torch.ones(1), "w": torch.ones(1)}, moved={"bias": 1.0, "w": 1.0})
    turned = run([1.0, 1.001, 2.0], weights={"bias": torch.full((1,), 1.01), "w": torch.ones(1)})
    same = run([1.0, 1.0, 2.0], weights=one.weights)
    ranks = run([1.0, 1.009, 2.018], weights={"bias": torch.full((1,), 1.2), "w": torch.ones(1)})
    assert not compare("x", one, ranks).ok
    found = compare("x", one, ranks, controls=[same, turned])
    assert [row.loss.limit for row in found.rows] == pytest.approx([1e-5, 1e-2, 1e-2])
    assert {name: pair.limit for name, pair in found.tensors.items()} == pytest.approx({"bias": 0.1, "w": 1e-4})
    assert found.culprits == ["bias"]
    assert "bias: difference 2.0e-01 of its change, allowed 1.0e-01  <" in report(found)
    assert found.control == pytest.approx((1e-3, 0.0))
    nearer = run([1.0, 1.009, 2.018], weights={"bias": torch.full((1,), 1.05), "w": torch.ones(1)})
    found = compare("x", one, nearer, controls=[same, turned])
    assert found.ok
    assert "PARITY: x: 3 steps within rounding" in report(found)
    early = run([1.009, 1.0, 2.0], weights=one.weights)
    assert not compare("x", one, early, controls=[turned]).ok, "rounding comes up at step 1 only"


def test_metrics_of_validation_are_compared_on_every_rank():
    one = run([1.0, 2.0], validation={"val_loss": (2.0,), "val_acc": (0.5,), "nan": (math.nan,)})
    alike = run([1.0, 2.0], validation={"val_loss": (2.0, 2.0), "val_acc": (0.5, 0.5), "nan": (math.nan, math.nan)})
    assert compare("x", one, alike).ok
    padded = run([1.0, 2.0], validation={"val_loss": (2.0, 3.0), "val_acc": (0.5, 0.5), "nan": (math.nan,)})
    found = compare("x", one, padded)
    assert not found.ok
    assert found.validation["val_loss"].ranks == 3.0
    assert "NO PARITY: x: differs in validation (val_loss)" in report(found)
    assert "training agrees, validation does not" in found.hints[0]
    lacking = run([1.0, 2.0], validation={"val_loss": (2.0,), "val_acc": (0.5,)})
    assert not compare("x", one, lacking).validation["nan"].ok


@pytest.mark.parametrize(
    ("dead", "why"),
    [
        (run([1.0, 2.0], [(0.0,), (0.0,)]), "every gradient is zero"),
        (run([1.5, 1.5]), "the loss stays 1.5 for 2 steps"),
        (run([1.0, 2.0], moved={"w": 0.0}), "no weight has moved in 2 steps"),
    ],
)
def test_a_run_that_does_not_train_is_no_parity(dead, why):
    found = compare("x", dead, dead)
    assert not found.ok
    assert f"NO PARITY: x: nothing was trained: {why}" in report(found)
    assert not compare("x", run([1.0, 2.0]), dead).ok


# --- the verdict -----------------------------------------------------------------------------------------------


def ask(answers, **options):
    """Sends a verdict what each of its rounds asks for; returns it and what it asked for."""
    options = {"precision": "32-true", "rtol": 1e-5, **options}
    runs = verdict("x", Setting(2, 42, ranks=2), **options)
    asked = [next(runs)]
    for answer in answers:
        try:
            asked.append(runs.send(answer))
        except StopIteration as end:
            return end.value, asked
    raise AssertionError(f"it asks for more: {asked[-1]}")


FINE, NEAR, FAR = run([1.0, 2.0]), run([1.0, 2.0001]), run([1.0, 2.3])
ROUNDED = run([1.0, 2.00005])


def test_runs_that_agree_take_no_others():
    found, asked = ask([[FINE, FINE]])
    assert found.ok
    assert asked == [[Setting(2, 42, ranks=2), Setting(2, 42, shares=0)]]


def test_double_precision_decides():
    found, asked = ask([[NEAR, FINE], [FINE, FINE], [ROUNDED, FINE]])
    assert found.ok
    assert [(s.ranks, s.double, s.control) for s in asked[1]] == [(2, True, 0), (None, True, 0)]
    assert [s.control for s in asked[2]] == [1, 2]
    assert "PARITY: x: 2 steps within rounding, in double precision within 1e-07" in report(found)
    found, asked = ask([[NEAR, FINE], [NEAR, FINE]])
    assert not found.ok
    assert len(asked) == 2, "no other rounding excuses it"
    assert "NO PARITY: x: differs from step 1 on, in double precision too" in report(found)


def test_what_rounding_does_not_explain_in_single_precision_takes_another_seed():
    chance, asked = ask([[NEAR, FINE], [FINE, FINE], [FINE, FINE], [FINE, FINE, FINE, FINE]])
    assert chance.ok
    assert {s.seed for s in asked[3]} == {43}
    fault, _ = ask([[FAR, FINE], [FINE, FINE], [FINE, FINE], [FAR, FINE, FINE, FINE]])
    assert not fault.ok
    assert "in single precision only, with another seed too" in report(fault)


def test_other_rounding_decides_where_double_precision_cannot():
    found, asked = ask([[NEAR, FINE], ["no doubles here", FINE], [ROUNDED, FINE, FINE]])
    assert found.ok
    assert len(asked[2]) == 3
    assert "in double precision: not compared (no doubles here); other rounding decides" in report(found)
    assert not ask([[NEAR, FINE], ["no doubles here", FINE], [FINE, FINE, FINE]])[0].ok
    halves, asked = ask([[FAR, FINE], [FINE, FINE, FINE]], precision="bf16-mixed", rtol=1e-2)
    assert not halves.ok
    assert not any(s.double for s in asked[1])


def test_a_first_step_that_half_precision_explains_is_no_fault():
    found, asked = ask([[run([1.02]), run([1.0])], [run([1.004])] * 3], precision="bf16-mixed", rtol=RTOL_BF16)
    assert found.ok
    assert len(asked) == 2
    for answers in ([[run([1.02]), run([1.0])], [run([1.0])] * 3], [[run([2.0]), run([1.0])]]):
        assert not ask(answers, precision="bf16-mixed", rtol=RTOL_BF16)[0].ok


@pytest.mark.parametrize(("precision", "differs"), [("bf16-mixed", True), ("32-true", False)])
def test_other_rounding_of_gradients_is_tried_in_half_precision(precision, differs):
    """The order of samples changes no gradient of a recurrent network that is rounded to bf16."""

    class Recurrent(LightningModule):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.RNN(4, 8, batch_first=True), nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return self.head(self.recurrent(batch[0])[0][:, -1]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    norms = []
    for control in (0, 2):
        torch.manual_seed(0)
        model, data = Recurrent(), DataLoader(TensorDataset(torch.randn(8, 5, 4)), batch_size=8)
        options = {"precision": precision, "accelerator": "cpu", "callbacks": []}
        record = record_training(model, data, options, Setting(1, 1, shares=1, control=control))
        norms.append(record.steps[0].norms[0])
    assert (abs(norms[1] / norms[0] - 1) > 1e-5) == differs
    assert norms[1] == pytest.approx(norms[0], rel=RTOL_BF16)


def test_what_is_certain_takes_no_further_runs():
    for ranks in (
        run([2.0, 2.0]),
        run([1.0, 2.0, 3.0]),
        run([1.0, math.nan], drew=0),
        Record([Step(1.0, (1.0,), 8, 100), Step(2.1, (1.0,), 8, 9)], initial={"w": 1}),
        Record([Step(1.0, (1.0,), 8, 100), Step(2.1, (1.0,), 8, 101)], initial={"w": 2}),
    ):
        found, asked = ask([[ranks, FINE]])
        assert not found.ok
        assert len(asked) == 1
    assert not ask([[NEAR, FINE]], further=False)[0].ok


@pytest.mark.parametrize(
    ("ranks", "hint"),
    [
        (Record([Step(2.0, (1.0,), 8, 100)], initial={"w": 2}), "the weights differ before the first step, 1 tensors"),
        (run([1.0], weights={"w": torch.zeros(2)}), "the cause comes after them"),
        (run([1.0, 1.1]), "one process made 1 steps and the ranks 2"),
    ],
)
def test_hints(ranks, hint):
    assert hint in " ".join(compare("x", run([1.0]), ranks).hints)


def test_the_record_of_all_ranks():
    """Ranks 0 and 1 share a replica, whose loss rank 1 has; 2 and 3 have other data, each a part of its sequences."""
    ranks = [
        Record([Step(loss, (3.0 + rank,), samples, samples)], place=(place, 2), drew=drew)
        for rank, (loss, place, samples, drew) in enumerate(
            [(None, 0, 4, None), (1.0, 0, 4, 5), (2.0, 1, 4, 3), (9.0, 1, 4, None)]
        )
    ]
    whole = merge_records(ranks)
    assert whole.steps == [Step((1.0 + (2.0 + 9.0) / 2) / 2, (3.0, 4.0, 5.0, 6.0), 8, 8)]
    assert (whole.place, whole.drew) == ((0, 2), 3)


@pytest.mark.parametrize(
    ("apart", "group"),
    [
        ("abcd", "all 4 parameters"),
        ("ac", "all parameters of Linear modules"),
        ("cd", "the parameters that rank 1 steps"),
        ("bcd", "the 3 parameters from b to d, a run as a bucket or a stage has it,"),
        ("ad", "a, d"),
        ("", ""),
    ],
)
def test_parameters_that_the_first_step_changes_otherwise_are_a_group(apart: str, group: str) -> None:
    def ran(turned: str) -> Record:
        record = Record(weights={name: torch.zeros(9) for name in "abcd"}, stepped=[{"a", "b"}, {"c", "d"}])
        record.kinds = dict(zip("abcd", ("Linear", "LayerNorm", "Linear", "Embedding"), strict=True))
        record.first = {name: outline(torch.arange(9.0).double() * (-1 if name in turned else 1)) for name in "abcd"}
        return record

    assert first_group(ran(""), ran(apart)) == group


# --- weights that ranks share, whole again, and the norm of gradients that they share -------------------------------


class OwnNorm(SingleProcessStrategy):
    def gradient_norm(self, optimizer):
        return torch.tensor(5.0)


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "plain": torch.randn(3),
        "flat": torch.randn(5, 4),
        "scalar": torch.tensor(7),
        "sharded": torch.randn(5, 2),
        "last_stage": torch.randn(2, 2),
    }


def _spread(rank: int, world_size: int) -> tuple[dict, float, float]:
    tensors, mesh = whole(), init_device_mesh("cpu", (world_size,))
    flat, cut = tensors["flat"].view(-1), 7
    mine = {
        "plain": tensors["plain"],
        "flat": FlatShard(flat[:cut] if rank == 0 else flat[cut:], torch.Size((5, 4)), 0 if rank == 0 else cut),
        "scalar": FlatShard(tensors["scalar"].view(-1)[: 1 - rank], torch.Size(()), rank),
        "sharded": distribute_tensor(tensors["sharded"], mesh, [Shard(0)]),
        "extra": {"no": "tensor"},
    }
    if rank == world_size - 1:
        mine["last_stage"] = tensors["last_stage"]
    gathered = gather_full_tensors(mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_BUNDLE", 41)  # bytes: "plain" and "scalar" fit into one message, "flat" into none
        again = gather_full_tensors(mine)
    assert again.keys() == gathered.keys()
    assert all(torch.equal(again[name], value) for name, value in gathered.items())

    plain, sharded = nn.Parameter(torch.zeros(3)), nn.Parameter(mine["sharded"].detach().clone())
    plain.grad, sharded.grad = tensors["plain"].clone(), mine["sharded"].detach().clone()
    optimizer = torch.optim.SGD([plain, sharded], lr=0.1)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    norm = float(contract_of(trainer.strategy).gradient_norm(optimizer))
    trainer.strategy.__class__ = OwnNorm
    own = float(contract_of(trainer.strategy).gradient_norm(optimizer))
    dist.barrier()
    return gathered, norm, own


def test_what_two_ranks_share_is_whole_again():
    found = run_distributed(_spread, 2)
    expected = whole()
    assert set(found[0][0]) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[0][0][name], tensor), name
    norm = torch.cat([expected["plain"], expected["sharded"].view(-1)]).norm()
    for _, found_norm, own in found:
        assert abs(found_norm - float(norm)) < 1e-6
        assert own == 5.0, "a strategy that has a norm is asked"


def test_names_are_plain_and_tensors_are_copies():
    model = BoringModel()
    model.layer = torch.compile(model.layer, backend="eager")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    weights = gather_full_weights(trainer)
    assert set(weights) == {"layer.weight", "layer.bias"}
    before = checksum(weights["layer.bias"])
    with torch.no_grad():
        model.layer.bias.add_(1)
    assert checksum(weights["layer.bias"]) == before
    assert checksum(model.layer.bias) != before


def test_checksums_of_all_kinds():
    for tensor in (torch.randn(2, 3).T, torch.tensor(1.5), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True])):
        assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.empty(0)) == 0


# --- what is random in training: found, switched off or made equal --------------------------------------------------


class Layer(nn.Module):
    """As transformers' layers: rates in plain attributes, and in a config that the forward pass reads."""

    class Config:
        hidden_dropout_prob = 0.5

        def __init__(self) -> None:
            self.attention_dropout, self.hidden_size, self.droplet = 0.2, 8, 0.7

    def __init__(self) -> None:
        super().__init__()
        self.config, self.dropout, self.layerdrop, self.p = self.Config(), 0.1, 0.3, 0.4


def repeats(model: nn.Module, x: torch.Tensor) -> bool:
    model.train()
    return torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)), (4, 6, 8), "1 AlphaDropout, 1 Drop"),
        (nn.Sequential(nn.Identity(), StochasticDepth(0.5, "row")), (16, 8), "1 StochasticDepth"),
        (nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), (4, 6, 8), "3 Dropout, 1 MultiheadAttention"),
        (nn.RReLU(), (4, 8), "1 RReLU"),
        (
            timm.create_model(
                "vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.1, drop_path_rate=0.2, attn_drop_rate=0.1
            ),
            (2, 3, 32, 32),
            "DropPath",
        ),
    ],
    ids=["dropout", "stochastic_depth", "encoder", "rrelu", "timm"],
)
def test_a_model_without_dropout_repeats_itself(model, shape, said):
    x = torch.randn(shape)
    assert not repeats(model, x)
    assert said in switch_off_dropout(model)
    assert repeats(model, x)
    assert switch_off_dropout(model) is None


def test_rates_in_attributes_are_found_and_nothing_else():
    layer = Layer()
    assert switch_off_dropout(layer) == "1 Config, 1 Layer"
    assert (layer.dropout, layer.layerdrop, layer.config.attention_dropout) == (0.0, 0.0, 0.0)
    assert (layer.p, layer.config.droplet, layer.config.hidden_size) == (0.4, 0.7, 8)


class Noise:
    """A dataset that draws from all three generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_seeded_items_are_the_same_in_any_order_and_leave_the_random_state_alone():
    data = SeededDataset(Noise(), seed=3)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    items = [data[index] for index in range(6)]
    assert [data[index] for index in reversed(range(6))] == items[::-1]
    assert len({value for item in items for value in item[1:]}) == 18
    assert items != [SeededDataset(Noise(), seed=4)[index] for index in range(6)]
    assert before[0] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert torch.equal(before[2], torch.get_rng_state())


@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_those_of_all_ranks(drop_last):
    """22 samples on 4 ranks are 6 each, in batches of 4 and 2; padded samples come twice."""
    one = GlobalBatches(range(22), 4, 4, drop_last, shuffle=True, seed=5)
    one.sampler.set_epoch(2)
    batches = list(one)
    assert [len(batch) for batch in batches] == ([16] if drop_last else [16, 8])
    assert len(one) == len(batches)
    for rank in range(4):
        sampler = torch.utils.data.DistributedSampler(range(22), 4, rank, shuffle=True, seed=5)
        sampler.set_epoch(2)
        whole = list(sampler)
        mine = [index for batch in batches for index in batch[rank * len(batch) // 4 : (rank + 1) * len(batch) // 4]]
        assert mine == whole[: len(mine)]


def test_loaders_of_unknown_kinds_are_used_as_they_are_and_named():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    plain, stream, notes = DataLoader(TensorDataset(torch.arange(6)), batch_size=2), DataLoader(Stream()), []
    found = prepare_loaders({"a": plain, "b": [stream, "own"]}, seed=0, shares=2, shuffle=False, notes=notes)
    assert found["b"] == [stream, "own"]
    assert [batch[0].tolist() for batch in found["a"]] == [[0, 2, 1, 3], [4, 5]]
    assert len(notes) == 2
    assert "DataLoader over Stream is used unchanged" in notes[1]
