"""Compare the models with their references: layers, gradients, updates, what must not happen.

Every layer of a `ByteLM` is compared on the very input and output gradient that the kernels gave
it, so an error is found where it is made, and a rounding in one layer does not count in the next.
A `GraphLM` with all of its parts is compared from the bytes on, a small one and on a GPU those of
the presets, in bf16 too: there the reference takes the choices that were made, and judges them by
its own scores. Small ones of `HNet` and `CompressedLM` are compared likewise, and entries that
a `CompressedLM` chooses are taken and judged in float32 too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from arbcli.config.compressed import CompressedConfig
from arbcli.config.dense import VOCABULARY, ModelConfig
from arbcli.config.graph import GraphConfig
from arbcli.config.hnet import HNetConfig
from arbcli.config.presets import PRESETS
from arbcli.device import deterministic
from arbcli.directions import DIRECTIONS
from arbcli.kernels.rows.weighted_rows import TouchedRows
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.spec import EXACT, Gate
from arbcli.kernels.update.cast_votes import cast_scale_votes_reference, cast_trit_votes_reference
from arbcli.kernels.update.gradient_statistics import gradient_statistics_reference
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.rotary import rotary_table, rotate
from arbcli.model.layers.vector import VectorWeight
from arbcli.model.packed import TernaryTensor
from arbcli.rules import RULES, WITH_DIGITS, find_rule
from arbcli.train.updater import Updater
from arbcli.verify.compare import errors, poisoned
from arbcli.verify.compressed_reference import reference_compressed
from arbcli.verify.graph_reference import Choices, reference_graph_lm, reference_ponder
from arbcli.verify.hnet_reference import reference_hnet
from arbcli.verify.reference import (
    reference_direction,
    reference_layers,
    reference_loss,
    reference_slope,
    reference_step,
    reference_weight,
    rotary_angles,
    state_values,
)
from arbcli.verify.workers import JobDone, Workers

CHECKS = {
    "output": "every layer's output, on the input that the kernels gave it, against float64",
    "gradient": "gradients of every layer's input and weights, for the same gradient of its"
    " output, against float64 autograd",
    "end to end": "logits and loss from the bytes on, against float64",
    "whole gradient": "of the other models' losses, added up, by every weight as its sink is"
    " handed it, against float64 autograd from the bytes on",
    "causality": "a byte is changed: no earlier logit may differ in a bit, and its own must; in the"
    " graph model earlier ones may by a rounding, as positions share the products of an expert",
    "determinism": "a training step, twice from the same state, compared bit for bit",
    "rotary": "cos**2 + sin**2 = 1, turning back undoes turning, angles against float64",
    "update": "every stored number within one unit of the formula in float64, rounding unbiased",
}
"""What each check compares, and how."""

RAGGED = ModelConfig(dim=36, layers=2, heads=2, ffn=50, ctx=6)
"""Sizes that fit neither 5 nor 32 nor 160, and small enough for the interpreter."""
RAGGED_GRAPH = GraphConfig(
    dim=24, layers=2, heads=2, ffn=13, ctx=6, latent=10, rotary=4, ngram_rows=61, ngram_dim=11,
    key_dim=4, codes=(5, 7), code_dim=17, code_heads=2, knowledge=(6, 4), knowledge_dim=7,
    knowledge_heads=3, top_k=3, experts=3, expert_dim=7, expert_ffn=5, gate_dim=5,
    adapter_rank=3, edges=(17, 2), head_ffn=11, memory_rows=59, max_moe_iters=2, memgram=True,
)  # fmt: skip
"""The same of a `GraphLM` with all of its parts; a context has a 6-gram, which can be recalled."""
GATES = {
    "graph softplus": replace(
        RAGGED_GRAPH, moe_gate="softplus", shared_expert=True, moe_clamp=True
    ),
    "graph hash": replace(RAGGED_GRAPH, moe_gate="hash"),
}
"""The same with other ways to choose experts."""
RAGGED_HNET = HNetConfig(
    dim=24, layers=2, heads=2, ffn=13, ctx=17, outer_dim=(20, 28), outer_layers=(1, 1),
    outer_heads=(2, 1), outer_ffn=(11, 9), chunk_length=(4, 2), window=5,
)  # fmt: skip
"""The same of an `HNet` of two stages; one text has too many chunks for its slots, one too few."""
HNETS = {
    "hnet": RAGGED_HNET,
    "hnet words": replace(
        RAGGED_HNET, outer_dim=20, outer_layers=1, outer_heads=2, outer_ffn=11, chunk_length=8,
        boundaries="space",
    ),
    "hnet every": replace(RAGGED_HNET, boundaries="every"),
    "hnet mamba": replace(
        RAGGED_HNET, outer_dim=20, outer_layers=1, outer_heads=2, outer_ffn=11, chunk_length=5,
        outer_blocks="mamba", states=7,
    ),
}  # fmt: skip
"""An `HNet` of each kind of boundaries."""
RAGGED_COMPRESSED = CompressedConfig(
    dim=24, layers=3, heads=4, ffn=13, ctx=19, head_width=10, kv_heads=2, rotary=6, window=5,
    ratios=(3, 7), indexed_ratio=3, top_k=2, index_heads=3, index_width=8,
)  # fmt: skip
"""The same of a `CompressedLM`: groups and windows are cut off, and not all entries are chosen."""
WITH_CHOICES = {
    "graph": RAGGED_GRAPH,
    **GATES,
    "compressed": RAGGED_COMPRESSED,
    "compressed of all": replace(RAGGED_COMPRESSED, top_k=99),
}
"""What is compared in bf16: a reference takes the choices of these models, or there are none."""
BYTES_OF_REFERENCE = 48
"""Of a weight: itself and its gradient in float64, the kernels' gradient, and what passes by."""
LAYERS = 4
"""Blocks of a preset that are compared, as all of them are alike."""
LR = 2.0
"""Of the compared updates: large enough that trits, scales and clips all take part."""


@dataclass(frozen=True, slots=True)
class ParityResult:
    """How one thing in the model compares with its reference."""

    check: str
    """A key of `CHECKS`."""
    item: str
    model: str
    scale_type: str
    backend: str
    shape: tuple[int, ...]
    gate: str
    reason: str
    """Of the gate."""
    max_error: float | None
    relative_error: float | None
    """Of the norms; None where it is not finite, as the largest error."""
    cosine: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """What is compared: a model on a device, of a type, with a batch."""

    name: str
    config: ModelConfig
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str
    part: str = "model"
    """What of it: `layers`, `model` for causality and determinism besides, or `update`."""
    forced: bool = False
    """Whether a reference takes the model's choices: of codes, experts and halting, of entries."""

    @property
    def of_graph(self) -> bool:
        """Whether it is a `GraphLM`."""
        return isinstance(self.config, GraphConfig)

    @property
    def of_compressed(self) -> bool:
        """Whether it is a `CompressedLM`."""
        return isinstance(self.config, CompressedConfig)

    @property
    def of_hnet(self) -> bool:
        """Whether it is an `HNet`."""
        return isinstance(self.config, HNetConfig)

    def build(self) -> LanguageModel:
        """Make the model, with scales that differ from group to group, and memories that hold some.

        It is the same on every device: all is drawn on the CPU.
        """
        generator = torch.Generator().manual_seed(1)
        with torch.device(self.device):
            model = build_model(self.config, self.dtype)
        for tensor in model.weights().values():
            tensor.spread = 1.0  # of tables too: rows of zeros would hide a lot
            if isinstance(tensor, VectorWeight) and set(tensor.values) != {1.0}:
                # steps and decays of a size at which no gradient is what large sums differ by
                tensor.values = tuple(0.1 + 0.4 / (i + 1) for i in range(tensor.out_features))
        with use_backend("torch"):
            model.initialise(0)
        for tensor in model.weights().values():
            if isinstance(tensor, VectorWeight):  # its scales differ, and say what its numbers are
                continue
            for digits, spread in ((tensor.exponent, 2), (tensor.scales[1], 128)):
                if digits is not None:
                    like = {"generator": generator, "dtype": torch.int8}
                    digits += torch.randint(spread, digits.shape, **like).to(self.device)
                    digits.clamp_(max=127)
            if tensor.scales[1] is not None:
                tensor.fraction.bitwise_and_(127)
        if self.of_graph:
            fill_memories(model, math.prod(self.config.codes))
        return model

    def bytes(self) -> tuple[Tensor, Tensor]:
        """Draw (B, T) inputs and targets."""
        generator = torch.Generator().manual_seed(2)
        shape = (self.batch, self.config.ctx + 1)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        if self.of_hnet:  # words and spaces
            ids = torch.where(ids < VOCABULARY // 3, ord(" "), ids)
        ids = ids.to(self.device)
        return ids[:, :-1], ids[:, 1:]

    def result(
        self, check: str, item: str, got: Tensor, wanted: Tensor, gate: Gate
    ) -> ParityResult:
        """Compare two tensors by a gate."""
        largest, relative, cosine = errors(got, wanted)
        close = relative is not None and relative <= gate.relative
        return ParityResult(
            check=check,
            item=item,
            model=f"{self.name} {'bf16' if self.dtype == torch.bfloat16 else 'fp32'}",
            scale_type=self.config.scale_type,
            backend=self.backend,
            shape=tuple(wanted.shape),
            gate=gate.text,
            reason=gate.reason,
            max_error=largest,
            relative_error=relative,
            cosine=cosine,
            passed=torch.equal(got, wanted) if gate.exact else close,
        )

    @property
    def gate(self) -> Gate:
        """How closely a layer must agree."""
        if self.dtype == torch.bfloat16:
            return Gate(
                exact=False,
                relative=0.03,
                reason="a dozen roundings to bf16, of 2**-9 each, in a layer",
            )
        relative = max(1e-5, self.config.ctx * 2.0**-24)
        return Gate(
            exact=False, relative=relative, reason="float32 sums; float32 angles of late positions"
        )


def check_parity(
    device: torch.device,
    backends: Iterable[str],
    group_sizes: Mapping[str, int],
    workers: Workers | None = None,
    progress: Callable[[JobDone], None] = lambda _: None,
) -> tuple[ParityResult, ...]:
    """Compare the model with its reference, in poisoned memory.

    Args:
        device: where to run. On a GPU the presets are compared too, in bf16 and in float32.
        backends: of the kernel path.
        group_sizes: scale types of the ragged model; presets have their own. Causality and
            determinism are checked with the first.
        workers: processes that share the work; None is this one.
        progress: is told each part that is done, and what it found.
    """
    backends = tuple(backends)
    jobs = [(s.name, s.backend, s) for s in _subjects(device, backends, group_sizes)]
    found = (workers or Workers()).map(_check, jobs, progress)
    return (*_rotary(device), *(result for results in found for result in results))


def _check(_name: str, _backend: str, subject: Subject) -> list[ParityResult]:
    """Make all checks of one subject."""
    with deterministic(), poisoned(warn_only=False):
        if subject.part == "update":
            return list(_votes(subject) if subject.config.rule == "votes" else _update(subject))
        whole = subject.of_graph or subject.of_hnet or subject.of_compressed
        results = list(_whole(subject) if whole else _layers(subject))
        if subject.part == "model":
            results += [*_causality(subject), *_determinism(subject)]
        return results


def matrix_shapes() -> tuple[tuple[int, int], ...]:
    """List the (N, K) of matrices of the presets, each once.

    Of a `GraphLM` they are the largest ones, and of an `HNet` those of its main network.
    """
    shapes: dict[tuple[int, int], None] = {}
    for config in PRESETS.values():
        dim, ffn = config.dim, config.ffn
        if isinstance(config, CompressedConfig):
            inner, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
            shapes |= dict.fromkeys(((inner + 3 * kv, dim), (dim, inner)))
        if isinstance(config, GraphConfig):
            width, inner = config.expert_dim, config.expert_ffn
            found = (2 * ffn, dim), (dim, ffn), (2 * inner, width), (width, inner)
            shapes |= dict.fromkeys((*found, (dim, config.head_ffn)))
            continue
        matrices = (VOCABULARY, dim), (3 * dim, dim), (dim, dim), (2 * ffn, dim), (dim, ffn)
        shapes |= dict.fromkeys(matrices)
    return tuple(shapes)


def short_graph(config: GraphConfig) -> GraphConfig:
    """Make the preset of a `GraphLM` as short as its reference is slow, with all of its parts."""
    return replace(config, layers=2, ctx=8, moe=True, graph=True, memgram=True)


def graph_dtypes(name: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """List in which dtypes a GPU has memory for the reference of a preset of `GraphLM`.

    Other processes share it: where it is not small, it is compared once, as it is trained.
    """
    with torch.device("meta"):
        model = build_model(short_graph(PRESETS[name]))
    needed = BYTES_OF_REFERENCE * sum(tensor.num_weights for tensor in model.weights().values())
    memory = torch.cuda.get_device_properties(device).total_memory
    if 10 * needed < memory:
        return torch.float32, torch.bfloat16
    return (torch.bfloat16,) if 2 * needed < memory else ()


def _subjects(
    device: torch.device, backends: tuple[str, ...], group_sizes: Mapping[str, int]
) -> Iterator[Subject]:
    for backend in backends:
        # the interpreter computes wrongly in bf16
        half = () if backend == "interpreter" else (torch.bfloat16,)
        scale_types = [*group_sizes]
        if backend == "native":  # its loops know groups by their size alone
            scale_types = scale_types[:1]
        for dtype in (torch.float32, *half):
            place = (dtype, device, backend)
            if backend == "triton":
                for name, config in PRESETS.items():
                    if isinstance(config, GraphConfig) and dtype in graph_dtypes(name, device):
                        yield Subject(name, short_graph(config), 1, *place, "layers", True)
                    if isinstance(config, GraphConfig | HNetConfig | CompressedConfig):
                        continue  # small ones stand for them, below
                    fewer = replace(config, layers=min(config.layers, LAYERS))
                    yield Subject(name, fewer, 1, *place)
            # few rows go through the fused products, many do not
            for batch in (1,) if backend == "interpreter" else (1, 12):
                for index, scale_type in enumerate(scale_types):
                    config = replace(RAGGED, scale_type=scale_type)
                    part = "layers" if index else "model"
                    yield Subject(f"ragged {scale_type} batch {batch}", config, batch, *place, part)
        for name in () if backend == "interpreter" else WITH_DIGITS:  # its kernels run above
            config = replace(RAGGED, rule=name, digits="all", scale_type=scale_types[0])
            about = (config, 1, torch.float32, device, backend, "layers")
            yield Subject(f"all digits of {name} {config.scale_type}", *about)
        for streams, digits in ((4, "trit"), (2, "all")) if backend != "interpreter" else ():
            # its kernels run by themselves there
            config = replace(RAGGED, streams=streams, digits=digits)
            config = replace(config, scale_type=scale_types[0])
            about = (config, 2, torch.float32, device, backend)
            yield Subject(f"{streams} streams {config.scale_type}", *about)
        # in bf16 another expert or code may be chosen, and all else follows
        for name, config in WITH_CHOICES.items() if half else ():
            config = replace(config, scale_type=scale_types[0])
            about = (config, 2, torch.bfloat16, device, backend, "layers", True)
            yield Subject(f"{name} {config.scale_type}", *about)
        interpreted = backend == "interpreter"  # 10 s each
        for index, scale_type in enumerate(scale_types[: 2 if interpreted else None]):
            config = replace(RAGGED_GRAPH, scale_type=scale_type)
            part = "layers" if index or interpreted else "model"
            place = (torch.float32, device, backend, part)
            yield Subject(f"graph {scale_type}", config, 2, *place)
        for name, config in GATES.items() if not interpreted else ():
            config = replace(config, scale_type=scale_types[0])
            place = (torch.float32, device, backend, "model")
            yield Subject(f"{name} {config.scale_type}", config, 2, *place)
        for index, (name, config) in enumerate(HNETS.items()):  # interpreted, the first alone
            if index and interpreted:
                continue
            place = (torch.float32, device, backend, "layers" if interpreted else "model")
            config = replace(config, scale_type=scale_types[0])
            yield Subject(f"{name} {config.scale_type}", config, 2, *place)
        for index, scale_type in enumerate(scale_types[: 1 if interpreted else None]):
            config = replace(RAGGED_COMPRESSED, scale_type=scale_type)
            part = "layers" if index or interpreted else "model"
            place = (torch.float32, device, backend, part)
            yield Subject(f"compressed {scale_type}", config, 2, *place, True)
        for name in RULES:
            for direction in DIRECTIONS if find_rule(name).direction else (None,):
                config = replace(RAGGED, rule=name, direction=direction)
                title = f"{name} {direction}" if direction else name
                yield Subject(title, config, 1, torch.float32, device, backend, "update")
            if name in WITH_DIGITS:
                config = replace(
                    RAGGED, rule=name, digits="all", direction=find_rule(name).direction
                )
                title = f"{name} {config.direction} all digits"
                yield Subject(title, config, 1, torch.float32, device, backend, "update")


def fill_memories(part: nn.Module, codes: int) -> None:
    """Put random integers in a graph of so many codes, the balance of experts and n-grams."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in part.named_buffers():
        kind = name.rpartition(".")[2]
        low, high = {
            "source": (0, codes // len(buffer)), "target": (0, codes), "sign": (-127, 128),
            "score": (0, 128), "symbol": (-128, 128), "strength": (0, 128), "balance": (-3, 4),
        }.get(kind, (0, 0))  # fmt: skip
        if high:
            drawn = torch.randint(low, high, buffer.shape, generator=generator)
            if kind == "source":  # a code of the bucket
                drawn = drawn * len(buffer) + torch.arange(len(buffer))[:, None]
            buffer.copy_(drawn)


def dense_gradient(
    tensor: TernaryTensor, grad: Tensor, where: range | TouchedRows | None = None
) -> Tensor:
    """Put a gradient that a sink was handed where it belongs in (N, K) zeros."""
    if where is None:
        return grad
    dense = grad.new_zeros(tensor.out_features, tensor.in_features)
    if isinstance(where, TouchedRows):
        count = int(where.count)
        dense[where.rows[:count]] = grad[:count]
    else:
        dense.view(tensor.matrices, -1, tensor.in_features)[where.start : where.stop] = grad
    return dense


def trace(
    subject: Subject, model: LanguageModel
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Run the real model forward, and backward from the sum of its losses.

    Returns:
        The outputs of the embedding, the blocks and the head, which have their gradients in `grad`;
        the gradients of the weights, and the losses, by name.
    """
    outputs: list[Tensor] = []
    gradients: dict[str, Tensor] = {}

    def keep(_module, _inputs, output: Tensor | tuple[Tensor, ...]) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        first.retain_grad()
        outputs.append(first)

    def add(tensor: TernaryTensor, *handed) -> None:
        name, dense = names[id(tensor)], dense_gradient(tensor, *handed)
        gradients[name] = gradients[name] + dense if name in gradients else dense

    names = {id(tensor): name for name, tensor in model.weights().items()}
    for tensor in model.weights().values():
        tensor.sink = add
    for part in (model.embedding, *model.blocks, model.head):
        part.register_forward_hook(keep)
    with use_backend(subject.backend):
        losses = model.losses(*subject.bytes())
        sum(losses.values()).backward()
    return outputs, gradients, {name: loss.detach() for name, loss in losses.items()}


def _layers(subject: Subject) -> Iterator[ParityResult]:
    """Compare outputs and gradients layer by layer, then logits and loss from the bytes on."""
    model, gate = subject.build(), subject.gate
    (ids, targets), (outputs, gradients, losses) = subject.bytes(), trace(subject, model)
    reached, source, before = ids, ids, None
    for (name, weights, run), got in zip(reference_layers(model), outputs, strict=True):
        wanted = run(source, weights)
        yield subject.result("output", name, got, wanted, gate)
        leaves = {name: leaf for name, leaf in weights.items() if leaf.requires_grad}
        found = {name: gradients[name] for name in leaves}
        if before is not None:
            leaves[f"input of {name}"], found[f"input of {name}"] = source, before.grad
        grads = torch.autograd.grad(wanted, [*leaves.values()], got.grad.double())
        for leaf, grad in zip(leaves, grads, strict=True):
            yield subject.result("gradient", leaf, found[leaf], grad, gate)
        with torch.no_grad():
            reached = run(reached, weights)
        before, source = got, got.detach().double().requires_grad_()
    if subject.dtype == torch.float32:
        loose = replace(gate, relative=10 * gate.relative)
        yield subject.result("end to end", "logits", outputs[-1], reached, loose)
        wanted = reference_loss(reached, targets)
        yield subject.result("end to end", "loss", losses["text"], wanted, loose)


def _whole(subject: Subject) -> Iterator[ParityResult]:
    """Compare a model from the bytes on: logits, losses, and the gradient of every weight."""
    model, gate = subject.build(), subject.gate
    reason, looser = "float32 sums over the whole depth of the model", 10
    if subject.of_hnet and subject.config.outer_blocks == "mamba":
        reason, looser = f"{reason}; gradients of decays are what large sums differ by", 50
    gate = replace(gate, relative=looser * gate.relative, reason=reason)
    of_losses = gate
    if subject.dtype == torch.bfloat16:
        of_losses = replace(gate, relative=0.05)
    ids, targets = subject.bytes()
    with _noted_choices(model) as choices:
        outputs, gradients, losses = trace(subject, model)
    tensors = model.weights()
    weights = {name: reference_weight(tensor) for name, tensor in tensors.items()}
    leaves = {name: w.requires_grad_() for name, w in weights.items() if not tensors[name].frozen}
    forced = choices if subject.forced else None
    if subject.of_compressed:
        logits, divergence = reference_compressed(weights, model.config, ids, forced)
        others = {"indexer": divergence}
    elif subject.of_hnet:
        logits, ratio = reference_hnet(weights, model.config, ids)
        others = {} if ratio is None else {"ratio": ratio}
    else:
        named = {name.removesuffix(".weight"): weight for name, weight in weights.items()}
        logits, shares = reference_graph_lm(named, model, ids, choices=forced)
        others = {} if shares is None else {"ponder": reference_ponder(shares)}
    if forced:
        mine, best = (torch.cat(part) for part in zip(*forced.scores, strict=True))
        yield subject.result("end to end", "scores of choices", mine, best, of_losses)
        if forced.products:
            mine, best = (torch.cat(part) for part in zip(*forced.products, strict=True))
            yield subject.result("end to end", "products above 0", mine, best, of_losses)
    wanted = {"text": reference_loss(logits, targets)} | others
    yield subject.result("end to end", "logits", outputs[-1], logits, of_losses)
    for name, loss in wanted.items():
        yield subject.result("end to end", f"{name} loss", losses[name], loss, of_losses)
    grads = torch.autograd.grad(sum(wanted.values()), [*leaves.values()])
    for name, grad in zip(leaves, grads, strict=True):
        yield subject.result("whole gradient", name, gradients[name], grad, gate)


@contextmanager
def _noted_choices(model: LanguageModel) -> Iterator[Choices]:
    """Note what a `GraphLM` or a `CompressedLM` chooses in a forward."""
    found = Choices({}, [], None)
    handles = []

    def note_rows(name: str, heads: int, _table, given: tuple) -> None:
        if name not in found.rows:  # a graph reads rows, too, behind its codebook
            rows = given[0]
            batch = len(rows) // heads // model.config.ctx
            found.rows[name] = rows.view(batch, -1, heads, rows.shape[1])

    def note_experts(_gate, _given, output: tuple[Tensor, Tensor]) -> None:
        found.experts.append(output[0])

    def note_halting(_part, _given, output: tuple[Tensor, Tensor]) -> None:
        found.halted = (output[1] > 0).sum(dim=0) - 1

    def note_entries(index: int, choose: Callable[..., Tensor], *given, **options) -> Tensor:
        q, _, keys = (part.double() for part in given[:3])
        found.positive[index] = torch.einsum("bnhd,bjd->bnhj", q, keys) > 0
        found.entries[index] = choose(*given, **options)
        return found.entries[index]

    indexers = {}
    if isinstance(model.config, CompressedConfig):
        parts = {index: block.attention.indexer for index, block in enumerate(model.blocks)}
        indexers = {index: indexer for index, indexer in parts.items() if indexer}
        for index, indexer in indexers.items():
            indexer.choose = partial(note_entries, index, indexer.choose)
    if isinstance(model.config, GraphConfig):
        for name in model.config.codebooks:
            book = getattr(model, name)
            note = partial(note_rows, name, book.heads)
            handles.append(book.table.register_forward_pre_hook(note))
        if model.moe_graph:
            handles.append(model.moe_graph.register_forward_hook(note_halting))
            if model.config.moe:
                gate = model.moe_graph.experts.gate
                handles.append(gate.register_forward_hook(note_experts))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for indexer in indexers.values():
            del indexer.choose


@torch.no_grad()
def _causality(subject: Subject) -> Iterator[ParityResult]:
    model, (ids, _) = subject.build(), subject.bytes()
    gate = subject.gate if subject.of_graph else EXACT
    length = ids.shape[1]
    # what begins a chunk, or completes an entry, may see too much, and elsewhere nothing shows it
    blocks = subject.of_hnet or subject.of_compressed
    positions = range(1, length) if blocks else (length // 2, length - 1)
    with use_backend(subject.backend):
        logits = model(ids)
        for position in positions:
            other = ids.clone()
            other[:, position] = (other[:, position] + 100) % VOCABULARY
            changed = model(other)
            same = changed[:, :position], logits[:, :position]
            yield subject.result("causality", f"before byte {position}", *same, gate)
            moved = (changed != logits)[:, position].any(dim=-1)
            wanted = torch.ones_like(moved)
            yield subject.result("causality", f"at byte {position}", moved, wanted, EXACT)


def _determinism(subject: Subject) -> Iterator[ParityResult]:
    runs = []
    for _ in range(2):
        model = subject.build()
        updater = Updater(model.weights().values(), 3, subject.dtype)
        for tensor in updater.tensors:
            tensor.sink = updater
        updater.begin(0, LR)
        with use_backend(subject.backend):
            losses = model.losses(*subject.bytes())
            sum(losses.values()).backward()
            model.after_step()
        losses = [loss.detach() for loss in losses.values()]
        runs.append([*losses, *model.state_dict().values()])
    differing = torch.stack([(a != b).sum() for a, b in zip(*runs, strict=True)])
    zeros = torch.zeros_like(differing)
    yield subject.result("determinism", "loss and state", differing, zeros, EXACT)


def _rotary(device: torch.device) -> Iterator[ParityResult]:
    generator = torch.Generator(device).manual_seed(5)
    bits = Gate(exact=False, relative=1e-6, reason="float32; in bf16 it would be off by 0.4 %")
    for name, config in {"ragged": RAGGED, **PRESETS}.items():
        subject = Subject(name, config, 1, torch.float32, device, "torch")
        length, width = config.ctx, config.head_dim
        cos, sin = rotary_table(length, width, device)
        square = cos.double() ** 2 + sin.double() ** 2
        one = subject.result("rotary", "cos**2 + sin**2", square, torch.ones_like(square), bits)
        yield replace(one, gate="each within 1e-06", passed=(one.max_error or 0.0) <= 1e-6)
        x = torch.randn(length, width, generator=generator, device=device)
        back = rotate(rotate(x, cos, sin), cos, -sin)
        yield subject.result("rotary", "inverse", back, x, bits)
        angle = rotary_angles(length, width, device)
        reason = "the angle of the last position, rounded to float32"
        gate = Gate(exact=False, relative=length * 2.0**-23, reason=reason)
        table, wanted = torch.cat([cos, sin]), torch.cat([angle.cos(), angle.sin()])
        yield subject.result("rotary", "angles", table, wanted, gate)


def _tensor(subject: Subject) -> tuple[TernaryTensor, list[Tensor]]:
    """Make a packed tensor, and two gradients of long tails, whose rows and columns differ."""
    generator = torch.Generator(subject.device).manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=subject.device)

    with torch.device(subject.device), use_backend("torch"):
        tensor = TernaryTensor(37, 165, subject.config, area="mlp", std=0.1)
        tensor.initialise(0, 0)
    return tensor, [
        normal(37, 165) ** 3 * normal(37, 1).exp() * normal(165).exp() for _ in range(2)
    ]


def _update(subject: Subject) -> Iterator[ParityResult]:
    """Compare one step with the formulas, of one micro-batch and of two, and a refused one."""
    config, unit = subject.config, {"z": 1.0, "v": 1.0}
    rule = find_rule(config.rule, config.digits)
    if rule.moment_range:
        alone = "moment" in rule.buffers(1, 1, 1)  # else it has four bits of a byte
        unit["m"] = rule.moment_range / (127 if alone else 7)
    for micros in (1, 2):
        tensor, grads = _tensor(subject)
        updater = Updater([tensor], 3, torch.float32)
        for micro, grad in enumerate(grads[:micros]):
            before = state_values(tensor)
            slope = reference_slope(grad, reference_weight(tensor), tensor.group_size)
            with use_backend(subject.backend):
                updater.begin(0, LR, micro, micros)
                updater(tensor, grad)
            after = state_values(tensor)
            direction = reference_direction(grad, config.direction, before)
            wanted = reference_step(tensor, before, after["m"], direction, slope, LR, micro, micros)
            for name, size in unit.items():
                got = (after[name] / size, wanted[name] / size)
                yield _rounded(subject, f"{name} of micro-batch {micro + 1}/{micros}", *got)
    before = {name: buffer.clone() for name, buffer in tensor.named_buffers()}
    grad[3, 5] = torch.nan
    with use_backend(subject.backend):
        updater(tensor, grad)
    for name, buffer in tensor.named_buffers():
        yield subject.result("update", f"{name} given NaN", buffer, before[name], EXACT)


def _rounded(subject: Subject, item: str, got: Tensor, wanted: Tensor) -> ParityResult:
    """Compare numbers that were rounded stochastically to integers, first each, then the mean."""
    error, bias = got - wanted, 5 * 0.5 / got.numel() ** 0.5
    gate = Gate(exact=False, reason="rounding moves by less than 1; statistics are stored to 0.5 %")
    result = subject.result("update", item, got, wanted, gate)
    passed = bool((error.abs() <= 1.1).all()) and abs(float(error.mean())) <= bias
    return replace(result, gate=f"each within 1.1, mean within {bias:.2f}", passed=passed)


def _votes(subject: Subject) -> Iterator[ParityResult]:
    tensor, (grad, _) = _tensor(subject)
    ok = torch.ones((), dtype=torch.int32)
    slope, *_ = gradient_statistics_reference(grad, tensor.packed, factored=False, signs=True)
    wanted = (
        *cast_trit_votes_reference(tensor.trits, tensor.votes, grad, ok)[:2],
        *cast_scale_votes_reference(tensor.exponent, tensor.scale_votes, slope, ok),
    )
    updater = Updater([tensor], 3, torch.float32)
    with use_backend(subject.backend):
        updater.begin(0, LR)
        updater(tensor, grad)
    for name, expected in zip(("trits", "votes", "exponent", "scale_votes"), wanted, strict=True):
        yield subject.result("update", name, getattr(tensor, name), expected, EXACT)
