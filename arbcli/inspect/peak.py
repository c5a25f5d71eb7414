"""The most memory that a training step holds at once, predicted from its configuration alone.

A prediction is a list of moments, in the backward from the loss on: what is still kept for the
rest of it, and what comes and goes. The largest is the peak. Like the state's it is arithmetic,
shares no code with the modules and imports no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from arbcli.config.model import VOCABULARY, GraphConfig, ModelConfig
from arbcli.inspect.memory import predict

CUBLAS_BYTES = 2 * 2**25
"""Workspaces that cuBLAS keeps once it has run, one for each thread: forward and backward."""
PARTS_BYTES = 132 * 128 * 128 * 4
"""Sums that the programs of a symmetric product hand each other: a tile each, on an H200."""
WIDE = 2
"""Smallest ratio of the sides of a matrix whose Newton-Schulz steps are composed."""
WIDE_PRODUCTS = 2**31
"""Smallest product of such a matrix's sides and the smaller side."""
CHUNK = 2**18
"""Elements that the torch backend steps at once."""
DECODED = 2**20
"""Weights of a table that the torch backend decodes at once."""
EXPERTS_AT_ONCE = 2**25
"""Weights of experts that are decoded, or have their gradient formed, at the same time."""
ORDERS = 3
"""N-grams that end at a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The most memory that a training step holds at once."""

    device: str
    """`cuda` or `cpu`."""
    batch: int
    """Windows of a micro-batch."""
    compute_bytes: int
    """Of an activation."""
    state_bytes: int
    saved_bytes: int
    """Activations that the backward still needs at the peak."""
    transient_bytes: int
    """What comes and goes where the peak is: gradients, and tensors of the shape of a weight."""
    constant_bytes: int
    """Rotary table, and workspaces of the matrix library."""
    peak_bytes: int
    """The sum of these four."""
    at: str
    """What the model does at the peak."""


class _Moment(NamedTuple):
    """A moment of the backward."""

    at: str
    saved: int
    """Bytes of activations that the rest of the backward needs."""
    transient: int
    """All others."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What a training step computes, and where; `a` is the bytes of an activation."""

    config: ModelConfig
    tokens: int
    a: int
    on_cpu: bool
    recompute: bool
    fp8: bool

    def propagate(self, outputs: int, inputs: int) -> int:
        """Predict what a gradient is multiplied from in eight bits: it and the weight, rounded."""
        if not self.fp8:
            return 0
        rounded = self.tokens * outputs + outputs * inputs
        # the torch backend multiplies them in float32, then by the scales
        return 5 * rounded + 8 * self.tokens * inputs if self.on_cpu else rounded

    def update(self, rows: int, columns: int, matrices: int = 1, stacked: int = 1) -> int:
        """Predict the transient part of an update: the gradient, and what is made of it.

        `matrices` gradients are there together, `stacked` of them are orthogonalised together, and
        they are stepped one by one.
        """
        config, a, on_cpu = self.config, self.a, self.on_cpu
        weights, smaller = rows * columns, min(rows, columns)
        found = 4 * rows * divide_up(columns, config.group_size)  # slopes of the scales
        if config.direction == "factored" and not on_cpu:
            found += weights // 16  # sums of rows and columns, for every 128 weights of each
        hands = 0
        if on_cpu:  # what the torch backend makes of a chunk, and what is left beside the next
            chunk = min(weights, CHUNK)
            hands = max(11 * chunk, 4 * chunk + 12 * min(weights - chunk, chunk))
        if config.rule == "votes":
            # products of a chunk, or all votes widened at once
            hands = max((16 - 2 * a) * chunk, (14 + a) * weights // 2) if on_cpu else 0
        elif config.direction == "orthogonal":
            # an iterate, squares and what programs hand each other, or two iterates and a square;
            # then the last iterate
            large = stacked * weights * smaller >= WIDE_PRODUCTS
            squares = 4 if large and weights >= WIDE * smaller**2 else 2
            hands = max(
                a * stacked * (weights + squares * smaller**2) + (0 if on_cpu else PARTS_BYTES),
                a * stacked * (2 * weights + smaller**2),
                a * stacked * weights + hands,
            )
        return a * matrices * weights + found + hands

    def in_loss(self) -> int:
        """Predict what the torch backend has in hand in the loss, in float32."""
        return 8 * min(CHUNK, self.tokens * VOCABULARY) if self.on_cpu else 0

    def in_gate(self, rows: int, ffn: int, *, normalised: bool) -> int:
        """Predict what it has in hand in the middle of a gated MLP, in float32."""
        return (16 if normalised else 10) * min(CHUNK, 2 * rows * ffn) if self.on_cpu else 0

    def in_rows(self, rows: int, slots: int, width: int) -> int:
        """Predict what it has in hand where rows of a table are decoded."""
        if not self.on_cpu:
            return 0
        together = min(rows, max(1, DECODED // (slots * width)))
        # of the rows before these there are the weights
        return (7 if together == rows else 11) * together * slots * width

    def mlp(self, name: str, saved: int, ffn: int, beside: int = 0) -> Iterator[_Moment]:
        """Follow the backward of a gated MLP; `beside` are bytes alive that are not its own."""
        tokens, a, dim = self.tokens, self.a, self.config.dim
        in_gate = self.in_gate(tokens, ffn, normalised=self.config.sub_norms)
        # gradient of the stream; gradients on both sides of the gate, and its result
        inside = beside + tokens * a * (dim + 4 * ffn) + in_gate
        yield _Moment(f"{name}.sub_norm", saved, inside)
        # the same without the gradient of that result
        inside = beside + tokens * a * (dim + 3 * ffn) + self.update(dim, ffn)
        yield _Moment(f"{name}.output", saved, inside)
        # gate and up are gone; gradients of the stream, of them and of the input; it normalised
        inside = tokens * a * dim + self.update(2 * ffn, dim)
        inside = beside + tokens * a * 2 * dim + max(inside, self.propagate(2 * ffn, dim))
        yield _Moment(f"{name}.gate_up", saved, inside)

    def output(self, saved: int, beside: int = 0) -> Iterator[_Moment]:
        """Follow the backward of the loss and the head, whose input is in `saved` or `beside`."""
        tokens, a, dim = self.tokens, self.a, self.config.dim
        # logits and their gradient
        yield _Moment("loss", saved, beside + tokens * a * 2 * VOCABULARY + self.in_loss())
        # gradient of the head's input, that normalised, gradient of the logits
        inside = tokens * a * (2 * dim + VOCABULARY) + self.update(VOCABULARY, dim)
        yield _Moment("head", saved, beside + inside)

    def rows(
        self, name: str, saved: int, beside: int, uses: list[tuple[int, int]], size: tuple[int, int]
    ) -> Iterator[_Moment]:
        """Follow the backward of a table of `size`.

        `uses` are, for each, the sums that were made and the rows of each sum.
        """
        num_rows, width = size
        sums, slots = sum(m for m, _ in uses), sum(m * k for m, k in uses)
        touched, a = min(slots, num_rows), self.a
        grad_y = a * sums * width if len(uses) > 1 else 0
        state = _state_bytes(self.config, touched, width)
        bag = 4 * width * (touched + sums) if self.on_cpu else 0
        # ids, weights and positions of slots, that are sorted and then left
        inside = max(
            60 * slots,
            30 * slots + bag + a * touched * width,
            30 * slots + state + self.update(touched, width),
        )
        yield _Moment(f"{name}.table", saved, beside + grad_y + inside)
        yield _Moment(f"{name}.rows", saved, beside + self.in_rows(*uses[0], width))


def predict_peak(
    config: ModelConfig,
    *,
    batch: int,
    compute_bytes: int = 2,
    device: str = "cuda",
    recompute: bool = False,
    fp8: bool = False,
) -> PeakReport:
    """Predict the most memory that a training step holds at once.

    Args:
        config: of the model.
        batch: windows of a micro-batch.
        compute_bytes: of an activation: 2 or 4.
        device: `cuda` or `cpu`.
        recompute: whether only the blocks' inputs are kept, and one block's inside at a time.
        fp8: whether products are computed in eight bits.
    """
    on_cpu = device == "cpu"
    step = _Step(config, batch * config.ctx, compute_bytes, on_cpu, recompute, fp8)
    moments: Callable[[_Step], Iterator[_Moment]]
    if isinstance(config, GraphConfig):
        moments, rotary = _graph_moments, config.rotary
    else:
        moments, rotary = _dense_moments, config.head_dim
    peak = max(moments(step), key=lambda moment: moment.saved + moment.transient)
    parts = {
        "state_bytes": predict(config).total.state_bytes,
        "saved_bytes": peak.saved,
        "transient_bytes": peak.transient,
        "constant_bytes": 4 * config.ctx * rotary + (0 if on_cpu else CUBLAS_BYTES),
    }
    return PeakReport(
        device=device,
        batch=batch,
        compute_bytes=compute_bytes,
        **parts,
        peak_bytes=sum(parts.values()),
        at=peak.at,
    )


def _dense_moments(step: _Step) -> Iterator[_Moment]:
    """Follow the backward of a `ByteLM` through its loss and its last block.

    With D, F and H the width, the MLP's width and the heads, a block saves, a token:

        a D: inputs of both branches (2), queries, keys and values (3), what was attended to (1)
        a F: gate and up (2)
        12 H: what queries and keys were divided by, and the log-sum-exp, in float32
    """
    config, tokens, a, dim, ffn = step.config, step.tokens, step.a, step.config.dim, step.config.ffn
    block = a * (6 * dim + 2 * ffn) + 12 * config.heads
    ids = 16  # two int64
    saved = tokens * (ids + config.layers * (a * dim if step.recompute else block))
    again = tokens * (block - a * dim) if step.recompute else 0  # of the block in its backward
    last = tokens * a * dim  # output of the last block

    yield from step.output(saved, last)
    yield from step.mlp("mlp", saved, ffn, again)
    # only the input of the block is left, and normalised; gradients of the stream, of queries,
    # keys and values, and of the input
    inside = tokens * a * dim + step.update(3 * dim, dim)
    inside = max(inside, step.propagate(3 * dim, dim)) + again + tokens * (a * 6 * dim - block)
    yield _Moment("attention.qkv", saved, inside)


def _graph_moments(step: _Step) -> Iterator[_Moment]:
    """Follow the backward of a `GraphLM` from the loss to the sequencer.

    What its parts save a token is said beside each; D is the width, and F that of an MLP.
    """
    config, tokens, a, dim = step.config, step.tokens, step.a, step.config.dim
    heads, ffn, head_ffn = config.heads, config.ffn, config.head_ffn
    stream = a * dim
    books = [
        (name, halves[0] * halves[1], width, of)
        for name, (halves, width, of) in config.codebooks.items()
    ]
    iterates = config.moe or config.graph

    # ids and targets; n-grams, their weights and their sum; what is remembered, and seen
    before = 16
    before += 12 * ORDERS + a * config.ngram_dim if config.sequencer else 0
    before += 28 + stream if config.memgram else 0
    # input of the MLP; gate and up
    block = stream + 2 * a * ffn
    if config.attention:
        # input; queries and what is compressed; keys and values as they are made of it; what was
        # attended to; queries and keys before and behind their norm, in float32 before it on a
        # CPU; what they were divided by, and the log-sum-exp
        block += 2 * stream + a * (config.latent + config.rotary)
        block += a * (2 * dim - heads * config.rotary) + stream
        block += 2 * ((4 * dim if step.on_cpu else stream) + stream) + 12 * heads
    kept = stream if step.recompute else block
    again = block - stream if step.recompute else 0
    first, second = config.layers // 2 * kept, (config.layers - config.layers // 2) * kept
    # their input; queries, four int64 and a weight of every row that is read, what was read; and
    # for the router what each gives
    found = stream if books else 0
    for _, _, width, of in books:
        found += of * (a * (2 * config.key_dim + width) + 36 * config.top_k)
        found += stream if config.router else 0
    iterations = config.max_moe_iters if iterates else 0
    # input, and what every iteration saves
    iterated = stream + iterations * _iteration_bytes(step) if iterates else 0
    streams = 2 + len(books)
    mixed = stream + (a + 4) * streams if config.router else 0
    byte_mlp = stream + 2 * a * head_ffn

    # from the loss to the router
    saved = before + first + found + iterated + second + mixed + byte_mlp
    yield from step.output(tokens * (saved + stream))
    yield from step.mlp("byte_mlp", tokens * saved, head_ffn)
    saved -= byte_mlp
    waiting = 0  # gradients of what went around the blocks
    if config.router:
        waiting = streams * stream - stream
        yield _Moment("router", tokens * saved, tokens * (waiting + 3 * stream))
        saved -= mixed
    # the last block
    beside = tokens * (again + waiting)
    yield from step.mlp("mlp", tokens * saved, ffn, beside)
    if config.attention:
        columns = dim + config.latent + config.rotary
        # as in the MLP, but its input and all that is behind are gone
        inside = tokens * (5 * stream + a * columns - (block - stream)) + step.update(columns, dim)
        yield _Moment("attention.query_down", tokens * saved, beside + inside)
    saved -= second
    if iterates:
        left = saved - (iterations - 1) * _iteration_bytes(step)
        yield from _iterated_moments(step, tokens * left, tokens * waiting)
    saved -= iterated
    # the codebooks; the graph has read rows of the first one, too
    for name, num_rows, width, of in books:
        uses = [(tokens * of, config.top_k)]
        if name == "codebook" and config.graph:
            uses += [(tokens, config.edges[1])] * iterations
        # gradients of the stream, of where it began and of what this gives
        beside = tokens * 3 * stream + sum(a * m * width for m, _ in uses[1:])
        read = tokens * of * width * a
        inside = 2 * read + step.update(dim, of * width)
        yield _Moment(f"{name}.output", tokens * saved, beside + inside)
        # what was read is gone, and there is its gradient
        yield from step.rows(name, tokens * saved - read, beside + read, uses, (num_rows, width))
    saved -= found + first
    # the n-grams, with nothing else left but the gradient of the stream
    if config.sequencer:
        size = config.ngram_rows, config.ngram_dim
        beside = tokens * (stream + a * config.ngram_dim)
        yield from step.rows("sequencer", tokens * saved, beside, [(tokens, ORDERS)], size)


def _iteration_bytes(step: _Step) -> int:
    """Count what an iteration over the experts saves a token."""
    config, a = step.config, step.a
    k, width = config.moe_top_k, config.expert_dim
    # the stream it begins with, what that is projected to, and the parts of halting
    saved = a * (config.dim + _inward(config)) + 24
    if config.moe:
        # slots before, in and behind their expert; what is added to their sum; scores and choices
        saved += a * k * (2 * width + 2 * config.expert_ffn) + a * width
        saved += 4 * config.experts + 20 * k
    if config.graph:
        # rows of the codes that edges lead to; these, and their weights twice
        saved += a * config.code_dim + 16 * config.edges[1] + 8
    return saved


def _inward(config: GraphConfig) -> int:
    """Count what an iteration projects its stream to."""
    return config.adapter_rank + 1 + config.moe * (config.expert_dim + config.gate_dim)


def _iterated_moments(step: _Step, saved: int, beside: int) -> Iterator[_Moment]:
    """Follow the backward of the iterations through the one that came first, the last to come.

    Weights that all iterations use are updated in it. Until then the inputs and the gradients of
    every use wait together.

    Args:
        step: of the model.
        saved: what is kept but for all later iterations.
        beside: bytes alive that are not those of the iterations.
    """
    config, a, tokens, dim = step.config, step.a, step.tokens, step.config.dim
    uses, inward = config.max_moe_iters, _inward(config)
    beside += tokens * a * 3 * dim  # gradients of the stream, of its beginning and of the result
    beside += tokens * a * uses * config.graph * config.code_dim  # of the rows of codes
    ends = (uses - 1) * a * tokens * (inward + dim)
    if config.moe:
        k, width, ffn = config.moe_top_k, config.expert_dim, config.expert_ffn
        ends += (uses - 1) * a * tokens * (config.gate_dim + config.experts)
        slots = tokens * k
        in_gate = step.in_gate(slots, ffn, normalised=True)
        waits = (uses - 1) * a * slots * (2 * ffn + width)
        # gradients of what experts give, on both sides of their gate, and its result
        inside = uses * a * slots * (width + ffn) + 3 * slots * a * ffn + in_gate
        yield _Moment("moe_graph.experts.sub_norm", saved, beside + ends + waits + inside)
        for name, rows, columns in (("down", width, ffn), ("gate_up", 2 * ffn, width)):
            if name == "gate_up":  # by now what experts gave is gone, and their gates
                waits = -a * tokens * width - a * slots * (width + 2 * ffn)
            every = uses * a * slots
            together = min(config.experts, max(1, EXPERTS_AT_ONCE // (rows * columns)))
            ranges = min(2, divide_up(config.experts, together))  # one is made, another is left
            inside = every * (rows + columns)
            inside += step.update(rows, columns, together * ranges, together)
            if uses > 1:
                # as they came: gradients, once more in one, and once more sorted
                inside += every * rows
                inside = max(inside, every * (3 * rows + 2 * columns))
                inside = max(inside, every * (2 * rows + 3 * columns))
            yield _Moment(f"moe_graph.experts.{name}", saved, beside + ends + waits + inside)
    # nothing is left of the iteration but its input
    inside = 2 * uses * a * tokens * (inward + dim) + step.update(inward, dim)
    inside += a * tokens * dim - tokens * _iteration_bytes(step)
    yield _Moment("moe_graph.inward", saved, beside + inside)


def divide_up(number: int, size: int) -> int:
    """Divide, and round up."""
    return -(-number // size)


def _state_bytes(config: ModelConfig, rows: int, columns: int) -> int:
    """Count what a packed matrix takes."""
    import torch

    from arbcli.model.packed import TernaryTensor

    with torch.device("meta"):
        return sum(
            buffer.nbytes for buffer in TernaryTensor(rows, columns, config, area="").buffers()
        )
