"""Exports a checkpoint as a folder in transformers' format, which vLLM and others also load."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from dlo_framework.checkpoint.formats.safetensors_file import PREFIX, model_weights
from dlo_framework.errors import DloError
from dlo_tasks.llm import adapters, language_models
from dlo_tasks.llm.adapters import Lora, is_transposed


def describe(task: Any) -> dict[str, Any]:
    """Returns the data that an export needs beside the weights, as plain data for checkpoints.

    Args:
        task: Task `CausalLM` with its model.

    Returns:
        Dict of `plugin`, the task's name; `config` and `generation_config`, JSON; `tokenizer`, its files' names and
        texts; `lora`, the adapters' options, or None; `base`, the folder or hub name of the initial weights;
        `logit_softcap`, the soft bound of the logits that transformers' model lacks, or None; `experts`, their number
        in mixtures that it lacks, or None.
    """
    generation = getattr(task.model, "generation_config", None)
    return {
        "plugin": "CausalLM",
        "config": task.model.config.to_json_string(use_diff=False),
        "generation_config": None if generation is None else generation.to_json_string(),
        "tokenizer": {} if task.tokenizer is None else tokenizer_files(task.tokenizer),
        "lora": None if task.lora is None else vars(task.lora).copy(),
        "base": task.model_name,
        "logit_softcap": task.logit_softcap,
        "experts": None if task.experts is None else task.experts.count,
    }


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """Returns the files in which transformers saves a tokenizer, names and texts; binary files are left out."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.suffix in (".json", ".txt", ".jinja")]
        return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def write_folder(checkpoint: dict[str, Any], folder: Path, dtype: torch.dtype | None = None) -> str:
    """Writes a checkpoint's model as a folder: weights in safetensors, config, generation config, tokenizer.

    Adapters are merged into the weights, and a head with an adapter is then untied from the embedding. With
    `merge: false`, only the adapters are written, in peft's format.

    Args:
        checkpoint: Loaded checkpoint.
        folder: New or empty folder.
        dtype: Dtype of the weights in the files; None for the checkpoint's.

    Returns:
        Description of what was written.

    Raises:
        DloError: If the folder is not empty, or the checkpoint is not of this task.
    """
    about = checkpoint.get("exporter")
    if not isinstance(about, dict) or "config" not in about:
        raise DloError(
            "checkpoint must be saved by CausalLM, got one without its model's config; export one of a CausalLM run"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DloError(f"output folder must be new or empty, got {folder}; remove it, or choose another")
    if about.get("experts"):
        raise DloError(
            f"the model of a folder must be one of transformers', got mixtures of {about['experts']} experts in place"
            " of its MLPs; name TARGET *.safetensors for its weights alone"
        )
    model = _model(checkpoint, about, dtype)
    lora = None if about["lora"] is None else Lora(**about["lora"])
    if about.get("logit_softcap") is not None:
        rank_zero_warn(
            f"transformers' {type(model).__name__} does not bound its logits, got logit_softcap"
            f" {about['logit_softcap']}: its most probable tokens are the same, its probabilities are not"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in about["tokenizer"].items():
        path = _below(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if lora is not None and not lora.merge:
        return _write_adapter(model, lora, about["base"], folder)
    if lora is not None:
        adapters.merge_adapters(model)
    with _quiet_save():
        model.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"a transformers folder: {type(model).__name__}, {count:,} parameters" + (", merged" if lora else "")


@contextlib.contextmanager
def _quiet_save() -> Iterator[None]:
    """Saves without notes that do not concern an export, and without a progress bar in files.

    transformers asks accelerate (1.15), which imports DeepSpeed, which looks for a device and warns if there is none.
    """
    searches = "DS_ACCELERATOR" not in os.environ and not torch.cuda.is_available()
    if searches:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with language_models.limit_progress_bars():
            yield
    finally:
        if searches:
            del os.environ["DS_ACCELERATOR"]


def _model(checkpoint: dict[str, Any], about: dict[str, Any], dtype: torch.dtype | None) -> Any:
    """Returns the model of a checkpoint, with its adapters, on the CPU."""
    language_models.require_package("transformers")
    from transformers import GenerationConfig

    config = language_models.config_from_json(about["config"])
    weights = model_weights(checkpoint, PREFIX)
    stored = weights.dtype(next(iter(weights)))
    with torch.device("meta"):
        model = language_models.build_model(None, config, dtype=dtype or stored, attention=None)
        if about["lora"] is not None:
            adapters.add_adapters(model, model.get_output_embeddings(), Lora(**about["lora"]), dtype or stored)
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)  # Buffers that checkpoints leave out, such as rotary frequencies.
    state = {name: _converted(weights[name], dtype) for name in weights}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise DloError(f"checkpoint's weights do not match its config: {error}") from error
    if about["lora"] is not None and model.get_output_embeddings() in adapters.adapter_layers(model).values():
        _untie(model)
    else:
        model.tie_weights()
    if about["generation_config"] is not None:
        model.generation_config = GenerationConfig.from_dict(json.loads(about["generation_config"]))
    return model.eval()


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a tensor in a dtype; integers, which are codes of 4-bit weights, stay as they are."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _untie(model: Any) -> None:
    """Marks a head with an adapter as untied in the config; its weights were loaded separately."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _below(folder: Path, name: str) -> Path:
    """Returns a path inside a folder; refuses names that lead out of it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise DloError(
            f"tokenizer files of a checkpoint must be inside its folder, got {name!r}; do not trust this checkpoint"
        )
    return path


def _write_adapter(model: Any, lora: Lora, base: str | None, folder: Path) -> str:
    from safetensors.torch import save_file

    layers = adapters.adapter_layers(model)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    transposed = any(is_transposed(layer.get_base_layer()) for layer in layers.values())
    config = lora.peft_config(targets, transposed=transposed, base=base)
    config.inference_mode = True
    config.save_pretrained(folder)
    state = adapters.adapter_state(model)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return f"a peft folder: {len(layers)} adapters of rank {lora.rank}" + (f", for {base}" if base else "")
