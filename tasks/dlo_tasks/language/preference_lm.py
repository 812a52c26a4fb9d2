"""Task that tunes causal language models to preferences: `PreferenceLM`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.data.description import DataDescription
from dlo_framework.data.module import data_parallel_coordinates
from dlo_framework.distributed.collectives import sum_over_ranks
from dlo_framework.distributed.groups import control_group
from dlo_framework.distributed.step_primitives import mean_over_data
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.models.attention import Attention
from dlo_framework.strategy_abilities import mesh_groups
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import log_scalars
from dlo_tasks.language import adapters, batches, language_models, preference_losses
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.evaluation import TokenMean, sum_dtype
from dlo_tasks.language.preference_losses import (
    DEFAULT_BETA,
    OBJECTIVES,
    WITH_REFERENCE,
    CombinedMeans,
    KTOLoss,
    Objective,
)
from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import token_log_probs

_REFERENCE = "reference_log_probs"


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer, `[B, A]`; 0 where a row has fewer answers.

    Attributes:
        log_probs: Log-probabilities of the answers.
        tokens: Numbers of their tokens.
        nll: Negative log-probabilities of chosen answers with their prompts; None for objectives that do not need them.
        nll_tokens: Numbers of the tokens of `nll`.
    """

    log_probs: Tensor
    tokens: Tensor
    nll: Tensor | None = None
    nll_tokens: Tensor | None = None


class PreferenceLM(CausalLM):
    """Tunes a causal language model to prefer chosen answers to rejected ones.

    ```yaml
    model:
      class_path: PreferenceLM
      init_args:
        model: my_sft_model
        objective: dpo
        reference: {task: {class_path: CausalLM, init_args: {model: my_sft_model}}}
    data:
      class_path: PreferenceData
      init_args: {train_files: "pairs/*.jsonl"}
    ```

    | `objective` | data | reference | paper |
    |---|---|---|---|
    | `dpo` | pairs | yes | arXiv 2305.18290 |
    | `ipo` | pairs | yes | arXiv 2310.12036 |
    | `hinge` | pairs | yes | arXiv 2305.10425, 2309.06657 |
    | `kto` | judged completions | yes | arXiv 2402.01306 |
    | `orpo` | pairs | no | arXiv 2403.07691 |
    | `simpo` | pairs | no | arXiv 2405.14734 |

    The reference is the model before the tuning, whose log-probabilities each step computes. With `lora` it is the
    model without its adapters, otherwise the second model `reference`.

    Batches are those of `PreferenceData`. The loss is the mean over all pairs of the optimizer step, for any division
    into ranks and micro-batches; the divergence of KTO is estimated over each micro-batch of all ranks.

    Validation and test log `loss`, `reward_chosen`, `reward_rejected`, `reward_margin` and, for pairs,
    `reward_accuracy`: exact means over all ranks. Training logs the rewards as `train/reward_margin` and so on. A
    reward is `beta` times the log-ratio to the reference; without one, `beta` times the mean log-probability per token.

    Args:
        objective: Loss: `dpo`, `ipo`, `hinge`, `kto`, `orpo` or `simpo`.
        beta: Weight of the divergence from the reference; of ORPO the weight of the odds ratio, of SimPO the scale of
            the rewards. Default: 0.1, for SimPO 2.
        gamma: Margin of SimPO's rewards.
        desirable_weight: Weight of KTO's desirable completions.
        undesirable_weight: Weight of KTO's undesirable completions.
        reference: Second model that does not train: `{checkpoint: RUN}`, or `{task: {class_path: CausalLM, ...}}`.
        lr: Base learning rate, for the global batch. Adapters need about ten times more.
        weight_decay: Weight decay; norms and biases have none.
        **causal_lm: Further arguments of `CausalLM`.

    Raises:
        DloError: If a value is out of range; by :meth:`check`, if the objective, the reference and the data do not
            match.
    """

    not_saved = ("reference",)

    def __init__(
        self,
        objective: Objective = "dpo",
        beta: float | None = None,
        gamma: float = 1.0,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: FrozenModel | None = None,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        **causal_lm: Any,
    ) -> None:
        super().__init__(lr=lr, weight_decay=weight_decay, **causal_lm)
        check_choice("objective", objective, OBJECTIVES)
        for name, value in (("beta", beta), ("desirable_weight", desirable_weight)):
            check_number(name, value, "above 0", f"{DEFAULT_BETA[objective]} is usual")
        for name, value in (("gamma", gamma), ("undesirable_weight", undesirable_weight)):
            if value < 0:
                raise DloError(f"{name} must not be negative, got {value}; 1.0 is the default")
        if self.loss_kernel != "torch":
            raise DloError(f"loss_kernel must be torch for PreferenceLM, got {self.loss_kernel}; leave it out")
        for name, value in vars(self.token_loss).items():
            if value:
                raise DloError(f"{name} must be 0 for PreferenceLM, got {value}; leave it out")
        if isinstance(self.attention, Attention) and self.attention.mask is not None and self.attention.mask.prefix:
            raise DloError(
                "attention.mask must be causal for PreferenceLM, whose answers are scored by all of their tokens, got"
                " Prefix; choose another pattern"
            )
        self.objective, self.gamma = objective, gamma
        self.beta = DEFAULT_BETA[objective] if beta is None else beta
        self.weights = (desirable_weight, undesirable_weight)
        self.reference = reference
        self._is_prepared = False
        self._tap: list[Tensor] | None = None
        self._window: Tensor | None = None
        self._logged_step = 0

    @property
    def compares(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.objective in WITH_REFERENCE

    @property
    def frozen_models(self) -> list[FrozenModel]:
        """Second models of the run."""
        return [] if self.reference is None else [self.reference]

    # --- before training -----------------------------------------------------------------------------------

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Checks that objective, reference and data match, and that the model can be built.

        Raises:
            DloError: If they do not.
        """
        self._check_reference()
        unpaired = DataDescription(datamodule).unpaired
        if datamodule is not None and unpaired is None:
            raise DloError(
                f"data must be PreferenceData for PreferenceLM, got {type(datamodule).__name__}; set data.class_path:"
                " PreferenceData"
            )
        if unpaired is not None and unpaired != (self.objective == "kto"):
            fix = "set data.init_args.unpaired: true" if self.objective == "kto" else "remove it, or set objective: kto"
            raise DloError(
                f"data.init_args.unpaired must be {str(self.objective == 'kto').lower()} for objective"
                f" {self.objective}, got {str(unpaired).lower()}; {fix}"
            )
        super().check(datamodule)
        if self.reference is not None:
            self._check_vocabulary(self.reference.check(self, datamodule))

    def _check_reference(self) -> None:
        if not self.compares:
            if self.reference is not None:
                raise DloError(f"reference must be unset for objective {self.objective}, which needs none; remove it")
            return
        if self.reference is not None and self.reference.average is not None:
            raise DloError(
                f"reference must have checkpoint or task, got average {self.reference.average}, which follows the model"
                " that is tuned; set checkpoint or task"
            )
        if self.reference is None and self.lora is None:
            raise DloError(
                f"reference must be set for objective {self.objective}, got none; set reference: {{task: {{class_path:"
                " CausalLM, init_args: {model: ...}}} with the initial weights, or lora (the model without adapters is"
                " the reference)"
            )

    def _check_vocabulary(self, reference: Any) -> None:
        """Raises DloError if the reference has another vocabulary."""
        if not isinstance(reference, CausalLM):
            raise DloError(
                f"reference must be a CausalLM, got {type(reference).__name__}; set reference to a checkpoint of one"
            )
        if self.model_name is None and not self.has_model:  # The data's tokenizer decides later.
            return
        own, other = (language_models.model_vocabulary_size(task.config) for task in (self, reference))
        if own != other:
            raise DloError(
                f"reference must have the model's vocabulary of {own} tokens, got {other}; set reference to the model"
                " before the tuning"
            )

    def example_batch(self, datamodule: LightningDataModule | None) -> dict[str, Tensor]:
        """Returns a batch of one row with two answers, each as long as the data's windows."""
        text_batch = super().example_batch(datamodule)
        length = text_batch["input_ids"].shape[1]
        names = ("input_ids", "labels", "position_ids")
        batch = {name: text_batch[name].repeat(1, 2) for name in names}
        batch["context_labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
        batch["sequence_ids"] = torch.arange(2).repeat_interleave(length)[None]
        batch["answers"] = torch.tensor([[1, 0]])
        if self.compares:
            batch[_REFERENCE] = torch.zeros(1, 2)
        return batch | {"tokens_in_step": torch.tensor(length), "pairs_in_step": torch.tensor(1)}

    def setup(self, stage: str) -> None:
        """Creates the metrics."""
        if hasattr(self, "measures"):
            return
        kinds: dict[str, Metric] = {name: TokenMean() for name in ("reward_chosen", "reward_rejected")}
        kinds["reward_margin"] = CombinedMeans((1, -1))
        if self.objective == "kto":
            kinds |= {"loss": KTOLoss(self.beta, self.weights), "divergence": TokenMean()}
        else:
            kinds |= {"loss": TokenMean(), "reward_accuracy": TokenMean()}
        if self.objective == "orpo":
            kinds |= {"loss": CombinedMeans((1, 1)), "nll": TokenMean()}
        self.measures = nn.ModuleDict(kinds)

    def configure_callbacks(self) -> list[Callback]:
        """Returns the callback that adds the reference's log-probabilities to training batches."""
        return [*super().configure_callbacks(), *([ReferenceLogProbs()] if self.compares else [])]

    # --- the reference -------------------------------------------------------------------------------------

    def _prepare_reference(self) -> None:
        """Places the second model, if the reference is one; once a run, on all ranks, before the first batch."""
        if not self.compares or self._is_prepared:
            return
        self._check_reference()
        if self.reference is not None:
            self.reference.start(self.trainer, self)
            self._check_vocabulary(self.reference.placed.task)
        self._is_prepared = True

    def on_fit_start(self) -> None:
        """Reads the weights of a model on the meta device."""
        super().on_fit_start()
        self._is_prepared = False

    def on_sanity_check_start(self) -> None:
        """Prepares the reference: a resumed run's state has been loaded."""
        self._prepare_reference()

    def on_train_start(self) -> None:
        """Prepares the reference, unless the sanity check has done so."""
        self._window, self._logged_step = None, self.trainer.global_step
        self._prepare_reference()

    def on_validation_start(self) -> None:
        """Reads the weights of a model on the meta device, and prepares the reference."""
        super().on_fit_start()
        self._prepare_reference()

    on_test_start = on_validation_start

    def teardown(self, stage: str) -> None:
        """Frees the reference."""
        self._is_prepared = False
        if self.reference is not None:
            self.reference.stop()

    def with_reference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch with the reference's log-probabilities, and for KTO with the divergence; on all ranks.

        Under a pipeline the ranks of other stages than the last get zeros: they compute no loss, but the ranks' batches
        must have the same entries.

        Args:
            batch: Batch on the device, before it is sharded.
        """
        if not self.compares:
            return batch
        matched = {name: value for name, value in batch.items() if not name.startswith("mismatched_")}
        matched[_REFERENCE] = self._or_zeros(self.reference_log_probs(matched), batch)
        if self.objective == "kto":
            prefix = "mismatched_"
            others = {name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)}
            others["answers"] = batch["answers"]
            theirs = self._or_zeros(self.reference_log_probs(others), batch)
            own = self._or_zeros(self.own_log_probs(others), batch)
            matched |= self.divergence_of(torch.where(batch["answers"] >= 0, own - theirs, 0), batch["answers"])
        return matched

    def divergence_of(self, ratios: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """Returns the entries of a batch for KTO's divergence: this rank's sum and number; in training the estimate."""
        total, count = ratios.sum(), (answers >= 0).sum()
        entries = {"divergence_total": total, "divergence_count": count}
        if self.stage == "train":
            mean = mean_over_data(self._trainer, torch.stack([total, count.to(total.dtype)]))
            entries["divergence"] = preference_losses.kto_divergence(mean[0], mean[1])
        return entries

    @staticmethod
    def _or_zeros(log_probs: Tensor | None, batch: dict[str, Any]) -> Tensor:
        answers: Tensor = batch["answers"]
        return torch.zeros(answers.shape, device=answers.device) if log_probs is None else log_probs

    @torch.no_grad()
    def reference_log_probs(self, batch: dict[str, Any]) -> Tensor | None:
        """Returns the reference's log-probabilities of a batch's answers, `[B, A]`; None on other stages' ranks."""
        if self.reference is None:
            with adapters.without_adapters(self.model) if self.lora is not None else contextlib.nullcontext():
                return self.own_log_probs(batch)
        outputs = self.reference.outputs(batch)
        if not self.reference.has_outputs:
            return None
        part = self.reference.placed.own_part(batch)
        with self.reference.head() as head:
            return self.answer_sums(head, outputs, part).log_probs

    @torch.no_grad()
    def own_log_probs(self, batch: dict[str, Any]) -> Tensor | None:
        """Returns this model's log-probabilities of a batch's answers, `[B, A]`, without a graph and without dropout.

        None on ranks of other stages than the last.

        Args:
            batch: Batch on the device, before it is sharded.
        """
        training, log_probs = self.model.training, list[Tensor]()
        strategy, self._tap = self.trainer.strategy, log_probs
        self.model.eval()
        try:  # By the strategy's validation step, which gathers, shards and cuts.
            # The class's method: the evaluation loop replaces the object's for the one call that it counts. The number
            # of the batch is not 0, with which the prompts would be completed.
            type(strategy).validation_step(strategy, batch, 1)
        finally:
            self._tap = None
            self.model.train(training)
        return log_probs[0] if log_probs else None

    # --- steps ---------------------------------------------------------------------------------------------

    def answer_sums(self, head: VocabularyHead, outputs: Any, batch: Any) -> AnswerSums:
        """Returns the sums over each answer's tokens, over all ranks that share a sequence."""
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        labels, numbers, answers = batch["labels"], batch["sequence_ids"], batch["answers"]
        targets, count = labels, batches.read_target_count(labels)
        is_answer, of_chosen = labels != IGNORE_INDEX, None
        if self.objective == "orpo":  # Its cross-entropy is over the prompts too.
            of_chosen = (answers.gather(1, numbers.clamp(min=0)) == 1) & (numbers >= 0)
            targets, count = torch.where(of_chosen & ~is_answer, batch["context_labels"], labels), None
        values = token_log_probs(head, hidden.flatten(0, 1), targets.flatten(), count=count).view(labels.shape)
        parts = [torch.where(is_answer, values, 0), is_answer.to(values.dtype)]
        if of_chosen is not None:
            parts += [torch.where(of_chosen, -values, 0), of_chosen.to(values.dtype)]
        inside = numbers[:, None] == torch.arange(answers.shape[1], device=numbers.device)[:, None]  # [B, A, L]
        sums = [(part[:, None] * inside).sum(dim=2) for part in parts]
        groups = None if self._trainer is None else mesh_groups(contract_of(self._trainer.strategy))
        if groups is None or groups.spec.cp == 1:
            return AnswerSums(*sums)
        return AnswerSums(*sum_over_ranks(torch.stack(sums), groups.group("cp")))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Returns this micro-batch's part of the mean loss over all pairs of the optimizer step, a scalar.

        As in :meth:`CausalLM.loss`, the divisions by ranks and micro-batches that follow are undone here. The
        load-balancing loss is added per pair.
        """
        sums, answers = self.answer_sums(self.head, outputs, batch), batch["answers"]
        scores, rewards = self._scores(sums, batch)
        if self.stage == "train":
            self._add_to_window(rewards.detach(), batch)
        answers_per_pair = 1 if self.objective == "kto" else 2
        total, pairs = self._losses(scores, sums, batch).sum(), (answers >= 0).sum() / answers_per_pair
        if isinstance(outputs, tuple):
            total = total + outputs[1] * pairs
        loss = self._share(total, pairs, batch.get("pairs_in_step"))
        if sums.nll is not None and sums.nll_tokens is not None:
            loss = loss + self._share(sums.nll.sum(), sums.nll_tokens.sum(), batch.get("tokens_in_step"))
        return loss

    def _share(self, total: Tensor, count: Tensor, in_step: Tensor | None) -> Tensor:
        """Returns a sum's part of the mean over the optimizer step, of which `in_step` is the number of summands."""
        if in_step is None:
            return total / mean_over_data(self._trainer, count.float()).clamp(min=1)
        ranks = data_parallel_coordinates(self._trainer)[1]
        micro_batches = int(self._trainer.accumulate_grad_batches) if self._trainer is not None else 1
        return total * (ranks * micro_batches) / in_step.clamp(min=1)

    def _scores(self, sums: AnswerSums, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns what the objective compares, and the rewards, of each answer, `[B, A]`."""
        mean_tokens = sums.tokens.clamp(min=1)
        if not self.compares:
            scores = sums.log_probs / mean_tokens
            return scores, self.beta * scores
        if _REFERENCE not in batch:
            raise DloError(
                f"batches must have '{_REFERENCE}' for objective {self.objective}, got {', '.join(batch)}; train with a"
                " Trainer, which adds it"
            )
        ratios = sums.log_probs - batch[_REFERENCE]
        return ratios / mean_tokens if self.objective == "ipo" else ratios, self.beta * ratios

    def _losses(self, scores: Tensor, sums: AnswerSums, batch: Any) -> Tensor:
        """Returns the loss of each pair or completion; 0 where there is none."""
        answers = batch["answers"]
        if self.objective == "kto":
            divergence = batch.get("divergence", torch.zeros((), device=scores.device))
            losses = preference_losses.kto_losses(scores, answers == 1, divergence, self.beta, self.weights)
            return torch.where(answers >= 0, losses, 0)
        real = answers[:, ::2] >= 0
        # Answers that are not there get a value inside each loss's domain, so that gradients are finite.
        chosen, rejected = (torch.where(real, scores[:, first::2], -1.0) for first in (0, 1))
        compute = getattr(preference_losses, f"{self.objective}_losses")
        more = (self.gamma,) if self.objective == "simpo" else ()
        losses = compute(chosen, rejected, self.beta, *more)
        return torch.where(real, losses, 0)

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> list[float]:
        """Returns the weight of each micro-batch's loss: 1 with `pairs_in_step`, by which the loss is divided."""
        is_share = all("pairs_in_step" in part for part in micro_batches)
        return [1.0 if is_share else 1.0 / len(micro_batches)] * len(micro_batches)

    # --- metrics -------------------------------------------------------------------------------------------

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds the reference's log-probabilities to the batch."""
        batch.update(self.with_reference(batch))

    on_test_batch_start = on_validation_batch_start

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Metric | Tensor | None]:
        """Updates and returns the metrics of the stage; none while :meth:`own_log_probs` reads the answers' sums."""
        sums, answers = self.answer_sums(self.head, outputs, batch), batch["answers"]
        if self._tap is not None:
            self._tap.append(sums.log_probs)
            return {"loss": None}
        scores, rewards = self._scores(sums, batch)
        totals, counts = _by_preference(rewards, answers)
        values: dict[str, tuple[Tensor, ...]] = {
            "reward_chosen": (totals[0], counts[0]),
            "reward_rejected": (totals[1], counts[1]),
            "reward_margin": (totals, counts),
        }
        if self.objective == "kto":
            real = answers >= 0
            values["divergence"] = batch["divergence_total"], batch["divergence_count"]
            values["loss"] = (scores[real], answers[real] == 1, *values["divergence"])
        else:
            values["reward_accuracy"] = (_count_hits(rewards, answers), counts[0])
            values["loss"] = (self._losses(scores, sums, batch).sum(dtype=sum_dtype()), counts[0])
        if sums.nll is not None and sums.nll_tokens is not None:
            nll, tokens = sums.nll.sum(dtype=sum_dtype()), sums.nll_tokens.sum().long()
            odds, pairs = values["loss"]
            values |= {"nll": (nll, tokens), "loss": (torch.stack([odds, nll]), torch.stack([pairs, tokens]))}
        return self._measure(values)

    def _add_to_window(self, rewards: Tensor, batch: Any) -> None:
        """Adds a micro-batch's rewards to those that are logged next, on the device."""
        totals, counts = _by_preference(rewards, batch["answers"])
        hits = torch.zeros_like(totals[0]) if self.objective == "kto" else _count_hits(rewards, batch["answers"])
        divergence = batch.get("divergence", torch.zeros((), device=rewards.device))
        sums = torch.stack([*totals, *counts, hits, divergence, torch.ones_like(divergence)]).to(sum_dtype())
        self._window = sums if self._window is None else self._window + sums

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the rewards of the steps since the last record, every `log_every_n_steps` steps."""
        trainer: Any = self.trainer
        every = max(1, trainer.log_every_n_steps)
        if trainer.global_step // every > self._logged_step // every:
            self._log_window()

    def on_train_end(self) -> None:
        """Logs the last rewards, and prints the last completed prompts."""
        if self.trainer.global_step > self._logged_step:
            self._log_window()
        super().on_train_end()

    def _log_window(self) -> None:
        """Logs the rewards over all ranks; ranks that share samples count them alike, so that means are unchanged."""
        window, self._window = self._window, None
        self._logged_step = self.trainer.global_step
        if window is None:
            window = torch.zeros(7, dtype=sum_dtype(), device=self.trainer.strategy.root_device)
        group = control_group(self.trainer)
        window = window.cpu()
        if group is not None:
            dist.all_reduce(window, group=group)
        chosen, rejected, chosen_count, rejected_count, hits, divergence, batches = window.tolist()
        if not batches:
            return
        chosen = chosen / chosen_count if chosen_count else math.nan
        rejected = rejected / rejected_count if rejected_count else math.nan
        scalars = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": chosen - rejected}
        if self.objective == "kto":
            scalars["divergence"] = divergence / batches
        else:
            scalars["reward_accuracy"] = hits / chosen_count
        log_scalars(self.trainer, {f"train/{name}": value for name, value in scalars.items()})


class ReferenceLogProbs(BatchTransform):
    """Adds the reference's log-probabilities to each training batch; :class:`PreferenceLM` brings it along."""

    order = 90

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with them."""
        assert isinstance(pl_module, PreferenceLM)
        return pl_module.with_reference(batch)


def _by_preference(rewards: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of the rewards of chosen and of rejected answers, `[2]`, and their numbers, `[2]`."""
    masks = torch.stack([answers == 1, answers == 0])
    return torch.where(masks, rewards, 0).sum(dim=(1, 2), dtype=sum_dtype()), masks.sum(dim=(1, 2))


def _count_hits(rewards: Tensor, answers: Tensor) -> Tensor:
    """Returns the number of pairs whose chosen answer has the higher reward."""
    return ((rewards[:, ::2] > rewards[:, 1::2]) & (answers[:, ::2] >= 0)).sum().to(sum_dtype())
