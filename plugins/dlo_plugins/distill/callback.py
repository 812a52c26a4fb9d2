"""Callback `Distill`: trains a student on a frozen teacher's outputs, beside its own loss.

The teacher's outputs are computed after a batch has been moved and mixed, and travel with the batch: so a pipeline's
micro-batches, accumulation and sequence shards need no code of their own. The student's `loss` is replaced on the
object for the time of a fit, because every strategy computes the loss by it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.batches import is_named
from dlo_framework.checkpoint import load
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.data.description import run_datamodule
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, check_number
from dlo_framework.frozen_model import FrozenModel, build_on_meta, find_checkpoint
from dlo_framework.placed_model import PlacedModel
from dlo_framework.strategy_abilities import (
    ArrangesRanks,
    BlocksInPlace,
    SplitsSequences,
    full_sequences,
    mesh_groups,
    mesh_spec,
)
from dlo_framework.strategy_contract import PlacesSecondModel, contract_of, loads_checkpoint
from dlo_framework.task import Task, add_training_module, find_example, training_modules
from dlo_framework.task_abilities import CompletesBatches, Distillable, WeighsMicroBatches
from dlo_framework.watch.media import log_scalars
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.distill.student_losses import (
    AttentionTransfer,
    HiddenStates,
    LayerOutputs,
    LogitDistance,
    LogitLossName,
    OnPolicy,
    as_sequence,
    attention_distances,
    check_layers,
    hidden_distances,
    layer_pairs,
    layer_shapes,
    match_tensors,
    parse_every,
    pool_to_same_grid,
)
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.collectives import gather_sequence

#: Key of the teacher's outputs in a batch that is a dict.
KEY = "teacher_outputs"
#: Key of a batch's positions, 1 each, where ranks share sequences: the strategy pads them with 0.
_POSITIONS = "distilled_positions"
#: Prefix of the projections' names among the task's training modules.
_PROJECTION = "distill_"


class _PlainWeights(WeighsMicroBatches):
    """A task's weights of micro-batches that carry the teacher's outputs.

    Args:
        own: Ability of the task.
        noted: The last weights by the `id` of the micro-batch, for the loss.
    """

    def __init__(self, own: WeighsMicroBatches, noted: dict[int, float | Tensor]) -> None:
        self.own, self.noted = own, noted

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> Sequence[float | Tensor]:
        """Returns the task's weights."""
        weights = self.own.micro_batch_weights([split_batch(part)[0] for part in micro_batches])
        self.noted.clear()
        self.noted.update((id(part), weight) for part, weight in zip(micro_batches, weights, strict=True))
        return weights


class TeacherOutputs(NamedTuple):
    """Teacher's outputs for a batch, which travel with it.

    Attributes:
        outputs: Outputs of the teacher's task.
        layers: Outputs of the teacher's named layers.
        kind: Class of the batch, for a list or a tuple.
        is_sampled: Whether the batch is the student's own, for which the task has no targets.
    """

    outputs: Any
    layers: dict[str, Tensor]
    kind: type
    is_sampled: bool = False


class Distill(BatchTransform):
    """Trains the model on the outputs of a frozen teacher, beside its own loss.

    The loss is `weight` times the distance between both models' logits, plus `ce_weight` times the task's own loss. The
    teacher gets the batches that the model trains on, mixed and resized as they are, in evaluation mode and without
    a graph. The strategy places it as the model: sharded, cut and gathered in the same way. Checkpoints and exports
    hold the student alone.

    ```yaml
    trainer:
      callbacks:
        - class_path: Distill
          init_args:
            teacher: {checkpoint: runs/teacher}
            temperature: 4
            ce_weight: 0.5
    ```

    ================================ =================================================================
    tag                              meaning
    ================================ =================================================================
    ``distill/distance``             mean distance to the teacher's logits, without `weight`
    ``distill/task_loss``            mean of the task's own loss, without `ce_weight`
    ``distill/agreement``            share of samples or tokens whose best class is the teacher's
    ``distill/hidden``               mean distance of hidden states, without its weight
    ``distill/attention``            mean distance of attention maps, without its weight
    ================================ =================================================================

    Args:
        teacher: Teacher, a frozen model: `{checkpoint: runs/teacher}`, or `{task: ...}` with pretrained weights.
        loss: Distance between logits: `kl` (Hinton et al. 2015), `cross_entropy`, `reverse_kl`, `jsd`, `wasserstein`
            (of sorted probabilities), `mse`, or `hard`, cross-entropy with the teacher's best class (DeiT).
        temperature: Divisor of both models' logits; distances are multiplied by its square, as in Hinton et al.
        beta: Weight of the teacher in `jsd`'s mixture.
        weight: Factor of the distance between logits; 0 leaves it out, for hidden states or attention alone.
        ce_weight: Factor of the task's own loss, lambda; 0 leaves it out.
        token: Whether the distance uses the logits of the model's distillation token (DeiT; timm's `*_distilled`), and
            the task's loss those of its class token.
        hidden: Distance between hidden states of layers, with a projection.
        attention: Distance between attention maps of layers.
        on_policy: Distillation on the student's own completions in a share of the steps (GKD), for language models.
            Their loss has no task loss.
        first_classes: Whether a teacher may have more classes than the student, of which the first are compared: for a
            vocabulary that is the student's, padded to a larger size.
        init_from: `every k` copies the weights of every k-th block of the teacher into the student, and all other
            weights of the same names (DistilBERT: `every 2`). A resumed run does not.

    Raises:
        DloError: A value is out of range, or nothing is distilled. Before processes start: the teacher has other
            classes, a layer does not exist, the model has no distillation token, or the strategy divides what the loss
            needs.
    """

    order = 100  # after all transforms of images: the teacher gets what the student gets

    def __init__(
        self,
        teacher: FrozenModel,
        loss: LogitLossName = "kl",
        temperature: float = 1.0,
        beta: float = 0.5,
        weight: float = 1.0,
        ce_weight: float = 1.0,
        token: bool = False,
        hidden: HiddenStates | None = None,
        attention: AttentionTransfer | None = None,
        on_policy: OnPolicy | None = None,
        init_from: str | None = None,
        first_classes: bool = False,
    ) -> None:
        self.teacher, self.distance = teacher, LogitDistance(loss, temperature, beta)
        self.weight, self.ce_weight, self.token = weight, ce_weight, token
        self.hidden, self.attention, self.on_policy = hidden, attention, on_policy
        self.first_classes = first_classes
        self.every = None if init_from is None else parse_every(init_from)
        for name, value in (("weight", weight), ("ce_weight", ce_weight)):
            check_number(f"Distill: {name}", value, "at least 0", "1 is usual")
        if not weight and hidden is None and attention is None:
            raise DloError(
                "Distill: weight must be above 0 without hidden and attention, got 0, so that nothing is distilled; set"
                " weight: 1"
            )
        if on_policy is not None and not weight:
            raise DloError("Distill: weight must be above 0 with on_policy, got 0; set weight: 1")
        if token and not weight:
            raise DloError("Distill: weight must be above 0 with token, got 0; set weight: 1, or token: false")
        self.latest: dict[str, float] = {}
        self._pairs: dict[str, dict[str, str]] = {}  # of layers, by option
        self._widths: dict[str, tuple[int, int]] = {}  # of student and teacher, by the student's layer
        self._positions: dict[str, int] = {}  # of the student's layers, in the example batch
        self._sequences: Communicator | None = None  # of the ranks that shard tokens between blocks
        self._copies: dict[str, str] = {}  # the teacher's tensors by the student's
        self._task: Task | None = None
        self._ours: LayerOutputs | None = None
        self._theirs: LayerOutputs | None = None
        self._own: PlacedModel | None = None  # the student, for its completions
        self._weights: dict[int, float | Tensor] = {}  # of a pipeline's micro-batches
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # of batches, by tag
        self._computed: set[str] = set()  # tags of the current batch
        self._tick = 0

    # --- before training -----------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the student against the teacher, before any process starts.

        Raises:
            DloError: They do not fit; the message has the fix.
        """
        if not isinstance(module, Task):
            raise DloError(
                f"Distill: the model must be a dlo_framework.Task, whose loss it replaces, got"
                f" {type(module).__name__}; derive it from Task"
            )
        module.check(datamodule)
        try:
            teacher = self.teacher.check(module, datamodule, contract_of(trainer.strategy))
        except DloError as error:
            raise DloError(f"Distill: teacher: {error}") from error
        student = build_on_meta(module)
        self._check_classes(student if module.has_model else module, teacher)
        self._check_strategy(trainer)
        if self.on_policy is not None:
            self._check_on_policy(trainer, module)
        if self.token:
            self._check_token(student)
        if self.every is not None:
            decided = module.ability(Distillable).class_count is not None
            undecided = None if decided else student.ability(Distillable).class_count
            self._copies = match_tensors(student, teacher, self.every, undecided)
            self._check_source(trainer)
        self._pairs = {}
        for option, what in (("hidden", self.hidden), ("attention", self.attention)):
            if what is not None:
                pairs = layer_pairs(what.layers, student, teacher)
                check_layers(f"{option}.layers", student.model, pairs)
                check_layers(f"{option}.layers", teacher.model, pairs.values())
                self._pairs[option] = pairs
        if self._pairs:
            self._check_compiled(trainer, student)
            self._check_shapes(student, teacher, datamodule)

    def _check_classes(self, student: Task, teacher: Task) -> None:
        ours, theirs = (task.ability(Distillable).class_count for task in (student, teacher))
        if not self.weight or ours is None or theirs is None or ours == theirs:
            return
        if theirs < ours or not self.first_classes:
            padded = (
                ", set first_classes: true if its vocabulary is the student's with padding" if theirs > ours else ""
            )
            raise DloError(
                f"Distill: teacher must have the student's {ours} classes (or tokens of its vocabulary), got {theirs};"
                f" use a teacher for the same classes and tokenizer{padded}, or set weight: 0 to distil layers alone"
            )

    def _check_strategy(self, trainer: Trainer) -> None:
        spec = mesh_spec(contract_of(trainer.strategy))
        stages = 1 if spec is None else spec.pp
        if (self.hidden or self.attention) and stages > 1:
            raise DloError(
                "Distill: the rank that computes the loss must have the outputs of all blocks for hidden and attention,"
                f" got pp={stages}, whose last stage has its own blocks alone; use the other axes, or distil logits"
                " alone"
            )

    def _check_on_policy(self, trainer: Trainer, module: Task) -> None:
        assert self.on_policy is not None
        strategy = trainer.strategy
        module.ability(CompletesBatches, "Distill: on_policy")
        split = contract_of(strategy).find_ability(SplitsSequences)
        shards = 1 if split is None else split.sequence_multiple()
        if self.on_policy.multiple % shards:
            raise DloError(
                f"Distill: on_policy.multiple must be a multiple of {shards} on a mesh that shards sequences, got"
                f" {self.on_policy.multiple}; set multiple: {-(-self.on_policy.multiple // shards) * shards}"
            )
        contract_of(strategy).ability(BlocksInPlace, "Distill with on_policy")

    def _check_compiled(self, trainer: Trainer, student: Task) -> None:
        """Checks that no layer is inside compiled code, which blocks of one kind share and which keeps no outputs."""
        callbacks, strategy = trainer.callbacks, trainer.strategy  # type: ignore[attr-defined]
        scopes = [callback.scope for callback in callbacks if isinstance(callback, Compile)]
        if isinstance(strategy, MeshStrategy) and any(isinstance(a, CompileBlocks) for a in strategy.appliers.ordered):
            scopes.append("blocks")
        if not scopes:
            return
        blocks = student.parallel_plan().block_names(student.model)
        names = [name for pairs in self._pairs.values() for name in pairs]
        inside = [name for name in names if any(name.startswith(f"{block}.") for block in blocks)]
        if scopes[0] != "blocks" or inside:
            raise DloError(
                "Distill: layers of hidden and attention must be blocks of the plan, or outside of them, and Compile"
                f" must have scope: blocks, got layer '{(inside or names)[0]}' and scope: {scopes[0]}; name a block,"
                f" such as {blocks[-1]}, or leave Compile out"
            )

    def _check_token(self, student: Task) -> None:
        if not student.ability(Distillable).use_distillation_token():
            raise DloError(
                f"Distill: token must be false for a model without a distillation token, got true for"
                f" {type(student.model).__name__}; use a *_distilled model of timm, such as"
                " deit_tiny_distilled_patch16_224"
            )

    def _check_source(self, trainer: Trainer) -> None:
        """Checks that the weights to copy can be read: from a checkpoint, or from full tensors."""
        contract = contract_of(trainer.strategy)
        cuts = contract.find_ability(ArrangesRanks) is not None and trainer.world_size > 1
        if self.teacher.checkpoint is None and (cuts or contract.zero_stage == 3):
            raise DloError(
                f"Distill: teacher must have a checkpoint for init_from under {contract.ability_owner}, which shards"
                " it, got a task alone; save the teacher by a run of one process with max_steps: 0, and set"
                " teacher.checkpoint"
            )

    def _check_shapes(self, student: Task, teacher: Task, datamodule: LightningDataModule | None) -> None:
        example = find_example(student, datamodule)
        if example is None:
            raise DloError(
                f"Distill: {type(student).__name__} must have an example_batch for hidden and attention, got None;"
                " return a batch of one sample from it"
            )
        ours = layer_shapes(student, example, [name for pairs in self._pairs.values() for name in pairs])
        theirs = layer_shapes(teacher, example, [name for pairs in self._pairs.values() for name in pairs.values()])
        self._widths = {}
        self._positions = {name: shape[1] for name, shape in ours.items() if len(shape) == 3}
        for option, pairs in self._pairs.items():
            for name, other in pairs.items():
                shapes = ours[name], theirs[other]
                if option == "attention" and any(len(shape) < 3 for shape in shapes):
                    raise DloError(
                        "Distill: attention.layers must have positions, [B, D, H, W] or [B, N, D], for an attention"
                        f" map, got {list(shapes[0])} of '{name}' and {list(shapes[1])} of '{other}'; name earlier"
                        " layers, or use hidden"
                    )
                if not _same_positions(*shapes):
                    raise DloError(
                        f"Distill: {option}.layers must pair layers with the same positions, got {list(shapes[0])} of"
                        f" '{name}' and {list(shapes[1])} of '{other}'; pair others"
                    )
                if option == "hidden":
                    width, theirs_width = (shape[1 if len(shape) == 4 else -1] for shape in shapes)
                    self._widths[name] = width, theirs_width

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the student, unless the command line has, and adds the projections, which the strategy shards."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.check_run(trainer, pl_module, run_datamodule(trainer))
        assert isinstance(pl_module, Task)
        if self.hidden is not None:
            for number, name in enumerate(self._pairs["hidden"]):
                width, theirs = self._widths[name]
                if width != theirs or self.hidden.project:
                    with torch.random.fork_rng(devices=[]):  # the run's random numbers do not change
                        torch.manual_seed(number)
                        projection = nn.Linear(width, theirs, bias=False)
                    add_training_module(pl_module, f"{_PROJECTION}{number}", projection)

    @property
    def frozen_models(self) -> list[FrozenModel]:
        """The teacher."""
        return [self.teacher]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Places the teacher, replaces the student's loss, and copies initial weights."""
        assert isinstance(pl_module, Task)
        self.teacher.start(trainer, pl_module)
        self._check_classes(pl_module, self.teacher.placed.task)  # A vocabulary is known only now.
        if self.token:
            self._check_token(pl_module)
        if self.every is not None and not loads_checkpoint(trainer):
            self._copy_layers(trainer)
        self._replace_methods(pl_module)
        if self.on_policy is not None:
            self._own = contract_of(trainer.strategy).ability(PlacesSecondModel).place_own()
        if self._pairs:
            self._ours = LayerOutputs(pl_module.model, [name for pairs in self._pairs.values() for name in pairs])
            names = [name for pairs in self._pairs.values() for name in pairs.values()]
            self._theirs = LayerOutputs(self.teacher.placed.task.model, names)
            self._sequences = _sharding_sequences(trainer.strategy)
        control_group(trainer)
        self._sums, self._counts, self._tick = {}, {}, trainer.global_step
        self._computed.clear()

    def _copy_layers(self, trainer: Trainer) -> None:
        """Copies the teacher's layers, each rank its shards."""
        pairs = self._copies
        if self.teacher.checkpoint is not None:
            saved = as_lazy_state_dict(load(find_checkpoint(self.teacher.checkpoint))["state_dict"])
        else:
            saved = as_lazy_state_dict(self.teacher.placed.shards())
        state: dict[str, Any] = {name: saved[source] for name, source in pairs.items()}
        trainer.strategy.load_model_state_dict({"state_dict": state}, strict=False)
        contract_of(trainer.strategy).refresh()
        rank_zero_info(f"Distill: {len(pairs)} tensors begin with the teacher's, of every {self.every} blocks")

    def _replace_methods(self, task: Task) -> None:
        """Replaces methods on the object, for the fit: a batch then carries the teacher's outputs."""
        self._task = task
        own_loss, own_inputs, declared = task.loss, task.inputs, task.abilities()
        weights = _PlainWeights(task.ability(WeighsMicroBatches), self._weights)

        def loss(outputs: Any, batch: Any) -> Tensor:
            plain, theirs = split_batch(batch)
            return (
                own_loss(outputs, plain)
                if theirs is None
                else self._loss(task, own_loss, outputs, plain, theirs, batch)
            )

        def inputs(batch: Any) -> Any:
            return own_inputs(split_batch(batch)[0])

        task.__dict__.update(loss=loss, inputs=inputs, abilities=lambda: declared | {WeighsMicroBatches: weights})

    def release(self, trainer: Trainer) -> None:
        """Frees the teacher, and restores the student's loss."""
        super().release(trainer)
        for outputs in (self._ours, self._theirs):
            if outputs is not None:
                outputs.remove()
        if self._task is not None:
            for name in ("loss", "inputs", "abilities"):
                self._task.__dict__.pop(name, None)
            if self.token:
                self._task.ability(Distillable).use_distillation_token(False)
        self._ours = self._theirs = self._task = self._own = self._sequences = None
        self.teacher.stop()

    # --- in training ---------------------------------------------------------------------------------------

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with the teacher's outputs, on the ranks that compute the loss."""
        is_sampled = self.on_policy is not None and self.on_policy.samples_at(trainer.global_step)
        if is_sampled:
            batch = self._sample(trainer, batch)
        if self._ours is not None:
            self._ours.values.clear()
        outputs = self.teacher.outputs(batch)
        layers = {} if self._theirs is None else self._theirs.pop()
        if not self.teacher.has_outputs:
            return batch
        if self.attention is not None and _sharing_group(trainer) is not None:
            batch = {**batch, _POSITIONS: torch.ones_like(batch["input_ids"])}
        return join_batch(batch, TeacherOutputs(outputs, layers, type(batch), is_sampled))

    def _sample(self, trainer: Trainer, batch: Any) -> Any:
        """Returns a batch of the student's completions."""
        assert self.on_policy is not None
        assert self._task is not None
        assert self._own is not None
        options = self.on_policy
        complete = partial(
            self._task.ability(CompletesBatches).complete_batch,
            prompt_tokens=options.prompt_tokens,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed_of(trainer.global_step),
            multiple=options.multiple,
        )
        contract = contract_of(trainer.strategy)
        contract.finish_step()  # The last step's parameters may still be on their way.
        with full_sequences(contract):
            return self._own.run(complete, batch)

    def _loss(self, task: Task, own_loss: Any, outputs: Any, plain: Any, theirs: TeacherOutputs, part: Any) -> Tensor:
        """Returns the student's loss for a batch or a micro-batch."""
        own, distilled = outputs if self.token else (outputs, outputs)
        values: dict[str, Tensor] = {}
        terms: list[Tensor] = []
        if self.ce_weight and not theirs.is_sampled:
            values["task_loss"] = own_loss(own, plain)
            terms.append(self.ce_weight * values["task_loss"])
        if self.weight:
            distance = task.ability(Distillable).distillation_loss
            apart = distance(distilled, theirs.outputs, self.teacher, plain, self.distance)
            values |= {"distance": apart.loss, "agreement": apart.agreement}
            terms.append(self.weight * apart.loss)
        if self._ours is not None:
            ours, layers = self._ours.pop(), dict(theirs.layers)
            self._gather_sequences(ours, layers, plain)
            if self.hidden is not None:
                values["hidden"] = self._hidden_loss(task, ours, layers, plain)
                terms.append(self.hidden.weight * values["hidden"])
            if self.attention is not None:
                values["attention"] = self._attention_loss(task, ours, layers, plain, part)
                terms.append(self.attention.weight * values["attention"])
        self._note(values, self._weights.pop(id(part), 1.0))
        return functools.reduce(torch.add, terms)

    def _gather_sequences(self, ours: dict[str, Tensor], theirs: dict[str, Tensor], batch: Any) -> None:
        """Gathers the tokens of layers between blocks, in place, where the ranks of `tp` shard them."""
        if self._sequences is None:
            return
        tokens = batch["input_ids"].shape[1] if isinstance(batch, dict) and "input_ids" in batch else None
        for pairs in self._pairs.values():
            for name, other in pairs.items():
                for layers, layer in ((ours, name), (theirs, other)):
                    length = tokens or self._positions.get(name, 0)
                    if layers[layer].ndim == 3 and layers[layer].shape[1] != length:
                        layers[layer] = gather_sequence(layers[layer], length, self._sequences)

    def _hidden_loss(self, task: Task, ours: dict[str, Tensor], theirs: dict[str, Tensor], batch: Any) -> Tensor:
        assert self.hidden is not None
        losses, projections = [], training_modules(task)
        for number, (name, other) in enumerate(self._pairs["hidden"].items()):
            student, teacher = pool_to_same_grid(ours[name], theirs[other])
            states = as_sequence(student)
            if f"{_PROJECTION}{number}" in projections:
                states = projections[f"{_PROJECTION}{number}"](states)
            apart = hidden_distances(states, as_sequence(teacher), self.hidden.loss)  # [B, N]
            losses.append(task.ability(Distillable).batch_mean(apart[:, 0] if student.ndim == 2 else apart, batch))
        return torch.stack(losses).mean()

    def _attention_loss(
        self, task: Task, ours: dict[str, Tensor], theirs: dict[str, Tensor], batch: Any, part: Any
    ) -> Tensor:
        pairs = self._pairs["attention"].items()
        group = None if task._trainer is None else _sharing_group(task.trainer)
        counted = None if group is None else part[_POSITIONS]
        maps = [
            attention_distances(*pool_to_same_grid(ours[name], theirs[other]), counted, group) for name, other in pairs
        ]
        return torch.stack([task.ability(Distillable).batch_mean(apart, batch) for apart in maps]).mean()

    # --- logging -------------------------------------------------------------------------------------------

    def _note(self, values: dict[str, Tensor], weight: float | Tensor) -> None:
        self._computed |= values.keys()
        for name, value in values.items():
            value = (value.detach() * weight).float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        """Logs the means since the last record, every `trainer.log_every_n_steps` steps."""
        for name in self._computed:
            self._counts[name] = self._counts.get(name, 0) + 1
        self._computed.clear()
        self._weights.clear()
        every, step = max(1, trainer.log_every_n_steps), trainer.global_step  # type: ignore[attr-defined]
        complete = step // every > self._tick // every
        self._tick = step
        if complete:
            self._record(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the last means."""
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        """Logs the means over all batches of all ranks that computed losses; called on all ranks."""
        names = ("task_loss", "distance", "agreement", "hidden", "attention")
        values = [float(self._sums[name]) if name in self._sums else 0.0 for name in names]
        sums = torch.tensor([*values, *(self._counts.get(name, 0) for name in names)], dtype=torch.float64)
        group = control_group(trainer)
        if group is not None:
            dist.all_reduce(sums, group=group)
        self._sums, self._counts = {}, {}
        totals, counts = sums.split(len(names))
        means = {
            f"distill/{name}": float(total / count)
            for name, total, count in zip(names, totals, counts, strict=True)
            if count
        }
        if means:
            self.latest = means
            log_scalars(trainer, self.latest)


def join_batch(batch: Any, theirs: TeacherOutputs) -> Any:
    """Returns a batch that carries the teacher's outputs: a dict under a key of its own, a tuple or list at its end.

    Raises:
        DloError: The batch is of another kind.
    """
    if isinstance(batch, dict):
        return {**batch, KEY: theirs}
    if isinstance(batch, tuple | list):
        return (*batch, theirs)
    raise DloError(f"Distill: a batch must be a dict, a tuple or a list, got {type(batch).__name__}; return one")


def split_batch(batch: Any) -> tuple[Any, TeacherOutputs | None]:
    """Returns a batch as the datamodule made it, and the teacher's outputs; None if it carries none."""
    if isinstance(batch, dict) and KEY in batch:
        return {key: value for key, value in batch.items() if key not in (KEY, _POSITIONS)}, batch[KEY]
    if isinstance(batch, tuple) and batch and isinstance(batch[-1], TeacherOutputs):
        items, kind = batch[:-1], batch[-1].kind
        return (kind(*items) if is_named(kind) else kind(items)), batch[-1]
    return batch, None


def _same_positions(student: torch.Size, teacher: torch.Size) -> bool:
    """Returns whether two layers' outputs have the same positions; grids are pooled to the same size."""
    if len(student) == len(teacher) == 4:
        return True
    counts = [math.prod(shape[2:] if len(shape) == 4 else shape[1:-1]) for shape in (student, teacher)]
    return counts[0] == counts[1]


def _sharing_group(trainer: Trainer) -> Any:
    """Returns the process group of the ranks that share sequences (`cp`); None without any."""
    groups = mesh_groups(contract_of(trainer.strategy))
    return None if groups is None or groups.spec.cp == 1 else groups.group("cp")


def _sharding_sequences(strategy: Any) -> Communicator | None:
    """Returns the communicator of the ranks of `tp`, if they shard tokens between blocks; None otherwise."""
    contract = contract_of(strategy)
    split, groups = contract.find_ability(SplitsSequences), mesh_groups(contract)
    return Communicator(groups.group("tp")) if split is not None and split.sequence_parallel else None
