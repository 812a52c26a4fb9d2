"""Second models of a run, which do not train: the teacher of a distillation, the reference of a preference loss."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import instantiate_module
from torch import Tensor

from dlo_framework.batches import map_leaves
from dlo_framework.checkpoint import check as check_checkpoint
from dlo_framework.checkpoint import load, locate
from dlo_framework.checkpoint.loading import LazyStateDict, as_lazy_state_dict
from dlo_framework.data.description import ModuleDescription, run_datamodule
from dlo_framework.ema import AveragedModel
from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean, shown_names
from dlo_framework.placed_model import PlacedModel
from dlo_framework.registry import Registry
from dlo_framework.registry.registry import allowed_roots, check_class_path
from dlo_framework.run import runs
from dlo_framework.strategy_abilities import CanonicalCheckpoints
from dlo_framework.strategy_contract import PlacesSecondModel, StrategyContract, contract_of, plain_name
from dlo_framework.task import Task
from dlo_framework.task_abilities import ReadsPlacedWeights
from dlo_framework.yaml_text import read_yaml

#: Dtypes of a second model's parameters, by their names in a config.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@final
class FrozenModel:
    """Second model of a run, which does not train: it is in no optimizer, and not in the run's checkpoints.

    Whoever needs it has one as an option, and lists it in an attribute `frozen_models`, so that it is checked before
    processes start. It calls :meth:`start` in `on_fit_start`, :meth:`outputs` for each batch, and :meth:`stop` at the
    end. The run's strategy places the model as it does the run's own: sharded, cut and gathered in the same way.

    Args:
        checkpoint: Run folder, whose best checkpoint is used, or its last where it has no best; or a checkpoint:
            `runs/digits/version_0/last`, or a path. Task and settings come from the checkpoint, unless `task` is set.
        task: Task of the model. Without `checkpoint` its weights are its own, such as pretrained ones.
        average: Decay of an exponential average of the run's own weights, which is the second model: 0.999 averages
            about 1,000 optimizer steps. It starts from the run's first weights, and is in the run's checkpoints.
        dtype: Dtype of the parameters, in which the model computes: `float32`, `bfloat16` or `float16`; by default
            the Trainer's precision.
        offload: Whether parameters are in CPU memory, and each block's are copied to the device while the block before
            computes.

    Raises:
        DloError: The model has no source, or two; or the dtype is unknown.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        task: Task | None = None,
        average: float | None = None,
        dtype: str | None = None,
        offload: bool = False,
    ) -> None:
        sources = {"checkpoint": checkpoint, "task": task, "average": average}
        given = [name for name, value in sources.items() if value is not None]
        if not given:
            raise DloError("a second model must have one of checkpoint, task and average, got none; set one")
        if average is not None and len(given) > 1:
            raise DloError(f"a second model must have one source, got {' and '.join(given)}; leave out all but one")
        check_number("average of a second model", average, "at least 0 and below 1", "0.999 is usual")
        if task is not None and not isinstance(task, Task):
            raise DloError(
                f"task of a second model must be a dlo_framework.Task, got a {type(task).__name__}; make it one"
            )
        check_choice("dtype of a second model", dtype, DTYPES)
        own = {"dtype": dtype, "offload": offload or None}
        option = next((name for name, value in own.items() if value is not None), None)
        if average is not None and option is not None:
            raise DloError(
                f"{option} of a second model must be unset with average, whose weights change and are the run's own,"
                f" got {own[option]}; leave it out"
            )
        self.checkpoint, self.task, self.average, self.offload = checkpoint, task, average, offload
        self.dtype = None if dtype is None else DTYPES[dtype]
        #: Whether :meth:`check` has been called with the run's strategy.
        self.checked = False
        self._made: Task | None = None  # task without a model, of the last check
        self._placed: PlacedModel | None = None

    # --- before processes start ----------------------------------------------------------------------------

    def check(
        self,
        module: LightningModule,
        datamodule: LightningDataModule | None = None,
        contract: StrategyContract | None = None,
    ) -> Task:
        """Checks that the model exists, fits the data, and can be built and placed; called before processes start.

        Args:
            module: Module of the run.
            datamodule: Datamodule of the run; None without one.
            contract: Strategy of the run; None leaves out the checks of how it cuts the model.

        Returns:
            The task, with its model on the meta device.

        Raises:
            DloError: It does not; the message has the fix.
        """
        self.checked = contract is not None
        if self.average is not None:
            if not isinstance(module, Task):
                raise DloError(
                    "a run's module must be a dlo_framework.Task for an average as second model, got a"
                    f" {type(module).__name__}; derive it from Task"
                )
            return module.on_meta()
        task = self._make_task()
        task.check(datamodule)
        twin = build_on_meta(task)
        if self.checkpoint is not None:
            path = find_checkpoint(self.checkpoint)
            check_weights(as_lazy_state_dict(load(path, level=None)["state_dict"]), twin, path)
        if contract is not None:
            try:
                contract.ability(PlacesSecondModel).check_frozen(twin, datamodule)
            except DloError as error:
                raise DloError(f"second model: {error}") from error
        self._made = task
        return twin

    def _make_task(self) -> Task:
        """Returns the task without a trainer; without a model too, unless the user gave one that has it."""
        if self.task is not None:
            return copy.deepcopy(self.task)
        assert self.checkpoint is not None
        return task_of(find_checkpoint(self.checkpoint))

    # --- the run -------------------------------------------------------------------------------------------

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Builds the model, and places it by the run's strategy; called on all ranks, after the run's model is set up.

        The run's random numbers are those of a run without a second model.

        Args:
            trainer: Trainer of the run.
            module: Module of the run.

        Raises:
            DloError: The model cannot be built or placed.
        """
        self.stop()
        strategy: Any = trainer.strategy
        contract = contract_of(strategy)
        if self.average is not None:
            self.check(module)
            self._placed = AveragedModel(trainer, self.average)
            return
        if self._made is None:
            self.check(module, run_datamodule(trainer), contract)
        task, self._made = self._made, None
        assert task is not None
        device = strategy.root_device
        own_random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with own_random, strategy.tensor_init_context(), default_dtype(self.dtype):
            task.configure_model()
        if self.dtype is None:
            task = strategy.precision_plugin.convert_module(task)
        else:
            _cast(task, self.dtype)
        task.eval().requires_grad_(False)
        loads = self.checkpoint is not None
        placed = contract.ability(PlacesSecondModel).place_frozen(
            task, dtype=self.dtype, offload=self.offload, loads_weights=loads
        )
        _update_properties(task, device=device)
        if (reads := task.find_ability(ReadsPlacedWeights)) is not None:
            reads.read_placed_weights(placed.shards(), replaced=loads)
        placed.refresh()
        if self.checkpoint is not None:
            path = strategy.broadcast(str(find_checkpoint(self.checkpoint)))
            reader = contract.find_ability(CanonicalCheckpoints)
            saved = load(path) if reader is None else reader.load_checkpoint(path)
            placed.load(as_lazy_state_dict(saved["state_dict"]))
        self._placed = placed

    @property
    def placed(self) -> PlacedModel:
        """Model as the strategy has placed it."""
        assert self._placed is not None, "start comes first"
        return self._placed

    def held_bytes(self) -> int:
        """Returns the bytes of the model in this rank's memory; 0 before :meth:`start` and after :meth:`stop`."""
        return 0 if self._placed is None else self._placed.held_bytes()

    @property
    def has_outputs(self) -> bool:
        """Whether this rank gets outputs; under a pipeline only the last stage's ranks do."""
        return self.placed.has_outputs

    def outputs(self, batch: Any) -> Any:
        """Returns the model's outputs for a batch on the device, without a graph; called on all ranks.

        They are those of the task's `forward`: logits of images, hidden states `[B, L, D]` of a causal language model.
        Under context parallelism they are this rank's shard of the sequences. Under a pipeline only the ranks of the
        last stage get them, and the others None.

        Args:
            batch: Batch as a `BatchTransform` gets it.
        """
        if self.dtype is not None:
            batch = map_leaves(self._cast_input, batch)
        return self.placed.outputs(batch)

    def _cast_input(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    @contextlib.contextmanager
    def head(self) -> Iterator[Any]:
        """Yields the task's `head`, for example a causal language model's, whose weights are gathered inside the block.

        Called on all ranks with outputs, in the same order. Outside the block its weights may be freed, so that a
        backward that needs them is inside too.
        """
        with self.placed.gathered():
            yield self.placed.head

    def stop(self) -> None:
        """Frees the model; does nothing without one."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()


def find_frozen_models(owners: Iterable[Any]) -> list[FrozenModel]:
    """Returns the second models of a run's module and callbacks, which list them in an attribute `frozen_models`."""
    return [frozen for owner in owners for frozen in ModuleDescription(owner).frozen_models or ()]


# --- the source ------------------------------------------------------------------------------------------------


def find_checkpoint(text: str) -> Path:
    """Returns the checkpoint that an option `checkpoint` of a second model names.

    Args:
        text: Run folder (its best checkpoint, or else its last), folder of runs (the newest with a checkpoint), `last`
            or `best` in a run folder, or the path of a checkpoint.

    Raises:
        DloError: There is none; the message names the nearest path.
    """
    path = Path(text).expanduser()
    checkpoint: Path | None = None
    if path.name in ("last", "best") and locate(path) is None:
        checkpoint = runs.checkpoint_of(path.parent, path.name, weights_only=True)
    elif (path / runs.CHECKPOINTS).is_dir():
        checkpoint = _checkpoint_in(path)
        if checkpoint is None:
            raise DloError(
                f"checkpoint of a second model must be a run with a checkpoint, got {text} without; train it"
            )
    elif any((run / runs.CHECKPOINTS).is_dir() for run in runs.versions(path)):
        checkpoint = next((f for run in runs.versions(path) if (f := _checkpoint_in(run)) is not None), None)
    elif locate(path) is not None:
        check_checkpoint(path)
        checkpoint = path
    if checkpoint is not None:
        return checkpoint
    raise DloError(
        f"checkpoint of a second model must be a run folder or a checkpoint, got {text}{_nearest_path(path)}"
        " (train one with `dlo fit`)"
    )


def _checkpoint_in(run: Path) -> Path | None:
    """Returns a run's best checkpoint, or its last where it has no best; None if it has none."""
    return runs.checkpoint_of(run, "best") or runs.checkpoint_of(run, "last", weights_only=True)


def _nearest_path(path: Path) -> str:
    """Returns the part of an error message that names the nearest path that exists."""
    parent = next((folder for folder in path.parents if folder.is_dir()), Path())
    missing = path.relative_to(parent).parts[0] if path != parent else path.name
    near = did_you_mean(missing, sorted(entry.name for entry in parent.iterdir()))
    return near or f"; {parent} has no '{missing}'"


def task_of(path: Path) -> Task:
    """Returns the task of a checkpoint, with the settings that it was saved with and without a model.

    They are the checkpoint's hyperparameters; what these lack is in `config.yaml` of the run folder.

    Raises:
        DloError: There are none, the class may not be imported, or it is not a Task.
    """
    saved = load(path, level=None)
    settings: dict[str, Any] = dict(saved.get("hyper_parameters") or {})
    class_path, by_parser = settings.pop("_class_path", None), settings.pop("_instantiator", None) is not None
    config = path.parent.parent / "config.yaml"
    if class_path is None and config.is_file():
        model = (read_yaml(config) or {}).get("model") or {}
        class_path = model.get("class_path")
        if not settings:
            settings, by_parser = dict(model.get("init_args") or {}), True
    if class_path is None:
        raise DloError(
            f"checkpoint of a second model must name its task, got {path} without hyperparameters or a run's"
            " config.yaml; set task of the second model too"
        )
    kind = _import_task(class_path)
    parameters = inspect.signature(kind.__init__).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        settings = {name: value for name, value in settings.items() if name in parameters}
    made: Task = instantiate_module(kind, settings) if by_parser else kind(**settings)
    return made


def _import_task(class_path: str) -> type[Task]:
    registry = Registry()
    plugin = next(iter(registry.find_named([class_path])), None)
    module, _, name = class_path.rpartition(".")
    if plugin is not None:
        task_class: Any = registry.load(plugin.name, plugin.kind)
    else:
        if module not in sys.modules:
            check_class_path(class_path, allowed_roots())
            __import__(module)
        task_class = getattr(sys.modules[module], name, None)
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise DloError(
            f"checkpoint of a second model must be of a dlo_framework.Task, got one of {class_path}; set task of the"
            " second model too, or derive that class from Task"
        )
    return task_class


def build_on_meta(task: Task) -> Task:
    """Returns a task with its model on the meta device.

    Raises:
        DloError: The model cannot be built there.
    """
    try:
        return task.on_meta()
    except DloError:
        raise
    except Exception as error:
        raise DloError(
            f"a second model must be buildable on the meta device, got {type(error).__name__} of"
            f" {type(task).__name__}.configure_model: {error}; read no values of weights there"
        ) from error


def check_weights(saved: LazyStateDict, twin: Task, path: Path) -> None:
    """Checks that a checkpoint has all weights of a task, in their shapes; weights outside its model may be more.

    Raises:
        DloError: It has not.
    """
    own = {plain_name(name): value for name, value in twin.state_dict().items()}
    missing = [name for name in own if name not in saved]
    extra = [name for name in saved if name.startswith("model.") and name not in own]
    resized = [
        f"{name} {list(saved.shape(name))} for {list(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor) and name in saved and tuple(saved.shape(name)) != tuple(value.shape)
    ]
    for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", resized)):
        if names:
            raise DloError(
                f"checkpoint of a second model must have the weights of {type(twin).__name__}'s model, got"
                f" {shown_names(names)} {what} in {path}; leave task out, or set the task that was saved"
            )


# --- building --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Makes new tensors of a dtype inside the block; None changes nothing."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast(task: Task, dtype: torch.dtype) -> None:
    """Casts the parameters and the saved buffers; others, such as the frequencies of rotary positions, stay exact."""
    for parameter in task.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for module in task.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)
    _update_properties(task, dtype=dtype)
