"""Records the operations of a forward and a backward on fake tensors: matrix products, bytes moved, bytes saved."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from dlo_framework.batches import tree_leaves
from dlo_framework.models.experts.layer import OPERATORS
from dlo_plugins.plan.work import Dim, DividedAmount, Kernels, Product, Work

_aten = torch.ops.aten
#: Operators that are matrix products.
_EXPERTS, _EXPERT_GRADIENTS = OPERATORS
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm, _aten.convolution, _EXPERTS}
_GRADIENTS = {_aten.convolution_backward}
#: Operators that move no bytes of their own.
_FREE = {
    _aten.detach,
    _aten.alias,
    _aten.empty,
    _aten.empty_like,
    _aten.new_empty,
    _aten.empty_strided,
    _aten.lift_fresh,
}
#: Operators whose outputs ActivationCheckpoint's mode `selective` keeps.
_KEPT = {_aten.mm, _aten.addmm, _aten.convolution, _aten._grouped_mm, _EXPERTS}
#: Normalisations, which write their result in the dtype to which it is cast for a product.
_NORMS = {_aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm}
#: Operators after which a kernel of compiled code ends.
_REDUCTIONS = {
    *_NORMS,
    *(_aten._softmax, _aten._log_softmax, _aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.native_layer_norm_backward, _aten.mean, _aten.sum, _aten.var, _aten.amax, _aten.logsumexp),
    _aten.linalg_vector_norm,
}


@dataclass
class Operation:
    """Operation that was recorded.

    Attributes:
        packet: Operator; None for fused attention, which is intercepted.
        reads: Bytes that it reads, by number of the storage.
        writes: Bytes that it writes, by number of the storage.
        is_inside: Whether tensor parallelism divides its results.
        product: Matrix product, if it is one.
    """

    packet: Any
    reads: dict[int, int]
    writes: dict[int, int]
    is_inside: bool
    product: Product | None = None

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Record:
    """Operations of a forward or a backward, in order.

    Attributes:
        operations: Operations.
        casts: Numbers of parameters that autocast casts: divided by tensor parallelism, and not. They grow with the
            model and not with the rows, so that casts are left out of the operations.
    """

    operations: list[Operation] = field(default_factory=list)
    casts: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Recorder(TorchDispatchMode):
    """Mode that records operations; enter it inside a `FakeTensorMode`.

    Args:
        region_of: Function that returns, for the modules that are running, which dim of a product tensor parallelism
            divides, and whether results are divided: None if they are where an operand is.

    Attributes:
        record: Record to which operations are added; None records nothing.
        weights: Numbers of the storages of parameters, of buffers and of casts of parameters, and whether tensor
            parallelism divides them.
    """

    def __init__(self, region_of: Callable[[bool], tuple[Dim, bool | None]]) -> None:
        super().__init__()
        self.record: Record | None = None
        self.classes: dict[int, bool] = {}
        self.weights: dict[int, bool] = {}
        self._region_of = region_of
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes; negative for a release
        self._casts: dict[int, int] = {}  # numbers of the results of casts, and of their sources
        self._left_out: set[int] = set()

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = self._next
            self._next += 1
        return number

    def add_product(self, product: Product, inputs: list[Tensor], output: Tensor) -> None:
        """Adds a matrix product that runs as no operator of torch, such as intercepted attention."""
        if self.record is not None:
            inside = bool(self._region_of(False)[1])
            self._allocate(output, inside)
            reads = {self.number(tensor): _bytes(tensor) for tensor in inputs}
            self.record.operations.append(
                Operation(None, reads, {self.number(output): _bytes(output)}, inside, product)
            )

    def add_gradients(self, products: Iterable[Product]) -> None:
        """Adds products of a backward that run inside an operator, or as no operator of torch."""
        if self.record is not None:
            self.record.operations += [Operation(None, {}, {}, False, product) for product in products]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and records it."""
        result = func(*args, **(kwargs or {}))
        known = func.namespace == "aten" or func.overloadpacket in (_EXPERTS, _EXPERT_GRADIENTS)
        if self.record is not None and known and func.overloadpacket not in _FREE:
            self._add(func, args, kwargs or {}, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        assert self.record is not None
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        reads = self._reads(inputs)
        if func.overloadpacket is _aten._to_copy:
            source, target = self.number(inputs[0]), self.number(outputs[0])
            self._casts[target] = source
            if source in self.weights:
                self.weights[target] = self.weights[source]
                self.record.casts[not self.weights[source]] += outputs[0].numel()
                return
        is_view = func.is_view or (
            not func._schema.is_mutable and outputs and all(self.number(tensor) in reads for tensor in outputs)
        )
        if is_view or not outputs:
            return
        is_product = func.overloadpacket in _PRODUCTS
        role, known = self._region_of(is_product)
        inside = any(self.classes.get(number, False) for number in reads) if known is None else known
        for tensor in outputs:
            if self.number(tensor) not in reads or func._schema.is_mutable:
                self._allocate(tensor, inside)
        product = None
        if is_product:
            product = _product(func.overloadpacket, args, outputs[0], role)
        elif func.overloadpacket in _GRADIENTS:
            self.add_gradients(_convolution_gradients(args))
            return  # It reads and writes what its products do.
        elif func.overloadpacket is _EXPERT_GRADIENTS:
            self.add_gradients(_experts_product(args[1], args[2]).gradients())
            return
        if func.overloadpacket is _aten.copy_ and len(inputs) > 1:
            reads.pop(self.number(inputs[0]), None)
        writes = {self.number(tensor): _bytes(tensor) for tensor in outputs}
        self.record.operations.append(Operation(func.overloadpacket, reads, writes, inside, product))

    def _reads(self, inputs: list[Tensor]) -> dict[int, int]:
        """Returns the bytes that are read of each storage: all parts of it, and none twice."""
        parts = {(self.number(x), x.storage_offset(), x.shape, x.stride()): _bytes(x) for x in inputs}
        read_bytes: dict[int, int] = {}
        for (number, *_), size in parts.items():
            read_bytes[number] = read_bytes.get(number, 0) + size
        return {self.number(x): min(read_bytes[self.number(x)], x.untyped_storage().nbytes()) for x in inputs}

    def _allocate(self, tensor: Tensor, inside: bool) -> None:
        storage, number = tensor.untyped_storage(), self.number(tensor)
        if number in self.classes:
            return
        self.classes[number] = inside
        size = storage.nbytes()
        self._events.append((number, size))
        weakref.finalize(storage, self._free, number, size)

    def _free(self, number: int, size: int) -> None:
        self._events.append((number, -size))

    def forget(self) -> None:
        """Restarts the count of bytes that are alive."""
        self._events = []

    def leave_out_gradient(self, parameter: Tensor, is_expert: bool) -> None:
        """Leaves out the gradient of a parameter that autocast casts, but not that of the cast; an expert's both.

        The gradients of experts are counted apart, as `ep` divides them.
        """
        assert parameter.grad is not None
        number = self.number(parameter.grad)
        source = self._casts.get(number)
        if source is not None or is_expert:
            self._left_out.add(number)
        if source is not None and self.record is not None:
            self.record.operations = [op for op in self.record.operations if number not in op.writes]
            self._left_out |= {source} if is_expert else set()

    def peak(self) -> DividedAmount:
        """Returns the most bytes alive at once since :meth:`forget`; releases of older storages do not count."""
        live, best = [0.0, 0.0], DividedAmount()
        born: set[int] = set()
        for number, size in self._events:
            if number in self._left_out or (size < 0 and number not in born):
                continue
            born.add(number)
            live[not self.classes[number]] += size
            if sum(live) > best.total:
                best = DividedAmount(*live)
        return best


class FusedKernels(TorchFunctionMode):
    """Mode in which attention and dropout are a device's kernels, also for fake tensors.

    Scaled dot-product attention is one kernel without stored scores; on a CPU only without dropout. On an accelerator
    dropout keeps a mask of one byte an element, on a CPU one of the tensor's dtype.

    transformers (5.3) makes a mask for fake tensors where a run needs none, and then repeats the heads of keys and
    values for it. A CPU's kernels take them as they were before.

    Args:
        recorder: Recorder that gets its two products.
        device: Type of the device.
    """

    def __init__(self, recorder: Recorder, device: str = "cuda") -> None:
        super().__init__()
        self._recorder, self._on_cpu = recorder, device == "cpu"
        self._before_repeat: Any = WeakIdKeyDictionary()  # keys and values, by the tensors with their heads repeated

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout) and not self._on_cpu:
            return _dropout(*args, **kwargs)
        repeats = self._on_cpu and func is Tensor.reshape and args[0].ndim == 5
        if repeats and args[0].stride(2) == 0 and args[0].shape[2] > 1:
            repeated = func(*args, **kwargs)
            self._before_repeat[repeated] = args[0].select(2, 0)
            return repeated
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        if self._on_cpu and given.get("dropout_p"):
            return func(*args, **kwargs)
        key, value = (self._before_repeat.get(tensor, tensor) for tensor in (key, value))
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
        length = query.shape[-2]
        mask = given.get("attn_mask")
        causal = bool(given.get("is_causal")) or (
            mask is not None and length > 1 and mask.shape[-2:] == (length, length)
        )
        with torch._C.DisableTorchFunctionSubclass():
            out: Tensor = _Attention.apply(query, key, value, self._recorder, causal)
        return out


class _Attention(torch.autograd.Function):
    """Attention that saves its operands, its result and one value a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, recorder: Recorder, causal: bool) -> Tensor:
        """Returns an empty result `[..., L, D]`."""
        # In memory it is [..., L, H, D], as of all of torch's kernels, so that joining the heads copies nothing.
        swapped = query.transpose(-3, -2)
        out = swapped.new_empty(*swapped.shape[:-1], value.shape[-1]).transpose(-3, -2)
        recorder.add_product(_scores(query, key, causal), [query, key, value], out)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        recorder._allocate(lse, bool(recorder._region_of(False)[1]))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.recorder, ctx.product = recorder, _scores(query, key, causal)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Returns empty gradients."""
        query, key, value, *_ = ctx.saved_tensors
        ctx.recorder.add_gradients([ctx.product])
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Tensor:
    """Returns torch's dropout by its fused kernel."""
    if not (training and train) or p == 0.0:
        return input
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _scores(query: Tensor, key: Tensor, causal: bool) -> Product:
    batch, (length, width) = query.shape[:-2].numel(), query.shape[-2:]
    return Product(
        m=length, n=key.shape[-2], k=width, batch=batch, size=query.element_size(), divided="batch", tokens="batch",
        fraction=0.5 if causal else 1.0, is_attention=True,
    )  # fmt: skip


def _product(packet: Any, args: Any, out: Tensor, role: Dim) -> Product | None:
    """Returns the matrix product of an operator; None for one that is bound by memory."""
    size = out.element_size()
    if packet is _aten.convolution:
        return _convolution(out, args[1], args[8], role)
    if packet is _EXPERTS:
        return _experts_product(args[0], args[1], role)
    if packet is _aten._grouped_mm:
        a, b = args[0], args[1]
        if b.ndim == 2:  # The gradient of the weights: the sums are over each group's tokens.
            groups = out.shape[0] if out.ndim == 3 else 1
            return Product(a.shape[-2], b.shape[-1], a.shape[-1] / groups, groups, size, role, is_grouped=True)
        return Product(a.shape[-2] / b.shape[0], b.shape[-1], a.shape[-1], b.shape[0], size, role, is_grouped=True)
    a, b = (args[1], args[2]) if packet in (_aten.addmm, _aten.baddbmm) else (args[0], args[1])
    if a.ndim == 2:
        return Product(a.shape[0], b.shape[1], a.shape[1], 1, size, role)
    return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0], size, role or "", tokens="batch")


def _experts_product(rows: Tensor, weight: Tensor, role: Dim = "") -> Product:
    """Returns the product of rows with as many for each expert, by weights `[E, H, D]`."""
    experts, features, width = weight.shape
    return Product(len(rows) / experts, features, width, experts, rows.element_size(), role, is_grouped=True)


def _convolution(out: Tensor, weight: Tensor, groups: int, role: Dim = "") -> Product | None:
    """Returns a convolution as a matrix product; None for a depthwise one, which is bound by memory."""
    channels = out.shape[1]
    if channels == groups:
        return None
    return Product(out.numel() // channels, channels // groups, weight[0].numel(), groups, out.element_size(), role)


def _convolution_gradients(args: Any) -> list[Product]:
    """Returns the products of a convolution's backward, by the arguments of its operator."""
    product = _convolution(args[0], args[2], args[9])
    wanted: list[bool] = args[10]
    if product is None:
        return []
    return [gradient for gradient, is_wanted in zip(product.gradients(), wanted[:2], strict=True) if is_wanted]


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes that reading a tensor moves; an expanded dim is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size() if tensor.numel() else 0


@dataclass(frozen=True)
class Fusion:
    """Kernels of a forward or a backward.

    Attributes:
        kernels: Kernels other than matrix products.
        internal: Numbers of the storages that no kernel but their own needs.
        kernel_of: Kernel of each internal storage.
        sources: Storages that each kernel reads from outside: number, bytes, and whether tensor parallelism divides it.
    """

    kernels: Kernels
    internal: frozenset[int]
    kernel_of: Mapping[int, int]
    sources: Mapping[int, tuple[tuple[int, int, bool], ...]]

    def saved(self, sizes: Mapping[int, tuple[int, bool]], known: set[int]) -> DividedAmount:
        """Returns the bytes that compiled code saves of what autograd would save.

        A kernel's internal results are computed again from what the kernel reads, where that takes less memory.

        Args:
            sizes: Bytes that autograd saves, and whether tensor parallelism divides them, by number.
            known: Numbers of storages that are in memory anyway.
        """
        saved = {
            number: entry for number, entry in sizes.items() if number not in self.internal and number not in known
        }
        by_kernel: dict[int, dict[int, tuple[int, bool]]] = {}
        for number, entry in sizes.items():
            if number in self.internal and number not in known:
                by_kernel.setdefault(self.kernel_of[number], {})[number] = entry
        for kernel, own in by_kernel.items():
            reads = self.sources.get(kernel, ())
            sources = {n: (size, inside) for n, size, inside in reads if n not in saved and n not in known}
            is_less = sum(size for size, _ in sources.values()) < sum(size for size, _ in own.values())
            saved |= sources if is_less else own
        return DividedAmount.sum(saved.values())


def fuse(operations: Iterable[Operation], kept: set[int]) -> Fusion:
    """Returns the kernels of compiled code: neighbouring operations are one, and only what others need is stored.

    A kernel ends after a reduction, since what follows needs its result over all of a dim.

    Args:
        operations: Operations in order.
        kept: Numbers of the storages that are outputs: they are always written.
    """
    operations = list(operations)
    group, maker, users = _groups(operations)
    seen: set[tuple[int, int]] = set()
    moved: list[tuple[float, bool]] = []
    internal: set[int] = set()
    reads: dict[int, dict[int, tuple[int, int, bool]]] = {}
    inside = {number: op.is_inside for op in operations for number in op.writes}
    for index, op in enumerate(operations):
        if op.product is not None:
            continue
        own = group[index]
        for number, size in op.reads.items():
            before = maker.get(number)
            if (before is None or group[before] != own) and (own, number) not in seen:
                seen.add((own, number))
                moved.append((size, op.is_inside))
                reads.setdefault(own, {})[number] = (number, size, inside.get(number, False))
        for number, size in op.writes.items():
            if number not in kept and all(group[user] == own for user in users.get(number, ())):
                internal.add(number)
            elif (own, -number - 1) not in seen:
                seen.add((own, -number - 1))
                moved.append((size, op.is_inside))
    return Fusion(
        Kernels(DividedAmount.sum(moved), len({group[at] for at, op in enumerate(operations) if op.product is None})),
        frozenset(internal),
        {number: group[at] for number, at in maker.items() if number in internal},
        {kernel: tuple(by_number.values()) for kernel, by_number in reads.items()},
    )


def _groups(operations: list[Operation]) -> tuple[list[int], dict[int, int], dict[int, set[int]]]:
    """Returns each operation's kernel, and the makers and users of each storage."""
    parent = list(range(len(operations)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    maker: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    for index, op in enumerate(operations):
        for number in op.reads:
            before = maker.get(number)
            if op.product is None and before is not None and _goes_on(operations[before], op):
                parent[root(before)] = root(index)
            users.setdefault(number, set()).add(index)
        maker |= dict.fromkeys(op.writes, index)
    return [root(index) for index in range(len(operations))], maker, users


def _goes_on(operation: Operation, after: Operation) -> bool:
    """Returns whether a kernel goes on from an operation to one that reads its result."""
    if operation.product is not None:
        return False
    return operation.packet not in _REDUCTIONS or (operation.packet in _NORMS and after.packet is _aten._to_copy)


def summarise(operations: list[Operation], kept: set[int]) -> Work:
    """Returns the work of recorded operations.

    Args:
        operations: Operations in order.
        kept: Numbers of the storages that are outputs.
    """
    products: Counter[Product] = Counter()
    for op in operations:
        if op.product is not None:
            products[op.product] += 2 if op.product.is_attention else 1  # scores, and the values' mean
    others = [op for op in operations if op.product is None]
    eager = Kernels(DividedAmount.sum((op.moved, op.is_inside) for op in others), len(others))
    return Work(tuple(products.items()), eager, fuse(operations, kept).kernels)


def selected(operations: list[Operation], every: int = 1) -> tuple[set[int], list[Operation]]:
    """Returns the storages that mode `selective` keeps, and the operations that it repeats.

    Args:
        operations: Operations of a forward.
        every: Interval of the matrix products whose results are kept; fused attention's always are.
    """
    products = [op for op in operations if op.packet in _KEPT]
    chosen = {id(op) for op in products[::every]} | {id(op) for op in operations if op.packet is None}
    kept = {n for op in operations if id(op) in chosen for n in op.writes}
    return kept, [op for op in operations if id(op) not in chosen]


def needed(operations: list[Operation], saved: set[int], kept: set[int]) -> set[int]:
    """Returns the kept storages from which compiled code computes what backward reads.

    Eager code keeps the result of each chosen product. Compiled code leaves out those that backward does not need, such
    as that of a block's last product, which is only added to the residual.

    Args:
        operations: Operations of a forward.
        saved: Numbers of the storages that backward reads.
        kept: Numbers of the storages that may be kept.
    """
    makers = {number: op for op in operations for number in op.writes}
    pending, seen = list(saved), set[int]()
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        if number not in kept and number in makers:
            pending += makers[number].reads
    return seen & kept


def attention_core(operations: list[Operation]) -> list[Operation]:
    """Returns the operations from the scores to the values' mean: what the paper's selective mode repeats."""
    batched = [n for n, op in enumerate(operations) if op.packet in (_aten.bmm, _aten.baddbmm)]
    if batched:
        core = operations[batched[0] : batched[-1] + 1]
        made = {number for op in core for number in op.writes}
        # A copy of the values is kept in place of the values.
        return [op for op in core if op.packet is not _aten.clone or made.intersection(op.reads)]
    return [op for op in operations if op.packet is None]


@contextlib.contextmanager
def running_modules(module: nn.Module, stack: list[nn.Module]) -> Iterator[None]:
    """Keeps the submodules whose forward is running on a stack, inside the block."""

    def enter(part: nn.Module, *_: Any) -> None:
        stack.append(part)

    def leave(*_: Any) -> None:
        stack.pop()

    with contextlib.ExitStack() as hooks:
        for part in module.modules():
            hooks.enter_context(part.register_forward_pre_hook(enter))
            hooks.enter_context(part.register_forward_hook(leave, always_call=True))
        yield
