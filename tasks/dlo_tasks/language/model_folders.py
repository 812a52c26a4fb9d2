"""Folders of transformers: each rank reads its shards of a model's weights, and a checkpoint is exported as one.

A strategy with `meta_init` builds the model on the meta device, and allocates one unit at a time while it shards it.
Parameters have transformers' initial values until the weights are read.

transformers 5 stacks experts while it reads: `experts.*.w1.weight` and `experts.*.w3.weight`, each `[I, D]`, become
`experts.gate_up_proj` `[E, 2 I, D]`. Here a stacked tensor is described by boxes of the stored ones, so that each rank
reads the experts, or the rows of them, that it holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from dlo_framework.checkpoint import LazyStateDict
from dlo_framework.checkpoint.formats.safetensors_file import PREFIX, model_weights
from dlo_framework.checkpoint.loading import TensorReader
from dlo_framework.checkpoint.manifest import Chunk, Key, SavedTensor, read_header
from dlo_framework.distributed.meta_init import set_read_later
from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.layer import Experts
from dlo_framework.models.experts.routers import Router
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_framework.shards import Box, Shard, full_box, held_boxes, slice_view
from dlo_framework.strategy_contract import plain_name
from dlo_tasks.language import adapters, language_models
from dlo_tasks.language.adapters import Lora, is_transposed

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SOURCE = "_dlo_weights_to_read"


def prepare_meta_init(model: Any, source: str | None) -> None:
    """Prepares a model on the meta device for initialisation module by module; does nothing for other models.

    Args:
        model: Model of transformers, with its adapters.
        source: Folder or hub name of its weights; None for random weights.
    """
    if not any(tensor.is_meta for tensor in model.parameters()):
        return
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            # An instance attribute: the strategy calls it like the method of torch's modules.
            module.__dict__["reset_parameters"] = partial(_initialise, model, module, name)
    model.__dict__[_SOURCE] = source
    if source is not None:
        for mixture in find_mixtures(model):
            set_read_later(model.get_submodule(mixture.experts))


def _initialise(model: Any, module: Any, name: str) -> None:
    """Initialises one module as transformers does; adapters as LoRA does, with B zero."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.__dict__.pop("_is_hf_initialized", None)
    if isinstance(module, FourBitLinear):
        adapters.initialise(model, module)
    elif ".lora_A." in name:
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    elif ".lora_B." in name:
        nn.init.zeros_(module.weight)
    elif ".lora_magnitude_vector." in name:
        # A wrapper's base layer is initialised before, in the same unit, so that its weight is full.
        module.weight.copy_(_row_norms(module, model.get_submodule(name.rsplit(".", 2)[0]).base_layer.weight))
    elif isinstance(module, Experts | Router):  # Their class's: the instance's is this function.
        reset: Any = type(module).reset_parameters
        reset(module)
    else:
        model._init_weights(module)


@torch.no_grad()
def read_weights(task: Any, *, resumes: bool, held: Mapping[str, Any] | None = None) -> None:
    """Reads the weights of a model that was built on the meta device and is now sharded; only once.

    Args:
        task: Task with the model, which its strategy has sharded.
        resumes: Whether a checkpoint's weights are loaded next, so that none need to be read.
        held: This rank's shards of the task's state, by name, if the task is not the run's own module.

    Raises:
        DloError: If a parameter, or a persistent buffer, is in none of the files.
    """
    if _SOURCE not in task.model.__dict__:
        return
    source = task.model.__dict__.pop(_SOURCE)
    for module in task.model.modules():
        module.__dict__.pop("reset_parameters", None)
    if source is None or resumes:
        return
    saved = open_safetensors(local_folder(source))
    _take_new_names(saved, task.model)
    model = task.model
    names: dict[int, list[str]] = {}
    for part in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in part:
            names.setdefault(id(tensor), []).append(plain_name(name))
    strategy = task.trainer.strategy if held is None else None
    held = strategy.lightning_module_state_dict() if strategy is not None else held
    assert held is not None
    for own in names.values():
        # Tensors of other pipeline stages and non-persistent buffers are not in the state dict.
        shard = held.get(f"model.{own[0]}")
        if shard is None:
            continue
        layer = model.get_submodule(own[0].rpartition(".")[0])
        key = own[0].rpartition(".")[2]
        if isinstance(layer, FourBitLinear) and key in ("codes", "scales", "scale_ranges"):
            weight = _stored_name([f"{own[0].rpartition('.')[0]}.weight"], saved, model.base_model_prefix)
            adapters.read_codes(saved, weight, layer, key, shard)
        elif ".lora_magnitude_vector." in own[0]:
            _read_row_norms(own[0], model, saved, shard)
        elif not any(".lora_" in name for name in own):
            saved.read_into(_stored_name(own, saved, model.base_model_prefix), shard)
    if strategy is not None:
        strategy.refresh()


def _row_norms(magnitude: Any, weight: Tensor) -> Tensor:
    """Returns DoRA's initial magnitudes of a weight: the norms over its input features."""
    return torch.linalg.vector_norm(weight, dim=0 if magnitude.fan_in_fan_out else 1)


def _read_row_norms(name: str, model: Any, saved: LazyStateDict, shard: Shard) -> None:
    """Fills a shard of DoRA's magnitudes from the stored weight, of which the rank reads all."""
    wrapper, _, adapter = name.removesuffix(".weight").rpartition(".lora_magnitude_vector.")
    stored = saved[_stored_name([f"{wrapper}.weight"], saved, model.base_model_prefix)]
    magnitude = model.get_submodule(wrapper).lora_magnitude_vector[adapter]
    norms = _row_norms(magnitude, stored.to(shard.dtype))
    for box, view in held_boxes(shard):
        view.copy_(slice_view(norms, full_box(tuple(norms.shape)), box))


def local_folder(source: str) -> Path:
    """Returns the folder of a model's files, downloaded if `source` is a hub name."""
    if language_models.is_folder(source):
        return Path(source).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))


def open_safetensors(folder: Path) -> LazyStateDict:
    """Returns the tensors of a model's safetensors files, not read yet.

    Raises:
        DloError: If the folder has none.
    """
    tensors: dict[Key, SavedTensor] = {}
    for path in _files(folder):
        stored, _ = read_header(path)
        for name, place in stored.items():
            chunks = (
                [Chunk(full_box(place.shape), path.name, place.begin, place.end)] if place.begin < place.end else []
            )
            tensors["model", name] = SavedTensor(place.dtype, place.shape, chunks)
    return LazyStateDict(TensorReader(folder, tensors), {key[1]: key for key in tensors}, title=str(folder))


def _take_new_names(saved: LazyStateDict, model: Any) -> None:
    """Renames stored tensors to the model's names, where transformers has changed them, and stacks experts.

    transformers 5.17 to 5.24 keep the changes in `conversion_mapping`, which is not documented. Changes beyond names
    and stacks are not applied, so these names are reported as missing.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if type(change) is WeightRenaming]
    for old in list(saved):
        new = old
        for renaming in renamings:
            new = renaming.rename_source_key(new)[0]
        if new != old:
            saved.rename(old, new)
    stored = {name: tensor for name in saved if (tensor := saved.saved_tensor(name)) is not None}
    for name, tensor in stack_stored(stored, read_stackings(changes)).items():
        if name not in saved:
            saved.add_saved(name, tensor)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise DloError(f"model must be a folder with {_SINGLE} or {_INDEX}, got {folder}; write it with save_pretrained")


def _stored_name(names: list[str], saved: LazyStateDict, base: str) -> str:
    """Returns the stored name of a parameter: tied ones have several names, and some files omit the base's prefix."""
    plain = [name.replace(".base_layer.", ".") for name in names]
    for name in [*plain, *(name.removeprefix(f"{base}.") for name in plain if name.startswith(f"{base}."))]:
        if name in saved:
            return name
    raise DloError(
        f"weights must include {plain[0]}, got {saved!r}, where transformers may store it under another name; remove"
        " meta_init, so that transformers reads the weights"
    )


@dataclass(frozen=True)
class Stacking:
    """Rule that stacks the matrices of experts.

    Attributes:
        sources: Patterns of stored names, in which `*` is the number of the expert: the matrices that are joined along
            their rows, in their order.
        target: End of the stacked tensor's name.
    """

    sources: tuple[str, ...]
    target: str

    def find(self, name: str) -> tuple[str, int, int] | None:
        """Returns the stacked tensor of a stored name, the number of the matrix, and that of the expert."""
        for number, pattern in enumerate(self.sources):
            match = re.search(re.escape(pattern).replace(r"\*", r"(\d+)") + "$", name)
            if match is not None:
                return name[: match.start()] + self.target, number, int(match.group(1))
        return None


@dataclass
class _Parts:
    matrices: int
    tensors: dict[tuple[int, int], SavedTensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def read_stackings(conversions: Iterable[object]) -> list[Stacking]:
    """Returns the rules among transformers' conversions of a family that stack experts and do nothing else.

    A reach into transformers 5.24 (`core_model_loading.WeightConverter`), which documents none of these attributes.

    Args:
        conversions: Conversions of the family.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    stackings = []
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter):
            continue
        first, *more = conversion.operations
        stacks = type(first) is MergeModulelist and first.dim == 0
        joins = len(more) == 1 and type(more[0]) is Concatenate and more[0].dim == 1
        targets = conversion._original_target_patterns
        if stacks and (joins or not more) and len(targets) == 1:
            stackings.append(Stacking(tuple(conversion._original_source_patterns), targets[0]))
    return stackings


def stack_stored(stored: Mapping[str, SavedTensor], stackings: Iterable[Stacking]) -> dict[str, SavedTensor]:
    """Returns the stacked tensors of stored ones, by name; those with a gap among their experts are left out.

    Args:
        stored: Stored tensors by name.
        stackings: Rules.
    """
    groups: dict[str, _Parts] = {}
    for stacking in stackings:
        for name, tensor in stored.items():
            place = stacking.find(name)
            if place is not None:
                target, matrix, expert = place
                groups.setdefault(target, _Parts(len(stacking.sources))).tensors[matrix, expert] = tensor
    stacked = {name: _join(parts) for name, parts in groups.items()}
    return {name: tensor for name, tensor in stacked.items() if tensor is not None}


def _join(parts: _Parts) -> SavedTensor | None:
    count = 1 + max(expert for _, expert in parts.tensors)
    if len(parts.tensors) != count * parts.matrices:
        return None
    heights = [parts.tensors[matrix, 0].shape[0] for matrix in range(parts.matrices)]
    first = parts.tensors[0, 0]
    chunks = []
    for (matrix, expert), tensor in parts.tensors.items():
        above = sum(heights[:matrix])
        for chunk in tensor.chunks:
            offsets = (expert, above + chunk.box.offsets[0], *chunk.box.offsets[1:])
            chunks.append(Chunk(Box(offsets, (1, *chunk.box.sizes)), chunk.file, chunk.begin, chunk.end))
    return SavedTensor(first.dtype, (count, sum(heights), *first.shape[1:]), chunks)


# --- export: a checkpoint as a folder in transformers' format, which vLLM and others also load --------------------


def describe(task: Any) -> dict[str, Any]:
    """Returns the data that an export needs beside the weights, as plain data for checkpoints.

    Args:
        task: Task with its model.

    Returns:
        Dict of `plugin`, the task's name; `kind`, the model's; `config` and `generation_config`, JSON; `tokenizer`, its
        files' names and texts; `lora`, the adapters' options, or None; `base`, the folder or hub name of the initial
        weights; `logit_softcap`, the soft bound of the logits that transformers' model lacks, or None; `experts`, their
        number in mixtures that it lacks, or None.
    """
    generation = getattr(task.model, "generation_config", None)
    return {
        "plugin": language_models.TASKS[task.kind],
        "kind": task.kind,
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
            "checkpoint must be saved by a task of language models, got one without its model's config; export one of"
            " a CausalLM run"
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
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise DloError(
                f"tokenizer files of a checkpoint must be inside its folder, got {name!r}; do not trust this checkpoint"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if lora is not None and not lora.merge:
        return _write_adapter(model, lora, about, folder)
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
        kind = about.get("kind", "causal")  # Checkpoints of dlo 0.2 have none.
        model = language_models.build_model(None, config, kind, dtype=dtype or stored, attention=None)
        if about["lora"] is not None:
            adapters.add_adapters(model, model.get_output_embeddings(), Lora(**about["lora"]), dtype or stored, kind)
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)  # Buffers that checkpoints leave out, such as rotary frequencies.
    # Integers, which are codes of 4-bit weights, stay as they are.
    tensors = ((name, weights[name]) for name in weights)
    state = {name: t.to(dtype) if dtype is not None and t.is_floating_point() else t for name, t in tensors}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise DloError(f"checkpoint's weights do not match its config: {error}") from error
    if about["lora"] is not None and model.get_output_embeddings() in adapters.adapter_layers(model).values():
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False  # The head's weights were loaded separately.
    else:
        model.tie_weights()
    if about["generation_config"] is not None:
        model.generation_config = GenerationConfig.from_dict(json.loads(about["generation_config"]))
    return model.eval()


def _write_adapter(model: Any, lora: Lora, about: dict[str, Any], folder: Path) -> str:
    from safetensors.torch import save_file

    layers = adapters.adapter_layers(model)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    transposed = any(is_transposed(layer.get_base_layer()) for layer in layers.values())
    base = about["base"]
    config = lora.peft_config(targets, about.get("kind", "causal"), transposed=transposed, base=base)
    config.inference_mode = True
    config.save_pretrained(folder)
    state = adapters.adapter_state(model)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return f"a peft folder: {len(layers)} adapters of rank {lora.rank}" + (f", for {base}" if base else "")
