"""Work of a part of a model: its matrix products, the bytes that its other operations move, and what it saves.

All amounts are those of one micro-batch on one rank without parallelism. :class:`RankFraction` says which part of them
a rank of a mesh has, so that a model is profiled once for all meshes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

#: Dim of a matrix product.
Dim = Literal["", "m", "n", "k", "batch"]

_IN_INPUT_GRADIENT: dict[Dim, Dim] = {"": "", "batch": "batch", "m": "m", "n": "k", "k": "n"}
_IN_WEIGHT_GRADIENT: dict[Dim, Dim] = {"": "", "batch": "batch", "m": "k", "n": "n", "k": "m"}


class RankFraction(NamedTuple):
    """Fraction of a micro-batch's work that one rank has.

    Attributes:
        tokens: Rows of the micro-batch over the profiled rows, divided by `cp`.
        tp: Number of ranks that share each layer.
        sequence_parallel: Whether these ranks also share the tokens between the divided layers.
        ep: Number of ranks among which the experts of each mixture are divided.
    """

    tokens: float = 1.0
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1

    @property
    def outside(self) -> int:
        """Divisor of what tensor parallelism divides only with a sharded sequence."""
        return self.tp if self.sequence_parallel else 1


class DividedAmount(NamedTuple):
    """Bytes of activations, or a number of parameters, by whether tensor parallelism divides them.

    Attributes:
        inside: Amount of what tensor parallelism divides: heads, hidden features, logits.
        outside: Amount of what it divides only with a sharded sequence.
    """

    inside: float = 0.0
    outside: float = 0.0

    @classmethod
    def sum(cls, sizes: Iterable[tuple[float, bool]]) -> DividedAmount:
        """Returns the sum of some bytes, each with whether tensor parallelism divides them."""
        totals = [0.0, 0.0]
        for size, is_inside in sizes:
            totals[not is_inside] += size
        return cls(*totals)

    def on(self, fraction: RankFraction) -> float:
        """Returns a rank's bytes."""
        return fraction.tokens * (self.inside / fraction.tp + self.outside / fraction.outside)

    def plus(self, other: DividedAmount, times: float = 1.0) -> DividedAmount:
        """Returns the sum with a multiple of another amount."""
        return DividedAmount(self.inside + times * other.inside, self.outside + times * other.outside)

    def times(self, factor: float) -> DividedAmount:
        """Returns a multiple of it."""
        return DividedAmount(self.inside * factor, self.outside * factor)

    def beyond(self, other: DividedAmount) -> DividedAmount:
        """Returns what it has more than another amount of each kind."""
        return DividedAmount(max(self.inside - other.inside, 0.0), max(self.outside - other.outside, 0.0))

    def local(self, tp: int) -> float:
        """Returns a rank's amount, where the sequence is not sharded."""
        return self.inside / tp + self.outside

    @property
    def total(self) -> float:
        """Bytes without parallelism."""
        return self.inside + self.outside


_NOTHING = DividedAmount()


@dataclass(frozen=True)
class Product:
    """Matrix product `[batch, m, k] @ [batch, k, n]`.

    Attributes:
        m: Rows of the result.
        n: Columns of the result.
        k: Dim that is summed over.
        batch: Number of such products in one kernel.
        size: Bytes of an element.
        divided: Dim that tensor parallelism divides; empty for none.
        tokens: Dim that grows with the number of tokens.
        fraction: Fraction of the result that is computed; half under a causal mask that a kernel makes use of.
        is_attention: Whether a fused attention kernel computes it, which keeps its scores on the chip.
        is_grouped: Whether each of the batch is an expert's product, of the tokens that are routed to it.
    """

    m: float
    n: float
    k: float
    batch: float = 1
    size: int = 2
    divided: Dim = ""
    tokens: Dim = "m"
    fraction: float = 1.0
    is_attention: bool = False
    is_grouped: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.batch * self.m * self.n * self.k * self.fraction

    @property
    def bytes(self) -> float:
        """Bytes that it reads and writes at least once; none for scores that stay on the chip."""
        return (
            0.0 if self.is_attention else self.size * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
        )

    def on(self, fraction: RankFraction) -> Product:
        """Returns a rank's product; under `ep` it has fewer experts, and each has the tokens of more ranks."""
        product = self._scaled(self.tokens, fraction.tokens)
        if self.is_grouped and fraction.ep > 1:
            product = product._scaled("batch", 1 / fraction.ep)._scaled(self.tokens, fraction.ep)
        return product._scaled(self.divided, 1 / fraction.tp) if self.divided else product

    def _scaled(self, dim: Dim, factor: float) -> Product:
        if not dim:
            return self
        scaled: dict[str, Any] = {dim: getattr(self, dim) * factor}
        return replace(self, **scaled)

    def gradients(self) -> tuple[Product, Product]:
        """Returns the products of its backward: the gradient of the left operand and that of the right one."""
        left = replace(
            self,
            n=self.k,
            k=self.n,
            divided=_IN_INPUT_GRADIENT[self.divided],
            tokens=_IN_INPUT_GRADIENT[self.tokens],
        )
        right = replace(
            self,
            m=self.k,
            k=self.m,
            divided=_IN_WEIGHT_GRADIENT[self.divided],
            tokens=_IN_WEIGHT_GRADIENT[self.tokens],
        )
        return left, right


class Kernels(NamedTuple):
    """Kernels that memory bounds.

    Attributes:
        moved: Bytes that all of them read and write.
        number: Number of kernels.
    """

    moved: DividedAmount = _NOTHING
    number: int = 0


_NO_KERNELS = Kernels()


@dataclass(frozen=True)
class Work:
    """Work of a forward or a backward.

    Attributes:
        products: Matrix products and how often each occurs.
        eager: The other operations, each as a kernel of its own.
        compiled: The same operations where neighbouring ones are one kernel, as in compiled code.
    """

    products: tuple[tuple[Product, int], ...] = ()
    eager: Kernels = _NO_KERNELS
    compiled: Kernels = _NO_KERNELS

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products, without parallelism."""
        return sum(product.flops * count for product, count in self.products)


@dataclass(frozen=True)
class Recomputation:
    """Way in which a block keeps its activations.

    Attributes:
        saved: Bytes that it keeps for backward, without its input and its output.
        fused: The same bytes in compiled code, in which backward recomputes what is internal to a kernel.
        repeated: Work that backward repeats.
        gathers_again: Whether backward repeats tensor parallelism's collectives of forward.
    """

    saved: DividedAmount = _NOTHING
    fused: DividedAmount = _NOTHING
    repeated: Work = field(default_factory=Work)
    gathers_again: bool = False

    def kept(self, fused: bool) -> DividedAmount:
        """Returns the bytes that it keeps for backward."""
        return self.fused if fused else self.saved


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a model: its stem, one of its blocks, or its head with the loss.

    Attributes:
        name: Name of the block, `stem` or `head`.
        forward: Work of its forward.
        backward: Work of its backward.
        modes: Ways to keep its activations, by name: `none`; `selective`, which keeps results of matrix products, as
            ActivationCheckpoint does; `alternate`, which keeps every second of them, as torchtitan does; `attention`,
            which repeats unfused attention, as Megatron does; and `full`.
        output: Bytes of its output.
        transient: Most bytes in use at once in either, with the gradients of parameters; of a block beyond its output
            and what `none` saves.
        parameters: Numbers of parameters in the run's dtype: divided by tensor parallelism, and not.
        trained: Numbers of trained ones.
        fixed: Bytes of frozen parameters with a dtype of their own, such as 4-bit codes; they are not in `parameters`.
        experts: Numbers of those of `parameters` that `ep` divides: the experts of mixtures.
        trained_experts: Numbers of trained ones.
        exchanged: Bytes of the tokens that its mixtures send to experts in forward, and of the outputs that return.
        cast: Number of parameters that autocast casts in each forward.
        collectives: Number of divided regions; each sums its output in forward, and its input's gradient in backward.
        gathered: Bytes of its input.
        entered: Bytes of the inputs of its divided regions.
        left: Bytes of their outputs.
    """

    name: str
    forward: Work
    backward: Work
    modes: dict[str, Recomputation]
    output: DividedAmount
    transient: DividedAmount
    parameters: DividedAmount = _NOTHING
    trained: DividedAmount = _NOTHING
    collectives: int = 0
    gathered: float = 0.0
    fixed: DividedAmount = _NOTHING
    experts: DividedAmount = _NOTHING
    trained_experts: DividedAmount = _NOTHING
    exchanged: float = 0.0
    cast: DividedAmount = _NOTHING
    entered: float = 0.0
    left: float = 0.0

    def local_count(self, tp: int, *, trained: bool = False, ep: int = 1) -> float:
        """Returns the number of parameters on a rank of the axes `tp` and `ep`, before they are sharded.

        With its default `ep`, the number divided by all ranks that share the state is the rank's shard under any `ep`.
        """
        count = (self.trained if trained else self.parameters).local(tp)
        return count - self.expert_count(tp, trained=trained) * (1 - 1 / ep)

    def expert_count(self, tp: int, *, trained: bool = False) -> float:
        """Returns the number of parameters that `ep` divides, on a rank of the axis `tp`."""
        return (self.trained_experts if trained else self.experts).local(tp)

    def cast_count(self, tp: int, ep: int) -> float:
        """Returns the number of parameters that autocast casts, on a rank of the axes `tp` and `ep`."""
        count = self.cast.local(tp)
        return count - self.expert_count(tp) * (1 - 1 / ep) if count else 0.0

    def local_bytes(self, tp: int, element: int, ep: int = 1) -> float:
        """Returns the bytes of the parameters on a rank of the axes `tp` and `ep`, before they are sharded.

        Args:
            tp: Size of the axis.
            element: Bytes of a parameter in the run's dtype; others have a size of their own.
            ep: Size of the axis; see :meth:`local_count`.
        """
        return element * self.local_count(tp, ep=ep) + self.fixed.local(tp)


#: Parts of a stage, each with its mode of recomputation and how often it occurs.
Stage = tuple[tuple[Part, str, int], ...]


def trained_count(stage: Stage, tp: int, ep: int = 1) -> float:
    """Returns the number of a stage's trained parameters on a rank; see :meth:`Part.local_count`."""
    return sum(times * part.local_count(tp, trained=True, ep=ep) for part, _, times in stage)
