"""The check before a run goes one step with each distinct rank's part on fake tensors: what passes runs.

Slow: every type of causal language model, and a model of each timm module, with random weights. Where the check of a
mesh passes, two gloo ranks train two steps, and their losses are those of one process.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework import Task
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_copy, fake_tensors
from dlo_framework.plan import Applier, ParallelPlan, Phase, Rule
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh import mesh_simulation
from dlo_plugins.parallel.mesh.pipelined_task import forward_costs
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.tp_plan import measure_coverage
from dlo_plugins.schedules.lr_curves import OneCycle
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import SIZES, TYPES, tiny
from support.image_models import IMAGE_MODELS, TRANSFORMERS, options
from support.runs import Losses
from support.token_batches import Batches
from support.trainers import quiet_trainer

WIDTH, HEADS, TOKENS = 48, 6, 8


class Attention(nn.Module):
    """Six heads, whose projections a plan cuts by `column`: it does not say that they are heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (projection(x).view(shape).transpose(1, 2) for projection in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Words(Task):
    net, blocks = Net, 4

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = self.net(self.blocks)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def example_batch(self, datamodule: Any) -> Any:
        row = torch.zeros(1, TOKENS, dtype=torch.long)
        return row, row

    def parallel_plan(self) -> ParallelPlan:
        rules = {f"blocks.*.attn.{name}": Rule.COLUMN for name in "qkv"} | {"blocks.*.attn.o": Rule.ROW}
        return ParallelPlan(blocks=("blocks.*",), stem=("embed",), head=("head",), tensor=rules)


def strategy_of(ranks: int, **axes: Any) -> MeshStrategy:
    strategy = MeshStrategy(dp_shard=1, **axes)
    quiet_trainer(devices=ranks, strategy=strategy)
    return strategy


def causal(kind: str, **more: Any) -> CausalLM:
    return CausalLM(config=tiny(kind, **more), optimizer="sgd", lr=0.1, schedule="constant")


def check_plan(task: Task, axis: str) -> None:
    strategy = strategy_of(2, **{axis: 2})
    strategy.check_model(task, Windows())
    strategy.describe(task, Windows())


class Windows:
    """What a datamodule tells before it has read data."""

    seq_len, batch_size, num_classes = 16, 8, 3


def test_heads_that_ranks_do_not_divide_are_named_with_their_rules_and_a_size_that_works() -> None:
    strategy_of(3, tp=3).check_model(Words())
    with pytest.raises(DloError) as error:
        strategy_of(4, tp=4).check_model(Words())
    message = str(error.value)
    assert "tp 4 must be able to train its part of Net, got RuntimeError in the forward of 'blocks.0.attn'" in message
    assert "rules q: column, k: column, v: column, o: row" in message
    assert "set tp to 2" in message
    with pytest.raises(DloError, match=r"pp 2 x tp 4 .* set tp to 2"):
        strategy_of(8, tp=4, pp=2).check_model(Words())


def test_a_check_copies_no_model_in_memory_and_leaves_nothing(monkeypatch) -> None:
    class Still(Words):
        blocks = 32

    task = Still()
    task.configure_model()
    weights = {name: (id(p), p._version) for name, p in task.named_parameters()}

    def copied(self: Tensor, memo: Any) -> Tensor:
        raise AssertionError("a weight is copied")

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", copied)
    states = torch.get_rng_state(), random.getstate()
    strategy_of(4, tp=2, pp=2).check_model(task)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not dist.is_initialized()
    assert {name: (id(p), p._version) for name, p in task.named_parameters()} == weights
    assert all(p.grad is None and not p.is_meta for p in task.parameters())


def test_identical_blocks_are_rehearsed_once_and_a_pipelines_middle_stages_too(monkeypatch) -> None:
    blocks, ranks = [], []
    simulated = mesh_simulation.simulated_rank

    def noted(task: Any, strategy: Any, pipelining: Any, spec: Any, rank: int, *args: Any, **options: Any) -> Any:
        blocks.append(len(task.model.blocks))
        ranks.append(rank)
        return simulated(task, strategy, pipelining, spec, rank, *args, **options)

    monkeypatch.setattr(mesh_simulation, "simulated_rank", noted)

    class Deep(Words):
        blocks = 32

    strategy_of(2, tp=2).check_model(Deep())
    assert blocks == [2]
    blocks.clear(), ranks.clear()
    strategy_of(8, pp=8).check_model(Deep())
    assert blocks == [8] * 3  # one for each stage; the first, one in the middle, the last
    assert ranks == [0, 1, 14 // 2]


class Branching(Net):
    """Asks for values, which fake tensors have not: of a branch, and, if it is told so, of shapes or an assertion."""

    needs = ""

    def forward(self, x: Tensor) -> Tensor:
        if x.float().mean() > 100:
            return super().forward(x + 1)
        if self.needs == "shapes":
            x = x.flatten()[x.flatten() >= 0].view(x.shape)
        if self.needs == "a value":
            assert x.max().item() + 1 > 0
            assert (x >= 0).all()
        return super().forward(x)


def test_a_forward_that_goes_by_values_is_rehearsed_as_far_as_it_can_be() -> None:
    def by_value(what: str = "") -> Task:
        return type("ByValue", (Words,), {"net": type("Needing", (Branching,), {"needs": what})})()

    strategy_of(2, pp=2).check_model(by_value())
    with pytest.raises(DloError, match=r"'blocks\.0\.attn'"):
        strategy_of(4, tp=4).check_model(by_value())
    # Neither passes on one rank, so nothing can be said of many.
    for what in ("shapes", "a value"):
        strategy_of(4, tp=4).check_model(by_value(what))


def test_a_loss_that_cannot_be_rehearsed_gives_way_to_a_stand_in() -> None:
    class OfTrainer(Words):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return super().loss(outputs, batch) * (1 + self.trainer.current_epoch)

    class ByValue(Words):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            found = super().loss(outputs, batch)
            return found if found.item() < 100 else found * 0

    strategy_of(2, tp=2).check_model(OfTrainer())
    with pytest.raises(DloError, match=r"'blocks\.0\.attn'"):
        strategy_of(4, tp=4).check_model(ByValue())


def test_a_loss_that_no_rank_can_compute_is_named() -> None:
    class Parts(Words):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return super().loss(outputs, batch) + self.model.blocks[0].attn.q.weight.view(WIDTH, WIDTH).mean()

    strategy_of(1, tp=1).check_model(Parts())
    with pytest.raises(DloError, match=r"tp 2 must be able to train its part of Net, got RuntimeError .*set tp to 1"):
        strategy_of(2, tp=2).check_model(Parts())


def test_mixtures_whose_experts_are_one_product_are_weighed_and_checked() -> None:
    task = causal("mixtral")
    check_plan(task, "pp")
    on_meta = task.on_meta()
    costs = forward_costs(on_meta, on_meta.parallel_plan(), Windows())
    assert costs is not None
    assert len(set(costs.blocks)) == 1
    tokens, width, features, used = 16, 32, 48, 2
    experts = 2 * tokens * used * 3 * width * features
    assert experts < costs.blocks[0] < 2 * experts


def test_a_rank_without_the_tied_embedding_knows_what_it_receives() -> None:
    """It holds neither of the names of a weight that is tied between the first and the last stage."""
    task = causal("llama", tie_word_embeddings=True, num_hidden_layers=4)
    strategy_of(4, pp=4, micro_batches=4).check_model(task, Windows())


def test_a_copy_with_fake_tensors_shares_what_objects_hold():
    """Copying a tensor in a `FakeTensorMode` raises where it is on the meta device."""
    module = nn.Linear(2, 3)
    module.held = [SimpleNamespace(tensor=torch.ones(3, device="meta"))]
    with fake_tensors():
        copied = fake_copy(module)
        assert copied(torch.ones(1, 2)).shape == (1, 3)
    assert copied.held[0] is not module.held[0]
    assert copied.held[0].tensor is module.held[0].tensor


@pytest.mark.parametrize(
    ("task", "axis"),
    [
        (causal("nemotron_h"), "tp"),  # Rules of its own for the vocabulary alone; the others are inferred.
        (ImageClassifier("vgg11", num_classes=3, image_size=32), "pp"),
    ],
)
def test_models_that_failed_in_their_ranks_are_cut(task: Task, axis: str) -> None:
    """All others are slow, below."""
    check_plan(task, axis)


class Unused(Net):
    """A layer that no loss depends on, in each block and in the head."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.spare = nn.Linear(2, 2)
        for block in self.blocks:
            block.spare = nn.Linear(2, 2)


class Spare(Words):
    net = Unused

    def parallel_plan(self) -> ParallelPlan:
        return replace(super().parallel_plan(), head=("head", "spare"))


def test_parameters_without_a_gradient_are_refused_before_a_process_starts() -> None:
    make_strategy = partial(strategy_of, 4, pp=2, tp=2)
    with pytest.raises(DloError) as error:
        make_strategy().check_model(Spare())
    message = str(error.value)
    assert "every trainable parameter must get a gradient from the loss" in message
    assert "model.blocks.0.spare.weight" in message
    assert "and 5 more" in message  # of two for each of four blocks and the head, five are named
    assert "appliers: [{class_path: FullyShard, init_args: {find_unused: true}}]" in message
    # What the message advises passes, and so does what needs no gradients.
    make_strategy(appliers=[FullyShard(find_unused=True)]).check_model(Spare())
    make_strategy().check_model(Spare(), trains=False)
    frozen = Spare()
    frozen.configure_model()
    for name, parameter in frozen.model.named_parameters():  # type: ignore[union-attr]
        parameter.requires_grad = "spare" not in name
    make_strategy().check_model(frozen)


class Freezing(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for block in pl_module.model.blocks:
            block.spare.requires_grad_(False)


@pytest.mark.parametrize(
    "members",
    [
        {"training_step": lambda self, batch, batch_idx: Spare.training_step(self, batch, batch_idx)},
        {"on_fit_start": lambda self: self.model.spare.requires_grad_(False)},
        {"configure_callbacks": lambda self: [Freezing()]},
        {"automatic_optimization": False},
    ],
)
def test_a_task_whose_steps_are_its_own_is_not_refused_for_parameters_without_a_gradient(members: Any) -> None:
    strategy_of(2, tp=2).check_model(type("Own", (Spare,), members)())


def test_what_a_users_code_freezes_before_the_first_step_is_not_asked_for_a_gradient() -> None:
    class InOptimizers(Spare):
        freezes_head = True

        def configure_optimizers(self) -> Any:
            for block in self.model.blocks:  # type: ignore[union-attr]
                block.spare.requires_grad_(False)  # type: ignore[union-attr]
            self.model.spare.requires_grad_(not self.freezes_head)  # type: ignore[union-attr]
            return super().configure_optimizers()

    class WithTrainer(InOptimizers):
        def configure_optimizers(self) -> Any:
            assert self.trainer.max_epochs
            return super().configure_optimizers()

    strategy_of(2, pp=2).check_model(Spare(), callbacks=[Freezing()])
    task = InOptimizers()
    strategy_of(2, tp=2).check_model(task)
    assert not task.has_model
    strategy_of(2, pp=2).check_model(WithTrainer())
    task.freezes_head = False
    with pytest.raises(DloError, match=r"got none for model\.spare\.weight, model\.spare\.bias; set requires_grad"):
        strategy_of(2, tp=2).check_model(task)
    # A callback of dlo's or Lightning's freezes nothing.
    with pytest.raises(DloError, match=r"model\.blocks\.0\.spare\.weight"):
        strategy_of(2, tp=2).check_model(Spare(), callbacks=[ModelSummary(), OneCycle(max_lr=0.1)])


def test_weights_tied_across_stages_are_not_taken_for_unused() -> None:
    strategy_of(2, pp=2).check_model(causal("gpt2", tie_word_embeddings=True), Windows())
    strategy_of(2, pp=2).check_model(causal("gpt2", tie_word_embeddings=False), Windows())


class Middle(Net):
    """Calls its stem's second layer after the first block, or after all of them."""

    after_all = False

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if not number and not self.after_all:
                x = self.middle(x)
        return self.head(self.middle(x) if self.after_all else x)


@pytest.mark.parametrize(
    ("part", "after_all", "refused"),
    [
        ("stem", True, r"stem must run before the first block, got a forward that calls 'middle' after 'blocks\.3'"),
        ("head", False, r"head must run after the last block, .* Middle that calls 'middle' before 'blocks\.3'"),
        ("head", True, None),
    ],
)
def test_a_layer_that_a_plan_names_in_the_wrong_part_is_named(part: str, after_all: bool, refused: str | None) -> None:
    class Named(Words):
        net = type("Middle", (Middle,), {"after_all": after_all})

        def parallel_plan(self) -> ParallelPlan:
            plan = super().parallel_plan()
            return replace(plan, **{part: (*getattr(plan, part), "middle")})

    with contextlib.nullcontext() if refused is None else pytest.raises(DloError, match=refused):
        strategy_of(2, pp=2).check_model(Named())


def test_parameters_of_the_model_itself_are_named_among_those_in_full() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    model.register_parameter("pos_embed", torch.nn.Parameter(torch.zeros(8)))
    coverage = measure_coverage(model, {})
    assert coverage.replicated == {"pos_embed": 8, "0": 16}
    assert coverage.describe().endswith("the plan has no rule for them: 0 (66.7%), pos_embed (33.3%)")


# --- appliers of phase SHARD ------------------------------------------------------------------------------------


class Doubled(Applier):
    """Doubles a model's last weight, and notes when it is called."""

    phase = Phase.SHARD

    def __init__(self) -> None:
        self.calls: list[int] = []

    def apply(self, module: nn.Module, mesh: Any, plan: ParallelPlan) -> None:
        self.calls.append(len(plan.block_names(module)))
        with torch.no_grad():
            module.head.weight.mul_(2)  # type: ignore[union-attr]


def fit(task: Task, strategy: MeshStrategy) -> None:
    row = torch.zeros(2, TOKENS, dtype=torch.long)
    torch.manual_seed(0)
    try:
        trainer = quiet_trainer(devices=1, strategy=strategy, max_steps=1)
        trainer.fit(task, DataLoader([(row, row)], batch_size=None))  # type: ignore[arg-type]
    finally:
        leave_group()


def test_an_applier_of_phase_shard_is_applied() -> None:
    class Still(Words):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    plain, changed, applier = Still(), Still(), Doubled()
    fit(plain, MeshStrategy())
    fit(changed, MeshStrategy(appliers=[applier]))
    assert applier.calls == [Words.blocks]
    torch.testing.assert_close(changed.model.head.weight, plain.model.head.weight * 2)  # type: ignore[union-attr]


def test_an_applier_of_phase_shard_that_shards_itself_is_refused() -> None:
    class Own(Applier):
        phase = Phase.SHARD

        def apply(self, module: nn.Module, mesh: Any, plan: ParallelPlan) -> None:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh["dp_shard"])

    with pytest.raises(DloError, match=r"appliers must leave sharding to FullyShard, got a DTensor .* from Own"):
        fit(Words(), MeshStrategy(appliers=[Own()]))


# --- every type of language model, and a model of each timm module ---------------------------------------------------


ROWS, STEPS = 4, 2
#: Models that ranks train before others take their place: each leaves process groups behind.
AT_ONCE = 40
#: Losses in single precision, whose last bits depend on the order of sums; experts are chosen by them.
RTOL = 2e-4


def make(kind: str, name: str) -> Task:
    if kind == "text":
        return causal(name, dropout=False)
    return ImageClassifier(name, num_classes=3, optimizer="sgd", lr=0.01, schedule="constant", **options(name))


def batches(kind: str, task: Any) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    found: list[Any] = []
    for _ in range(STEPS):
        if kind == "image":
            images = torch.randn(ROWS, 3, task.image_size, task.image_size, generator=draw)
            found.append((images, torch.randint(3, (ROWS,), generator=draw)))
            continue
        ids = torch.randint(3, SIZES["vocab_size"], (ROWS, Windows.seq_len + 1), generator=draw)
        batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
        batch["position_ids"] = torch.arange(Windows.seq_len).repeat(ROWS, 1)
        found.append(batch | {"tokens_in_step": torch.tensor(ROWS * Windows.seq_len)})
    return found


def train(kind: str, name: str, strategy: Any, devices: int) -> list[float]:
    """Returns the losses of two steps; one process takes images by micro-batches, which batch norm sees apart."""
    seed_everything(1, workers=True, verbose=False)
    task, losses = make(kind, name), Losses()
    found, parts = batches(kind, task), 1
    if kind == "image" and devices == 1:
        found, parts = [halves for x, y in found for halves in zip(x.chunk(2), y.chunk(2), strict=True)], 2
    given = {"max_steps": STEPS, "accumulate_grad_batches": parts, "callbacks": [losses]}
    trainer = quiet_trainer(devices=devices, strategy=strategy, **given)
    trainer.fit(task, DataLoader(Batches(found), batch_size=None))
    return [sum(losses.found[first : first + parts]) for first in range(0, len(losses.found), parts)]


def check(kind: str, name: str, axis: str) -> tuple[str, list[float]]:
    """Returns why a model is not trained on two ranks, "" if it passes its check, and its losses on one process."""
    try:
        alone = train(kind, name, "auto", 1)
    except Exception as error:  # It does not train on one process either: nobody's plan is at fault.
        return f"no model: {error!r}", []
    try:
        with torch.random.fork_rng():
            check_plan(make(kind, name), axis)
    except DloError as error:
        return f"refused: {error}", alone
    except Exception as error:
        return f"wrong: the check raises {error!r}", alone
    return "", alone


def _check_share(rank: int, ranks: int, kind: str, names: list[str], axis: str) -> dict[str, tuple[str, list[float]]]:
    os.environ["RANK"] = "0"  # As in the process that a user starts: the ranks after it check nothing.
    return {name: check(kind, name, axis) for name in names[rank::ranks]}


def _train_all(rank: int, world_size: int, kind: str, names: list[str], axis: str) -> list[list[float]]:
    found = []
    for name in names:
        more = {"micro_batches": 2} if axis == "pp" else {}
        try:
            found.append(train(kind, name, MeshStrategy(**{axis: 2}, dp_shard=1, **more), world_size))
        except Exception as error:
            error.add_note(f"the check accepts {name}")
            raise
    return found


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("kind", "names", "axis", "least"),
    [
        ("text", TYPES, "tp", 120),
        ("text", TYPES, "pp", 120),
        ("text", TYPES, "cp", 80),
        ("image", IMAGE_MODELS, "pp", 80),
        ("image", TRANSFORMERS, "tp", 24),
    ],
)
def test_each_model_that_passes_its_check_trains_as_one_process(kind: str, names: Any, axis: str, least: int) -> None:
    """At least that many pass; `DLO_SWEEP_ONLY` selects some."""
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    names = only or names
    one, other = run_distributed(_check_share, 2, kind, names, axis, backend=None, timeout=3 * 3600)
    checked = one | other
    found = {name: said for name, (said, _) in checked.items()}
    accepted = [name for name in names if not found[name]]
    for start in range(0, len(accepted), AT_ONCE):
        some = accepted[start : start + AT_ONCE]
        ranks = run_distributed(_train_all, 2, kind, some, axis, timeout=3000, group_timeout=60)
        for name, first, second in zip(some, *ranks, strict=True):
            # The ranks of cp have the losses of other tokens; those of the others the same.
            means, expected = [sum(pair) / 2 for pair in zip(first, second, strict=True)], checked[name][1]
            alike = means == pytest.approx(expected, rel=RTOL)
            found[name] = "runs" if alike else f"wrong: losses {means}, one process {expected}"
    counts = Counter(said.partition(":")[0] for said in found.values())
    wrong_ones = {name: said for name, said in found.items() if said.startswith("wrong")}
    assert not wrong_ones, wrong_ones
    assert only or counts["runs"] >= least, counts
