"""Builds transformers' causal language models: from a folder or the hub, or from a config with random weights.

Weights are read from safetensors alone, and no code that comes with a model is run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.runs import is_first_process
from dlo_tasks.llm import packed_attention
from dlo_tasks.llm.tokenizer import has_tokenizer, vocabulary_size
from dlo_tasks.llm.vocabulary_loss import VocabularyHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def require(package: str) -> Any:
    """Returns an imported package of the extra `llm`.

    Raises:
        DloError: if it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DloError(f"language models need {package}, which is missing: pip install 'dlo_framework[llm]'") from error


def is_folder(model: str) -> bool:
    """Returns whether `model` names a folder here, and not a model of the hub (`owner/name`, or `name`)."""
    return Path(model).expanduser().is_dir() or model.startswith((".", "/", "~")) or model.count("/") > 1


def check_folder(model: str) -> None:
    """Checks that a folder holds a model in safetensors.

    Raises:
        DloError: if it is not there, has no config, or has its weights in pickles; none of them is opened.
    """
    if not is_folder(model):
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        near = [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DloError(
            f"model: no folder {folder}{did_you_mean(str(folder), near)}; give a folder, or a name of the hub:"
            " owner/name"
        )
    if not (folder / "config.json").is_file():
        raise DloError(f"model: {folder} has no config.json; give the folder that save_pretrained wrote")
    if any(folder.glob("*.safetensors")):
        return
    pickle = next((path for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickle is not None:
        raise DloError(
            f"refusing {pickle}: a pickle may run code when it is read, and was not opened; convert the weights to"
            " safetensors where you trust them: model.save_pretrained(FOLDER)"
        )
    raise DloError(f"model: {folder} has no *.safetensors; give the folder that save_pretrained wrote")


def read_config(model: str | None, config: Mapping[str, Any] | str | None) -> PretrainedConfig:
    """Returns the config of a model: of a folder or a hub's name, or a dict or JSON file for random weights.

    Raises:
        DloError: if there is none, or an unknown kind of model or setting in it; with the nearest name.
    """
    require("transformers")
    from transformers import AutoConfig

    if model is not None:
        check_folder(model)
        try:
            return AutoConfig.from_pretrained(_path(model), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise DloError(f"model: cannot read the config of {model}: {first_line(error)}") from error
    assert config is not None
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).expanduser().read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise DloError(f"config: cannot read {config}: {error}") from error
    if not isinstance(config, Mapping):
        raise DloError("config: a mapping of settings is needed, such as {model_type: llama, hidden_size: 256}")
    return _new_config(dict(config))


def _new_config(settings: dict[str, Any]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = settings.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING)
        raise DloError(f"config: model_type is a family of transformers, given {kind}{hint or '; llama, for one'}")
    probe = AutoConfig.for_model(kind)
    known = {*probe.to_dict(), *probe.attribute_map, "architectures", "dtype", "torch_dtype", "transformers_version"}
    for name in settings:
        if name not in known:
            raise DloError(f"config: {kind} has no setting '{name}'{did_you_mean(name, known)}")
    try:
        return AutoConfig.for_model(kind, **settings)
    except (ValueError, TypeError) as error:
        raise DloError(f"config: {kind} takes no such settings: {first_line(error)}") from error
    except Exception as error:  # transformers 5 checks settings with classes of huggingface_hub's own
        if type(error).__module__.startswith("huggingface_hub"):
            raise DloError(f"config: {kind} takes no such settings: {error}") from error
        raise


def text_config(config: PretrainedConfig) -> Any:
    """Returns the part of a config that describes the text model; the config itself where it has no such part."""
    found = config.get_text_config(decoder=True)
    # Of an encoder and decoder in one flat config transformers returns a copy, which is not the model's.
    return found if any(found is part for part in vars(config).values()) else config


def vocabulary_of(config: PretrainedConfig) -> int:
    """Returns the number of tokens in a model's vocabulary."""
    return int(text_config(config).vocab_size)


def fit_to_tokenizer(config: PretrainedConfig, given: Mapping[str, Any], tokenizer: Any) -> None:
    """Takes what a config for random weights leaves open from the data's tokenizer: vocabulary, special tokens.

    Args:
        config: changed in place.
        given: the settings that the user has given.
        tokenizer: of the data.
    """
    text = text_config(config)
    part = next((name for name, value in vars(config).items() if value is text), None)
    of_text: Mapping[str, Any] = given if part is None else given.get(part) or {}
    if "vocab_size" not in of_text:
        text.vocab_size = vocabulary_size(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in of_text:
            setattr(text, name, getattr(tokenizer, name, None))


def check_vocabulary(vocabulary: int, tokenizer: Any, *, trained: bool) -> None:
    """Checks that every token of the data has a row in the model's embedding.

    Args:
        vocabulary: rows of the embedding.
        tokenizer: of the data.
        trained: whether the model's weights are given, so that its vocabulary cannot become larger.

    Raises:
        DloError: if the tokenizer has ids that the model has no row for.
    """
    needed = vocabulary_size(tokenizer)
    if needed > vocabulary:
        fix = (
            "give the data the model's own tokenizer (leave data.init_args.tokenizer out)"
            if trained
            else f"set config.vocab_size={needed}, or leave it out"
        )
        raise DloError(
            f"the tokenizer's ids go up to {needed - 1} and the model's vocabulary has {vocabulary}; every token needs"
            f" a row in the embedding: {fix}"
        )


def build(model: str | None, config: PretrainedConfig, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Returns a causal language model with its weights; random ones without `model`, and none under the meta device.

    Args:
        model: a folder or a hub's name.
        config: of the model.
        dtype: of its parameters.
        attention: transformers' name of an implementation, such as `sdpa`; None takes `sdpa`, and `eager` where
            attention scores are soft-capped (Gemma 2), which `sdpa` would leave out.

    Raises:
        DloError: if it cannot be built, or its weights are not safetensors.
    """
    from transformers import AutoModelForCausalLM

    if attention == packed_attention.NAME:
        packed_attention.register()
    kind = attention or ("eager" if getattr(text_config(config), "attn_logit_softcapping", None) else None)
    options: dict[str, Any] = {"dtype": dtype, **({"attn_implementation": kind} if kind else {})}
    if dtype == torch.float64:  # transformers' default for mixtures, grouped_mm, has no kernel for it (torch 2.15).
        options["experts_implementation"] = "eager"
    try:
        if model is None or torch.get_default_device().type == "meta":
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        with bars_on_terminals():
            found = AutoModelForCausalLM.from_pretrained(
                _path(model), config=config, use_safetensors=True, trust_remote_code=False, **options
            )
        return found.train()
    except (OSError, ValueError, ImportError) as error:
        what = model if model is not None else getattr(config, "model_type", "config")
        raise DloError(f"cannot build a causal language model from {what}: {first_line(error)}") from error


@contextlib.contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Keeps transformers' progress bars out of log files, and on one rank."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if not (sys.stderr.isatty() and is_first_process()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tokenizer_source(model: str | None) -> str | None:
    """Returns where the tokenizer of a model is: its folder, if that holds one, or its name on the hub."""
    if model is None:
        return None
    if not is_folder(model):
        return model
    folder = Path(model).expanduser()
    return str(folder) if has_tokenizer(folder) else None


def head_of(model: PreTrainedModel) -> VocabularyHead:
    """Returns what makes a model's logits of its base model's hidden states."""
    config = text_config(model.config)
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return VocabularyHead(model.get_output_embeddings(), scale, softcap)  # Gemma 2; RecurrentGemma


def hidden_states(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Returns what the head is given: `[B, L, D]`, without a cache of keys and values."""
    found: torch.Tensor = base_of(model)(**inputs, use_cache=False)[0]
    return found


def logits(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Returns what the model itself makes of all tokens, `[B, L, V]`, without a cache of keys and values."""
    found: torch.Tensor = model(**inputs, use_cache=False).logits
    return found


def base_of(model: PreTrainedModel) -> nn.Module:
    """Returns the model without its head; also where `base_model` is the model itself, as it is in Llama 4's text."""
    from transformers import PreTrainedModel

    for base in (model.base_model, model.get_decoder()):
        if base is not model:
            return base
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the list of a model's blocks, and its name: that which holds most of its parameters.

    Raises:
        DloError: if there is none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise DloError(f"{type(model).__name__} has no list of blocks")
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def _path(model: str) -> str:
    return str(Path(model).expanduser()) if is_folder(model) else model


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
