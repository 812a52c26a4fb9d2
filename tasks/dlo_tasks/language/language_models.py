"""Builds transformers' language models from a folder, the hub, or a config with random weights.

Weights are read from safetensors only; code that comes with a model is never run.

A model may have fewer heads than its width holds, also in families whose configs have no width of a head. In GPT-2, OPT
and GPT-NeoX the heads' widths add up to the model's, so that transformers cannot describe a model without some of its
heads. Here a config of these families may have `head_dim`: the model is built with all heads that fit, and its
attention is then replaced by one with the first of them. The result needs dlo: transformers ignores `head_dim`.

A reach into transformers (5.24): the names of the projections and of the attributes that count heads are those of its
attention modules.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from inspect import getfile, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dlo_framework.config_only import note_missing
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.models.hugging_face import is_conv1d
from dlo_framework.run.runs import is_first_process
from dlo_framework.yaml_text import read_yaml
from dlo_tasks.language import packed_attention
from dlo_tasks.language.encoder_decoder import default_start_token
from dlo_tasks.language.text_settings import TextSettings, text_settings
from dlo_tasks.language.tokenizer import check_hub_name, first_line, has_tokenizer, vocabulary_size
from dlo_tasks.language.vocabulary_head import VocabularyHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


#: Kind of a language model: it predicts the next token, masked tokens, or a target text from a source.
ModelKind = Literal["causal", "masked", "seq2seq"]
#: Class of transformers that builds each kind, and the task that trains it.
AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
TASKS = {"causal": "CausalLM", "masked": "MaskedLM", "seq2seq": "Seq2SeqLM"}
#: Datamodule whose batches each kind takes.
DATA = {"causal": "TextData", "masked": "MaskedTextData", "seq2seq": "Seq2SeqData"}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

#: Families whose attention reads a head_dim that their config classes do not declare (transformers 5.17).
READS_HEAD_DIM = ("phi3",)


def require_package(package: str) -> Any:
    """Imports and returns a package of the extra `llm`.

    Raises:
        DloError: If it is not installed.
    """
    import importlib

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # peft imports bitsandbytes, which warns of kernels that it does not find.
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DloError(
            f"a language model needs {package}, which is not installed; pip install 'dlo_framework[llm]'"
        ) from error
    finally:
        logging.disable(before)


def is_folder(model: str) -> bool:
    """Returns whether `model` names a local folder, not a model of the hub (`owner/name`, or `name`)."""
    return Path(model).expanduser().is_dir() or model.startswith((".", "/", "~")) or model.count("/") > 1


def check_folder(model: str) -> None:
    """Checks that a local folder has a model in safetensors.

    Raises:
        DloError: If it does not exist, has no config, or has its weights in pickles, which are never opened.
    """
    if not is_folder(model):
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        near = [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise DloError(
            f"model must be a folder or a hub name (owner/name), got {folder}, which does not exist"
            f"{did_you_mean(str(folder), near) or '; correct the path'}"
        )
    if not (folder / "config.json").is_file():
        raise DloError(
            f"model must be a folder with config.json, got {folder}; set it to one that save_pretrained wrote"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickle = next((path for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickle is not None:
        raise DloError(
            f"model must have its weights in safetensors, got the pickle {pickle}, which can run code and was not"
            " opened; if you trust it, convert it: model.save_pretrained(FOLDER)"
        )
    raise DloError(f"model must be a folder with *.safetensors, got {folder}; set it to one that save_pretrained wrote")


def read_config(model: str | None, config: Mapping[str, Any] | str | None) -> PretrainedConfig:
    """Returns the config of a model: from a folder or hub name, or from a dict or JSON file for random weights.

    A command that needs shapes alone gets the public config that dlo ships where neither machine nor hub has it.

    Raises:
        DloError: If the config is missing, or its model type or a setting is unknown; with the nearest name.
    """
    require_package("transformers")
    if model is not None:
        check_folder(model)
        try:
            return _read_own_config(model)
        except DloError as error:
            note = f"weights and tokenizer of {model} (config: the public one that dlo ships)"
            if is_folder(model) or not note_missing(note):
                raise
            public = public_configs().get(model)
            if public is None:
                fix = "model.init_args.model: null and model.init_args.config: path/to/config.json"
                raise DloError(f"{error}; or download its config.json, and set {fix}") from error
            return _new_config(dict(public["config"]))
    assert config is not None
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).expanduser().read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise DloError(f"config: cannot read {config}: {error}") from error
    if not isinstance(config, Mapping):
        raise DloError(
            f"config must be a mapping, got {type(config).__name__}; write, for example,"
            " {model_type: llama, hidden_size: 256}"
        )
    return _new_config(dict(config))


def public_configs() -> dict[str, dict[str, Any]]:
    """Returns `config` and the number of `parameters` of each model that dlo's recipes name, by hub name."""
    configs: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("public_configs.yaml"))
    return configs


def _read_own_config(model: str) -> PretrainedConfig:
    from transformers import AutoConfig

    if not is_folder(model):
        check_hub_name(model, "model", "config.json")
    try:
        return AutoConfig.from_pretrained(_path(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        where = "" if is_folder(model) else f"; {Path.cwd()} has no such folder either"
        raise DloError(f"model: cannot read the config of {model}: {first_line(error)}{where}") from error


def _new_config(settings: dict[str, Any]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = settings.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        hint = "" if kind is None else did_you_mean(str(kind), CONFIG_MAPPING)
        raise DloError(
            f"config.model_type must be a family of transformers, got {kind}{hint or '; llama, for example'}"
        )
    probe = AutoConfig.for_model(kind)
    known = {*probe.to_dict(), *probe.attribute_map, "architectures", "dtype", "torch_dtype", "transformers_version"}
    if probe.is_encoder_decoder:  # T5's class has no such attribute until it is set.
        known.add("decoder_start_token_id")
    # A model may read a `head_dim` that its config class does not declare (Qwen3-MoE, Phi-3).
    sources = Path(getfile(type(probe))).parent.glob("modeling_*.py")
    if kind in NARROW_FAMILIES or any('config, "head_dim"' in path.read_text(encoding="utf-8") for path in sources):
        known.add("head_dim")
    for name in settings:
        if name not in known:
            raise DloError(
                f"config must have settings of {kind}, got '{name}'{did_you_mean(name, known) or '; remove it'}"
            )
    try:
        return AutoConfig.for_model(kind, **settings)
    except (ValueError, TypeError) as error:
        raise DloError(f"config: {kind} takes no such settings: {first_line(error)}") from error
    except Exception as error:  # transformers 5 checks settings with huggingface_hub's classes.
        if type(error).__module__.startswith("huggingface_hub"):
            raise DloError(f"config: {kind} takes no such settings: {error}") from error
        raise


def text_config(config: PretrainedConfig) -> Any:
    """Returns the sub-config of the text model, or the config itself where it has none."""
    sub_config = config.get_text_config(decoder=True)
    # For a flat encoder-decoder config transformers returns a copy, which is not the model's.
    return sub_config if any(sub_config is part for part in vars(config).values()) else config


def model_vocabulary_size(config: PretrainedConfig) -> int:
    """Returns a model's vocabulary size."""
    return int(text_config(config).vocab_size)


def has_vocabulary_size(given: Mapping[str, Any]) -> bool:
    """Returns whether the user's settings of a config, or those of its text model, have a vocabulary size."""
    parts = [given, *(value for value in given.values() if isinstance(value, Mapping))]
    return any("vocab_size" in part for part in parts)


def fit_to_tokenizer(config: PretrainedConfig, given: Mapping[str, Any], tokenizer: Any) -> None:
    """Fills the unset vocabulary size and special tokens of a config from the data's tokenizer.

    Args:
        config: Config for random weights, changed in place.
        given: Settings that the user has set.
        tokenizer: Tokenizer of the data.
    """
    text = text_config(config)
    part = next((name for name, value in vars(config).items() if value is text), None)
    of_text: Mapping[str, Any] = given if part is None else given.get(part) or {}
    if "vocab_size" not in of_text:
        text.vocab_size = vocabulary_size(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name not in of_text:
            setattr(text, name, getattr(tokenizer, name, None))
    if config.is_encoder_decoder and "decoder_start_token_id" not in given:
        config.decoder_start_token_id = default_start_token(config)


def check_vocabulary(vocabulary: int, tokenizer: Any, *, trained: bool) -> None:
    """Checks that every token of the data has a row in the model's embedding.

    Args:
        vocabulary: Rows of the embedding.
        tokenizer: Tokenizer of the data.
        trained: Whether the model has trained weights, so that its vocabulary cannot grow.

    Raises:
        DloError: If the tokenizer has ids without a row.
    """
    needed = vocabulary_size(tokenizer)
    if needed > vocabulary:
        fix = (
            "use the model's own tokenizer (remove data.init_args.tokenizer)"
            if trained
            else f"set config.vocab_size={needed}, or remove it"
        )
        raise DloError(
            f"vocabulary of the model must have a row for each token id, up to {needed - 1}, got {vocabulary} rows;"
            f" {fix}"
        )


def build_model(
    model: str | None,
    config: PretrainedConfig,
    kind: ModelKind = "causal",
    *,
    dtype: torch.dtype,
    attention: str | None,
) -> PreTrainedModel:
    """Returns a language model with its weights: random without `model`, none under the meta device.

    Args:
        model: Folder or hub name, or None.
        config: Config of the model.
        kind: Kind of the model.
        dtype: Dtype of the parameters.
        attention: Attention implementation of transformers, such as `sdpa`. None selects `sdpa`, or `eager` where
            attention scores are soft-capped (Gemma 2), which `sdpa` does not compute.

    Raises:
        DloError: If it cannot be built, or its weights are not safetensors.
    """
    import transformers

    auto: Any = getattr(transformers, AUTO_CLASSES[kind])
    if attention == packed_attention.NAME:
        packed_attention.register_attention()
    options: dict[str, Any] = {"dtype": dtype}
    if attention or text_settings(text_config(config)).attn_logit_softcapping:
        options["attn_implementation"] = attention or "eager"
    if dtype == torch.float64:  # transformers' default for mixtures, grouped_mm, has no kernel for it (torch 2.15).
        options["experts_implementation"] = "eager"
    narrow: Any = narrow_class(config) if kind == "causal" and is_narrow(config) else None
    try:
        if model is None or torch.get_default_device().type == "meta":
            if narrow is not None:
                language_model = narrow._from_config(config, **options)
            else:
                language_model = auto.from_config(config, trust_remote_code=False, **options)
        else:
            source: Any = narrow or auto
            options["trust_remote_code"] = False
            with limit_progress_bars():
                language_model = source.from_pretrained(
                    _path(model), config=config, use_safetensors=True, **options
                ).train()
    except (OSError, ValueError, ImportError) as error:
        what = model if model is not None else config.model_type
        fits = [TASKS[other] for other, name in AUTO_CLASSES.items() if _builds(getattr(transformers, name), config)]
        fix = f"; use {' or '.join(fits)}" if fits and TASKS[kind] not in fits else ""
        raise DloError(f"cannot build a {kind} language model from {what}: {first_line(error)}{fix}") from error
    if dtype == torch.float64 and language_model.config._attn_implementation == "eager":
        _bound_eager_masks(language_model)
    if text_settings(config).rescale_every > 0:
        # RWKV divides its weights in evaluation, for the range of float16, and checkpoints would have them so.
        base: Any = find_base_model(language_model)
        base.config = copy.copy(base.config)
        base.config.rescale_every = 0
    return language_model


def _builds(auto: Any, config: PretrainedConfig) -> bool:
    """Returns whether a class of transformers (5.24) builds models of a config."""
    return type(config) in auto._model_mapping


def _bound_eager_masks(model: PreTrainedModel) -> None:
    """Bounds float64 attention masks by the lowest float32 number, so that rows that are fully masked stay finite.

    In transformers (5.24), eager attention adds the lowest float64 number and computes its softmax in float32, where
    that is -inf: a row of padding without any position to attend to becomes NaN, and with it all rows that skip it.
    """

    def bound(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        mask = options.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dtype != torch.float64:
            return None
        return args, {**options, "attention_mask": mask.clamp(min=torch.finfo(torch.float32).min)}

    for module in model.modules():
        takes_mask = [part for part in module.modules() if "attention_mask" in signature(part.forward).parameters]
        if takes_mask == [module]:  # The attention itself; the modules around it pass the mask on.
            module.register_forward_pre_hook(bound, with_kwargs=True)


@contextlib.contextmanager
def limit_progress_bars() -> Iterator[None]:
    """Shows transformers' progress bars only on a terminal, and on one rank."""
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
    """Returns the folder or hub name of a model's tokenizer; None without one."""
    if model is None:
        return None
    if not is_folder(model):
        return model
    folder = Path(model).expanduser()
    return str(folder) if has_tokenizer(folder) else None


def recomputed_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the layers that recompute their activations: those that transformers marks, else the plan's blocks."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    marked: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    return marked or list(find_blocks(model)[1])


def find_head(model: PreTrainedModel, softcap: float | None = None) -> VocabularyHead:
    """Returns the head that turns the base model's hidden states into logits.

    Args:
        model: Model.
        softcap: Soft bound of the logits; None for that of the model's config.
    """
    settings = text_settings(text_config(model.config))
    scale = float(settings.logit_scale or 1.0) / float(settings.logits_scaling or 1.0)
    return VocabularyHead(model.get_output_embeddings(), scale, softcap or _own_softcap(settings))


def _own_softcap(settings: TextSettings) -> float | None:
    softcap = settings.final_logit_softcapping or settings.logits_soft_cap
    return None if softcap is None else float(softcap)


def check_softcap(softcap: float | None, config: PretrainedConfig) -> None:
    """Checks a soft bound of the logits, which the model must not have by itself.

    Raises:
        DloError: If it is not positive, or the model's config has one.
    """
    if softcap is None:
        return
    if not 0 < softcap < float("inf"):
        raise DloError(f"logit_softcap must be above 0, got {softcap}; 15 to 50 are usual, and null leaves it out")
    own = _own_softcap(text_settings(text_config(config)))
    if own is not None:
        raise DloError(
            f"logit_softcap must be unset for a model whose config has one, got {softcap} and {own} of"
            f" {config.model_type}; set it under config: {{final_logit_softcapping: {softcap}}}"
        )


def hidden_states(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Returns the hidden states before the head, `[B, L, D]`, computed without a KV cache."""
    hidden: torch.Tensor = find_base_model(model)(**inputs, use_cache=False)[0]
    return hidden


def logits(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Returns the model's own logits of all tokens, `[B, L, V]`, computed without a KV cache."""
    token_logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return token_logits


def find_base_model(model: PreTrainedModel) -> nn.Module:
    """Returns the model without its head; also where `base_model` is the model itself, as in Llama 4's text model."""
    from transformers import PreTrainedModel

    for base in (model.base_model, model.get_decoder()):
        if base is not model:
            return base
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the name and the `ModuleList` of a model's blocks: the list with most parameters, the decoder's if any.

    Raises:
        DloError: If the model has no `ModuleList`.
    """
    from transformers import PreTrainedModel

    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if isinstance(model, PreTrainedModel):  # Beside a decoder some have a tower for images.
        own = set(model.get_decoder().modules())
        lists = [(name, module) for name, module in lists if module in own] or lists
    if not lists:
        raise DloError(
            f"model must have its blocks in a ModuleList, got {type(model).__name__} without one; choose another family"
        )
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def _path(model: str) -> str:
    return str(Path(model).expanduser()) if is_folder(model) else model


def config_from_json(text: str) -> Any:
    """Returns the config of a JSON text that has `model_type`."""
    from transformers import AutoConfig

    settings = json.loads(text)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


#: Names of the number of hidden units of an MLP, of which a config has one.
_HIDDEN = ("intermediate_size", "ffn_dim", "n_inner")


def resized_config(config: Any, sizes: Mapping[str, float]) -> dict[str, Any]:
    """Returns the settings of a config in other sizes, with `model_type`.

    Args:
        config: Config of the model in its present sizes.
        sizes: New sizes that change: `heads`, with `kv_heads` and `head_width`, `hidden` and `blocks`.

    Raises:
        DloError: If the family's config does not have such a size.
    """
    config = copy.deepcopy(config)
    if "blocks" in sizes:
        layers: Any = text_settings(config).layer_types
        if len(set(layers)) > 1:
            raise DloError(
                f"prune: blocks must be alike for --blocks, got {len(set(layers))} kinds in {config.model_type}; prune"
                " heads or hidden units"
            )
        if layers:
            config.layer_types = layers[: sizes["blocks"]]
        config.num_hidden_layers = sizes["blocks"]
    if "hidden" in sizes:
        key = next((key for key in _HIDDEN if hasattr(config, key)), None)
        if key is None:
            raise DloError(
                f"prune: the config must have one of {', '.join(_HIDDEN)} for --hidden, got none in"
                f" {config.model_type}; prune blocks"
            )
        setattr(config, key, sizes["hidden"])
    if "heads" in sizes:
        if not hasattr(config, "head_dim") and config.model_type not in (*READS_HEAD_DIM, *NARROW_FAMILIES):
            raise DloError(
                "prune: the config must have head_dim for --heads, as that of Llama has, got none in"
                f" {config.model_type}; prune hidden units or blocks"
            )
        config.num_attention_heads, config.head_dim = sizes["heads"], sizes["head_width"]
        if text_settings(config).num_key_value_heads is not None:
            config.num_key_value_heads = sizes["kv_heads"]
    return {**config.to_diff_dict(), "model_type": config.model_type}


#: Projections of a family's attention: those that compute heads, each with its number of equal parts, and the one that
#: reads them. GPT-NeoX's fused projection has a head's queries, keys and values side by side: one part of width 3.
_PROJECTIONS: dict[str, tuple[dict[str, int], str, int]] = {
    "gpt2": ({"c_attn": 3}, "c_proj", 1),
    "opt": ({"q_proj": 1, "k_proj": 1, "v_proj": 1}, "out_proj", 1),
    "gpt_neox": ({"query_key_value": 1}, "dense", 3),
}
#: Families whose models are built here where their config has `head_dim`.
NARROW_FAMILIES = tuple(_PROJECTIONS)


def is_narrow(config: PretrainedConfig) -> bool:
    """Returns whether a config has a width of a head, of a family whose transformers config has none."""
    return config.model_type in NARROW_FAMILIES and text_settings(config).head_dim is not None


def narrow_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Returns transformers' class of a model, which builds it with the heads of a config that has `head_dim`.

    Raises:
        DloError: The width is not a multiple of the head's, or has less than the heads.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    full_config(config)
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, full_config(config), *args, **kwargs)
        narrow_attention(self, config)

    # Its name is in the folders that it writes.
    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


def full_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the model with all heads that fit into its width.

    Raises:
        DloError: The width is not a multiple of the head's, or has less than the heads.
    """
    full = copy.deepcopy(config)
    width, head = int(config.hidden_size), int(config.head_dim)
    if width % head or config.num_attention_heads > width // head:
        raise DloError(
            f"config.head_dim must divide the width of {config.model_type} into at least its"
            f" {config.num_attention_heads} heads, got {head} of {width}; leave it out, or set"
            f" {width // config.num_attention_heads}"
        )
    full.num_attention_heads = width // head
    return full


def narrow_attention(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Keeps the first heads of each attention of a model that has been built by :func:`full_config`.

    Args:
        model: Model, changed in place.
        config: Config with the number of heads to keep.
    """
    heads, width = int(config.num_attention_heads), int(config.head_dim)
    writers, reader, per_head = _PROJECTIONS[config.model_type]
    names = {reader, *writers}
    for attention in [module for module in model.modules() if names <= module._modules.keys()]:
        for name, parts in writers.items():
            _keep(attention.get_submodule(name), heads * width * per_head, parts, of_outputs=True)
        _keep(attention.get_submodule(reader), heads * width, 1, of_outputs=False)
        for key, value in (("num_heads", heads), ("split_size", heads * width)):
            if isinstance(getattr(attention, key, None), int):
                setattr(attention, key, value)
    model.config.num_attention_heads = heads


@torch.no_grad()
def _keep(layer: nn.Module, features: int, parts: int, *, of_outputs: bool) -> None:
    """Keeps the first features of each part of a layer's outputs or inputs."""
    transposed = is_conv1d(layer)
    weight: Any = layer.weight
    layer.weight = _first(weight, 1 if of_outputs == transposed else 0, features, parts)
    if of_outputs and isinstance(layer.bias, Tensor):
        layer.bias = _first(layer.bias, 0, features, parts)
    count = features * parts
    names = ("nf", "out_features") if of_outputs else ("nx", "in_features")
    setattr(layer, names[0] if transposed else names[1], count)


def _first(tensor: Any, dim: int, features: int, parts: int) -> nn.Parameter:
    kept = torch.cat([part.narrow(dim, 0, features) for part in tensor.chunk(parts, dim)], dim)
    return nn.Parameter(kept.contiguous(), requires_grad=tensor.requires_grad)
