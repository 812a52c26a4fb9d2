"""Distill in one process: what it adds to the loss, logs, saves and copies, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from dlo_framework.checkpoint import load
from dlo_framework.checkpoint.formats.safetensors_file import export_weights
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.task import training_parameters
from dlo_plugins.compile.callback import Compile
from dlo_plugins.distill.callback import AttentionTransfer, Distill, HiddenStates, OnPolicy, split_batch
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.distill_runs import OPTIMIZER, DistilledLM, digits, lm, seeded, sharp, tokens, vit
from support.token_batches import FAMILIES
from support.trainers import quiet_trainer


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    fixed = {"max_steps": 2, "devices": 1, "limit_val_batches": 1, "log_every_n_steps": 1}
    found = quiet_trainer(callbacks=list(callbacks), **fixed | options)
    use_canonical_checkpoints(found)
    return found


def fit(task: Any, distill: Distill, *others: Any, data: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    found = trainer(distill, *others, **options)
    data = data or (tokens() if hasattr(task, "tokenizer") else digits())
    found.fit(task, datamodule=data, ckpt_path=ckpt_path)
    return found


class Seen(ImageClassifier):
    """Records batches and losses of training."""

    seen: list[Any]
    losses: list[Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.seen.append(batch)
        self.losses.append(found["loss"].detach())
        return found


def seen(kind: type[Seen] = Seen, **options: Any) -> Seen:
    found = seeded(vit(kind=kind, **options))
    found.seen, found.losses = [], []
    return found


# --- the loss ----------------------------------------------------------------------------------------------


def test_the_loss_is_hintons_beside_the_tasks_own() -> None:
    task, teacher = seen(), sharp(vit(3, 64))
    start = {name: value.clone() for name, value in task.state_dict().items()}
    distill = Distill(FrozenModel(task=teacher), temperature=3.0, weight=0.7, ce_weight=0.2)
    fit(task, distill, max_steps=1)
    images, targets, theirs = task.seen[0]
    task.load_state_dict(start)
    with torch.no_grad():
        s, t = task.train()(images), teacher.eval()(images)
    torch.testing.assert_close(theirs.outputs, t, rtol=1e-5, atol=1e-5)
    kl = 9 * F.kl_div(F.log_softmax(s / 3, 1), F.log_softmax(t / 3, 1), log_target=True, reduction="batchmean")
    ce = F.cross_entropy(s, targets)
    torch.testing.assert_close(task.losses[0], 0.7 * kl + 0.2 * ce)
    agreed = float((s.argmax(1) == t.argmax(1)).float().mean())
    expected = {"distill/task_loss": float(ce), "distill/distance": float(kl), "distill/agreement": agreed}
    assert distill.latest == pytest.approx(expected, rel=1e-5)


def test_the_teacher_gets_the_mixed_images_and_validation_is_unchanged() -> None:
    task, teacher = seen(), sharp(vit(3))
    fit(task, Distill(FrozenModel(task=teacher)), BatchMix(num_classes=10), max_steps=1)
    images, targets, theirs = task.seen[0]
    assert targets.is_floating_point()
    with torch.no_grad():
        torch.testing.assert_close(theirs.outputs, teacher.eval()(images), rtol=1e-5, atol=1e-5)
    assert split_batch(task.seen[0])[0][0] is images


def test_the_students_methods_are_its_own_after_a_fit_and_after_an_error() -> None:
    task = seen()
    fit(task, Distill(FrozenModel(task=vit())), max_steps=1)
    assert not {"loss", "inputs", "abilities"} & task.__dict__.keys()

    class Fails(Seen):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("stop")

    failing = seen(Fails)
    with pytest.raises(RuntimeError, match="stop"):
        fit(failing, Distill(FrozenModel(task=vit())))
    assert not {"loss", "inputs", "abilities"} & failing.__dict__.keys()


def test_language_models_are_distilled_per_token() -> None:
    task, teacher = seeded(lm()), sharp(lm(3))
    distill = Distill(FrozenModel(task=teacher), temperature=2.0)
    fit(task, distill, max_steps=1)
    data = tokens()
    data.trainer = None
    batch = next(iter(data.train_dataloader()))
    task = seeded(lm()).train()
    keep = batch["labels"] != -100
    with torch.no_grad():
        s, t = (model.head.logits(model(**model.inputs(batch)[1]))[keep] for model in (task, teacher.eval()))
    kl = 4 * F.kl_div(F.log_softmax(s / 2, 1), F.log_softmax(t / 2, 1), log_target=True, reduction="batchmean")
    assert distill.latest["distill/distance"] == pytest.approx(float(kl), rel=1e-4)
    assert distill.latest["distill/agreement"] == pytest.approx(float((s.argmax(1) == t.argmax(1)).float().mean()))


def test_accumulated_batches_have_the_means_of_one() -> None:
    found = []
    for micro_batches in (1, 2):
        distill = Distill(FrozenModel(task=sharp(vit(3))))
        fit(seeded(vit()), distill, data=digits(8 // micro_batches), max_steps=1, accumulate_grad_batches=micro_batches)
        found.append(distill.latest)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# --- the token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["hard", "kl"])
def test_deits_token_learns_from_the_teacher_and_the_class_token_from_targets(loss: Any) -> None:
    task = seen(model="deit_tiny_distilled_patch16_224")
    start = {name: value.clone() for name, value in task.state_dict().items()}
    teacher = sharp(vit(3))
    fit(task, Distill(FrozenModel(task=teacher), loss, token=True, weight=0.5, ce_weight=0.5), max_steps=1)
    images, targets, theirs = task.seen[0]
    assert isinstance(task.train()(images), Tensor), "a later run gets one tensor again"
    task.load_state_dict(start)
    task.use_distillation_token()
    with torch.no_grad():
        by_class, by_token = task.train()(images)
    t = theirs.outputs
    if loss == "hard":
        apart = F.cross_entropy(by_token, t.argmax(1))
    else:
        apart = F.kl_div(F.log_softmax(by_token, 1), F.log_softmax(t, 1), log_target=True, reduction="batchmean")
    torch.testing.assert_close(task.losses[0], 0.5 * F.cross_entropy(by_class, targets) + 0.5 * apart)


# --- layers ------------------------------------------------------------------------------------------------


def test_projections_train_and_are_saved_by_name_but_not_exported(tmp_path: Path) -> None:
    task = seeded(vit())
    distill = Distill(FrozenModel(task=sharp(vit(3, 64))), hidden=HiddenStates({"blocks.0": "blocks.1"}))
    before: list[Tensor] = []

    class Start(ModelCheckpoint):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before.append(pl_module.training_modules["distill_0"].weight.detach().clone())

    saver = Start(dirpath=tmp_path, save_last=True, filename="it")
    fit(task, distill, saver, max_steps=2, enable_checkpointing=True)
    path = Path(saver.last_model_path)
    saved = load(path)["state_dict"]
    name = "training_modules.distill_0.weight"
    assert saved[name].shape == (64, 32)
    assert not torch.equal(before[0], saved[name])
    assert {key.split(".")[0] for key in saved} == {"model", "training_modules"}, "the teacher is left out"
    export_weights(path, tmp_path / "student.pt")
    exported = torch.load(tmp_path / "student.pt", weights_only=True)
    assert exported.keys() == {key.removeprefix("model.") for key in saved if key.startswith("model.")}
    plain = vit()
    trainer().validate(plain, datamodule=digits(), ckpt_path=path, verbose=False)
    assert not training_parameters(plain)
    resumed = vit()
    again = Distill(FrozenModel(task=sharp(vit(3, 64))), hidden=HiddenStates({"blocks.0": "blocks.1"}))
    fit(resumed, again, max_steps=2, ckpt_path=path)
    assert torch.equal(resumed.training_modules["distill_0"].weight.detach(), saved[name])


@pytest.mark.slow
def test_layers_of_convolutions_are_pooled_to_one_grid() -> None:
    student = seeded(ImageClassifier("resnet10t", num_classes=10, image_size=32, **OPTIMIZER))
    teacher = ImageClassifier("regnety_002", num_classes=10, image_size=32, **OPTIMIZER)
    distill = Distill(
        FrozenModel(task=teacher),
        hidden=HiddenStates({"layer1": "s1", "layer4": "s3"}),
        attention=AttentionTransfer({"layer2": "s2"}),
    )
    fit(student, distill, data=DigitsData(image_size=32, batch_size=8), max_steps=2)
    assert distill.latest["distill/hidden"] > 0
    assert distill.latest["distill/attention"] > 0
    assert len(training_parameters(student)) == 2


@pytest.mark.slow
def test_compiled_blocks_give_the_same_distances() -> None:
    found = []
    for others in ([], [Compile(scope="blocks", backend="aot_eager")]):
        distill = Distill(
            FrozenModel(task=sharp(vit(3, 64))),
            hidden=HiddenStates({"blocks.0": "blocks.1"}),
            attention=AttentionTransfer({"blocks.1": "blocks.2.attn"}),
        )
        fit(seeded(vit()), distill, *others)
        found.append(distill.latest)
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0]["distill/attention"] > 0


# --- initial weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [vit, lm])
def test_a_student_starts_from_every_second_layer(make: Any) -> None:
    task, teacher = seeded(make(2)), sharp(make(4))
    distill = Distill(FrozenModel(task=teacher), init_from="every 2")
    first: dict[str, Tensor] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            first.update({name: value.clone() for name, value in pl_module.model.state_dict().items()})

    fit(task, distill, Look(), max_steps=1)
    blocks = task.parallel_plan().block_names(task.model)
    theirs = teacher.model.state_dict()
    for name, value in first.items():
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        number = None if block is None else blocks.index(block)
        source = name if block is None else name.replace(block, block[: -len(str(number))] + str(2 * number), 1)
        assert torch.equal(value, theirs[source]), name


# --- refusals ----------------------------------------------------------------------------------------------


def refuse(message: str, student: Any, distill: Distill, data: Any = None, **options: Any) -> None:
    with pytest.raises(DloError, match=message):
        distill.check_run(trainer(distill, **options), student, data or digits())


def test_what_does_not_fit_is_refused_before_processes_start() -> None:
    teacher = FrozenModel(task=vit(4, 64))
    fewer = FrozenModel(task=vit(num_classes=7))
    refuse("Distill: teacher: num_classes must be the data's 10, got 7", vit(), Distill(fewer))
    fewer = FrozenModel(task=lm(vocab_size=80))
    refuse("teacher must have the student's 96 classes .*got 80", lm(), Distill(fewer), tokens())
    larger = FrozenModel(task=lm(vocab_size=128))
    refuse("got 128; .* set first_classes: true if its vocabulary", lm(), Distill(larger), tokens())
    fits = Distill(larger, first_classes=True)
    fits.check_run(trainer(fits), lm(), tokens())
    smaller = Distill(fewer, first_classes=True)
    refuse("got 80; use a teacher for the same classes and tokenizer, or", lm(), smaller, tokens())
    unknown = Distill(teacher, hidden=HiddenStates({"blocks.0": "block.1"}))
    refuse("hidden.layers must name layers of VisionTransformer, got 'block.1'.*blocks.1", vit(), unknown)
    flat = AttentionTransfer({"head": "head"})
    refuse("attention.layers must have positions", vit(), Distill(teacher, attention=flat))
    coarser = Distill(FrozenModel(task=vit(patch_size=8)), attention=AttentionTransfer())
    refuse("must pair layers with the same positions", vit(), coarser)
    refuse("token must be false for a model without", vit(), Distill(teacher, token=True))
    refuse("every 2 must give the student's 3 blocks, got 2", vit(3), Distill(teacher, init_from="every 2"))
    refuse("must have a teacher with the student's shapes", vit(2), Distill(teacher, init_from="every 2"))
    # The data's tokenizer sets the vocabulary later, but not the width.
    config = {name: value for name, value in FAMILIES["llama"].items() if name != "vocab_size"}
    undecided = CausalLM(config={"model_type": "llama", **config, "num_hidden_layers": 1})
    assert undecided.class_count is None
    half = Distill(FrozenModel(task=lm(2)), init_from="every 2")
    half.check_run(trainer(half), undecided, tokens())
    wider = Distill(FrozenModel(task=lm(2, hidden_size=64)), init_from="every 2")
    refuse("must have a teacher with the student's shapes", undecided, wider, tokens())
    strategy: Any = MeshStrategy(pp=2, micro_batches=2)
    inside = Distill(FrozenModel(task=lm()), hidden=HiddenStates())
    message = "must have the outputs of all blocks for hidden and attention, got pp=2"
    refuse(message, lm(), inside, tokens(), strategy=strategy, devices=2)

    inner = Distill(teacher, attention=AttentionTransfer({"blocks.1.attn": "blocks.2.attn"}))
    with pytest.raises(DloError, match=r"must be blocks of the plan, .*got layer 'blocks.1.attn' and scope: blocks"):
        inner.check_run(trainer(inner, Compile(scope="blocks")), vit(), digits())

    class Plain(LightningModule):
        pass

    refuse("must be a dlo_framework.Task", Plain(), Distill(teacher))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1.0}, "weight must be at least 0, got -1.0"),
        ({"weight": 0.0}, "weight must be above 0 without hidden and attention"),
        ({"weight": 0.0, "token": True, "attention": AttentionTransfer()}, "weight must be above 0 with token"),
        ({"init_from": "each 2"}, "init_from must be 'every' and a number"),
        ({"hidden": {"weight": 0.0}}, "hidden.weight must be above 0, got 0"),
        ({"hidden": {"loss": "l1"}}, "hidden.loss must be one of mse, cosine, got l1"),
        ({"on_policy": {"fraction": 0.0}}, "on_policy.fraction must be"),
        ({"on_policy": {"max_new_tokens": 0}}, "on_policy.max_new_tokens must be"),
        ({"on_policy": {"temperature": 0.0}}, "on_policy.temperature must be"),
        ({"on_policy": {"multiple": 0}}, "on_policy.multiple must be"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    kinds = {"hidden": HiddenStates, "on_policy": OnPolicy}
    with pytest.raises(DloError, match=message):
        Distill(FrozenModel(task=vit()), **{k: kinds[k](**v) if k in kinds else v for k, v in options.items()})


# --- on-policy ---------------------------------------------------------------------------------------------


class SeenLM(DistilledLM):
    """Records the batches of training."""

    seen: list[Any]

    def configure_callbacks(self) -> list[Any]:
        return []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return super().training_step(batch, batch_idx)


def on_policy(**options: Any) -> tuple[Any, Distill]:
    task = seeded(lm(kind=SeenLM))
    task.seen = []
    teacher = FrozenModel(task=sharp(lm(3)))
    distill = Distill(teacher, "jsd", on_policy=OnPolicy(**{"prompt_tokens": 5, "max_new_tokens": 7, **options}))
    fit(task, distill, max_steps=4)
    return task, distill


def test_the_student_learns_on_its_own_samples_and_without_their_targets_loss() -> None:
    task, distill = on_policy(fraction=1.0)
    for batch in task.seen:
        ids, labels = batch["input_ids"], batch["labels"]
        assert ids.shape == (4, 16), "11 tokens, padded to a multiple of 8"
        assert "tokens_in_step" not in batch
        assert (labels != -100).sum(1).tolist() == [7] * 4
        assert bool((labels[:, :4] == -100).all())
        assert bool((labels[:, 11:] == -100).all())
        assert torch.equal(labels[:, 4:10], ids[:, 5:11]), "each completion's tokens are targets of those before"
        assert batch["teacher_outputs"].outputs.shape[:2] == (4, 16)
    assert distill.latest.keys() == {"distill/distance", "distill/agreement"}
    again, _ = on_policy(fraction=1.0)
    other, _ = on_policy(fraction=1.0, seed=1)
    assert torch.equal(again.seen[3]["input_ids"], task.seen[3]["input_ids"])
    assert not torch.equal(other.seen[0]["input_ids"], task.seen[0]["input_ids"])


def test_micro_batches_weigh_as_much_as_their_tokens() -> None:
    """So that a pipeline's loss of sampled rows, which end early, is that of the full batch."""
    parts = [{"labels": torch.tensor([[1, 2, -100]])}, {"labels": torch.tensor([[1, -100, -100]])}]
    assert [float(each) for each in lm().micro_batch_weights(parts)] == pytest.approx([2 / 3, 1 / 3])
    assert [*lm().micro_batch_weights([{"labels": torch.tensor([[-100]])}] * 2)] == [0.5, 0.5]
    assert lm().micro_batch_weights([{**part, "tokens_in_step": 3} for part in parts]) == [1.0, 1.0]


def test_on_policy_needs_a_model_that_generates_and_lengths_that_the_ranks_can_share() -> None:
    pictures = Distill(FrozenModel(task=vit()), on_policy=OnPolicy())
    refuse("on_policy does not support ImageClassifier: it does not generate", vit(), pictures)
    distill = Distill(FrozenModel(task=lm()), on_policy=OnPolicy(multiple=5))
    for axes, shards, fix in (({"cp": 2}, 4, 8), ({"tp": 2, "sequence_parallel": True}, 2, 6)):
        mesh = MeshStrategy(**axes)
        message = f"on_policy.multiple must be a multiple of {shards} .* got 5; set multiple: {fix}"
        refuse(message, lm(), distill, tokens(), strategy=mesh, devices=mesh.spec.tp * mesh.spec.cp)
