"""A pipeline writes the tokens of one process: greedily and sampled, with prompts of several lengths and early ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from dlo_framework.data import data_parallel_coordinates
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.batches import pad_left
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, keeps_keys_and_values
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.seq2seq import FAMILIES as ENCODER_DECODERS
from support.seq2seq import seq2seq_config
from support.token_batches import FAMILIES, Batches
from support.trainers import quiet_trainer

GREEDY, SAMPLED = Sampling(14), Sampling(14, temperature=1.0, top_k=20, top_p=0.9, seed=5)
#: A token that ends a text, which some rows of most cases reach early.
END = 13


class Prompts(LightningDataModule):
    """Prompts of several lengths, each data rank its own; the last batch has one row."""

    def predict_dataloader(self) -> DataLoader:
        rank, ranks = data_parallel_coordinates(self.trainer)
        draw = torch.Generator().manual_seed(2)
        prompts = [torch.randint(96, (length,), generator=draw).tolist() for length in (3, 9, 1, 6, 4)]
        batches = []
        for numbers in ([0, 1, 2, 3], [4] * ranks):
            mine = numbers[rank * len(numbers) // ranks : (rank + 1) * len(numbers) // ranks]
            ids, mask = pad_left([prompts[number] for number in mine], 0, torch.device("cpu"))
            batches.append({"input_ids": ids, "attention_mask": mask, "index": torch.tensor(mine)})
        return DataLoader(Batches(batches), batch_size=None)


def trainer_of(strategy: Any, world_size: int, folder: Path) -> Trainer:
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        precision="64-true",
        default_root_dir=folder,
    )
    use_canonical_checkpoints(trainer)
    return trainer


def write(strategy: Any, world_size: int, folder: Path, model: str, sampling: Sampling) -> dict[int, list[int]]:
    """Returns the tokens of each prompt that this rank has written, by the prompt's number."""
    trainer = trainer_of(strategy, world_size, folder)
    kind = Seq2SeqLM if AutoConfig.from_pretrained(model).is_encoder_decoder else CausalLM
    batches: Any = trainer.predict(kind(model=model, sampling=sampling), datamodule=Prompts())
    return {row["index"]: row["tokens"] for batch in batches for row in batch}


def _write(rank: int, world_size: int, folder: Path, cases: list[tuple[str, Sampling, dict[str, Any]]]) -> list[Any]:
    found = []
    for model, sampling, options in cases:
        found.append(write(MeshStrategy(**{"dp_shard": 1, **options}), world_size, folder, model, sampling))
    return found


def save_models(folder: Path, families: list[str], layers: int = 2) -> dict[str, str]:
    found = {}
    for family in families:
        torch.manual_seed(3)
        ends = {"eos_token_id": END, "pad_token_id": 0}
        if family in ENCODER_DECODERS:
            scale = {"initializer_factor": 4.0} if family == "t5" else {"init_std": 0.4}
            config = AutoConfig.for_model(**seq2seq_config(family, decoder_start_token_id=0, **scale, **ends))
            AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / family)
        else:
            name = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
            more = {"initializer_range": 0.4, name: layers, **ends}
            config = AutoConfig.for_model(family, **{**FAMILIES[family], **more})
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        found[family] = str(folder / family)
    return found


def assert_written(folder: Path, cases: list[tuple[str, Sampling, dict[str, Any]]], world_size: int) -> None:
    answers = run_distributed(_write, world_size, folder, cases, backend=None)
    early = 0
    for number, (model, sampling, options) in enumerate(cases):
        expected = write("auto", 1, folder, model, sampling)
        written: dict[int, list[int]] = {}
        for answer in answers:
            assert all(trim(written.setdefault(key, row)) == trim(row) for key, row in answer[number].items()), options
        assert {key: trim(row) for key, row in written.items()} == {key: trim(row) for key, row in expected.items()}, (
            Path(model).name,
            sampling,
            options,
        )
        assert max(map(len, expected.values())) == sampling.max_new_tokens  # Some rows do not end early.
        early += any(len(trim(row)) < sampling.max_new_tokens for row in expected.values())
    assert early > len(cases) // 2


def trim(row: list[int]) -> list[int]:
    """A row to its end; what follows is padding, as long as the longest row of its batch."""
    return row[: row.index(END) + 1] if END in row else row


def test_two_stages_write_the_tokens_of_one_process(tmp_path: Path) -> None:
    models = save_models(tmp_path, ["llama", "gpt2", "t5"])
    cases: list[Any] = [(model, SAMPLED, {"pp": 2}) for model in models.values()]
    deep = save_models(tmp_path / "deep", ["mistral"], layers=4)["mistral"]
    cases += [(deep, GREEDY, {"pp": 2, "schedule": "Interleaved1F1B"})]
    assert_written(tmp_path, cases, 2)


@pytest.mark.slow
def test_stages_that_share_layers_or_weights_write_the_tokens_of_one_process(tmp_path: Path) -> None:
    models = save_models(tmp_path, ["llama", "qwen3", "gemma2", "bart"])
    cases: list[Any] = [(model, SAMPLED, {"pp": 2, "tp": 2}) for model in models.values()]
    # Data ranks that gather weights together write as often as the longest row of all.
    cases += [
        (models["llama"], GREEDY, {"dp_shard": 2, **axes})
        for axes in ({"pp": 2}, {"dp_shard": 1, "pp": 2, "cp": 2}, {"cp": 2, "cp_method": "ulysses"})
    ]
    assert_written(tmp_path, cases, 4)


def test_models_with_another_state_write_without_a_cache() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    models = {
        family: AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **more}))
        for family, more in (("llama", FAMILIES["llama"]), ("mistral", FAMILIES["mistral"]), ("mamba", {}))
    }
    assert {family: keeps_keys_and_values(model) for family, model in models.items()} == {
        "llama": True,
        "mistral": True,
        "mamba": False,
    }
