"""Measures this rank of a machine while its other ranks measure the same: products, blocks, optimizer, collectives.

All ranks work at once, as in a run, so that what they share, such as memory's bandwidth, is shared here too. With one
thread a rank, computation on a CPU is timed by the rank's CPU time: ranks that share a core are counted by the planner.

On a CPU collectives are timed between computation, as in a run. Where ranks share a core, a rank whose collective is
complete gets the core back only when the other's time slice ends, if that computes; not if it waits too.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves, tree_map

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.watch.memory import process_peak
from dlo_plugins.fsdp.fsdp_collectives import PairwiseAllGather, PairwiseReduceScatter
from dlo_plugins.planner.kernel_kind import KINDS, Kind
from dlo_plugins.planner.kernel_measurement import measure_kinds
from dlo_plugins.tensor.collectives import start_gather, start_scatter

#: Shape of a matrix product: m, n, k, batch, and whether the left operand is transposed.
Shape = tuple[int, int, int, int, bool]
#: Widths of the weights, and bytes of the buffers: caches hold the smaller ones, so that time is not linear in size.
_WIDTHS, _BUFFERS, _DEPTH = (16, 256, 768, 1280), (1 << 12, 1 << 17, 1 << 19, 1 << 21, 1 << 23), 8
_CALLS, _KERNEL_CALLS = 5, 3
#: Rows and columns of the matrix whose square is computed between collectives and beside them: a few milliseconds on a
#: core, and a part of one on a GPU.
_BETWEEN = {"cpu": 512, "cuda": 4096}
#: Rows of the tokens that `tp` shares: several, as collectives then copy tokens into their order.
_SHARED_ROWS = 4


@dataclass(frozen=True)
class BlockCall:
    """Call of a block.

    Attributes:
        name: Name of the block.
        block: Block on the meta device.
        arguments: Positional and keyword arguments on the meta device.
        rows: Rows of these.
    """

    name: str
    block: nn.Module
    arguments: tuple[Any, dict[str, Any]]
    rows: int


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        device: Type of the device.
        dtype: Dtype in which products run.
        products: Shapes of matrix products.
        attention: Query's batch and heads together, length, width, and whether it is causal; None for none.
        blocks: Calls of blocks.
        rows: Numbers of rows with which blocks run.
        seconds: Time for all of it, approximately.
    """

    device: str
    dtype: torch.dtype
    products: Sequence[Shape]
    attention: tuple[int, int, int, bool] | None
    blocks: Sequence[BlockCall]
    rows: Sequence[int]
    seconds: float


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of a rank, in seconds and bytes.

    Attributes:
        products: Seconds of each matrix product.
        attention: Seconds of fused attention, forward and backward.
        blocks: Seconds of forward and backward of each block and number of rows.
        copy: Bytes a second that a copy of a large tensor reads and writes.
        optimizer: Seconds of an AdamW step for a byte of parameters, of tensors like the blocks'.
        collectives: Seconds by kind, number of ranks and bytes of the full buffer.
        slowdown: Time of computation and communication at once, beyond the longer one, over the shorter one, plus 1.
        process: Bytes of the process before anything is allocated; on a GPU, those outside torch's allocator.
        kinds: Bytes a second of kernels, by kind and bytes that a kernel moves.
    """

    products: dict[Shape, float]
    attention: tuple[float, float] | None
    blocks: dict[tuple[str, int], tuple[float, float]]
    copy: float
    optimizer: float
    collectives: dict[tuple[str, int, int], float]
    slowdown: float
    process: int
    kinds: dict[tuple[Kind, float], float] = field(default_factory=dict)


def measure_rank(rank: int, world_size: int, wanted: Wanted) -> RankMeasurement:
    """Returns the measurement of this rank; all ranks must call it."""
    process = process_peak()
    if wanted.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    measuring = _Measuring(wanted, world_size)
    share = wanted.seconds / 10
    products = measuring.products(4 * share)
    blocks = measuring.blocks(3 * share)
    found = RankMeasurement(
        products, measuring.attention(), blocks, measuring.copy(), measuring.optimizer(), measuring.collectives(),
        measuring.slowdown(), process if wanted.device == "cpu" else memory_outside_allocator(), measuring.kinds(),
    )  # fmt: skip
    return found


def memory_outside_allocator() -> int:
    """Returns the bytes of the current GPU that torch's allocator does not have: of the context and of libraries."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


class _Computation(torch.autograd.Function):
    """Identity whose forward computes one product, and whose backward computes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        """Returns the first argument, after the square of the second."""
        ctx.matrix = matrix
        _compute(matrix)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient."""
        _compute(ctx.matrix, 2)
        return gradient, None


class _Layer(nn.Module):
    """Dense layer, followed by computation if there is a matrix for it.

    Args:
        width: Width of the layer.
        matrix: Matrix whose square is computed; None for no computation.
        device: Device of the layer.
    """

    def __init__(self, width: int, matrix: Tensor | None, device: torch.device) -> None:
        super().__init__()
        self.linear, self._matrix = nn.Linear(width, width, bias=False, device=device), [matrix]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        y: Tensor = self.linear(x)
        (matrix,) = self._matrix
        return y if matrix is None else _Computation.apply(y, matrix)


def _compute(matrix: Tensor, times: int = 1) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


class _Measuring:
    """Measures one kind of work after the other.

    Args:
        wanted: Work that is measured.
        world_size: Number of ranks.
    """

    def __init__(self, wanted: Wanted, world_size: int) -> None:
        self.wanted, self.world_size, self.device = wanted, world_size, torch.device(wanted.device)
        single = wanted.device == "cpu" and torch.get_num_threads() == 1
        self._own_clock = time.process_time if single else self._elapsed
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._alone: float | None = None  # a product between collectives, without them
        self._matrix: Tensor | None = None

    def _elapsed(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _together(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _seconds(
        self, run: Callable[[], object], calls: int = _CALLS, clock: Callable[[], float] | None = None
    ) -> float:
        """Returns the median time of a function after a first call."""
        now = clock or self._own_clock
        run()
        found = []
        for _ in range(calls):
            began = now()
            run()
            found.append(now() - began)
        return statistics.median(found)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.wanted.dtype)

    def products(self, limit: float) -> dict[Shape, float]:
        """Returns the seconds of products, as many as fit in the time."""
        found: dict[Shape, float] = {}
        self._together()
        began = time.perf_counter()
        for shape in self.wanted.products:
            m, n, k, batch, transposed = shape
            left = self._random(batch, k, m).mT if transposed else self._random(batch, m, k)
            right = self._random(batch, k, n) if transposed else self._random(batch, n, k).mT
            one = (left[0], right[0]) if batch == 1 else (left, right)
            found[shape] = self._seconds(lambda one=one: torch.matmul(*one))  # type: ignore[misc]
            if time.perf_counter() - began > limit:
                break
        return found

    def attention(self) -> tuple[float, float] | None:
        """Returns the seconds of fused attention, forward and backward."""
        if self.wanted.attention is None:
            return None
        heads, length, width, causal = self.wanted.attention
        query, key, value = (self._random(1, heads, length, width).requires_grad_() for _ in range(3))
        attend = nn.functional.scaled_dot_product_attention
        self._together()
        return self._passes(lambda: attend(query, key, value, is_causal=causal))

    def _passes(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Returns the median seconds of a forward and of its backward."""
        forward, backward = [], []
        for number in range(_CALLS + 1):
            began = self._own_clock()
            leaves = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor) and leaf.requires_grad]
            middle = self._own_clock()
            torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
            end = self._own_clock()
            if number:
                forward.append(middle - began)
                backward.append(end - middle)
        return statistics.median(forward), statistics.median(backward)

    def blocks(self, limit: float) -> dict[tuple[str, int], tuple[float, float]]:
        """Returns the seconds of blocks, by name and rows."""
        found: dict[tuple[str, int], tuple[float, float]] = {}
        self._together()
        began = time.perf_counter()
        for call in self.wanted.blocks:
            block = call.block.to_empty(device=self.device).to(self.wanted.dtype)
            for parameter in block.parameters():
                nn.init.normal_(parameter, std=0.02)
            for buffer in block.buffers():
                buffer.zero_()  # It may hold indices.
            for rows in self.wanted.rows:
                args, kwargs = tree_map(lambda leaf, c=call, r=rows: self._argument(leaf, c.rows, r), call.arguments)
                found[call.name, rows] = self._passes(lambda b=block, a=args, k=kwargs: b(*a, **k))  # type: ignore[misc]
                if time.perf_counter() - began > limit:
                    return found
        return found

    def _argument(self, leaf: Any, given: int, rows: int) -> Any:
        """Returns a real argument with a number of rows, without a mask that causal attention does not need."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype == torch.bool and leaf.ndim == 4:
            return None
        shape = [rows if at == 0 and size == given else size for at, size in enumerate(leaf.shape)]
        dtype = self.wanted.dtype if leaf.dtype.is_floating_point else leaf.dtype  # Autocast's may be mixed.
        made = torch.zeros(shape, dtype=dtype, device=self.device)
        return made.normal_().requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else made

    def copy(self) -> float:
        """Returns the bytes a second of a copy that the caches do not hold."""
        source = torch.zeros(1 << 24, device=self.device)
        target = torch.zeros_like(source)
        self._together()
        return 2 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def kinds(self) -> dict[tuple[Kind, float], float]:
        """Returns the bytes a second of kernels, by kind and bytes."""
        self._together()
        measured = [kind for kind in KINDS if kind != "optimizer"]
        seconds = functools.partial(self._seconds, calls=_KERNEL_CALLS)
        return measure_kinds(measured, self.device, self.wanted.dtype, seconds)

    def optimizer(self) -> float:
        """Returns the seconds of an AdamW step for a byte of parameters."""
        shapes = [tuple(p.shape) for call in self.wanted.blocks for p in call.block.parameters()] or [(1024, 1024)]
        parameters = [nn.Parameter(torch.zeros(shape, device=self.device)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters)
        self._together()
        return self._seconds(optimizer.step) / sum(parameter.nbytes for parameter in parameters)

    # --- communication -------------------------------------------------------------------------------------

    def _group(self, size: int) -> dist.ProcessGroup:
        """Returns this rank's group of neighbouring ranks."""
        if size not in self._groups:
            starts = range(0, self.world_size, size)
            groups: list[Any] = [dist.new_group(list(range(start, start + size))) for start in starts]
            self._groups[size] = groups[dist.get_rank() // size]
        return self._groups[size]

    def collectives(self) -> dict[tuple[str, int, int], float]:
        """Returns the seconds of collectives, of messages, and of gathering and reducing a unit with FSDP2."""
        found: dict[tuple[str, int, int], float] = {}
        for size in range(2, self.world_size + 1):
            if self.world_size % size:
                continue
            group = self._group(size)
            for length in _BUFFERS:
                for kind, (run, products) in self._exchanges(group, length // 4).items():
                    found[kind, size, length] = self._exchange_seconds(run, products)
            for width in _WIDTHS:
                gather, reduce = self._units(size, width)
                found["all_gather", size, 4 * width * width] = gather
                found["reduce_scatter", size, 4 * width * width] = reduce
        return found

    def _exchange_seconds(self, run: Callable[[], object], products: int) -> float:
        """Returns the seconds that an exchange adds to computation.

        Args:
            run: Function that exchanges.
            products: Number of products that it computes by itself; on a CPU one more is computed before it.
        """
        matrix = self._between()
        if self._alone is None:
            self._alone = self._computing_seconds(functools.partial(_compute, matrix))
        before = self.device.type == "cpu"

        def both() -> None:
            if before:
                _compute(matrix)
            run()

        return max(self._computing_seconds(both) - (products + before) * self._alone, 1e-7)

    def _computing_seconds(self, run: Callable[[], object]) -> float:
        """Returns the elapsed seconds of a function, by several calls of it one after the other."""

        def repeat() -> None:
            for _ in range(_DEPTH):
                run()

        self._together()
        return self._seconds(repeat, clock=self._elapsed) / _DEPTH

    def _between(self) -> Tensor:
        """Returns the matrix whose square is computed between collectives and beside them."""
        if self._matrix is None:
            size = _BETWEEN[self.device.type]
            self._matrix = self._random(size, size)
        return self._matrix

    def _exchanges(self, group: dist.ProcessGroup, count: int) -> dict[str, tuple[Callable[[], object], int]]:
        """Returns what tensor parallelism and a pipeline do, each with the number of products that it computes.

        A divided region gathers its input and scatters the sum of its output. Its backward gathers the output's
        gradient, and its input once more beside the product of the input's gradient, which it sums and scatters beside
        the product of the weight's.
        """
        ranks, rank = group.size(), group.rank()
        communicator = Communicator(group)
        buffer = torch.zeros(ranks, count // ranks, device=self.device)
        matrix, length = self._between(), ranks
        full = torch.zeros(_SHARED_ROWS, length, count // (_SHARED_ROWS * length), device=self.device)
        part = full[:, :1].contiguous()

        def all_reduce() -> None:
            communicator.all_gather_parts(buffer[0])
            communicator.reduce_scatter_parts(buffer)

        def region_forward() -> None:
            start_gather(part, length, communicator)()
            _compute(matrix)
            start_scatter(full, communicator)()

        def region_backward() -> None:
            start_gather(part, length, communicator)()
            for start in (
                functools.partial(start_gather, part, length, communicator),
                functools.partial(start_scatter, full, communicator),
            ):
                wait = start()
                _compute(matrix)
                wait()

        def send() -> None:
            into = torch.empty_like(buffer)
            # At once: NCCL runs messages of two ranks in their order, and both would wait in their send.
            both = [
                dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % ranks),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return {
            "all_reduce": (all_reduce, 0),
            "region_forward": (region_forward, 1),
            "region_backward": (region_backward, 2),
            "send": (send, 0),
        }

    def _units(self, size: int, width: int) -> tuple[float, float]:
        """Returns the seconds of gathering and of reducing a unit of FSDP2, beyond those of the unit by itself."""
        mesh = init_device_mesh(self.device.type, (self.world_size // size, size), mesh_dim_names=("copies", "shards"))
        own = mesh["shards"]
        x = torch.zeros(1, width, device=self.device, requires_grad=True)
        matrix, found = self._between() if self.device.type == "cpu" else None, []
        for shards in (False, True):
            layers = [_Layer(width, matrix, self.device) for _ in range(_DEPTH)]
            stack: Any = nn.Sequential(*layers)
            for part in (*layers, stack) if shards else ():
                sharded: Any = fully_shard(part, mesh=own)
                if self.device.type == "cpu":
                    communicator = Communicator(own.get_group())
                    sharded.set_custom_all_gather(PairwiseAllGather(communicator))
                    sharded.set_custom_reduce_scatter(PairwiseReduceScatter(communicator))
            found.append(self._elapsed_passes(functools.partial(stack, x)))
        gather = (found[1][0] - found[0][0]) / _DEPTH
        # The last unit stays gathered until backward, which repeats the other gathers.
        backward = (found[1][1] - found[0][1]) / _DEPTH
        return max(gather, 1e-7), max(backward - gather * (_DEPTH - 1) / _DEPTH, 1e-7)

    def _elapsed_passes(self, run: Callable[[], Any]) -> tuple[float, float]:
        before, self._own_clock = self._own_clock, self._elapsed
        self._together()
        try:
            return self._passes(run)
        finally:
            self._own_clock = before

    def slowdown(self) -> float:
        """Returns by how much communication lengthens computation at the same time; 2 where they do not overlap."""
        if self.world_size == 1 or self.device.type == "cpu":
            return 2.0  # On gloo a collective runs on the rank's core, and the step waits for it.
        left = self._random(4096, 4096)
        buffer = torch.zeros(1 << 24, device=self.device)

        def compute() -> None:
            for _ in range(8):
                left @ left

        def communicate() -> Any:
            return dist.all_reduce(buffer, async_op=True)

        def both() -> None:
            work = communicate()
            compute()
            work.wait()

        def communicate_alone() -> None:
            communicate().wait()

        alone, other = self._seconds(compute), self._seconds(communicate_alone)
        return min(2.0, max(1.0, 1 + (self._seconds(both) - max(alone, other)) / min(alone, other)))
