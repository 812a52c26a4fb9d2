"""Task that trains causal language models of transformers: `CausalLM`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.batches import FULL_POSITIONS
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
from dlo_framework.strategy_abilities import Pipelined, full_sequences
from dlo_framework.strategy_contract import contract_of, loads_checkpoint
from dlo_framework.task import Task
from dlo_framework.task_abilities import (
    BoundsLogits,
    CompileTarget,
    CompletesBatches,
    Distillable,
    FreezesUnused,
    Generates,
    KeepsBuffers,
    LooksInside,
    ReadsPlacedWeights,
    Resizable,
    WeighsMicroBatches,
)
from dlo_framework.token_loss import TokenLoss
from dlo_framework.units import format_bytes
from dlo_framework.watch.media import log_text
from dlo_tasks import optim
from dlo_tasks.language import (
    adapters,
    batches,
    families,
    generation,
    language_models,
    language_plans,
    model_folders,
    sparse_attention,
    vocabulary_distillation,
    vocabulary_loss,
)
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import IGNORE_INDEX, pad_left
from dlo_tasks.language.chat import warn_of_plain_prompts
from dlo_tasks.language.document_isolation import DocumentSpans, documents_of
from dlo_tasks.language.evaluation import BitsPerByte, Perplexity, TokenMean, count_token_bytes, sum_dtype
from dlo_tasks.language.generation import (
    Sampling,
    as_markdown,
    check_prompts,
    check_windows,
    complete_ids,
    complete_texts,
    end_tokens,
    max_positions,
    print_samples,
)
from dlo_tasks.language.language_plans import LoadBalancing, find_load_balancing, plan_for
from dlo_tasks.language.vocabulary_head import VocabularyHead


class CausalLM(
    Task,
    BoundsLogits,
    CompileTarget,
    CompletesBatches,
    Distillable,
    FreezesUnused,
    Generates,
    KeepsBuffers,
    LooksInside,
    ReadsPlacedWeights,
    Resizable,
    WeighsMicroBatches,
):
    """Trains any causal language model of transformers: all parameters, some of them, or low-rank adapters.

    Batches are dicts of `[B, L]` tensors: `input_ids`; `labels`, the id of the next token, or -100 where there is no
    target; `position_ids`, which restart at 0 with each document of a packed row, so that documents do not attend to
    each other; `attention_mask` for padded rows; and the scalar `tokens_in_step`, the number of targets in the whole
    optimizer step. With `tokens_in_step` the loss is the mean over all tokens of the step, for any division into ranks
    and micro-batches. Without it, the loss is the mean over all ranks' tokens of one micro-batch, and all micro-batches
    have the same weight.

    Validation and test log `loss`, `perplexity` and `accuracy` per token, and, with a tokenizer, `bits_per_byte` and
    `perplexity_per_byte`: exact means over all tokens of all ranks. `predict_step` completes prompts.

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
        prompts: Prompts that are completed at each validation, for TensorBoard, and printed when training ends: texts,
            or conversations, `[{role: user, content: ...}]`, which the tokenizer's chat template renders.
        sampling: Sampling options for `prompts` and for `dlo predict`: `{max_new_tokens: 64, temperature: 0.8}`.
        experts: Losses of a mixture's routers, `{aux_loss: 0.01, z_loss: 0.001}`; with `count`, mixtures in place of a
            dense model's MLPs, which start as copies of the MLP: `{count: 8, every: 2, top_k: 2}`.

    Raises:
        DloError: If a model, setting, target or argument does not exist, or values contradict each other.
    """

    #: Metric that selects the best checkpoint.
    best_metric = ("val_loss", "min")
    generates_in_stages = True
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
        prompts: list[str | list[dict[str, Any]]] | None = None,
        sampling: Sampling | None = None,
        experts: MixtureOptions | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["attention", "lora", "sampling", "experts", *self.not_saved])
        # Stored as plain data in checkpoints; `load_from_checkpoint` passes them as dicts.
        lora = Lora(**lora) if isinstance(lora, dict) else lora
        sampling = Sampling(**sampling) if isinstance(sampling, dict) else sampling
        attention = sparse_attention.read_option(attention)
        self.hparams["attention"] = attention.settings() if isinstance(attention, Attention) else attention
        self.hparams["lora"] = None if lora is None else vars(lora).copy()
        self.hparams["sampling"] = None if sampling is None else vars(sampling).copy()
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
        self.prompts, self.sampling = list(prompts or []), sampling or Sampling()
        self.tokenizer: Any = None
        self.samples: list[str] = []
        self._traits = families.KNOWN_TRAITS
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
        if self.tokenizer_source is not None and data.check_template is not None:
            data.check_template(self.tokenizer_source)
        if self.prompts and data.trains_on_chats:
            warn_of_plain_prompts("model.init_args.prompts", self.prompts)
        twin = self.on_meta()
        check_windows(twin.model, data.seq_len, trained=self.model_name is not None)  # type: ignore[arg-type]
        check_prompts(twin.model, self.prompts, None, self.sampling.max_new_tokens)  # type: ignore[arg-type]
        self._optimizer(twin.model)

    @property
    def isolates_documents(self) -> bool:
        """Whether the model keeps documents of packed rows apart; data are padded where it does not."""
        if self.has_model:
            return self._traits.isolates_documents
        try:
            return families.probe_traits(self.on_meta().model).isolates_documents  # type: ignore[arg-type]
        except (DloError, RuntimeError, AttributeError):  # The model itself can be tested only after the data are read.
            return False

    def on_meta(self) -> CausalLM:
        """Returns a copy of this task with its model on the meta device; its vocabulary may not be the data's yet."""
        if self.has_model:
            return self
        twin = copy.copy(self)
        twin._modules = dict(self._modules)
        with torch.device("meta"):
            dtype = getattr(torch, self.model_dtype) if self.model_dtype else torch.float32
            model = language_models.build_model(
                None, self.config, dtype=dtype, attention=sparse_attention.base_implementation(self.attention)
            )
            language_plans.install_mixtures(model, self.experts, reads_weights=False)
            on_cpu = self._trainer is not None and self._root_device.type == "cpu"
            sparse_attention.install(model, self.attention, torch.device("cpu") if on_cpu else None)
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
        model = language_models.build_model(self.model_name, self.config, dtype=dtype, attention=implementation)
        reads_weights = self.model_name is not None and any(tensor.is_meta for tensor in model.parameters())
        language_plans.install_mixtures(model, self.experts, reads_weights=reads_weights)
        if sparse_attention.is_default(self.attention) and self._trainer is not None:
            families.enable_packed_attention(model, self._root_device)
        check_prompts(model, self.prompts, self.tokenizer, self.sampling.max_new_tokens)
        self._traits, self._balance = families.probe_traits(model), find_load_balancing(model)
        self._check_head(model)
        if self._traits.isolation is not None:
            self._traits.isolation.install(model, language_models.find_blocks(model)[1])
        device = torch.device("cpu") if self._trainer is None else self._root_device
        kernel = sparse_attention.install(model, self.attention, device)
        if self._trainer is not None and self.trainer.is_global_zero:
            data = run_datamodule(self._trainer)
            sparse_attention.log_kernel(model, self.attention, kernel, DataDescription(data).seq_len)
        self.model = self._adapted(model)
        self._freeze_unused()
        model_folders.prepare_meta_init(self.model, self.model_name)

    @property
    def _root_device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def _fit_to_data(self) -> None:
        data = run_datamodule(self._trainer)
        self.tokenizer = DataDescription(data).tokenizer
        if self.tokenizer is None:
            if self.prompts and self._trainer is not None:
                raise DloError(
                    f"prompts must be unset where the datamodule has no attribute 'tokenizer', got {len(self.prompts)}"
                    " prompts; remove them, or add a tokenizer to the datamodule"
                )
            return
        if self.model_name is None:
            language_models.fit_to_tokenizer(self.config, self.given, self.tokenizer)
            # Saved in checkpoints: `load_from_checkpoint` then builds the same model without data.
            self.hparams["config"] = {**self.config.to_diff_dict(), "model_type": self.config.model_type}
        language_models.check_vocabulary(
            language_models.model_vocabulary_size(self.config), self.tokenizer, trained=self.model_name is not None
        )

    def _check_head(self, model: Any) -> None:
        """Warns of the memory cost of a head that is more than a projection; refuses it with a load-balancing loss."""
        if self._traits.has_linear_head:
            return
        name, vocabulary = type(model).__name__, language_models.model_vocabulary_size(self.config)
        if self._balance is not None:
            raise DloError(
                "config.output_router_logits must be false for models whose logits are more than a projection, a scale"
                f" and a soft-cap, got true for {name}; set config.output_router_logits: false"
            )
        rank_zero_warn(
            f"{name} computes its logits by more than a projection, a scale and a soft-cap; its loss needs the logits"
            f" of all tokens at once: {format_bytes(4 * vocabulary)} per token, and the same again for their gradient"
        )

    def _adapted(self, model: Any) -> Any:
        head = model.get_output_embeddings()
        if self.lora is not None:
            adapters.add_adapters(model, head, self.lora, torch.get_default_dtype())
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
        found = optim.optimizer_callbacks(self.optimizer_name)
        return found if self.experts is None else [*found, RouterTraining(self.experts)]

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

    def example_batch(self, datamodule: LightningDataModule | None) -> dict[str, Tensor]:
        """Returns a batch of one row, as long as the data's windows."""
        length = DataDescription(datamodule).seq_len or min(max_positions(self.config) or 512, 2048)
        row = torch.zeros(1, length, dtype=torch.long)
        positions = torch.arange(length)[None]
        return {"input_ids": row, "labels": row, "position_ids": positions, "tokens_in_step": torch.tensor(length)}

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's keyword arguments: tokens, positions, the mask of padded rows, and document boundaries.

        Raises:
            DloError: If rows hold several documents and the model would let them attend to each other.
        """
        names = ("input_ids", "position_ids", "attention_mask")
        found = {name: batch[name] for name in names if batch.get(name) is not None}
        positions = batch.get(FULL_POSITIONS, found.get("position_ids"))
        described = found if positions is None else found | {"position_ids": positions}
        told = families.document_arguments(self.model, described, packs=self._traits.isolates_documents)  # type: ignore[arg-type]
        if self._traits.isolation is not None and "attention_mask" not in found:
            told["documents"] = families.isolated_documents(positions)
        if not self._traits.positions_from_0:
            found.pop("position_ids", None)
        return (), found | told

    def forward(self, documents: DocumentSpans | None = None, **inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the hidden states before the head, `[B, L, D]`; the logits of all tokens are never computed at once.

        For a model whose logits are more than a projection, a scale and a soft-cap, it returns the logits, `[B, L, V]`.
        In training with a load-balancing loss, it returns a pair: the hidden states and that loss, a scalar.

        Args:
            documents: Documents of packed rows, for a model that ignores restarting positions.
            **inputs: Inputs of the model.
        """
        if documents is not None:
            with documents_of(documents):
                return self.forward(None, **inputs)
        if not self._traits.has_linear_head:
            return language_models.logits(self.model, **inputs)  # type: ignore[arg-type]
        if self._balance is None:
            return language_models.hidden_states(self.model, **inputs)  # type: ignore[arg-type]
        if self.stage == "train":
            return self._balance.hidden_states(self.model, inputs)  # type: ignore[arg-type]
        return language_models.hidden_states(self.model, **inputs, output_router_logits=False)  # type: ignore[arg-type]

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
        count = batches.read_target_count(labels)
        kernel = None if self.loss_kernel == "torch" else self.loss_kernel
        total = vocabulary_loss.summed_loss(
            self.head, hidden.flatten(0, 1), labels.flatten(), count=count, kernel=kernel, terms=self.token_loss
        )
        if balance is not None:
            total = total + balance * (labels != IGNORE_INDEX).sum()
        return self._per_token(total, batch)

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
        ours, theirs = (found[0] if isinstance(found, tuple) else found for found in (outputs, teacher_outputs))
        count = batches.read_target_count(labels)
        with teacher.head() as head:  # Its weights may be freed outside: the gradients are computed here.
            total, agreed = vocabulary_distillation.summed_distillation(
                self.head, ours.flatten(0, 1), head, theirs.flatten(0, 1), labels.flatten(), loss, count=count
            )
        return Distilled(self._per_token(total, batch), self._per_token(agreed, batch))

    def complete_batch(
        self,
        batch: Any,
        *,
        prompt_tokens: int | None,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        multiple: int = 1,
    ) -> dict[str, Tensor]:
        """Returns a batch with the model's completions of the rows' prompts, without padding on the left.

        It has no `tokens_in_step`: only other ranks know how many tokens they have written.
        """
        prompts = generation.find_prompts(batch, prompt_tokens)
        ids, mask = pad_left(prompts, 0, batch["input_ids"].device)
        sampling = Sampling(max_new_tokens, temperature)
        draws = generation.draw_for_rows(batch, max_new_tokens, seed).to(ids.device)
        written = self._complete_ids(ids, mask, sampling, draws)
        ends = end_tokens(self.model, self.tokenizer)  # type: ignore[arg-type]
        return generation.join_completions(prompts, written.tolist(), ends, batch["input_ids"].device, multiple)

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
        if self.tokenizer is not None:
            if self._bytes is None or self._bytes.device != labels.device:
                size = language_models.model_vocabulary_size(self.config)
                self._bytes = count_token_bytes(self.tokenizer, size).to(labels.device)
            number = (self._bytes[labels.clamp(min=0)] * is_target).sum()
            values |= {"bits_per_byte": (total, number), "perplexity_per_byte": (total, number)}
        return self._measure(values)

    def _measure(self, values: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Metric | Tensor]:
        """Updates metrics by the arguments of each, and returns these metrics."""
        found: dict[str, Metric | Tensor] = {}
        for name, update in values.items():
            measure = self.measures[name]
            assert isinstance(measure, Metric)
            measure.update(*update)
            found[name] = measure
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Updates the validation metrics, and completes the prompts with the first batch."""
        super().validation_step(batch, batch_idx)
        self.after_validation_step(batch_idx)

    def after_validation_step(self, batch_idx: int) -> None:
        """Completes the prompts with the first batch, where weights are available; a pipeline calls it too."""
        if batch_idx == 0 and self.prompts and not self.trainer.sanity_checking:
            with full_sequences(contract_of(self.trainer.strategy)):
                model: Any = self.model
                self.samples = complete_texts(
                    model,
                    self.prompts,
                    self.sampling,
                    self.tokenizer,
                    self._together,
                    self.logit_softcap,
                    contract_of(self.trainer.strategy).find_ability(Pipelined),
                    self._root_device,
                )

    def _complete_ids(self, ids: Tensor, mask: Tensor, sampling: Sampling, draws: Tensor | None = None) -> Tensor:
        model: Any = self.model
        pipelined = contract_of(self.trainer.strategy).find_ability(Pipelined)
        return complete_ids(
            model, ids, mask, sampling, self.tokenizer, self._together, draws, self.logit_softcap, pipelined
        )

    @property
    def _together(self) -> bool:
        """Whether a forward needs all ranks, because the strategy gathers weights in it."""
        return contract_of(self.trainer.strategy).forward_needs_all_ranks and dist.is_initialized()

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        """Returns the completion of each prompt: `[{index, prompt, completion, tokens}]`, with texts and token ids.

        Without a tokenizer, the texts are missing.

        Args:
            batch: Prompts: `input_ids` and `attention_mask`, `[B, L]`, padded on the left; `index [B]`, the prompts'
                numbers, -1 for rows to leave out.
            batch_idx: Index of the batch.
        """
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        with full_sequences(contract_of(self.trainer.strategy)):
            written = self._complete_ids(ids, mask, self.sampling)
        numbers = batch["index"].tolist() if "index" in batch else list(range(len(ids)))
        found: list[dict[str, Any]] = []
        for number, prompt, kept, row in zip(numbers, ids, mask, written, strict=True):
            if number >= 0:
                parts = {} if self.tokenizer is None else {"prompt": prompt[kept.bool()], "completion": row}
                texts = {name: self.tokenizer.decode(ids, skip_special_tokens=True) for name, ids in parts.items()}
                found.append({"index": number, **texts, "tokens": row.tolist()})
        return found

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Prints the first completions."""
        shown = [row for row in outputs[:3] if "completion" in row] if batch_idx == 0 else []
        if shown and self.trainer.is_global_zero:
            print_samples([row["prompt"] for row in shown], [row["completion"] for row in shown])

    # --- the run -------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Reads the weights of a model that was built on the meta device; each rank reads its own shards."""
        resumes = loads_checkpoint(self.trainer)
        model_folders.read_weights(self, resumes=resumes)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def read_placed_weights(self, shards: Mapping[str, Any], *, replaced: bool) -> None:
        """Reads this rank's shards of the weights, where this is a second model that was built on the meta device."""
        model_folders.read_weights(self, resumes=replaced, held=shards)

    def on_validation_epoch_end(self) -> None:
        """Logs the completed prompts."""
        if self.samples:
            log_text(self.trainer, "samples", lambda: as_markdown(self.prompts, self.samples))

    def on_train_end(self) -> None:
        """Prints the last completed prompts."""
        if self.samples and self.trainer.is_global_zero:
            print_samples(self.prompts, self.samples)

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
