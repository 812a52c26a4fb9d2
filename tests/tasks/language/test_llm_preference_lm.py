"""PreferenceLM: losses, refusals, resuming, checkpoints, exports, predictions, references, logs, and ranks."""

from __future__ import annotations

import csv
import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.models.attention import Attention, Prefix
from dlo_framework.testing import assert_parity
from dlo_tasks.language import model_folders, preference_losses, vocabulary_loss
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.preference_lm import PreferenceLM
from dlo_tasks.language.preference_losses import OBJECTIVES
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import token_log_probs
from support.preferences import build, data, write_pairs, write_tokenizer
from support.strategies import named_cases
from support.token_batches import FAMILIES
from support.trainers import quiet_trainer

SIZES = {"model_type": "llama", **FAMILIES["llama"], "vocab_size": 32}


def prepare(path: Path) -> Path:
    """Returns a folder with pairs, a tokenizer and a reference model."""
    write_pairs(path)
    write_tokenizer(path)
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**{**FAMILIES["llama"], "vocab_size": 32})).save_pretrained(path / "reference")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults = {"devices": 1, "max_steps": 5, "num_sanity_val_steps": 0}
    return quiet_trainer(default_root_dir=str(folder), **{**defaults, **options})


def fit(folder: Path, task: PreferenceLM, made: Any, ckpt_path: str | None = None, **options: Any) -> Trainer:
    running = trainer(folder, **options)
    use_canonical_checkpoints(running)
    running.fit(task, made, ckpt_path=ckpt_path, weights_only=False)
    return running


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"beta": 0.0}, {}, r"beta must be above 0, got 0\.0; 0\.1 is usual"),
    ({"objective": "simpo", "beta": -1.0}, {}, r"beta must be above 0, got -1\.0; 2\.0 is usual"),
    ({"gamma": -1.0}, {}, r"gamma must not be negative"),
    ({"desirable_weight": 0.0}, {}, r"desirable_weight must be above 0"),
    ({"objective": "ppo"}, {}, r"objective must be one of dpo, ipo, hinge, kto, orpo, simpo, got ppo"),
    ({"loss_kernel": "compiled"}, {}, r"loss_kernel must be torch for PreferenceLM"),
    ({"attention": Attention(mask=Prefix(3))}, {}, r"must be causal for PreferenceLM, .* got Prefix"),
    ({}, {}, r"reference must be set for objective dpo, got none; set reference: .* or lora"),
    ({"objective": "kto", "lora": Lora()}, {}, r"unpaired must be true for objective kto, got false; set data"),
    ({"lora": Lora()}, {"unpaired": True}, r"unpaired must be false for objective dpo, got true; remove it, or"),
]


@pytest.mark.parametrize(("options", "given", "message"), REFUSED)
def test_settings_that_do_not_match_are_refused_before_the_run(
    folder: Path, options: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(DloError, match=message) as found:
        PreferenceLM(config=SIZES, **options).check(data(str(folder), **given))
    assert "\n" not in str(found.value)


def test_a_reference_where_none_is_needed_and_one_of_another_vocabulary_are_refused(folder: Path) -> None:
    reference = FrozenModel(task=CausalLM(config={**SIZES, "vocab_size": 40}))
    with pytest.raises(DloError, match="reference must be unset for objective simpo"):
        PreferenceLM("simpo", config=SIZES, reference=reference).check(data(str(folder)))
    with pytest.raises(DloError, match=r"reference must have checkpoint or task, got average 0\.9, which follows"):
        PreferenceLM(config=SIZES, reference=FrozenModel(average=0.9)).check(data(str(folder)))
    task = PreferenceLM(model=str(folder / "reference"), reference=reference)
    with pytest.raises(DloError, match="reference must have the model's vocabulary of 32 tokens, got 40"):
        task.check(data(str(folder)))


def test_other_data_are_refused() -> None:
    with pytest.raises(DloError, match="data must be PreferenceData for PreferenceLM, got TextData"):
        PreferenceLM("orpo", config=SIZES).check(TextData())


def weights_of(task: PreferenceLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.state_dict().items() if "measures" not in name}


@pytest.mark.parametrize(
    ("objective", "source", "packing"),
    [("dpo", "model", "none"), ("kto", "model", "best_fit"), ("orpo", "", "none")],
)
def test_a_run_that_is_resumed_in_mid_epoch_ends_with_the_same_weights(
    folder: Path, objective: str, source: str, packing: str
) -> None:
    def made() -> tuple[PreferenceLM, Any]:
        seed_everything(1)
        return build(str(folder), objective, source, packing, rows=2, schedule="constant")

    whole, rows = made()
    fit(folder, whole, rows, max_steps=6)
    first, rows = made()
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=3, save_top_k=-1)
    fit(folder, first, rows, max_steps=3, callbacks=[saving], enable_checkpointing=True)
    second, rows = made()
    running = fit(folder, second, rows, ckpt_path=saving.best_model_path, max_steps=6)
    assert running.global_step == 6
    for name, value in weights_of(whole).items():
        assert torch.equal(value, second.state_dict()[name]), name
    names = load(saving.best_model_path)["state_dict"].keys()
    assert set(names) == {name for name in second.state_dict() if "measures" not in name} | {
        name for name in names if "measures" in name
    }  # None of the reference.
    assert not [name for name in names if "reference" in name]


def test_rewards_are_logged_in_training_and_validation(folder: Path) -> None:
    task, _ = build(str(folder), "dpo", "model", rows=2)
    rows = data(str(folder), batch_size=2, val_fraction=0.3)
    logger = CSVLogger(folder / "logs")
    running = fit(folder, task, rows, logger=logger, log_every_n_steps=2, max_steps=8, val_check_interval=4)
    logger.save()
    table = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    margins = [float(row["train/reward_margin"]) for row in table if row["train/reward_margin"]]
    assert len(margins) == 4
    assert margins[-1] > margins[0]
    for row in table:
        if row["train/reward_margin"]:
            difference = float(row["train/reward_chosen"]) - float(row["train/reward_rejected"])
            assert float(row["train/reward_margin"]) == pytest.approx(difference, abs=1e-6)
            assert 0 <= float(row["train/reward_accuracy"]) <= 1
    measured = running.callback_metrics
    assert {"val_loss", "val_reward_margin", "val_reward_accuracy", "val_reward_chosen", "val_reward_rejected"} <= set(
        measured
    )


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_validation_does_not_depend_on_the_batch_size(folder: Path, objective: str) -> None:
    found = []
    for rows in (1, 3, 8):
        seed_everything(1)
        reference = FrozenModel(task=CausalLM(config=SIZES))
        task = PreferenceLM(objective, model=str(folder / "reference"), reference=reference)  # type: ignore[arg-type]
        torch.manual_seed(7)
        made = data(str(folder), unpaired=objective == "kto", val_fraction=0.4, batch_size=2, eval_batch_size=rows)
        (measured,) = trainer(folder).validate(task, made, verbose=False)
        found.append(measured)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-5)
    assert found[0]["val_loss"] > 0


def test_an_export_is_a_model_that_transformers_loads_and_predicts_as_the_task(folder: Path) -> None:
    task, rows = build(str(folder), "dpo", "adapters")
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=2)
    (folder / "prompts.txt").write_text("the loss\nof a\n")
    rows.predict_files = str(folder / "prompts.txt")
    fit(folder, task, rows, max_steps=2, callbacks=[saving], enable_checkpointing=True)
    model_folders.write_folder(load(saving.best_model_path), folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    ids = torch.randint(20, (2, 7))
    with torch.no_grad():
        expected = task.model(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    found = trainer(folder).predict(task, rows)
    assert [row["prompt"] for batch in found for row in batch] == ["the loss", "of a"]


ROOT = Path(__file__).parents[3]
TRL = json.loads((ROOT / "tests" / "support" / "trl_losses.json").read_text())
TOKENS, WIDTH, VOCABULARY = 23, 8, 37


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that compares with TRL, and that has stored TRL's figures."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("preference")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_that_trl_has_computed(objective: str, compared: Any) -> None:
    expected, found = TRL["objectives"][objective], compared.stored(compared.by_dlo(objective))
    assert TRL["provenance"]["trl"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norms"].keys() == expected["norms"].keys()
    largest = max(expected["norms"].values())
    assert largest > 1e-3
    for kind in ("norms", "sums"):
        for name, value in expected[kind].items():
            assert found[kind][name] == pytest.approx(value, rel=1e-5, abs=1e-5 * largest), (kind, name)


@pytest.mark.parametrize("value", [-1e-7, -0.3, -0.6931, -0.6932, -60.0])
def test_gradients_of_odds_are_finite_at_every_probability(value: float) -> None:
    chosen = torch.tensor([value], requires_grad=True)
    preference_losses.orpo_losses(chosen, torch.tensor([-1.0]), 0.1).sum().backward()
    assert chosen.grad is not None
    assert torch.isfinite(chosen.grad).all()


class Adapted(nn.Module):
    """A projection with something beside it, as LoRA has."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection, self.beside = projection, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden) + self.beside(hidden)


@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["plain", "bias", "adapted", "gathered"])
def test_log_probs_in_chunks_are_those_of_all_logits(kind: str, softcap: float | None, chunk: int | None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=kind == "bias")
    module = Adapted(linear) if kind == "adapted" else linear
    if kind == "gathered":
        linear.register_forward_pre_hook(lambda module, args: None)
    head = VocabularyHead(module, softcap=softcap)
    assert head.fuses == (kind in ("plain", "bias"))
    hidden = (3 * torch.randn(TOKENS, WIDTH)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[::4] = IGNORE_INDEX
    weights = torch.randn(TOKENS)
    leaves = [hidden, *module.parameters()]
    expected = -F.cross_entropy(head.logits(hidden), targets, ignore_index=IGNORE_INDEX, reduction="none")
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    found = token_log_probs(head, hidden, targets, chunk)
    torch.testing.assert_close(found, expected)
    assert (found[::4] == 0).all()
    for one, other in zip(torch.autograd.grad((found * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_chunk_of_logits_is_the_most_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = vocabulary_loss.losses_and_slope

    def counted(logits: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(logits))
        return original(logits, *rest, **options)

    monkeypatch.setattr(vocabulary_loss, "losses_and_slope", counted)
    head, hidden = VocabularyHead(nn.Linear(WIDTH, VOCABULARY)), torch.randn(TOKENS, WIDTH, requires_grad=True)
    token_log_probs(head, hidden, torch.zeros(TOKENS, dtype=torch.long), chunk=10).sum().backward()
    assert seen == [10, 10, 3] * 2  # forward, and again in backward


# PreferenceLM trains on two ranks as in one process: each objective, each source of the reference, each strategy


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes cases of pairs in a folder."""
    return partial(named_cases, folder=str(prepare(tmp_path_factory.mktemp("preferences"))))


def test_strategies_are_one_process(cases: Any) -> None:
    found = cases(("cp",), objective="dpo", source="adapters")
    found += cases(("zero3", "pp"), objective="dpo", source="model")
    assert_parity(build, found, steps=2, rtol=1e-5)


@pytest.mark.slow
def test_stages_that_share_sequences_are_one_process(cases: Any) -> None:
    """On four ranks, where a second model's outputs are shards of sequences, on the last stage alone."""
    found = cases(["pp x cp"], objective="dpo", source="model")
    found += cases(["pp x cp"], objective="kto", source="model")
    found += cases(["pp x cp"], objective="ipo", source="adapters")
    assert_parity(build, found, steps=3, rtol=1e-5, world_size=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_objective_and_reference_is_one_process_under_every_strategy(cases: Any) -> None:
    everywhere = ["ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "cp", "deepspeed_3"]
    found = cases([*everywhere, "deepspeed_2"], objective="dpo", source="adapters")
    found += cases(everywhere, objective="dpo", source="model")
    # Squares of margins: in single precision the second moments differ by 2e-4. DeepSpeed has no double precision.
    found += cases(everywhere[:-1], {"precision": "64-true"}, objective="ipo", source="model")
    found += cases(everywhere, objective="orpo", packing="none")
    found += cases(("ddp", "fsdp", "zero3", "pp", "cp"), objective="kto", source="adapters")
    found += cases(("tp", "cp", "zero3"), objective="kto", source="model")
    found += cases(("ddp", "zero3", "pp"), {"accumulate_grad_batches": 2}, objective="dpo", source="model")
    found += cases(("fsdp", "zero3"), {"accumulate_grad_batches": 2}, objective="kto", source="adapters")
    assert_parity(build, found, steps=4, rtol=1e-5)
