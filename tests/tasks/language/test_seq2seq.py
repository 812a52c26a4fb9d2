"""Encoder-decoders: Seq2SeqLM's loss and targets, Seq2SeqData's rows, training on ranks, and transformers' types."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from dlo_framework.checkpoint import load
from dlo_framework.data import Draw
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, complete_ids
from dlo_tasks.language.model_folders import write_folder
from dlo_tasks.language.seq2seq_data import Seq2SeqData
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from dlo_tasks.language.span_corruption import SpanCorruption, find_sentinels
from dlo_tasks.language.text_data import TextData
from support.causal_types import tiny
from support.checkpoints import check_same
from support.divided_types import check_cut, check_divided
from support.runs import Watch
from support.seq2seq import FAMILIES, Pairs, pairs, seq2seq_config
from support.strategies import PP, named_cases
from support.texts import lines, sentences
from support.trainers import quiet_trainer


def built(config: dict[str, Any], **options: Any) -> Seq2SeqLM:
    torch.manual_seed(0)
    task = Seq2SeqLM(config=config, **options)
    task.configure_model()
    return task


def own_loss(task: Seq2SeqLM, batch: dict[str, Any]) -> Any:
    """The loss of transformers' own forward."""
    model: Any = task.model
    return model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@default_dtype(torch.float64)
def test_the_loss_is_transformers_own_and_the_head_runs_in_chunks(family: str, attention: str) -> None:
    task, batch = built(seq2seq_config(family), attention=attention), pairs()
    assert task._traits.has_linear_head
    expected, found = own_loss(task, batch), task.training_step(batch, 0)["loss"]
    torch.testing.assert_close(found, expected, check_dtype=False)
    weights = [weight for weight in task.parameters() if weight.requires_grad]  # Pegasus has tables of sines.
    torch.testing.assert_close(*(torch.autograd.grad(loss, weights) for loss in (found, expected)))


@default_dtype(torch.float64)
def test_a_bias_of_the_logits_is_part_of_the_loss() -> None:
    task, batch = built(seq2seq_config("bart")), pairs()
    torch.nn.init.normal_(task.model.final_logits_bias)  # type: ignore[arg-type]
    task._prepare(task.model)
    assert not task._traits.has_linear_head
    torch.testing.assert_close(task.training_step(batch, 0)["loss"], own_loss(task, batch), check_dtype=False)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_targets_are_those_of_transformers_generate(family: str) -> None:
    task, batch = built(seq2seq_config(family)), pairs()
    model: Any = task.model.eval()
    written = complete_ids(model, batch["input_ids"], batch["attention_mask"], Sampling(max_new_tokens=6), None, False)
    own = {"max_new_tokens": 6, "forced_eos_token_id": None, "forced_bos_token_id": None}
    expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **own)
    torch.testing.assert_close(written, expected[:, 1:])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Seq2SeqLM, {"config": {"model_type": "llama"}}, "must be an encoder-decoder for Seq2SeqLM, .* use CausalLM"),
        (CausalLM, {"config": seq2seq_config("t5")}, "cannot build a causal language model from t5: .*use Seq2SeqLM"),
        (Seq2SeqLM, {"config": seq2seq_config("t5"), "attention": "dlo_varlen"}, "attention must be auto, sdpa or"),
        (Seq2SeqLM, {"config": seq2seq_config("t5"), "prompts": [[{"role": "user", "content": "x"}]]}, "must be texts"),
    ],
)
def test_models_and_options_of_other_kinds_are_refused(task: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        task(**options).check(None)


def test_a_trained_model_without_a_start_token_is_refused(tmp_path: Any) -> None:
    model = built(seq2seq_config("t5")).model
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None  # type: ignore[union-attr]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path) is not None
    with pytest.raises(DloError, match="decoder_start_token_id must be set to the token with which targets begin"):
        Seq2SeqLM(str(tmp_path))


# --- data: span corruption, padded and packed rows ----------------------------------------------------------------


PAIRS = [{"source": text, "target": text[::-1][: 5 + number % 20]} for number, text in enumerate(sentences(40, 8))]


@pytest.fixture
def make(tmp_path: Path, cache: Path) -> Any:
    """Makes the datamodule of some records."""

    def made(records: list[dict[str, Any]] | None = None, **options: Any) -> Seq2SeqData:
        file = lines(tmp_path / "pairs.jsonl", *(PAIRS if records is None else records))
        sizes = {"seq_len": 48, "target_len": 24, "batch_size": 4, "vocab_size": 320, "corpus_bytes": 60_000}
        return Seq2SeqData(**{"train_files": str(file), "cache_dir": str(cache), "val_fraction": 0.0} | sizes | options)

    return made


def batches(data: Seq2SeqData, epoch: int = 0) -> list[dict[str, torch.Tensor]]:
    if not data._datasets:
        data.prepare_data()
        data.setup("fit")
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("length", [2, 3, 10, 97, 568])
def test_spans_are_cut_out_and_the_lengths_depend_on_the_length_alone(length: int) -> None:
    corruption, tokens = SpanCorruption(), np.arange(length)
    counts = corruption.count(np.array(length))
    for seed in range(5):
        source, target = corruption.corrupt(tokens, np.arange(1000, 1100), np.random.default_rng(seed))
        assert (len(source), len(target)) == (counts.source, counts.target)
        parts: dict[int, list[int]] = {}
        for token in target:
            parts.setdefault(int(token), []) if token >= 1000 else parts[list(parts)[-1]].append(int(token))
        assert list(parts) == [token for token in source if token >= 1000] == list(range(1000, 1000 + counts.spans))
        whole = [part for token in source for part in (parts[token] if token >= 1000 else [token])]
        assert whole == tokens.tolist()
        assert all(parts.values())
    assert counts.noise == max(1, round(0.15 * length))


def test_t5s_lengths() -> None:
    """A source of 512 and its target of 114 tokens, with their ends, as in the paper's code."""
    assert SpanCorruption().longest(512, 10_000, 100) == 568
    assert SpanCorruption().count(np.array(568)).target + 1 == 114


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_rows_have_all_pairs_and_their_targets_are_counted(make: Any, packing: str) -> None:
    data = make(packing=packing, batch_size=1)
    found, tokens = [], 0
    for batch in batches(data):
        source = batch.get("encoder_segment_ids", batch.get("attention_mask"))
        target = batch.get("decoder_segment_ids", (batch["labels"] != -100).long())
        tokens += int(batch["tokens_in_step"])
        assert int((batch["labels"] != -100).sum()) == int(batch["tokens_in_step"])
        for ids, labels, of, to in zip(batch["input_ids"], batch["labels"], source, target, strict=True):
            found += [(ids[of == n].tolist(), labels[to == n].tolist()) for n in range(1, int(of.max()) + 1)]
    texts = {tuple(data.tokenizer.decode(ids, skip_special_tokens=True) for ids in pair) for pair in found}
    assert texts == {(pair["source"], pair["target"]) for pair in PAIRS}
    assert all(ids[-1] == labels[-1] == data.tokenizer.eos_token_id for ids, labels in found)


def test_each_epoch_removes_other_spans_which_depend_on_the_draw_alone(make: Any) -> None:
    data = make([{"text": text} for text in sentences(60)], target_len=None)
    first, again, second = batches(data), batches(data), batches(data, epoch=1)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    sentinels = find_sentinels(data.tokenizer)
    assert sentinels.tolist() == list(range(len(data.tokenizer) - 100, len(data.tokenizer)))
    assert all(int(batch["tokens_in_step"]) == int((batch["labels"] != -100).sum()) for batch in (*first, *second))
    dataset = data._datasets["train"]
    rows = [dataset.fetch([Draw(1, seed, True)])["labels"] for seed in (7, 7, 8)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@default_dtype(torch.float64)
def test_packed_pairs_have_the_loss_that_they_have_alone(make: Any, attention: str) -> None:
    task = Seq2SeqLM(config=seq2seq_config("t5", vocab_size=450), attention=attention)
    task.configure_model()
    losses = []
    for packing in ("best_fit", "none"):
        found = [
            (task.training_step(batch, 0)["loss"], batch["tokens_in_step"])
            for batch in batches(make(packing=packing, batch_size=1))
        ]
        losses.append(sum(loss * tokens for loss, tokens in found) / sum(tokens for _, tokens in found))
    torch.testing.assert_close(*losses)


def test_a_model_with_learned_positions_gets_padded_rows(make: Any) -> None:
    data = make()
    quiet_trainer(max_steps=1).fit(Seq2SeqLM(config=seq2seq_config("bart", vocab_size=450)), datamodule=data)
    assert data.packing == "none"


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"source": "a", "target": "b"}, {"text": "c"}], {}, r"pairs.jsonl:2: records must all have 'source' and"),
        ([{"source": "a"}], {}, "record with 'source' must have 'target' too"),
        (None, {"long_samples": "error", "target_len": 2}, r"pairs.jsonl:\d+: source and target must have at most"),
        (None, {"long_samples": "split"}, "long_samples must be truncate, drop or error for pairs, got split"),
        (None, {"columns": {"prompt": "x"}}, "columns must rename source, target, text, got prompt"),
        (None, {"noise_density": 1.0}, "noise_density must be above 0 and below 1"),
    ],
)
def test_bad_data_are_refused(make: Any, records: Any, options: dict[str, Any], message: str) -> None:
    def run() -> None:
        data = make(records, **options)
        data.check()
        batches(data)

    with pytest.raises(DloError, match=message):
        run()


def test_data_of_another_kind_of_model_are_refused(make: Any) -> None:
    with pytest.raises(DloError, match=r"data must have targets for CausalLM, got those for Seq2SeqLM; set"):
        CausalLM(config={"model_type": "gpt2"}).check(make())
    with pytest.raises(DloError, match=r"data must have targets for Seq2SeqLM, got those for CausalLM; set"):
        Seq2SeqLM(config=seq2seq_config("t5")).check(TextData())


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(make: Any, tmp_path: Path, family: str) -> None:
    """The spans of the rest of the epoch are those of the interrupted run; the folder has the weights."""
    config, weights = seq2seq_config(family), []
    del config["vocab_size"]
    for checkpoint in (None, tmp_path / "at_3.ckpt"):
        seed_everything(0, verbose=False)
        task, saves = Seq2SeqLM(config=config, schedule="constant"), Watch(tmp_path / "at_3.ckpt", step=3)
        trainer = quiet_trainer(max_steps=5, default_root_dir=tmp_path, callbacks=[saves])
        data = make([{"text": text} for text in sentences(60)], target_len=None)
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=False)
        weights.append(task.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    check_folder(torch.load(tmp_path / "end.ckpt", weights_only=False), task, tmp_path / "folder")


def check_folder(checkpoint: Any, task: Seq2SeqLM, folder: Path) -> None:
    """Checks that transformers reads the folder of a checkpoint as the task's model."""
    write_folder(checkpoint, folder)
    read = AutoModelForSeq2SeqLM.from_pretrained(folder)
    ids = torch.randint(3, 60, (2, 9))
    models: list[Any] = [task.model, read]
    logits = [one.eval()(input_ids=ids, decoder_input_ids=ids).logits for one in models]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert {f"model.{name}" for name in read.state_dict()} == set(checkpoint["state_dict"])
    assert read.config.decoder_start_token_id == task.config.decoder_start_token_id


def test_targets_are_written_for_the_sources_of_a_file(make: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "sources.jsonl", {"source": "the loss"}, {"source": "a"})
    data = make(predict_files=str(file))
    task = Seq2SeqLM(config=seq2seq_config("bart", vocab_size=450), sampling=Sampling(max_new_tokens=4))
    found: Any = quiet_trainer().predict(task, datamodule=data)
    rows = data.prediction_rows([row for batch in found for row in batch])
    assert [row["prompt"] for row in rows] == ["the loss", "a"]
    assert all(1 <= len(row["tokens"]) <= 4 for row in found[0])


# --- several ranks, also where stages divide both stacks ----------------------------------------------------------


DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "deepspeed_1", "deepspeed_2", "deepspeed_3")
DOUBLE = {"precision": "64-true"}
CLIPPED = DOUBLE | {"gradient_clip_val": 0.1}


def build(family: str, lora: int = 0, packed: bool = False, **options: Any) -> tuple[Seq2SeqLM, Pairs]:
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = Seq2SeqLM(config=seq2seq_config(family), lora=Lora(rank=lora) if lora else None, **more)
    return task, Pairs(1, packed=packed)


def staged(family: str, arguments: dict[str, Any] | None = None, **options: Any) -> Case:
    """A case in which stages divide both stacks."""
    given = {"family": family, **(arguments or {})}
    return Case(partial(PP, **options), given, CLIPPED, f"{given}, {options}")


def test_strategies_are_one_process() -> None:
    """Of each way to divide weights one, in double precision, with tied embeddings and biases of positions."""
    found = named_cases(("zero3", "tp", "pp"), DOUBLE, family="t5") + named_cases(["fsdp"], DOUBLE, family="bart")
    assert_parity(build, found, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_is_one_process(family: str) -> None:
    found = named_cases(DATA, family=family) + named_cases(DATA[1:7], family=family, recompute=True)
    found += named_cases(("ddp", "fsdp", "zero3", "pp"), family=family, lora=4)
    assert_parity(build, found, steps=3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_of_both_stacks_are_one_process_on_two_ranks() -> None:
    schedules: list[dict[str, Any]] = [
        {"schedule": name} for name in ("1F1B", "GPipe", "ZBH1", "Interleaved1F1B", "ZBV")
    ]
    splits: list[dict[str, Any]] = [{"split": counts} for counts in ([1, 3], [3, 1])]
    found = [staged(family, **one) for family in ("t5", "bart") for one in (*schedules, *splits)]
    found += [staged("t5", {"packed": True}, **one) for one in splits]
    found += [staged(family, {"recompute": True}, split=[3, 1]) for family in ("mt5", "pegasus")]
    assert_parity(build, found, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_of_both_stacks_are_one_process_on_four_ranks() -> None:
    deep = {"pp": 4, "micro_batches": 4}
    ways: list[dict[str, Any]] = [deep, deep | {"schedule": "ZBH1"}, {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}]
    found = [staged(family, **way) for family in ("t5", "bart") for way in ways]
    assert_parity(build, found, world_size=4, steps=2, rtol=1e-9)


def _train(rank: int, world_size: int, folder: Path, family: str) -> None:
    for name, steps, resumed in (("straight", 4, None), ("half", 2, None), ("resumed", 4, "half")):
        torch.manual_seed(0)
        trainer = quiet_trainer(
            devices=world_size,
            strategy=MeshStrategy(pp=2, micro_batches=2),
            max_steps=steps,
            default_root_dir=folder,
        )
        use_canonical_checkpoints(trainer)
        path = None if resumed is None else folder / f"{resumed}.ckpt"
        task, data = build(family, schedule="constant")
        data.steps = 2  # Of an epoch: these data begin again with each.
        trainer.fit(task, datamodule=data, ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(folder / f"{name}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_stages_resume_bit_for_bit_and_are_read_by_transformers(tmp_path: Path, family: str) -> None:
    run_distributed(_train, 2, tmp_path, family, backend=None)
    check_same(tmp_path / "straight.ckpt", tmp_path / "resumed.ckpt")
    checkpoint = load(tmp_path / "resumed.ckpt")
    alone = build(family)[0]
    alone.configure_model()
    alone.load_state_dict(checkpoint["state_dict"])
    check_folder(checkpoint, alone, tmp_path / "folder")


# --- every type of transformers -----------------------------------------------------------------------------------


#: Types of speech models, which have no encoder of text.
SPEECH = (
    *("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo"),
    *("nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime"),
)
TYPES = sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) - set(SPEECH))
#: Types without tensor rules that can be proved; those whose gradients are NaN in double precision on one rank too.
NOT_DIVIDED = {"switch_transformers", "fsmt", "led", "prophetnet"}
#: FSMT's output projection is also its decoder's embedding; ProphetNet calls a method of its table of positions.
NOT_CUT = {"fsmt", "prophetnet"}


def example(kind: str) -> tuple[Seq2SeqLM, dict[str, Any]]:
    config = tiny(kind, dropout=False)
    if kind == "encoder-decoder":
        decoder = tiny("bert", dropout=False, add_cross_attention=True)
        config = {"encoder": decoder | {"is_decoder": False, "add_cross_attention": False}, "decoder": decoder}
        config |= {"model_type": kind, "decoder_start_token_id": 1, "pad_token_id": 0}
    batch = pairs()
    # Routers of Switch Transformers have noise in training.
    return built(config).eval(), batch | {"tokens_in_step": (batch["labels"] != -100).sum()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_trains_with_the_loss_of_its_logits(kind: str) -> None:
    task, data = example(kind)
    logits = task.model(**task.inputs(data)[1], use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
    torch.testing.assert_close(task.training_step(data, 0)["loss"], expected, rtol=1e-5, atol=1e-5)
    task.parallel_plan().validate(task.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPEECH)
def test_a_speech_model_is_refused(kind: str) -> None:
    with pytest.raises(DloError, match="must be an encoder-decoder for Seq2SeqLM"):
        Seq2SeqLM(config={"model_type": kind})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_types_divided_by_two_ranks_are_one_process() -> None:
    check_divided(example, [kind for kind in TYPES if kind not in NOT_DIVIDED], set())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_types_in_two_stages_are_one_process() -> None:
    check_cut(example, [kind for kind in TYPES if kind not in NOT_CUT])
