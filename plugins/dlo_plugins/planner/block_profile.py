"""Profiles one block apart from the others, and what runs outside blocks: forward, backward, and what is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dlo_framework.batches import tree_leaves, tree_map
from dlo_plugins.planner.operation_recorder import (
    Operation,
    Record,
    Recorder,
    attention_core,
    fuse,
    needed,
    selected,
    summarise,
)
from dlo_plugins.planner.work import Amount, Kernels, Part, Peaks, Product, Recomputation, Work

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

    def amount(self, left_out: set[int], only: set[int] | None = None) -> Amount:
        """Returns the saved bytes.

        Args:
            left_out: Numbers of storages that are not counted.
            only: Numbers of storages to which the count is limited.
        """
        found = [0.0, 0.0]
        for number, size in self.sizes.items():
            if number not in left_out and (only is None or number in only):
                found[not self._recorder.classes.get(number, False)] += size
        return Amount(*found)

    def fused(self, operations: list[Operation], ends: set[int], left_out: set[int]) -> Amount:
        """Returns the bytes that compiled code saves: backward recomputes what is internal to a kernel.

        Args:
            operations: Operations of the forward.
            ends: Numbers of the storages that are outputs.
            left_out: Numbers of storages that are not counted.
        """
        sizes = {number: (size, self._recorder.classes.get(number, False)) for number, size in self.sizes.items()}
        return fuse(operations, ends).saved(sizes, left_out)


def profile_block(
    recorder: Recorder,
    regions: Any,
    name: str,
    block: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    rows: int,
    experts: set[int],
) -> tuple[Part, Any]:
    """Returns a block's profile for one row, without its parameters, and its outputs.

    Args:
        recorder: Recorder, which records nothing else meanwhile.
        regions: Regions that tensor parallelism divides.
        name: Name of the block.
        block: Block.
        forward: Forward of the block.
        args: Positional arguments.
        kwargs: Keyword arguments.
        rows: Rows of the micro-batch.
        experts: Ids of the parameters that `ep` divides.
    """
    args, kwargs = tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf,
        (args, kwargs),
    )
    fixed = {recorder.number(tensor) for tensor in (*block.parameters(), *block.buffers())}
    given = {recorder.number(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    unsaved, selective = _recomputed_peaks(recorder, regions, forward, args, kwargs)
    saved, first = _Saved(recorder), Record()
    recorder.forget()
    regions.leave_block()
    recorder.record = first
    with saved.hooks(), torch.enable_grad():
        outputs = forward(*args, **kwargs)
    recorder.record = None
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    ends = {recorder.number(leaf) for leaf in found}
    left_out = fixed | given | ends
    output = Amount(0.0, float(sum(leaf.untyped_storage().nbytes() for leaf in found)))
    second, turn = Record(), recorder.mark()
    recorder.record = second
    _backward(recorder, found, block, experts)
    recorder.record = None
    modes = _modes(first.operations, saved, left_out, ends, rows)
    work = summarise(first.operations, ends | set(saved.sizes))
    kept = output.plus(modes["none"].saved, rows)
    # Beside these a backward has the gradient of the output.
    peaks = Peaks(
        recorder.peak(0).beyond(kept), recorder.peak(turn).beyond(kept).plus(output),
        unsaved.beyond(output), selective.beyond(output),
    )  # fmt: skip
    transient = recorder.peak(0, with_gradients=True).beyond(kept).times(1 / rows)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Hidden states need a gradient, unless nothing trains before them: then they come first.
    inputs = sum(x.untyped_storage().nbytes() for x in [x for x in leaves if x.requires_grad] or leaves[:1])
    passed = regions.passed_in(name, inputs)
    part = Part(
        name, _per_row(work, rows), _per_row(_backward_work(first.operations, second.operations), rows), modes,
        output.times(1 / rows), peaks.times(1 / rows), transient, Amount(), Amount(), len(regions.regions_in(name)),
        inputs / rows, entered=passed.entered / rows, left=passed.left / rows,
        gradients_at_peak=recorder.gradients_at_peak(turn),
    )  # fmt: skip
    return part, tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, outputs
    )


def _recomputed_peaks(
    recorder: Recorder, regions: Any, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Amount, Amount]:
    """Returns the most bytes alive in a forward that keeps nothing for backward, and in one of mode `selective`."""
    recorder.forget()
    regions.leave_block()
    recorder.record = record = Record()
    with torch.no_grad():
        forward(*args, **kwargs)
    recorder.record = None
    kept, _ = selected(record.operations)
    return recorder.peak(0), recorder.peak(0, held=kept)


def _backward(recorder: Recorder, outputs: list[Tensor], module: nn.Module, experts: set[int]) -> None:
    """Runs backward; gradients of parameters are freed at once, as they are counted elsewhere."""
    roots = [leaf for leaf in outputs if leaf.requires_grad]
    if not roots:
        return

    def free(parameter: Tensor) -> None:
        assert parameter.grad is not None
        recorder.leave_out(parameter.grad, always=id(parameter) in experts)
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(free) for p in module.parameters() if p.requires_grad]
    try:
        torch.autograd.backward(roots, [torch.empty_like(leaf) for leaf in roots])
    finally:
        for handle in handles:
            handle.remove()


def _modes(
    operations: list[Operation], saved: _Saved, left_out: set[int], ends: set[int], rows: int
) -> dict[str, Recomputation]:
    """Returns the ways to keep a block's activations, for one row."""
    sizes: dict[int, int] = {n: size for op in operations for n, size in op.writes.items()}
    inside = {n: op.is_inside for op in operations for n in op.writes}
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

    def amount(numbers: set[int]) -> Amount:
        found = [0.0, 0.0]
        for number in numbers:
            found[not inside[number]] += sizes[number]
        return Amount(*found).times(1 / rows)

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
        "full": Recomputation(Amount(), Amount(), _per_row(summarise(operations, used), rows), gathers_again=True),
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


def _divided_as(forward: Amount, kernels: Kernels) -> Kernels:
    """Returns a backward's kernels, of whose bytes tensor parallelism divides the same fraction as of the forward's."""
    inside, moved = forward.inside / forward.total if forward.total else 0.0, kernels.moved.total
    return Kernels(Amount(moved * inside, moved * (1 - inside)), kernels.number)


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
        self._peaks: dict[tuple[str, bool], Amount] = {}
        self._largest: dict[str, Amount] = {}
        self._name, self._is_backward, self._start = "stem", False, 0
        self._hooks: Any = None

    def begin(self, name: str) -> None:
        """Starts with the part before the first block."""
        self._recorder.forget()
        self.resume(name)

    def pause(self) -> None:
        """Stops to record."""
        if self._recorder.record is not None:
            key = self._name, self._is_backward
            peak = self._recorder.peak(self._start)
            self._peaks[key] = max(self._peaks.get(key, peak), peak, key=lambda amount: amount.total)
            every = self._recorder.peak(self._start, with_gradients=True)
            self._largest[key[0]] = max(self._largest.get(key[0], every), every, key=lambda amount: amount.total)
        self._recorder.record = None
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def resume(self, name: str) -> None:
        """Continues with another part."""
        self.pause()
        self._name, self._start = name, 0
        self._recorder.forget()
        self._recorder.record = self._records[name, self._is_backward]
        if not self._is_backward:
            self._hooks = self._saved[name].hooks()
            self._hooks.__enter__()

    def begin_backward(self) -> None:
        """Goes from forward to backward, which begins with the head."""
        self.pause()
        self._name, self._is_backward, self._start = "head", True, self._recorder.mark()
        self._recorder.record = self._records["head", True]

    def end(self) -> None:
        """Ends the record."""
        self.pause()

    def part(self, name: str, rows: int) -> Part:
        """Returns the profile of the stem or the head for one row; what runs between blocks is added to the stem."""
        names = (name, "between") if name == "stem" else (name,)
        forward = [op for n in names for op in self._records[n, False].operations]
        backward = [op for n in names for op in self._records[n, True].operations]
        made = {n for op in forward for n in op.writes}
        known = {n for part in names for n in self._saved[part].sizes} - made
        saved, compiled = Amount(), Amount()
        for n in names:
            saved = saved.plus(self._saved[n].amount(known))
            compiled = compiled.plus(self._saved[n].fused(forward, set(), known))
        known_peaks = [
            max((self._peaks.get((n, way), Amount()) for n in names), key=lambda amount: amount.total)
            for way in (False, True)
        ]
        largest = max((self._largest.get(n, Amount()) for n in names), key=lambda amount: amount.total)
        beyond = [peak.beyond(saved) for peak in known_peaks]
        work = summarise(forward, set())
        return Part(
            name, _per_row(work, rows), _per_row(_backward_work(forward, backward), rows),
            {"none": Recomputation(saved.times(1 / rows), compiled.times(1 / rows))},
            Amount(), Peaks(beyond[0], beyond[1], known_peaks[0]).times(1 / rows),
            largest.times(1 / rows), Amount(), Amount(),
        )  # fmt: skip


def _per_row(work: Work, rows: int) -> Work:
    """Returns the work of one of several rows."""
    products = tuple((product._scaled(product.tokens, 1 / rows), count) for product, count in work.products)
    eager, compiled = (Kernels(k.moved.times(1 / rows), k.number) for k in (work.eager, work.compiled))
    return Work(products, eager, compiled)
