"""Base of the tasks that train language models of transformers: `LanguageModel`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.data import gradient_ranks
from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.distillation import Distilled, LogitLoss
from dlo_framework.distributed.gradient_check import find_unused
from dlo_framework.distributed.step_primitives import mean_over_data
from dlo_framework.errors import DloError
from dlo_framework.models.attention import Attention
from dlo_framework.models.experts.balance import RouterTraining
from dlo_framework.models.experts.mixture_options import MixtureOptions, read_options
from dlo_framework.models.experts.routers import BIAS
from dlo_framework.models.recompute import recompute
from dlo_framework.plan import ParallelPlan
from dlo_framework.strategy_contract import loads_checkpoint
from dlo_framework.task import Task
from dlo_framework.task_abilities import (
    BoundsLogits,
    CompileTarget,
    Distillable,
    FreezesUnused,
    KeepsBuffers,
    LooksInside,
    ReadsPlacedWeights,
    Resizable,
    WeighsMicroBatches,
)
from dlo_framework.token_loss import TokenLoss
from dlo_tasks import optim
from dlo_tasks.language import (
    adapters,
    batches,
    families,
    language_models,
    language_plans,
    model_folders,
    sparse_attention,
    vocabulary_distillation,
    vocabulary_loss,
)
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.evaluation import BitsPerByte, Perplexity, TokenMean, count_token_bytes, sum_dtype
from dlo_tasks.language.generation import check_windows
from dlo_tasks.language.language_models import ModelKind
from dlo_tasks.language.language_plans import LoadBalancing, find_load_balancing, plan_for
from dlo_tasks.language.vocabulary_head import VocabularyHead


class LanguageModel(
    Task,
    BoundsLogits,
    CompileTarget,
    Distillable,
    FreezesUnused,
    KeepsBuffers,
    LooksInside,
    ReadsPlacedWeights,
    Resizable,
    WeighsMicroBatches,
):
    """Trains a language model of transformers: all parameters, some of them, or low-rank adapters.

    Batches are dicts with `labels`, the id of the token that a position predicts, or -100 where it predicts none, and
    `tokens_in_step`, a scalar: the number of targets in the whole optimizer step. With it the loss is the mean over all
    targets of the step, for any division into ranks and micro-batches. Without it, the loss is the mean over all ranks'
    targets of one micro-batch, and all micro-batches have the same weight.

    Args:
        model: Folder that `save_pretrained` wrote, or name on the Hugging Face hub. Weights are read from safetensors
            only; code that comes with a model is never run.
        config: Config of a model with random weights, in place of `model`: a dict with `model_type` and the settings
            that differ from the family's defaults, or the path of a `config.json`. By default, the vocabulary size and
            special tokens come from the data's tokenizer.
        dtype: Dtype of the parameters; by default that of the Trainer's `precision`. With `lora`, the dtype of the
            frozen parameters.
        attention: Kernel and mask of attention, `{kernel: auto, mask: {class_path: BSLongformer}}`; or the name of a
            kernel, of an implementation of transformers (`sdpa`, `eager`, `flash_attention_2`, ...), or dlo's
            `dlo_varlen`. Default: `dlo_varlen` on CUDA, `sdpa` elsewhere, and `eager` for models with features that
            these do not compute (Gemma 2). Each keeps packed documents apart.
        lora: Low-rank adapters to train instead of the weights: `{rank: 16, alpha: 32, targets: [q_proj, v_proj]}`.
        freeze: Names of modules or parameters that are not trained, with `*`: `model.embed_tokens`, `model.layers.0`.
            `auto` stands for all that get no gradient from text, such as BART's cross attentions.
        recompute: Whether to keep only the blocks' inputs for backward, and to recompute all other activations.
        loss_kernel: Implementation of the loss over the vocabulary: `torch`, torch's operations; `compiled`, the same
            with everything but the matrix products in one kernel of torch.compile; `liger`, Liger Kernel, on a GPU.
        z_loss: Factor of the squared logarithm of the softmax's normaliser in the training loss; PaLM uses 1e-4.
        label_smoothing: Probability that the training loss spreads evenly over the vocabulary.
        logit_softcap: Soft bound `c` of the logits, `c * tanh(logits / c)`, in training, metrics and generation; by
            default that of the model's config (Gemma 2: 30).
        optimizer: Name of the optimizer in timm: `adamw`, `lamb`, `adafactor`, `muon`...; in dlo's list: `adamw8bit`,
            `soap`, `adamw_schedulefree`...; or of a class under `plugins:`, or the path of a class.
        lr: Base learning rate, for the global batch, or with `lr_scaling` for its reference batch.
        weight_decay: Weight decay; norms and biases have none.
        optimizer_args: More arguments for the optimizer, such as `betas`.
        schedule: Decay of the learning rate after the warm-up, `cosine` or `linear`. `constant` uses no scheduler, so
            that a callback can set the learning rate.
        warmup_epochs: Epochs of linear warm-up; may be a fraction.
        warmup_steps: Optimizer steps of linear warm-up; overrides `warmup_epochs`.
        warmup_lr: Learning rate at the first step of the warm-up.
        min_lr: Learning rate at the end of training.
        lr_scaling: Scaling of `lr` and `min_lr` by the sequences of an optimizer step: `{reference_batch: 256, rule:
            linear}`, or `rule: sqrt`. None does not scale.
        experts: Losses of a mixture's routers, `{aux_loss: 0.01, z_loss: 0.001}`; with `count`, mixtures in place of a
            dense model's MLPs, which start as copies of the MLP: `{count: 8, every: 2, top_k: 2}`.

    Raises:
        DloError: If a model, setting, target or argument does not exist, or values contradict each other.
    """

    #: Metric that selects the best checkpoint.
    best_metric = ("val_loss", "min")
    #: Class of transformers that the model is of.
    kind: ModelKind = "causal"
    looks_inside_by = "it uses the routers' logits, by output_router_logits: true"
    looks_inside_fix = ", or set output_router_logits: false"
    #: Arguments of a subclass that are not plain data, which checkpoints do not have.
    not_saved: tuple[str, ...] = ()

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        attention: Attention | str | None = None,
        lora: Lora | None = None,
        freeze: list[str] | str | None = None,
        recompute: bool = False,
        loss_kernel: vocabulary_loss.UserKernel = "torch",
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        logit_softcap: float | None = None,
        optimizer: str = "adamw",
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        optimizer_args: dict[str, Any] | None = None,
        schedule: Literal["cosine", "linear", "constant"] = "cosine",
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        warmup_lr: float = 0.0,
        min_lr: float = 0.0,
        lr_scaling: dict[str, Any] | None = None,
        experts: MixtureOptions | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["attention", "lora", "experts", *self.not_saved])
        # Stored as plain data in checkpoints; `load_from_checkpoint` passes it as a dict.
        lora = Lora(**lora) if isinstance(lora, dict) else lora
        attention = sparse_attention.read_option(attention)
        self.hparams["attention"] = attention.settings() if isinstance(attention, Attention) else attention
        self.hparams["lora"] = None if lora is None else vars(lora).copy()
        self.experts = read_options(experts)
        self.hparams["experts"] = None if self.experts is None else self.experts.settings()
        if (model is None) == (config is None):
            raise DloError(
                f"model must be set for trained weights, or config for random weights, got {model} and {config};"
                f" {'set one of them' if model is None else 'remove one of them'}"
            )
        if lora is not None and freeze:
            raise DloError(
                "freeze must be unset with lora, which freezes all of the model's own parameters; remove freeze"
            )
        self.model_name, self.model_dtype, self.attention = model, dtype, attention
        self.config = language_models.read_config(model, config)
        language_plans.check_options(self.experts, self.config, lora)
        self.given = self.config.to_dict() if model is not None or not isinstance(config, dict) else dict(config)
        self.lora, self.recompute = lora, recompute
        self.frozen = [freeze] if isinstance(freeze, str) else list(freeze or [])
        vocabulary_loss.check_kernel(loss_kernel)
        self.loss_kernel, self.logit_softcap = loss_kernel, logit_softcap
        self.token_loss = TokenLoss(z_loss, label_smoothing)
        language_models.check_softcap(logit_softcap, self.config)
        self.optimizer_name, self.optimizer_args = optimizer, dict(optimizer_args or {})
        self.lr, self.weight_decay, self.schedule = lr, weight_decay, schedule
        self.warmup_epochs, self.warmup_steps = warmup_epochs, warmup_steps
        self.warmup_lr, self.min_lr, self.lr_scaling = warmup_lr, min_lr, lr_scaling
        self.tokenizer: Any = None
        self._traits: Any = families.KNOWN_TRAITS
        self._balance: LoadBalancing | None = None
        #: Folder or hub name of the model's own tokenizer; None without one.
        self.tokenizer_source = language_models.tokenizer_source(model)
        optim.check_options(self)

    # --- before training -----------------------------------------------------------------------------------

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Checks that the model, its adapters and the optimizer can be built, without reading weights.

        Raises:
            DloError: If one of them cannot be built.
        """
        data = DataDescription(datamodule)
        twin = self.on_meta()
        self._check_data(data, twin.model)
        self._optimizer(twin.model)

    def _check_data(self, data: DataDescription, model: Any) -> None:
        """Checks the data against a model on the meta device."""
        if data.model_kind not in (None, self.kind):
            raise DloError(
                f"data must have targets for {language_models.TASKS[self.kind]}, got those for"
                f" {language_models.TASKS[data.model_kind]}; set data.class_path: {language_models.DATA[self.kind]}, or"
                f" model.class_path: {language_models.TASKS[data.model_kind]}"
            )
        if self.tokenizer_source is not None and data.check_template is not None:
            data.check_template(self.tokenizer_source)
        check_windows(model, data.seq_len, trained=self.model_name is not None)

    @property
    def isolates_documents(self) -> bool:
        """Whether the model keeps documents of packed rows apart; data are padded where it does not."""
        if self.has_model:
            return self._traits.isolates_documents
        try:
            return self._probe(self.on_meta().model).isolates_documents
        except (DloError, RuntimeError, AttributeError):  # The model itself can be tested only after the data are read.
            return False

    def on_meta(self) -> Self:
        """Returns a copy of this task with its model on the meta device; its vocabulary may not be the data's yet."""
        if self.has_model:
            return self
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        with torch.device("meta"):
            dtype = getattr(torch, self.model_dtype) if self.model_dtype else torch.float32
            model = language_models.build_model(
                None,
                self.config,
                self.kind,
                dtype=dtype,
                attention=sparse_attention.base_implementation(self.attention),
            )
            language_plans.install_mixtures(model, self.experts, reads_weights=False)
            on_cpu = self._trainer is not None and self._root_device.type == "cpu"
            device = torch.device("cpu") if on_cpu else None
            sparse_attention.install(model, self.attention, device, causal=self.kind == "causal")
            twin._balance = find_load_balancing(model)
            twin.model = self._adapted(model)
        twin._freeze_unused()
        return twin

    def _freeze_unused(self) -> None:
        """Freezes the parameters that get no gradient from text, if `freeze` has `auto`."""
        if "auto" in self.frozen:
            for name in find_unused(self, self.example_batch(run_datamodule(self._trainer))):
                self.get_parameter(name).requires_grad_(False)

    def configure_model(self) -> None:
        """Builds the model, once. The data must be set up before, because the model must fit their tokenizer.

        Under the meta device, weights are read after sharding: see :mod:`dlo_tasks.language.model_folders`.

        Raises:
            DloError: If the tokenizer has more tokens than the model.
        """
        if self.has_model:
            return
        vocabulary_loss.check_kernel(self.loss_kernel, None if self._trainer is None else self._root_device)
        self._fit_to_data()
        dtype = getattr(torch, self.model_dtype) if self.model_dtype else torch.get_default_dtype()
        implementation = sparse_attention.base_implementation(self.attention)
        model = language_models.build_model(
            self.model_name, self.config, self.kind, dtype=dtype, attention=implementation
        )
        reads_weights = self.model_name is not None and any(tensor.is_meta for tensor in model.parameters())
        language_plans.install_mixtures(model, self.experts, reads_weights=reads_weights)
        self._prepare(model)
        device = torch.device("cpu") if self._trainer is None else self._root_device
        kernel = sparse_attention.install(model, self.attention, device, causal=self.kind == "causal")
        if self._trainer is not None and self.trainer.is_global_zero:
            data = run_datamodule(self._trainer)
            sparse_attention.log_kernel(model, self.attention, kernel, DataDescription(data).seq_len)
        self.model = self._adapted(model)
        self._freeze_unused()
        model_folders.prepare_meta_init(self.model, self.model_name)

    def _prepare(self, model: Any) -> None:
        """Finds what is known of a model that has just been built, and changes it where it needs that."""
        self._traits, self._balance = self._probe(model), find_load_balancing(model)

    def _probe(self, model: Any) -> Any:
        """Returns the properties of a model."""
        return families.probe_traits(model)

    @property
    def _root_device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def _fit_to_data(self) -> None:
        data = run_datamodule(self._trainer)
        self.tokenizer = DataDescription(data).tokenizer
        if self.tokenizer is None:
            return
        if self.model_name is None:
            language_models.fit_to_tokenizer(self.config, self.given, self.tokenizer)
            # Saved in checkpoints: `load_from_checkpoint` then builds the same model without data.
            self.hparams["config"] = {**self.config.to_diff_dict(), "model_type": self.config.model_type}
        language_models.check_vocabulary(
            language_models.model_vocabulary_size(self.config), self.tokenizer, trained=self.model_name is not None
        )

    def _adapted(self, model: Any) -> Any:
        head = model.get_output_embeddings()
        if self.lora is not None:
            adapters.add_adapters(model, head, self.lora, torch.get_default_dtype(), self.kind)
        if named := [pattern for pattern in self.frozen if pattern != "auto"]:
            adapters.freeze_parameters(model, named)
        adapters.freeze_unused_by_text(model)
        if self.recompute:
            recompute(language_models.recomputed_layers(model))
        return model

    def setup(self, stage: str) -> None:
        """Creates the metrics."""
        if not hasattr(self, "measures"):
            kinds: dict[str, TokenMean] = {"loss": TokenMean(), "perplexity": Perplexity(), "accuracy": TokenMean()}
            if self.kind != "masked":
                kinds |= {"bits_per_byte": BitsPerByte(), "perplexity_per_byte": Perplexity()}
            self.measures = nn.ModuleDict(kinds)
            self._bytes: Tensor | None = None

    @property
    def freezes_unused(self) -> str:
        """Fix in errors about parameters without a gradient; none with LoRA, which freezes them."""
        return "" if self.lora is not None or "auto" in self.frozen else "set --model.init_args.freeze auto"

    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan of the model's family; see :mod:`dlo_tasks.language.language_plans`."""
        return plan_for(self.model)  # type: ignore[arg-type]

    def full_precision_buffers(self) -> list[str]:
        """Returns the frequencies of rotary embeddings, single in transformers, and the loss-free biases of routers.

        In bf16 a frequency is off by up to 0.4%: at position 1,000 that is an angle of 4 radians.
        """
        return [name for name, _ in self.named_buffers() if name.endswith(("inv_freq", BIAS))]

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return optim.build_optimizer(
            model, self.optimizer_name, lr=self.lr, weight_decay=self.weight_decay, args=self.optimizer_args
        )

    def configure_callbacks(self) -> list[Callback]:
        """Returns the callbacks that the optimizer and the routers need."""
        callbacks = optim.optimizer_callbacks(self.optimizer_name)
        return callbacks if self.experts is None else [*callbacks, RouterTraining(self.experts)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the optimizer, and its learning-rate schedule unless that is `constant`."""
        return optim.configure(self, self._optimizer(self.model))

    # --- steps ---------------------------------------------------------------------------------------------

    @property
    def head(self) -> VocabularyHead:
        """Head that turns the outputs of :meth:`forward` into logits; the identity where they are logits already."""
        if not self._traits.has_linear_head:
            return VocabularyHead(nn.Identity(), softcap=self.logit_softcap)
        return language_models.find_head(self.model, self.logit_softcap)  # type: ignore[arg-type]

    def max_logits(self, device: str) -> int | None:
        """Returns the number of logits that the loss keeps at once, by the type of the device; None for all."""
        if not self._traits.has_linear_head:
            return None
        return vocabulary_loss.logits_on_cpu(self.head) if device == "cpu" else vocabulary_loss.ACCELERATOR_LOGITS

    @property
    def needs_hidden_states(self) -> bool:  # type: ignore[override]
        """Whether the loss needs the router logits of all blocks and all tokens."""
        return self._balance is not None

    def compile_target(self) -> nn.Module:
        """Returns the module that :meth:`forward` calls: the base model, or the model where it computes the logits."""
        return language_models.find_base_model(self.model) if self._traits.has_linear_head else self.model  # type: ignore[arg-type]

    def loss(self, outputs: Tensor | tuple[Tensor, Tensor], batch: Any) -> Tensor:
        """Returns this micro-batch's part of the mean loss over all tokens of the optimizer step, a scalar.

        Lightning divides the loss by the number of micro-batches, and strategies average over ranks. Both divisions are
        undone here, because the sum is divided by the tokens of the step. The load-balancing loss is added per token.
        """
        labels = sparse_attention.targets(self.attention, batch)
        hidden, balance = outputs if isinstance(outputs, tuple) else (outputs, None)
        count = self._count_targets(labels)
        kernel = None if self.loss_kernel == "torch" else self.loss_kernel
        total = vocabulary_loss.summed_loss(
            self.head, hidden.flatten(0, 1), labels.flatten(), count=count, kernel=kernel, terms=self.token_loss
        )
        if balance is not None:
            total = total + balance * (labels != IGNORE_INDEX).sum()
        return self._per_token(total, batch)

    def _count_targets(self, labels: Tensor) -> int | None:
        """Returns the number of targets, where it is known without reading the device."""
        return batches.read_target_count(labels)

    def _per_token(self, total: Tensor, batch: Any) -> Tensor:
        """Returns this micro-batch's part of the mean over all tokens of the optimizer step, from its sum."""
        tokens = batch.get("tokens_in_step")
        if tokens is not None:
            ranks = gradient_ranks(self._trainer)
            micro_batches = int(self._trainer.accumulate_grad_batches) if self._trainer is not None else 1
            return total * (ranks * micro_batches) / tokens.clamp(min=1)
        mean = mean_over_data(self._trainer, (batch["labels"] != IGNORE_INDEX).sum().float())
        return total / mean.clamp(min=1)

    @property
    def class_count(self) -> int | None:
        """Size of the vocabulary; None if the data's tokenizer will set it."""
        if not self.has_model and self.model_name is None and not language_models.has_vocabulary_size(self.given):
            return None
        return language_models.model_vocabulary_size(self.config)

    def batch_mean(self, values: Tensor, batch: Any) -> Tensor:
        """Returns this micro-batch's part of the mean over all tokens with a target of the optimizer step.

        A value of a sample, `[B]`, counts for each of its tokens.
        """
        is_target = sparse_attention.targets(self.attention, batch) != IGNORE_INDEX
        values = values[:, None].expand(is_target.shape) if values.ndim == 1 else values
        return self._per_token(values.masked_fill(~is_target, 0.0).sum(), batch)

    def distillation_loss(
        self, outputs: Any, teacher_outputs: Any, teacher: Any, batch: Any, loss: LogitLoss
    ) -> Distilled:
        """Returns this micro-batch's parts of the mean distance and agreement over all tokens of the optimizer step.

        Neither model's logits are in memory for all tokens; see :mod:`dlo_tasks.language.vocabulary_distillation`.
        """
        labels = sparse_attention.targets(self.attention, batch)
        ours, theirs = (states[0] if isinstance(states, tuple) else states for states in (outputs, teacher_outputs))
        count = self._count_targets(labels)
        with teacher.head() as head:  # Its weights may be freed outside: the gradients are computed here.
            total, agreed = vocabulary_distillation.summed_distillation(
                self.head, ours.flatten(0, 1), head, theirs.flatten(0, 1), labels.flatten(), loss, count=count
            )
        return Distilled(self._per_token(total, batch), self._per_token(agreed, batch))

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> Sequence[float | Tensor]:
        """Returns the weight of each micro-batch's loss: 1 with `tokens_in_step`, by which the loss is divided.

        Without it a loss is the mean over a micro-batch's tokens on all ranks, and its weight is their share of the
        batch's.
        """
        if all("tokens_in_step" in part for part in micro_batches):
            return [1.0] * len(micro_batches)
        counted = [(part["labels"] != IGNORE_INDEX).sum() for part in micro_batches]
        counts = mean_over_data(self._trainer, torch.stack(counted).float()).double()
        total = counts.sum()
        return torch.where(total > 0, counts / total, 1.0 / len(counted)).unbind()

    def metrics(self, outputs: Tensor, batch: Any) -> Mapping[str, Metric | Tensor | None]:
        """Updates and returns the metrics of the stage."""
        labels = sparse_attention.targets(self.attention, batch).flatten()
        losses, hits = vocabulary_loss.token_losses_and_hits(self.head, outputs.flatten(0, 1), labels)
        is_target = labels != IGNORE_INDEX
        total, tokens = losses.sum(dtype=sum_dtype()), is_target.sum()
        values = {"loss": (total, tokens), "perplexity": (total, tokens), "accuracy": (hits.sum(), tokens)}
        if self.tokenizer is not None and self.kind != "masked":
            if self._bytes is None or self._bytes.device != labels.device:
                size = language_models.model_vocabulary_size(self.config)
                self._bytes = count_token_bytes(self.tokenizer, size).to(labels.device)
            number = (self._bytes[labels.clamp(min=0)] * is_target).sum()
            values |= {"bits_per_byte": (total, number), "perplexity_per_byte": (total, number)}
        return self._measure(values)

    def _measure(self, values: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Metric | Tensor]:
        """Updates metrics by the arguments of each, and returns these metrics."""
        metrics: dict[str, Metric | Tensor] = {}
        for name, update in values.items():
            measure = self.measures[name]
            assert isinstance(measure, Metric)
            measure.update(*update)
            metrics[name] = measure
        return metrics

    # --- the run -------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Reads the weights of a model that was built on the meta device; each rank reads its own shards."""
        resumes = loads_checkpoint(self.trainer)
        model_folders.read_weights(self, resumes=resumes)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def read_placed_weights(self, shards: Mapping[str, Any], *, replaced: bool) -> None:
        """Reads this rank's shards of the weights, where this is a second model that was built on the meta device."""
        model_folders.read_weights(self, resumes=replaced, held=shards)

    def resized(self, saved: Mapping[str, Any], **sizes: float) -> dict[str, Any]:
        """Returns the `config` of a model with fewer heads, hidden units or blocks, and the checkpoint's vocabulary."""
        about = saved.get("exporter") or {}
        config = self.config if "config" not in about else language_models.config_from_json(about["config"])
        return {"model": None, "config": language_models.resized_config(config, sizes)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds to a checkpoint what an export needs beside the weights: config, tokenizer, adapters."""
        checkpoint["exporter"] = model_folders.describe(self)

    @classmethod
    def export_folder(cls, checkpoint: dict[str, Any], folder: Any, dtype: torch.dtype | None = None) -> str:
        """Writes a checkpoint as a folder of transformers: :func:`dlo_tasks.language.model_folders.write_folder`."""
        return model_folders.write_folder(checkpoint, folder, dtype)
