"""Arguments that tasks, their data and their options refuse when they are made, with the rule and the fix."""

from functools import partial
from typing import Any

import pytest

from dlo_framework.errors import DloError
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling
from dlo_tasks.language.preference_lm import PreferenceLM
from dlo_tasks.language.text_data import TextData

folder = partial(ImageFolderData, "x")
GEMMA = {"model_type": "gemma2", "final_logit_softcapping": 30.0}
llama, preferences = (partial(kind, config={"model_type": "llama"}) for kind in (CausalLM, PreferenceLM))
SOURCES = {"text": {"files": "x"}, "web": {"path": "y"}}
sourced = partial(TextData, sources=SOURCES, mix={"text": 1, "web": 1}, epoch_samples=9)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        # images
        (DigitsData, {"image_size": 4}, "at least 8"),
        (DigitsData, {"val_fraction": 1.0}, "above 0 and below 1"),
        (DigitsData, {"max_shift": 16}, "max_shift"),
        (DigitsData, {"max_rotation": 200.0}, "max_rotation"),
        (DigitsData, {"max_zoom": 1.0}, "max_zoom"),
        (DigitsData, {"batch_size": 0}, "batch_size must be at least 1"),
        (folder, {"image_size": 0}, "image_size must be at least 1"),
        (folder, {"scale": (0.5, 1.5)}, "scale must be two numbers"),
        (folder, {"crop_pct": 0}, "crop_pct"),
        (folder, {"rand_augment": "rand-m9-x2"}, "got 'x2' in"),
        (folder, {"rand_augment": {"num_ops": 2, "strength": 9}}, "unknown: strength"),
        (folder, {"rand_augment": "rand-m9", "three_augment": True}, "must not both be set"),
        (folder, {"random_erase": 1.5}, "probability"),
        (folder, {"std": (0.0, 1.0, 1.0)}, r"std in \(0, 1\]"),
        (folder, {"std": (0.5, 0.5)}, "3 values each"),
        (folder, {"mean": (0.5, float("nan"), 0.5)}, r"mean must be in 0\.\.1"),
        (folder, {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}, r"by 255: mean \[0.485, "),
        (folder, {"mean": (-0.5, 0.5, 0.5)}, r"got \[-0.5, .* ImageNet's are \[0.485"),
        (folder, {"color_jitter": [0.3, 0.3, 0.3, 0.9]}, "at most 0.5 for hue"),
        (folder, {"color_jitter": float("nan")}, "color_jitter must be"),
        (folder, {"repeated_augment": 0}, "repeated_augment"),
        (folder, {"prefetch_factor": 0}, "prefetch_factor must be at least 1"),
        (folder, {"mix": {"a": 1}}, "mix, mix_ramp and epoch_samples must be set with sources"),
        (folder, {"sources": {}}, "sources must name at least one source"),
        (folder, {"sources": {"a": "x"}, "mix": {"a": -1}}, "mix.a must be positive, got -1"),
        (folder, {"shuffle": "buffer", "shuffle_buffer": 8}, "at least one chunk of 64 samples, got 8"),
        (folder, {"batches_ahead": -1}, "batches_ahead must be at least 0"),
        (ImageClassifier, {"model": "vit_smal_patch16_224"}, "did you mean 'vit_small_patch16_224'"),
        (ImageClassifier, {"model": "resnet50.a1_in1kk"}, "of resnet50; did you mean 'a1_in1k'"),
        (ImageClassifier, {"model": "hf-hub:timm/resnet50"}, "pretrained must be true for a model on a hub"),
        (ImageClassifier, {"optimizer": "adamv"}, r"unknown optimizer 'adamv'; did you mean"),
        (ImageClassifier, {"label_smoothing": 1.0}, r"label_smoothing must be at least 0 and below 1, got 1.0"),
        (ImageClassifier, {"lr": 0.0}, "lr must be above 0, got 0.0"),
        (ImageClassifier, {"min_lr": 1.0}, "min_lr must be between 0 and lr=0.001, got 1.0"),
        (ImageClassifier, {"bce_threshold": 0.0}, "bce_threshold must have loss_name: bce"),
        (ImageClassifier, {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        (ImageClassifier, {"loss_name": "bce", "bce_threshold": 0.0, "label_smoothing": 0.1}, "it and become 1"),
        (ImageClassifier, {"ema_decay": 1.0}, "the EMA decay must be at least 0"),
        (ImageClassifier, {"lr_scaling": {"reference_batch": 0}}, "must be a number of samples, got 0"),
        (ImageClassifier, {"lr_scaling": {}}, "got None"),
        (ImageClassifier, {"lr_scaling": {"reference_batch": 8, "rule": "liner"}}, r"got liner; did you mean 'linear'"),
        (ImageClassifier, {"lr_scaling": {"reference": 8}}, "got reference; did you mean 'reference_batch'"),
        # texts
        (Lora, {"rank": 0}, "lora.rank"),
        (Lora, {"alpha": -1.0}, "lora.alpha"),
        (Lora, {"dropout": 1.0}, "lora.dropout"),
        (Lora, {"targets": []}, "lora.targets"),
        (Lora, {"base": "nf5"}, "lora.base"),
        (Lora, {"base_block": 7}, "lora.base_block"),
        (Lora, {"double_quantisation": True}, "lora.double_quantisation"),
        (Sampling, {"max_new_tokens": 0}, "max_new_tokens"),
        (Sampling, {"temperature": -1.0}, "temperature"),
        (Sampling, {"top_p": 0.0}, "top_p"),
        (Sampling, {"top_k": 0}, "top_k"),
        (CausalLM, {}, "model must be set for trained weights, or config"),
        (CausalLM, {"model": "x", "config": {}}, "model must be set for trained weights, or config"),
        (CausalLM, {"config": {"model_type": "llamaa"}}, "got llamaa; did you mean 'llama'"),
        (CausalLM, {"config": {"hidden_size": 32}}, "model_type must be a family of transformers, got None"),
        (llama, {"config": {"model_type": "llama", "hiden_size": 3}}, "'hiden_size'; did you mean 'hidden_size'"),
        (llama, {"lora": Lora(), "freeze": ["lm_head"]}, "freeze must be unset with lora"),
        (CausalLM, {"config": "nowhere.json"}, "cannot read nowhere.json"),
        (llama, {"z_loss": -1e-4}, "z_loss must be at least 0, got -0.0001; PaLM uses 1e-4"),
        (llama, {"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        (llama, {"logit_softcap": 0.0}, "logit_softcap must be above 0, got 0.0"),
        (CausalLM, {"logit_softcap": 5.0, "config": GEMMA}, "got 5.0 and 30.0 of gemma2; set it under config: {final"),
        (preferences, {"z_loss": 0.1}, "z_loss must be 0 for PreferenceLM, got 0.1"),
        (preferences, {"label_smoothing": 0.1}, "label_smoothing must be 0 for PreferenceLM, got 0.1"),
        (TextData, {"seq_len": 0}, "seq_len and corpus_bytes must be at least 1"),
        (TextData, {"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        (TextData, {"columns": {"body": "text"}}, "columns must rename messages, .*, got body"),
        (sourced, {"mix": {"text": 0, "web": 1}}, "mix.text must be positive, got 0"),
        (sourced, {"mix": {"text": 1, "wbe": 1}}, "mix must name sources, got 'wbe'; did you mean 'web'"),
        (sourced, {"sources": {"a": "x"}, "mix": None}, "sources.a must be an object with files or path, got 'x'"),
        (sourced, {"sources": {"a": {"file": "x"}}, "mix": None}, "got 'file'; did you mean 'files'"),
        (sourced, {"sources": {"a": {}}, "mix": None}, "sources.a must have either files, for text, or path"),
        (sourced, {"sources": {"a": {"files": "x", "column": "npy"}}, "mix": None}, "column must not be set for text"),
        (sourced, {"sources": {"a": {"path": "x", "format": "megaton"}}, "mix": None}, "did you mean 'megatron'"),
        (sourced, {"sources": {"a": {"path": "x", "format": "mds"}}, "mix": None}, "got 'mds'; removed in 0.2: write"),
        (sourced, {"packing": "none"}, "packing must be best_fit with sources, got none"),
        (sourced, {"train_files": "x"}, "train_files must not be set with sources, got x"),
        (sourced, {"sources": None}, "must be set with sources, got no sources"),
        (sourced, {"epoch_samples": 0}, "epoch_samples must be at least 1, got 0"),
        (sourced, {"tokenize_processes": 0}, "tokenize_processes must be at least 1, got 0"),
    ],
)
def test_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        make(**arguments)
