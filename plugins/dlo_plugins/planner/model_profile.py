"""Profiles a task's model on fake tensors: the work, saved bytes and parameters of its stem, blocks and head.

The model runs forward and backward once, without values or memory. Of the blocks, each kind runs once: a block with the
same class, parameters, settings and inputs as an earlier one has the same work.

CPUs and GPUs have lists of autocast of their own: a GPU computes norms, softmax and powers in single precision, a CPU
in the dtype of the operands. Fake tensors of a GPU would have its list, but torch (2.11 to 2.15) cannot run their
backward without one: fake tensors of a CPU get it here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import batch_size, map_rows, tree_leaves, tree_map
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeKernels, FakeTensorMode, copy_modules, fake_copy, fake_like
from dlo_framework.plan import ParallelPlan
from dlo_plugins.planner.block_profile import RestRecord, profile_block
from dlo_plugins.planner.operation_recorder import FusedKernels, Recorder, running_modules
from dlo_plugins.planner.regions_of_tp import ExpertProfile, PartParameters, TensorRegions
from dlo_plugins.planner.work import Amount, Part

_HALF = (torch.bfloat16, torch.float16)
#: Functions that autocast computes in single precision on a GPU (torch.amp, "CUDA Ops that can autocast to float32").
#: Left out are a few losses for pairs and margins.
_SINGLE = {
    *("layer_norm", "group_norm", "rms_norm", "normalize", "norm", "softmax", "log_softmax", "softmin", "softplus"),
    *(
        "pow",
        "square",
        "__pow__",
        "__rpow__",
        "__rtruediv__",
        "__rdiv__",
        "exp",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "reciprocal",
    ),
    *("rsqrt", "sum", "prod", "cumsum", "cumprod", "cosine_similarity", "cdist", "dist", "tan", "sinh", "cosh"),
    *("acos", "asin", "erfinv", "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "kl_div", "mse_loss"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "cosine_embedding_loss", "margin_ranking_loss"),
}


@contextlib.contextmanager
def device_autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Chooses the dtypes of operations as autocast does on a type of device, for fake tensors of a CPU.

    Args:
        device: Type of the device.
        dtype: Dtype of matrix products; None for no autocast.
    """
    if dtype is None:
        yield
        return
    single = contextlib.nullcontext() if device == "cpu" else _SingleFunctions()
    with torch.autocast("cpu", dtype=dtype), single:
        yield


class _SingleFunctions(TorchFunctionMode):
    """Mode in which functions of the GPU's list get operands in single precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _SINGLE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_single, (args, kwargs))
        return func(*args, **kwargs)


def _single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf


class CastWeights(TorchDispatchMode):
    """Mode that finds the parameters that autocast casts to half precision; enter it inside a `FakeTensorMode`.

    Args:
        module: Module with fake parameters.
        stack: Modules whose forward is running, the innermost last.

    Attributes:
        found: Names of the parameters. Of tied ones only those of the modules that cast them.
    """

    def __init__(self, module: nn.Module, stack: list[nn.Module]) -> None:
        super().__init__()
        self._stack = stack
        self._names: Mapping[int, str] = {id(part): name for name, part in module.named_modules()}
        self._owners: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name)
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in _HALF:
            names = self._owners.get(id(args[0]), [])
            running = self._names.get(id(self._stack[-1])) if self._stack else None
            own = [name for name in names if name.rpartition(".")[0] == running] if len(names) > 1 else names
            self.found.update(own)
        return func(*args, **(kwargs or {}))


def cast_parameters(module: nn.Module, names: set[str], dtype: torch.dtype) -> None:
    """Replaces fake parameters by ones of another dtype; a tied one only where its module is named."""
    made: dict[int, nn.Parameter] = {}
    for name in sorted(names):
        parent, _, key = name.rpartition(".")
        owner = module.get_submodule(parent)
        old = owner._parameters[key]
        assert old is not None
        if id(old) not in made:
            made[id(old)] = nn.Parameter(torch.empty_like(old, dtype=dtype), requires_grad=old.requires_grad)
        owner._parameters[key] = made[id(old)]


#: Rows of the profiled micro-batch: batch norm needs more than one value.
ROWS = 2
#: Attributes that number a block: blocks that differ only in these are of one kind.
_NUMBERS = ("idx", "index", "id", "number")


@dataclass(frozen=True)
class ModelProfile:
    """Profile of a model, for a micro-batch of one row.

    Attributes:
        model: Class name of the model.
        stem: Modules before the first block.
        blocks: Blocks in order; blocks of one kind share their work.
        head: Modules after the last block, and the loss.
        tied: Parameters that the stem and the head share, which both have under a pipeline.
        length: Tokens of a row; None where rows have no length.
        tp: Sizes of the axis `tp` that divide the model.
        pp: Largest size of the axis `pp`; 1 where the model cannot be cut into stages.
        cp: Whether attention can be divided along the sequence.
        parameters: Number of parameters.
        max_logits: Number of logits that the loss keeps at once; None for all.
        why_not: Reasons why an axis cannot be used, by its name.
        ep: Sizes of the axis `ep` that divide the experts of all mixtures.
        uncast: Profile on parameters in single precision, which autocast casts; None for the same profile.
        sequence_parallel: Whether the ranks of `tp` can share the sequence between layers.
    """

    model: str
    stem: Part
    blocks: tuple[Part, ...]
    head: Part
    tied: Amount
    length: int | None
    tp: tuple[int, ...]
    pp: int
    cp: bool
    parameters: int
    max_logits: int | None
    why_not: dict[str, str]
    ep: tuple[int, ...] = (1,)
    uncast: ModelProfile | None = None
    sequence_parallel: bool = True

    @property
    def parts(self) -> tuple[Part, ...]:
        """Stem, blocks and head."""
        return (self.stem, *self.blocks, self.head)

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of training on one row, as MFU counts them: without recomputation."""
        return sum(part.forward.flops + part.backward.flops for part in self.parts)


def profile_model(
    task: Any, batch: Any, plan: ParallelPlan | None, *, dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None, device: str = "cuda",
) -> ModelProfile:  # fmt: skip
    """Returns the profile of a task.

    Args:
        task: Task or LightningModule with its model on the meta device; it is not changed.
        batch: Batch of any number of rows; only shapes and dtypes are used.
        plan: Plan of the task's model; None for a module without blocks.
        dtype: Dtype in which parameters are used, and activations computed without autocast. If it is not autocast's,
            parameters keep their own, and weights that autocast casts are profiled as cast: the casts themselves grow
            with the model and not with the rows.
        autocast: Dtype of autocast, by the rules of the device; None for no autocast.
        device: Type of the device whose kernels run.

    Raises:
        DloError: A step fails on fake tensors, or is the module's own loop (manual optimization).
    """
    if not getattr(task, "automatic_optimization", True):
        raise DloError(
            f"a module must leave its optimizer to the Trainer to be planned, got {type(task).__name__} with"
            " automatic_optimization = False; measure a run with the callback Profile"
        )
    has_model = plan is not None and isinstance(getattr(task, "model", None), nn.Module)
    own = copy_modules(task)
    own.__dict__["_trainer"] = None
    rows = max(batch_size(batch), 1)
    level = _quiet()
    try:
        with (
            warnings.catch_warnings(),
            isolate_rng(include_cuda=False),
            FakeTensorMode(allow_non_fake_inputs=True),
            FakeKernels(),
        ):
            warnings.simplefilter("ignore")  # Lightning's, of values that are logged without a trainer.
            casts = autocast is not None and dtype != autocast
            own = fake_copy(own, None if casts else dtype)  # A frozen weight may have a dtype of its own.
            repeated = tree_map(fake_like, _rows(batch, rows))
            whole, divided = own.model if has_model else own, plan if has_model else None
            cast = set[str]()
            if casts and autocast is not None:
                cast = _Profiler(own, divided, whole, device).find_casts(repeated, autocast)
                cast_parameters(whole, cast, autocast)
            profiler = _Profiler(own, divided, whole, device)
            profiler.cast = cast
            profiler.run(repeated, dtype, autocast)
    except DloError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0][:300] or type(error).__name__
        raise DloError(
            f"a training step must run without values to be planned, got {type(error).__name__}: {first}; remove what"
            " depends on the values of tensors from the model's forward and the task's loss"
        ) from error
    finally:
        logging.getLogger(FakeTensorMode.__module__).setLevel(level)
    return profiler.profile(task, batch)


def _quiet() -> int:
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # torch prints the traceback of each operator that fails.
    return level


def _rows(batch: Any, rows: int) -> Any:
    """Returns a batch whose first sample is repeated."""

    def repeat(values: Any) -> Any:
        return values[:1].expand(ROWS, *values.shape[1:]) if isinstance(values, Tensor) else values

    return map_rows(repeat, batch, rows)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1 else leaf
        ),
        batch,
    )


class _Profiler:
    """Runs a step of a fake task once, and profiles its parts.

    Args:
        task: Fake task.
        plan: Plan of its model; None without blocks.
        model: Model that the plan describes.
        device: Type of the device whose kernels run.
    """

    def __init__(self, task: Any, plan: ParallelPlan | None, model: nn.Module, device: str) -> None:
        self.task, self.plan, self.model, self.device = task, plan, model, device
        self.regions, self.experts = TensorRegions(model, plan), ExpertProfile(model, plan)
        self.stack: list[nn.Module] = []
        self.recorder = Recorder(lambda is_product: self.regions.classify(self.stack, is_product))
        self.names = plan.block_names(model) if plan is not None else []
        self.known: dict[Any, tuple[Any, Any]] = {}
        self.blocks: list[Part] = []
        self.cast: set[str] = set()
        self._rest: dict[str, Any] = {}

    def find_casts(self, batch: Any, autocast: torch.dtype) -> set[str]:
        """Returns the names of the parameters that autocast casts in a forward; each kind of block runs once."""
        casts = CastWeights(self.model, self.stack)
        with (
            running_modules(self.model, self.stack),
            self._replaced_blocks(self._skip),
            FusedKernels(self.recorder, self.device),
            device_autocast(self.device, autocast),
            casts,
        ):
            self._loss(batch, None)
        by_kind: dict[Any, set[str]] = {}
        blocks = {name: _kind(self.model.get_submodule(name)) for name in self.names}
        for name, kind in blocks.items():
            inner = {found.removeprefix(f"{name}.") for found in casts.found if found.startswith(f"{name}.")}
            by_kind.setdefault(kind, set()).update(inner)
        return casts.found | {f"{name}.{inner}" for name, kind in blocks.items() for inner in by_kind[kind]}

    def run(self, batch: Any, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        """Runs forward and backward."""
        rest = RestRecord(self.recorder)
        casted = None if autocast is not None else dtype
        with (
            running_modules(self.model, self.stack),
            self.experts.watched(),
            self.regions.watched(),
            self._replaced_blocks(functools.partial(self._pass, rest)),
            FusedKernels(self.recorder, self.device),
            self.recorder,
            device_autocast(self.device, autocast),
        ):
            try:
                rest.begin("stem" if self.names else "head")
                loss = self._loss(batch if casted is None else _cast(batch, casted), casted)
                rest.begin_backward()
                with self._left_out_gradients():
                    loss.backward()
            finally:  # A refused step must not leave its hooks to the process.
                rest.end()
        self._rest = {"stem": rest.part("stem", ROWS), "head": rest.part("head", ROWS)}

    def _loss(self, batch: Any, dtype: torch.dtype | None) -> Tensor:
        """Returns the loss; the model's inputs are cast to a dtype, if there is one."""
        task = self.task
        if self.plan is None or not hasattr(task, "inputs"):
            takes_number = is_param_in_hook_signature(task.training_step, "batch_idx", min_args=2)  # As Lightning asks.
            found = task.training_step(batch, 0) if takes_number else task.training_step(batch)
            loss = found["loss"] if isinstance(found, dict) else found
        else:
            args, kwargs = task.inputs(batch)
            if dtype is not None:  # A task may cast them to its own dtype.
                args, kwargs = _cast((args, kwargs), dtype)
            loss = task.loss(task(*args, **kwargs), batch)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise DloError(
                f"a training step must return a loss with a gradient to be planned, got {type(loss).__name__} from"
                f" {type(task).__name__}; return the loss from training_step"
            )
        return loss

    @contextlib.contextmanager
    def _left_out_gradients(self) -> Iterator[None]:
        """Leaves the gradients of parameters out of the bytes of activations inside the block."""

        def leave_out(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.recorder.leave_out(parameter.grad)

        trained = [parameter for parameter in self.task.parameters() if parameter.requires_grad]
        handles = [parameter.register_post_accumulate_grad_hook(leave_out) for parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _replaced_blocks(self, run: Callable[..., Any]) -> Iterator[None]:
        """Replaces the forwards of the blocks inside the block: each kind runs once, apart from the others.

        Args:
            run: Function to call for a forward with the block's name, the block, its forward, whether it is the last
                and the first, and its inputs.
        """
        blocks = [self.model.get_submodule(name) for name in self.names]
        for number, (name, block) in enumerate(zip(self.names, blocks, strict=True)):
            block.__dict__["forward"] = functools.partial(
                run, name, block, block.forward, number == len(blocks) - 1, number == 0
            )
        try:
            yield
        finally:
            for block in blocks:
                block.__dict__.pop("forward", None)

    def _skip(
        self, name: str, block: nn.Module, forward: Callable[..., Any], last: bool, first: bool, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Returns a block's outputs; those of a kind that has run are empty."""
        key = (_kind(block), _signature((args, kwargs)))
        if key not in self.known:
            self.known[key] = None, forward(*args, **kwargs)
        like = self.known[key][1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        return tree_map(
            lambda leaf: (
                torch.empty_like(leaf, requires_grad=bool(inputs) or leaf.requires_grad)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
                else leaf
            ),
            like,
        )

    def _pass(
        self, rest: Any, name: str, block: nn.Module, forward: Callable[..., Any], last: bool, first: bool,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Returns a block's outputs, after it has been profiled if it is the first of its kind."""
        rest.pause()
        key = (_kind(block), _signature((args, kwargs)))
        if key not in self.known:
            part, like = profile_block(
                self.recorder, self.regions, name, block, forward, args, kwargs, ROWS, self.experts.parameters
            )
            self.known[key] = replace(part, exchanged=self.experts.exchanged_in(name) / ROWS), like
        part, like = self.known[key]
        self.blocks.append(part)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if not inputs and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(like)):
            inputs = [torch.empty(0, requires_grad=True)]  # The first trained weights are the block's own.
        outputs = _BlockPass.apply(rest, last, first, like, *inputs)
        rest.resume("head" if last else "between")
        flat = list(outputs)
        return tree_map(lambda leaf: flat.pop(0) if isinstance(leaf, Tensor) else leaf, like)

    def profile(self, task: Any, batch: Any) -> ModelProfile:
        """Returns the profile."""
        model = task.model if self.plan is not None else task
        counts, tied = self.regions.count_parameters(model, self.names, self.experts.names, self.cast)
        blocks = tuple(_with_parameters(part, counts[name]) for part, name in zip(self.blocks, self.names, strict=True))
        if len(self.blocks) != len(self.names):
            raise DloError(
                f"each block of the plan must run once in a forward, got {len(self.blocks)} calls of"
                f" {len(self.names)} blocks; correct ParallelPlan(blocks=...)"
            )
        shared: dict[Any, Part] = {}
        blocks = tuple(shared.setdefault((id(block.forward), block.parameters, block.fixed), block) for block in blocks)
        stem, head = (_with_parameters(self._rest[name], counts[name]) for name in ("stem", "head"))
        ids = next(
            (x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim == 2 and x.dtype == torch.long), None
        )
        is_sequence = self.plan is not None and bool(self.plan.attention) and ids is not None
        logits = "max_logits_on_cpu" if self.device == "cpu" else "max_logits"
        return ModelProfile(
            model=type(self.model).__name__,
            stem=stem,
            blocks=blocks,
            head=head,
            tied=tied,
            length=int(ids.shape[1]) if is_sequence and ids is not None else None,
            tp=self.regions.sizes,
            pp=len(self.names) if hasattr(task, "inputs") and self.names else 1,
            cp=is_sequence,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            max_logits=getattr(task, logits, None),
            why_not=self.regions.why_not | self.experts.why_not,
            ep=self.experts.sizes,
        )


class _BlockPass(torch.autograd.Function):
    """Block that has been profiled: empty outputs and empty gradients, and signals to the record of the rest."""

    @staticmethod
    def forward(ctx: Any, rest: Any, last: bool, first: bool, like: Any, *inputs: Tensor) -> Any:
        """Returns empty tensors like a block's outputs."""
        ctx.rest, ctx.last, ctx.first, ctx.shapes = rest, last, first, [(x.shape, x.dtype) for x in inputs]
        return tuple(torch.empty_like(leaf) for leaf in tree_leaves(like) if isinstance(leaf, Tensor))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns empty gradients of the inputs."""
        ctx.rest.pause()
        found = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes]
        ctx.rest.resume("stem" if ctx.first else "between")
        return None, None, None, None, *found


def _with_parameters(part: Part, counts: PartParameters) -> Part:
    return replace(
        part, parameters=counts.every, trained=counts.trained, fixed=counts.fixed, experts=counts.experts,
        trained_experts=counts.trained_experts, cast=counts.cast,
    )  # fmt: skip


def _kind(block: nn.Module) -> Any:
    """Returns what blocks of one kind have in common: classes, shapes and plain settings of all their modules."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool) and not any(key.endswith(end) for end in _NUMBERS)
        )
        shapes = [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        found.append((name, type(module), tuple(plain), tuple(shapes)))
    return tuple(found)


def _signature(inputs: Any) -> Any:
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else isinstance(leaf, type(None))
        for leaf in tree_leaves(inputs)
    )
