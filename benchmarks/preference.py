"""Are the losses of PreferenceLM, and their gradients, those of TRL's trainers on the same batch?

A small Llama with fixed weights, and another as the reference. TRL's `DPOTrainer`, `KTOTrainer`, `ORPOTrainer` and
`CPOTrainer` compute the loss of a padded batch by their own methods, and the gradients of all parameters; PreferenceLM
computes them from the same token sequences, packed two pairs in a row. A row of the table is the largest relative
difference of the gradients' elements, relative to the largest element, and of the loss.

KTO: one row of completions is TRL's batch.

Run: ``python benchmarks/preference.py [--write tests/support/trl_losses.json]``; it needs ``trl``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from torch import Tensor

#: Objectives, and the tuning's options.
CASES: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.1},
    "ipo": {"beta": 0.2},
    "hinge": {"beta": 0.5},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 1.0},
}
BAR = 1e-5
VOCABULARY = 31
#: Prompts, chosen and rejected answers, as token ids.
PAIRS = [
    ([3, 7, 11], [5, 9, 2, 1], [8, 4, 1]),
    ([12, 6], [14, 1], [3, 3, 15, 20, 1]),
    ([2, 25, 17, 9, 4], [10, 21, 1], [29, 1]),
    ([19], [28, 7, 7, 13, 1], [6, 16, 1]),
]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_model(shift: float, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a Llama whose weights are sines, the same in any version of torch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0)).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            angle = torch.arange(parameter.numel(), dtype=torch.float64) * (0.7 + 0.01 * number) + shift + number
            norm = parameter.ndim == 1
            parameter.copy_((0.3 * angle.sin() + (1 if norm else 0)).view(parameter.shape))
    return model


def trainer_of(objective: str, model: Any, reference: Any, folder: str) -> Any:
    """Returns TRL's trainer of an objective."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<end>": 1, **{f"t{number}": number for number in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    options = CASES[objective]
    common: dict[str, Any] = {
        "output_dir": folder,
        "beta": options["beta"],
        "report_to": "none",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "per_device_train_batch_size": 2,
    }
    pairs = Dataset.from_list([{"prompt": "t2", "chosen": "t3", "rejected": "t4"}] * 4)
    judged = Dataset.from_list([{"prompt": "t2", "completion": "t3", "label": bool(n % 2)} for n in range(4)])
    sources = {"args": None, "processing_class": tokenizer}
    if objective in ("dpo", "ipo", "hinge"):
        from trl import DPOConfig, DPOTrainer

        kind = {"dpo": "sigmoid"}.get(objective, objective)
        return DPOTrainer(
            model, reference, **{**sources, "args": DPOConfig(loss_type=[kind], **common)}, train_dataset=pairs
        )
    if objective == "kto":
        from trl import KTOConfig, KTOTrainer

        weights = {name: options[name] for name in ("desirable_weight", "undesirable_weight")}
        return KTOTrainer(model, reference, **{**sources, "args": KTOConfig(**weights, **common)}, train_dataset=judged)
    if objective == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(model, **{**sources, "args": ORPOConfig(**common)}, train_dataset=pairs)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": options["gamma"]}
    return CPOTrainer(model, **{**sources, "args": CPOConfig(**simpo, **common)}, train_dataset=pairs)


def padded(sequences: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Returns a padded batch of prompts with answers, in TRL's form."""
    width = max(len(prompt) + len(answer) for prompt, answer in sequences)
    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "completion_mask": []}
    for prompt, answer in sequences:
        rest = width - len(prompt) - len(answer)
        found["input_ids"].append([*prompt, *answer, *[0] * rest])
        found["attention_mask"].append([1] * (width - rest) + [0] * rest)
        found["completion_mask"].append([0] * len(prompt) + [1] * len(answer) + [0] * rest)
    return {name: torch.tensor(rows) for name, rows in found.items()}


def completions() -> tuple[list[tuple[list[int], list[int]]], list[bool], list[tuple[list[int], list[int]]]]:
    """Returns KTO's completions, whether they are desirable, and the mismatched ones."""
    found = [
        (prompt, chosen if number % 2 == 0 else rejected) for number, (prompt, chosen, rejected) in enumerate(PAIRS)
    ]
    labels = [number % 2 == 0 for number in range(len(found))]
    return found, labels, [(prompt, found[number - 1][1]) for number, (prompt, _) in enumerate(found)]


def by_trl(objective: str) -> tuple[float, dict[str, Tensor]]:
    """Returns TRL's loss and the gradients of all parameters."""
    model, reference = make_model(0.0), make_model(0.4)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(objective, model, reference, folder)
    chosen, rejected = ([(prompt, pair[number]) for prompt, *pair in PAIRS] for number in (0, 1))
    trainer.model.train()
    if objective == "kto":
        held, labels, mismatched = completions()
        inputs: dict[str, Any] = padded(held) | {"label": torch.tensor(labels)}
        inputs |= {f"KL_{name}": value for name, value in padded(mismatched).items()}
        loss = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    elif objective in ("orpo", "simpo"):
        inputs = {}
        for name, sequences in (("chosen", chosen), ("rejected", rejected)):
            batch = padded(sequences)
            labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
            inputs |= {f"{name}_input_ids": batch["input_ids"], f"{name}_labels": labels}
            inputs[f"{name}_attention_mask"] = batch["attention_mask"]
        loss, _ = trainer.get_batch_loss_metrics(trainer.model, inputs)
    else:
        loss = trainer._compute_loss(trainer.model, padded(chosen + rejected), return_outputs=False)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rows_of(held: list[list[tuple[list[int], list[int]]]], answers: list[list[int]]) -> dict[str, Tensor]:
    """Returns a batch of PreferenceLM.

    Args:
        held: Prompts and answers of each row.
        answers: Whether each is preferred, 1 or 0.
    """
    width = max(sum(len(prompt) + len(answer) - 1 for prompt, answer in row) for row in held)
    shape = len(held), width
    batch = {name: torch.full(shape, -100) for name in ("labels", "context_labels")}
    batch |= {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "position_ids": torch.arange(width).repeat(len(held), 1),
    }
    batch["sequence_ids"] = torch.full(shape, -1)
    for number, row in enumerate(held):
        at = 0
        for place, (prompt, answer) in enumerate(row):
            ids = torch.tensor([*prompt, *answer])
            span = slice(at, at + len(ids) - 1)
            batch["input_ids"][number, span] = ids[:-1]
            batch["position_ids"][number, span] = torch.arange(len(ids) - 1)
            batch["sequence_ids"][number, span] = place
            cut = at + len(prompt) - 1
            batch["labels"][number, cut : span.stop] = ids[len(prompt) :]
            batch["context_labels"][number, at:cut] = ids[1 : len(prompt)]
            at = span.stop
    return batch | {"answers": torch.tensor(answers)}


def our_batch(objective: str) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Returns the batch, and for KTO the mismatched one."""
    if objective == "kto":
        held, labels, mismatched = completions()
        answers = [[int(label) for label in labels]]
        return rows_of([held], answers), rows_of([mismatched], answers)
    rows = [[(prompt, answer) for prompt, *pair in PAIRS[first : first + 2] for answer in pair] for first in (0, 2)]
    return rows_of(rows, [[1, 0, 1, 0]] * 2), None


def by_dlo(objective: str, chunk: int | None = None) -> tuple[float, dict[str, Tensor]]:
    """Returns PreferenceLM's loss and the gradients of all parameters."""
    from dlo_tasks.language.preference_lm import PreferenceLM

    task, reference = (
        PreferenceLM(objective, config={"model_type": "llama", **SIZES}, **CASES[objective]) for _ in "ab"
    )
    task.model, reference.model = make_model(0.0), make_model(0.4)
    batch, mismatched = our_batch(objective)

    def log_probs(of: Any, rows: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return of.answer_sums(of.head, of._outputs(rows), rows).log_probs

    if task.compares:
        batch["reference_log_probs"] = log_probs(reference, batch)
    if mismatched is not None:
        batch |= task.divergence_of(log_probs(task, mismatched) - log_probs(reference, mismatched), batch["answers"])
    loss = task.loss(task._outputs(batch), batch)
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None
    }


def differences(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> tuple[float, float]:
    """Returns the relative differences of the losses and of the gradients."""
    assert one[1].keys() == other[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in other[1].values())
    gradients = max(float((one[1][name] - gradient).abs().max()) for name, gradient in other[1].items())
    return abs(one[0] - other[0]) / abs(other[0]), gradients / largest


def stored(found: tuple[float, dict[str, Tensor]]) -> dict[str, Any]:
    """Returns a loss, each gradient's norm, and a weighted sum of its elements, as plain data."""
    loss, gradients = found
    wave = {name: torch.arange(g.numel(), dtype=torch.float64).cos().view(g.shape) for name, g in gradients.items()}
    return {
        "loss": loss,
        "norms": {name: float(gradient.double().norm()) for name, gradient in gradients.items()},
        "sums": {name: float((gradient.double() * wave[name]).sum()) for name, gradient in gradients.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", help="file for TRL's losses and gradients")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options, "cpu")
    try:
        import trl
    except ImportError:
        record.without("TRL", "trl is not installed")
        record.finish()
        return
    table = Table("largest relative difference from TRL", "loss or gradients of TRL", "float32")
    kept = {}
    for objective in CASES:
        theirs, ours = by_trl(objective), by_dlo(objective)
        loss, gradients = differences(ours, theirs)
        table.add(objective, [max(loss, gradients)], bar=BAR, ours=True, loss=loss, gradients=gradients)
        kept[objective] = stored(theirs)
        assert math.isfinite(theirs[0])
    record.add(table)
    if options.write:
        about = {"made_by": "benchmarks/preference.py --write", "trl": trl.__version__, "torch": torch.__version__}
        Path(options.write).write_text(json.dumps({"provenance": about, "objectives": kept}, indent=1) + "\n")
    record.finish()


if __name__ == "__main__":
    main()
