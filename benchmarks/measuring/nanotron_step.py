"""Replay of the tensors of a training step of nanotron on the first rank of a pipeline.

What is allocated, and when it is freed, follows nanotron's source: `models/llama.py`, `optim/gradient_accumulator.py`,
`optim/zero.py`, `distributed.py`, `parallel/tensor_parallel/functional.py` and `parallel/pipeline_parallel/engine.py`.
Allocations go to a replay of torch's allocator, whose reserved memory is what the runs report.

- A block keeps its input, the normalised input, rotated queries, keys with values, the output of attention, the sum,
  the normalised sum, the gate with the up projection, SiLU's output and the product. Two tensors of the tokens more are
  kept, whose origin the source does not show: without them runs of one stage without `tp` are 2% too low, with them 0.4%.
- Locals of Python keep the fused projection until attention has returned.
- Half-precision gradients live from a micro-batch's backward until they are added to those in single precision.
- ZeRO 1 gathers the parameters into a tensor for each rank, and these into a flat one. This happens after the
  activations are freed, but what these leave is in too many segments to hold it.
- `tp` has two global buffers for a gathered input and a gathered gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from measuring.caching_allocator import CachingAllocator

#: Tensors of the tokens of a block that are kept for a reason that the source does not show.
_UNEXPLAINED = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama.

    Attributes:
        layers: Number of blocks.
        width: Features of the residual stream.
        hidden: Features inside the MLP.
        heads: Number of heads.
        tied: Whether the output projection is the embedding on one stage.
        vocabulary: Number of tokens.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    tied: bool
    vocabulary: int

    @property
    def block_parameters(self) -> int:
        """Parameters of the products of a block."""
        return 4 * self.width**2 + 3 * self.hidden * self.width


@dataclass(frozen=True)
class StepLayout:
    """Layout of a run.

    Attributes:
        pp: Number of stages.
        dp: Number of data-parallel ranks.
        tp: Number of tensor-parallel ranks.
        rows: Rows of a micro-batch.
        micro_batches: Number of micro-batches of a step.
        zero: Stage of ZeRO, 0 or 1.
        blocks: Number of blocks of the first stage.
        length: Tokens of a row.
    """

    pp: int
    dp: int
    tp: int
    rows: int
    micro_batches: int
    zero: int
    blocks: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length


def reserved_bytes(shape: Shape, layout: StepLayout, capacity: float) -> int:
    """Returns the largest number of bytes that the first rank reserves in three steps."""
    return _Replay(shape, layout, capacity).run()


class _Replay:
    def __init__(self, shape: Shape, layout: StepLayout, capacity: float) -> None:
        self.shape, self.layout = shape, layout
        self.allocator = CachingAllocator(int(capacity))
        self.full = 2 * layout.tokens * shape.width  # Bytes of a tensor of all tokens.
        self.shard = self.full / layout.tp
        self.ratio = shape.hidden / shape.width
        self.has_loss = layout.pp == 1
        self.parameters = self._parameters()
        self.buffers: set[str] = set()
        self.moments = False
        self.gradients: dict[int, int] = {}

    def new(self, size: float) -> int:
        return self.allocator.allocate(size)

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.allocator.release(address)

    def run(self) -> int:
        self._initialise()
        pp = self.layout.pp
        count = min(self.layout.micro_batches, 2 * pp + 2)  # The steady state repeats.
        warm_up = min(pp - 1, count)
        for _ in range(3):
            flying = [self._forward() for _ in range(warm_up)]
            for _ in range(count - warm_up):
                flying.append(self._forward())
                self._backward(*flying.pop(0))
            while flying:
                self._backward(*flying.pop(0))
            self._step()
        return self.allocator.peak

    def _parameters(self) -> list[int]:
        """Returns the parameters of each tensor: the embedding, six of each block, the norm and the projection."""
        shape, tp = self.shape, self.layout.tp
        width, hidden, vocabulary = shape.width, shape.hidden, shape.vocabulary * shape.width // tp
        block = [width, 3 * width**2 // tp, width**2 // tp, width, 2 * width * hidden // tp, width * hidden // tp]
        found = [vocabulary, *block * self.layout.blocks]
        if self.has_loss:
            found += [width] if shape.tied else [width, vocabulary]
        return found

    def _initialise(self) -> None:
        """Allocates parameters, gradients in single precision, master weights, and buckets without ZeRO."""
        for size in self.parameters:
            self.new(2 * size)
        total = sum(self.parameters)
        self.new(4 * total)
        self.new(4 * total // (self.layout.dp if self.layout.zero else 1))
        if not self.layout.zero and self.layout.dp > 1:
            bucket = 0
            for size in reversed(self.parameters):
                bucket += 2 * size
                if bucket > 25 << 20:
                    self.new(bucket)
                    bucket = 0
            self.new(bucket)

    def _step(self) -> None:
        """Runs the optimizer, which makes its moments at first, and gathers the parameters under ZeRO 1."""
        total, dp = sum(self.parameters), self.layout.dp
        shards = dp if self.layout.zero else 1
        if not self.moments:
            self.moments = True
            for size in self.parameters:
                self.new(4 * size / shards)
                self.new(4 * size / shards)
        if self.layout.zero and dp > 1:
            own = self.new(2 * total / dp)
            each = [self.new(2 * total / dp) for _ in range(dp)]
            flat = self.new(2 * total)
            self.free(flat, *each, own)

    def _use_buffer(self, name: str) -> None:
        if self.layout.tp > 1 and name not in self.buffers:
            self.buffers.add(name)
            self.new(self.full)

    def _reduce_scatter(self, tensor: int) -> int:
        """Returns the shard of a tensor of all tokens, which is freed."""
        if self.layout.tp == 1:
            return tensor
        shard = self.new(self.shard)
        self.free(tensor)
        return shard

    def _forward(self) -> tuple[list[list[int]], list[int]]:
        """Runs a micro-batch; returns what each block keeps, and what the end of the stage keeps."""
        embedded = self.new(self.full)
        if self.layout.tp > 1:
            masked = self.new(self.full)
            self.free(embedded)
            embedded = masked
        hidden = self._reduce_scatter(embedded)
        kept = []
        for _ in range(self.layout.blocks):
            saved, hidden = self._forward_block(hidden)
            kept.append(saved)
        ends = [hidden]
        if self.has_loss:
            logits = self.layout.tokens * self.shape.vocabulary / self.layout.tp
            normed, half = self.new(self.shard), self.new(2 * logits)
            single, difference = self.new(4 * logits), self.new(4 * logits)
            self.free(single, half)
            ends += [normed, difference]
        return kept, ends

    def _forward_block(self, hidden: int) -> tuple[list[int], int]:
        new, shard, wide = self.new, self.shard, self.ratio * self.shard
        tokens, tp, moves = self.layout.tokens, self.layout.tp, self.layout.rows > 1
        normed = new(shard)
        self._use_buffer("input")
        deviation = new(4 * tokens / tp)
        fused = new(3 * shard)
        copied = new(3 * shard)
        joined = new(2 * shard)
        keys_values = new(2 * shard)
        self.free(joined)
        queries = new(shard)
        self.free(copied)
        unexplained = new(_UNEXPLAINED * shard)
        attended, sums = new(shard), new(4 * tokens * self.shape.heads / tp)
        transposed = new(shard) if moves else None
        output = new(self.full)
        if transposed is not None:
            self.free(transposed)
        output = self._reduce_scatter(output)
        self.free(fused)
        middle = new(shard)
        self.free(output)
        normed_middle, deviation_middle = new(shard), new(4 * tokens / tp)
        gate_up, activated, product = new(2 * wide), new(wide), new(wide)
        output = self._reduce_scatter(new(self.full))
        result = new(shard)
        self.free(output)
        attention = [hidden, normed, deviation, queries, keys_values, unexplained, attended, sums]
        return [*attention, middle, normed_middle, deviation_middle, gate_up, activated, product], result

    def _backward(self, kept: list[list[int]], ends: list[int]) -> None:
        gradient = self._backward_loss(ends) if self.has_loss else self.new(self.shard)
        if not self.has_loss:
            self.free(*ends)
        for number in reversed(range(self.layout.blocks)):
            gradient = self._backward_block(kept[number], gradient, first=1 + 6 * number)
        if self.layout.tp > 1:
            gathered = self.new(self.full)
            self.free(gradient)
            gradient = self.new(self.full)
            self.free(gathered)
        self._add_gradient(0)
        self.free(gradient)
        if self.has_loss and self.shape.tied:  # Sums the gradients of its two uses.
            total = self.new(2 * self.parameters[0])
            self.free(self.gradients.pop(-1), self.gradients[0])
            self.gradients[0] = total
        self.free(*self.gradients.values())
        self.gradients = {}

    def _backward_loss(self, ends: list[int]) -> int:
        hidden, normed, difference = ends
        half = self.new(2 * self.layout.tokens * self.shape.vocabulary / self.layout.tp)
        self.free(difference)
        full = self.new(self.full)
        shard = self.new(self.shard) if self.layout.tp > 1 else full
        self.gradients[-1] = self.new(2 * self.parameters[0])
        self.free(half, normed)
        if self.layout.tp > 1:
            self.free(full)
        gradient = self.new(self.shard)
        self.free(shard, hidden)
        return gradient

    def _add_gradient(self, number: int) -> None:
        self.gradients[number] = self.new(2 * self.parameters[number])

    def _backward_block(self, kept: list[int], gradient: int, first: int) -> int:
        """Frees what a block keeps; returns the gradient of its input.

        Args:
            kept: Tensors of the block's forward.
            gradient: Gradient of its output.
            first: Number of the first of its six parameters.
        """
        hidden, normed, deviation, queries, keys_values, unexplained, attended, sums = kept[:8]
        middle, normed_middle, deviation_middle, gate_up, activated, product = kept[8:]
        new, free, shard, wide = self.new, self.free, self.shard, self.ratio * self.shard
        self._use_buffer("gradient")
        of_product = new(wide)
        self._add_gradient(first + 5)
        of_activated, of_up = new(wide), new(wide)
        free(of_product, product, activated)
        of_gate = new(wide)
        free(of_activated)
        of_gate_up = new(2 * wide)
        free(of_gate, of_up, gate_up)
        of_normed = self._backward_columns(of_gate_up, normed_middle, first + 4)
        of_middle = new(shard)
        self._add_gradient(first + 3)
        free(of_normed, deviation_middle, middle)
        total = new(shard)  # The sum of both branches.
        free(of_middle, gradient)
        of_attended = new(shard)
        moves = self.layout.rows > 1
        transposed = new(shard) if moves else None
        self._add_gradient(first + 2)
        if transposed is not None:
            free(transposed)
            transposed = new(shard)
            free(of_attended)
            of_attended = transposed
        of_queries, of_keys, of_values = new(shard), new(shard), new(shard)
        free(new(2 * shard))
        free(of_attended, queries, attended, sums)
        of_pair, of_rotated = new(2 * shard), new(2 * shard)
        free(of_keys, of_values, of_rotated, keys_values, unexplained)
        rotated = new(shard)
        free(of_queries)
        of_fused = new(3 * shard)
        free(of_pair, rotated)
        copied = new(3 * shard)
        free(of_fused)
        of_normed = self._backward_columns(copied, normed, first + 1)
        of_hidden = new(shard)
        self._add_gradient(first)
        free(of_normed, deviation, hidden)
        result = new(shard)
        free(of_hidden, total)
        return result

    def _backward_columns(self, of_output: int, saved: int, number: int) -> int:
        """Returns the gradient of the input of a column-parallel product, whose input and output's are freed."""
        full = self.new(self.full)
        shard = self.new(self.shard) if self.layout.tp > 1 else full
        self._add_gradient(number)
        self.free(of_output, saved)
        if self.layout.tp > 1:
            self.free(full)
        return shard
