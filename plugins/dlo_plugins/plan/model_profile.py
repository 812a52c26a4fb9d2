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
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from dlo_framework.ability import find_ability
from dlo_framework.batches import batch_size, map_rows, tree_leaves, tree_map
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import copy_modules, fake_copy, fake_like, fake_tensors
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task
from dlo_framework.task_abilities import BoundsLogits
from dlo_plugins.memory.block_survey import detached
from dlo_plugins.parallel.user_code import function_name
from dlo_plugins.plan.operation_recorder import (
    FusedKernels,
    Operation,
    Record,
    Recorder,
    attention_core,
    fuse,
    needed,
    running_modules,
    selected,
    summarise,
)
from dlo_plugins.plan.regions_of_tp import ExpertProfile, TensorRegions
from dlo_plugins.plan.work import DividedAmount, Kernels, Part, Product, Recomputation, Work

_HALF = (torch.bfloat16, torch.float16)
#: Functions that autocast computes in single precision on a GPU (torch.amp, "CUDA Ops that can autocast to float32").
#: Left out are a few losses for pairs and margins.
_SINGLE = {
    *("layer_norm", "group_norm", "rms_norm", "normalize", "norm", "softmax", "log_softmax", "softmin", "softplus"),
    *("pow", "square", "__pow__", "__rpow__", "__rtruediv__", "__rdiv__", "exp", "expm1", "log", "log2", "log10"),
    *("log1p", "reciprocal"),
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
        if function_name(func) in _SINGLE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_single, (args, kwargs))
        return func(*args, **kwargs)


def _single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf


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
    tied: DividedAmount
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
    if not task.automatic_optimization:
        raise DloError(
            f"a module must leave its optimizer to the Trainer to be planned, got {type(task).__name__} with"
            " automatic_optimization = False; measure a run with the callback Profile"
        )
    has_model = plan is not None and isinstance(task, Task)
    own = copy_modules(task)
    own.__dict__["_trainer"] = None
    rows = max(batch_size(batch), 1)
    try:
        with warnings.catch_warnings(), isolate_rng(include_cuda=False), fake_tensors():
            warnings.simplefilter("ignore")  # Lightning's, of values that are logged without a trainer.
            # A frozen weight may have a dtype of its own.
            own = fake_copy(own, dtype if autocast in (None, dtype) else None)
            repeated = tree_map(fake_like, _rows(batch, rows))
            whole, divided = own.model if has_model else own, plan if has_model else None
            profiler = _Profiler(own, divided, whole, device)
            profiler.run(repeated, dtype, autocast)
    except DloError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0][:300] or type(error).__name__
        raise DloError(
            f"a training step must run without values to be planned, got {type(error).__name__}: {first}; remove what"
            " depends on the values of tensors from the model's forward and the task's loss"
        ) from error
    return profiler.profile(task, batch)


def _rows(batch: Any, rows: int) -> Any:
    """Returns a batch whose first sample is repeated."""

    def repeat(values: Any) -> Any:
        return values[:1].expand(ROWS, *values.shape[1:]) if isinstance(values, Tensor) else values

    return map_rows(repeat, batch, rows)


def row_length(batch: Any) -> int | None:
    """Returns the tokens of a batch's rows; None without token ids `[rows, length]`."""
    ids = (x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim == 2 and x.dtype == torch.long)
    return next((int(x.shape[1]) for x in ids), None)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1 else leaf
        ),
        batch,
    )


#: Matrix products of fused attention's backward: the scores again, and a gradient for each operand of the two products.
_ATTENTION_BACKWARD = 5


class _Saved:
    """Storages that autograd keeps, by number."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.sizes: dict[int, int] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks that count, to be entered around a forward."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.sizes[self._recorder.number(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def _sizes(self) -> dict[int, tuple[int, bool]]:
        """Bytes of each storage, and whether tensor parallelism divides them."""
        return {number: (size, self._recorder.classes.get(number, False)) for number, size in self.sizes.items()}

    def amount(self, left_out: set[int]) -> DividedAmount:
        """Returns the saved bytes, without those of some storages."""
        return DividedAmount.sum(size for number, size in self._sizes.items() if number not in left_out)

    def fused(self, operations: list[Operation], ends: set[int], left_out: set[int]) -> DividedAmount:
        """Returns the bytes that compiled code saves: backward recomputes what is internal to a kernel.

        Args:
            operations: Operations of the forward.
            ends: Numbers of the storages that are outputs.
            left_out: Numbers of storages that are not counted.
        """
        return fuse(operations, ends).saved(self._sizes, left_out)


def profile_block(
    recorder: Recorder, regions: Any, name: str, forward: Callable[..., Any], args: Any, kwargs: Any, rows: int
) -> tuple[Part, Any]:
    """Returns a block's profile for one row, without its parameters, and its outputs.

    Args:
        recorder: Recorder, which records nothing else meanwhile.
        regions: Regions that tensor parallelism divides.
        name: Name of the block.
        forward: Forward of the block.
        args: Positional arguments.
        kwargs: Keyword arguments.
        rows: Rows of the micro-batch.
    """
    args, kwargs = tree_map(detached, (args, kwargs))
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    saved, first, second = _Saved(recorder), Record(), Record()
    recorder.forget()
    regions.leave_block()
    recorder.record = first
    with saved.hooks(), torch.enable_grad():
        outputs = forward(*args, **kwargs)
    output_leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    recorder.record = second
    roots = [leaf for leaf in output_leaves if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(leaf) for leaf in roots])
    recorder.record = None
    ends = {recorder.number(leaf) for leaf in output_leaves}
    left_out = {*recorder.weights, *map(recorder.number, leaves)} | ends
    output = DividedAmount(0.0, float(sum(leaf.untyped_storage().nbytes() for leaf in output_leaves)))
    modes = _modes(first.operations, saved, left_out, ends, rows)
    transient = recorder.peak().beyond(output.plus(modes["none"].saved, rows)).times(1 / rows)
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    # Hidden states need a gradient, unless nothing trains before them: then they come first.
    inputs = sum(x.untyped_storage().nbytes() for x in [x for x in floating if x.requires_grad] or floating[:1])
    passed = regions.passed_in(name, inputs)
    part = Part(
        name, _per_row(summarise(first.operations, ends | set(saved.sizes)), rows),
        _per_row(_backward_work(first.operations, second.operations), rows), modes, output.times(1 / rows), transient,
        collectives=len(regions.regions_in(name)), gathered=inputs / rows, cast=DividedAmount(*first.casts),
        entered=passed.entered / rows, left=passed.left / rows,
    )  # fmt: skip
    return part, tree_map(detached, outputs)


def _modes(
    operations: list[Operation], saved: _Saved, left_out: set[int], ends: set[int], rows: int
) -> dict[str, Recomputation]:
    """Returns the ways to keep a block's activations, for one row."""
    sizes = {n: (size, op.is_inside) for op in operations for n, size in op.writes.items()}
    core, used = attention_core(operations), ends | set(saved.sizes)
    of_core = {n for op in core for n in op.writes}
    last = set(core[-1].writes) if core else set()

    def keeping(every: int) -> Recomputation:
        kept, repeated = selected(operations, every)
        kept -= ends
        return Recomputation(
            amount(kept), amount(needed(operations, set(saved.sizes) - ends, kept)),
            _per_row(summarise(repeated, used), rows),
        )  # fmt: skip

    def amount(numbers: set[int]) -> DividedAmount:
        return DividedAmount.sum(sizes[number] for number in numbers).times(1 / rows)

    return {
        "none": Recomputation(
            saved.amount(left_out).times(1 / rows), saved.fused(operations, ends, left_out).times(1 / rows)
        ),
        "selective": keeping(1),
        "alternate": keeping(2),
        "attention": Recomputation(
            saved.amount(left_out | (of_core - last)).times(1 / rows),
            saved.fused(operations, ends, left_out | (of_core - last)).times(1 / rows),
            _per_row(summarise(core, used), rows),
        ),
        "full": Recomputation(repeated=_per_row(summarise(operations, used), rows), gathers_again=True),
    }


def _backward_work(forward: list[Operation], backward: list[Operation]) -> Work:
    """Returns the work of a backward: products by the rules of differentiation, other operations as recorded.

    Recorded operations do not know their modules: what tensor parallelism divides is taken as in forward. Gradients
    that backward has not computed are left out: those of frozen weights, and of inputs before the first trained layer.
    """
    ran = Counter(_shape(op.product) for op in backward if op.product is not None)
    products: Counter[Product] = Counter()
    for op in forward:
        if op.product is None:
            continue
        for product in (op.product,) if op.product.is_attention else op.product.gradients():
            if ran[_shape(product)]:
                ran[_shape(product)] -= 1
                products[product] += _ATTENTION_BACKWARD if product.is_attention else 1
    recorded, own = summarise(backward, set()), summarise(forward, set())
    return Work(
        tuple(products.items()),
        _divided_as(own.eager.moved, recorded.eager),
        _divided_as(own.compiled.moved, recorded.compiled),
    )


def _divided_as(forward: DividedAmount, kernels: Kernels) -> Kernels:
    """Returns a backward's kernels, of whose bytes tensor parallelism divides the same fraction as of the forward's."""
    inside, moved = forward.inside / forward.total if forward.total else 0.0, kernels.moved.total
    return Kernels(DividedAmount(moved * inside, moved * (1 - inside)), kernels.number)


def _shape(product: Product) -> tuple[object, ...]:
    """Returns a product's shape; the result of a gradient may be transposed."""
    return *sorted((product.m, product.n)), product.k, product.batch, product.is_attention


class RestRecord:
    """Record of what runs outside blocks, in a forward and a backward of the full model.

    Args:
        recorder: Recorder.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._records = {(name, way): Record() for name in ("stem", "head", "between") for way in (False, True)}
        self._saved = {name: _Saved(recorder) for name in ("stem", "head", "between")}
        self._largest: dict[str, DividedAmount] = {}
        self._name, self._is_backward = "stem", False
        self._hooks: Any = None

    def pause(self) -> None:
        """Stops to record."""
        if self._recorder.record is not None:
            own = (self._largest.get(self._name, DividedAmount()), self._recorder.peak())
            self._largest[self._name] = max(own, key=lambda amount: amount.total)
        self._recorder.record = None
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def resume(self, name: str) -> None:
        """Begins, or continues, with a part."""
        self.pause()
        self._name = name
        self._recorder.forget()
        self._recorder.record = self._records[name, self._is_backward]
        if not self._is_backward:
            self._hooks = self._saved[name].hooks()
            self._hooks.__enter__()

    def begin_backward(self) -> None:
        """Goes from forward to backward, which begins with the head."""
        self.pause()
        self._name, self._is_backward = "head", True
        self._recorder.record = self._records["head", True]

    def part(self, name: str, rows: int) -> Part:
        """Returns the profile of the stem or the head for one row; what runs between blocks is added to the stem."""
        names = (name, "between") if name == "stem" else (name,)
        forward, backward = ([op for n in names for op in self._records[n, way].operations] for way in (False, True))
        known = {n for part in names for n in self._saved[part].sizes} - {n for op in forward for n in op.writes}
        saved, compiled, cast = DividedAmount(), DividedAmount(), DividedAmount()
        for n in names:
            saved = saved.plus(self._saved[n].amount(known))
            compiled = compiled.plus(self._saved[n].fused(forward, set(), known))
            cast = cast.plus(DividedAmount(*self._records[n, False].casts))
        largest = max((self._largest.get(n, DividedAmount()) for n in names), key=lambda amount: amount.total)
        return Part(
            name, _per_row(summarise(forward, set()), rows), _per_row(_backward_work(forward, backward), rows),
            {"none": Recomputation(saved.times(1 / rows), compiled.times(1 / rows))}, DividedAmount(),
            largest.times(1 / rows), cast=cast,
        )  # fmt: skip


def _per_row(work: Work, rows: int) -> Work:
    """Returns the work of one of several rows."""
    products = tuple((product._scaled(product.tokens, 1 / rows), count) for product, count in work.products)
    eager, compiled = (Kernels(k.moved.times(1 / rows), k.number) for k in (work.eager, work.compiled))
    return Work(products, eager, compiled)


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
        divided = self.regions.divided
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *task.named_buffers()):
            self.recorder.weights[self.recorder.number(tensor)] = name in divided
        self.names = plan.block_names(model) if plan is not None else []
        self.known: dict[Any, tuple[Any, Any]] = {}
        self.blocks: list[Part] = []
        self._rest: dict[str, Any] = {}

    def run(self, batch: Any, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        """Runs forward and backward."""
        rest = RestRecord(self.recorder)
        casted = None if autocast is not None else dtype
        with (
            running_modules(self.model, self.stack),
            self.experts.watched(),
            self.regions.watched(),
            self._replaced_blocks(rest),
            FusedKernels(self.recorder, self.device),
            self.recorder,
            device_autocast(self.device, autocast),
        ):
            try:
                rest.resume("stem" if self.names else "head")
                loss = self._loss(batch if casted is None else _cast(batch, casted), casted)
                rest.begin_backward()
                loss.backward()
            finally:  # A refused step must not leave its hooks to the process.
                rest.pause()
        self._rest = {"stem": rest.part("stem", ROWS), "head": rest.part("head", ROWS)}

    def _loss(self, batch: Any, dtype: torch.dtype | None) -> Tensor:
        """Returns the loss; the model's inputs are cast to a dtype, if there is one."""
        task = self.task
        if self.plan is None or not isinstance(task, Task):
            takes_number = is_param_in_hook_signature(task.training_step, "batch_idx", min_args=2)  # As Lightning asks.
            step_output = task.training_step(batch, 0) if takes_number else task.training_step(batch)
            loss = step_output["loss"] if isinstance(step_output, dict) else step_output
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
    def _replaced_blocks(self, rest: RestRecord) -> Iterator[None]:
        """Replaces the forwards of the blocks, and frees each gradient of a parameter, inside the block."""

        def free(parameter: Tensor) -> None:
            self.recorder.leave_out_gradient(parameter, id(parameter) in self.experts.parameters)
            parameter.grad = None

        blocks = [self.model.get_submodule(name) for name in self.names]
        with contextlib.ExitStack() as hooks:
            for parameter in self.task.parameters():
                if parameter.requires_grad:
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(free))
            for number, (name, block) in enumerate(zip(self.names, blocks, strict=True)):
                ends = number == len(blocks) - 1, number == 0
                block.__dict__["forward"] = functools.partial(self._pass, rest, name, block, block.forward, *ends)
                hooks.callback(block.__dict__.pop, "forward", None)
            yield

    def _pass(
        self, rest: Any, name: str, block: nn.Module, forward: Callable[..., Any], last: bool, first: bool,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Returns a block's outputs, after it has been profiled if it is the first of its kind."""
        rest.pause()
        key = (_kind(block), _signature((args, kwargs)))
        if key not in self.known:
            part, like = profile_block(self.recorder, self.regions, name, forward, args, kwargs, ROWS)
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
        counts, tied = self.regions.count_parameters(model, self.names, self.experts.names)
        blocks = tuple(replace(part, **counts[name]) for part, name in zip(self.blocks, self.names, strict=True))
        if len(self.blocks) != len(self.names):
            raise DloError(
                f"each block of the plan must run once in a forward, got {len(self.blocks)} calls of"
                f" {len(self.names)} blocks; correct ParallelPlan(blocks=...)"
            )
        shared: dict[Any, Part] = {}
        blocks = tuple(shared.setdefault((id(block.forward), block.parameters, block.fixed), block) for block in blocks)
        stem, head = (replace(self._rest[name], **counts[name]) for name in ("stem", "head"))
        length = row_length(batch) if self.plan is not None and self.plan.attention else None
        bounds = find_ability(task, BoundsLogits)
        return ModelProfile(
            model=type(self.model).__name__,
            stem=stem,
            blocks=blocks,
            head=head,
            tied=tied,
            length=length,
            tp=self.regions.sizes,
            pp=len(self.names) if isinstance(task, Task) and self.names else 1,
            cp=length is not None,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            max_logits=None if bounds is None else bounds.max_logits(self.device),
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
        input_grads = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.shapes]
        ctx.rest.resume("stem" if ctx.first else "between")
        return None, None, None, None, *input_grads


def _kind(block: nn.Module) -> Any:
    """Returns what blocks of one kind have in common: classes, shapes and plain settings of all their modules."""
    modules: list[Any] = []
    for name, module in block.named_modules():
        plain = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | bool) and not any(key.endswith(end) for end in _NUMBERS)
        )
        shapes = [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        modules.append((name, type(module), tuple(plain), tuple(shapes)))
    return tuple(modules)


def _signature(inputs: Any) -> Any:
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else isinstance(leaf, type(None))
        for leaf in tree_leaves(inputs)
    )
