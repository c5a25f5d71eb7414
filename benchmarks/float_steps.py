"""Optimizers of the field that spare memory, for `float_qwen`: peers of tuning in integers.

Weights are bf16 and rounded stochastically, and each gradient is applied and released as soon as it
is there, for Adafactor and for AdamW with moments in bf16 or in eight bits. BAdam keeps a float32
copy and moments of one block at a time. Adapters are float32, on bf16 weights that are frozen.
Whatever changes between steps is a tensor on the device, so that a step can be a CUDA graph.
"""

import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from arbcli.kernels.runtime.device import capturing
from arbcli.training.compiled_baseline import side_stream
from benchmarks.float_qwen import FloatQwen

BETAS = (0.9, 0.95)
EPS = 1e-8
CODE_BLOCK = 256
"""Values of a moment in eight bits that share their largest magnitude."""
STEPS_OF_A_BLOCK = 25
"""Before BAdam goes on to another block."""
COMPILE_LIMIT = 64
"""Maximum number of compiled variants of an update function, one per shape."""
torch._dynamo.config.recompile_limit = COMPILE_LIMIT


class FloatSteps:
    """How weights of a model are stepped.

    Args:
        model: whose weights they are.
        lr: learning rate; `lr`, a scalar on the device, may be written between steps.
    """

    def __init__(self, model: FloatQwen, lr: float) -> None:
        self.model, self.steps = model, 0
        device = model.embedding.device
        self.lr = torch.tensor(lr, device=device)
        self.by_step = torch.ones(2, device=device)
        """Bias corrections of Adam's two moments at this step, (2,) float32."""

    def next_step(self) -> None:
        """Begin a step."""
        self.steps += 1
        for known, beta in zip(self.by_step, BETAS, strict=True):
            known.fill_(1 - beta**self.steps)

    repeats = True
    """Whether all steps do the same, so that one can be captured."""
    is_adding = False
    """Whether more micro-batches follow in this step, so that gradients are only added up."""

    def finish(self) -> None:
        """Step by the gradients that were not released."""

    def state_tensors(self) -> list[Tensor]:
        """List what is kept between steps besides the weights of the model."""
        raise NotImplementedError


class Released(FloatSteps):
    """Steps each weight as soon as its gradient of the whole step is there, and releases that."""

    def __init__(self, model: FloatQwen, lr: float) -> None:
        super().__init__(model, lr)
        self.state: dict[Tensor, tuple[Tensor, ...]] = {}
        for weight in model.parameters():
            self.state[weight] = self.start(weight)
            weight.register_post_accumulate_grad_hook(self._step)

    def start(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Make the state of a weight."""
        raise NotImplementedError

    def function(self, weight: Tensor) -> Callable[..., None]:
        """Choose what steps a weight: by the weight, its gradient, its state, `lr`, `by_step`."""
        raise NotImplementedError

    @torch.no_grad()
    def _step(self, weight: Tensor) -> None:
        if self.is_adding:
            return
        grad, weight.grad = weight.grad, None
        self.function(weight)(weight, grad, *self.state[weight], self.lr, self.by_step)

    def state_tensors(self) -> list[Tensor]:
        """List what is kept between steps besides the weights of the model."""
        return [part for parts in self.state.values() for part in parts]


class ReleasedAdafactor(Released):
    """Adafactor without a first moment; root-mean-squares of rows and columns are float32.

    Source: N. Shazeer and M. Stern, https://arxiv.org/abs/1804.04235
    """

    def start(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Make mean squares of rows and columns, or of the numbers of a vector."""
        return tuple(torch.zeros(size, device=weight.device) for size in weight.shape)

    def next_step(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.by_step.fill_(1 - self.steps**-0.8)

    def function(self, weight: Tensor) -> Callable[..., None]:
        """Choose what steps a weight."""
        return _adafactor_matrix if weight.dim() == 2 else _adafactor_vector


class ReleasedAdamW(Released):
    """AdamW with moments in bf16, without weight decay."""

    def start(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Make both moments."""
        return torch.zeros_like(weight), torch.zeros_like(weight)

    def function(self, weight: Tensor) -> Callable[..., None]:
        """Choose what steps a weight."""
        return _adamw


class ReleasedAdamW8(ReleasedAdamW):
    """The same with moments of matrices in eight bits, in blocks of 256, but for the embedding.

    Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
    https://arxiv.org/abs/2110.02861
    """

    def __init__(self, model: FloatQwen, lr: float) -> None:
        device = model.embedding.device
        self.codes = tuple(dynamic_codes(signed).to(device) for signed in (True, False))
        super().__init__(model, lr)

    def start(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Make codes and sizes of both moments; vectors and the embedding have them in bf16."""
        if not self._has_codes(weight):
            return super().start(weight)
        blocks = weight.numel() // CODE_BLOCK
        tensors: list[Tensor] = []
        for codes in self.codes:
            zero = int(codes.abs().argmin())
            moment = torch.full((blocks, CODE_BLOCK), zero, dtype=torch.uint8)
            tensors += [moment.to(weight.device), torch.zeros(blocks, 1, device=weight.device)]
        return (*tensors, *self.codes)

    def function(self, weight: Tensor) -> Callable[..., None]:
        """Choose what steps a weight."""
        return _adamw_of_codes if self._has_codes(weight) else _adamw

    def _has_codes(self, weight: Tensor) -> bool:
        # second moments of rare symbols are far below those of others in the same block
        return weight.dim() == 2 and weight is not self.model.embedding

    def state_tensors(self) -> list[Tensor]:
        """List what is kept between steps besides the weights of the model."""
        return [part for parts in self.state.values() for part in parts[:4]]


class BlockAdam(FloatSteps):
    """BAdam: AdamW on a float32 copy of one block at a time, in a new order with every round.

    Embedding and head are blocks too. Source: Q. Luo et al., https://arxiv.org/abs/2404.02827
    """

    repeats = False

    def __init__(self, model: FloatQwen, lr: float) -> None:
        super().__init__(model, lr)
        self.blocks: list[list[Tensor]] = [[*block.parameters()] for block in model.blocks]
        head = [] if model.shape.tied else [model.head]
        self.blocks += [[model.embedding], [model.norm, *head]]
        self.order: list[list[Tensor]] = []
        self.random = random.Random(0)
        self.active: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.adam: torch.optim.AdamW | None = None

    def next_step(self) -> None:
        """Begin a step, maybe with another block."""
        if self.steps % STEPS_OF_A_BLOCK == 0:
            if not self.order:
                self.order = self.random.sample(self.blocks, len(self.blocks))
            self.model.requires_grad_(False)
            self.active = self.order.pop()
            for weight in self.active:
                weight.requires_grad_(True)
            self.copies = [weight.detach().float() for weight in self.active]
            self.adam = _torch_adamw(self.copies, self.lr)
        self.steps += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Step the block."""
        for weight, copy in zip(self.active, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        assert self.adam is not None
        self.adam.step()
        for weight, copy in zip(self.active, self.copies, strict=True):
            weight.copy_(copy)

    def state_tensors(self) -> list[Tensor]:
        """List what is kept of the block that is stepped now."""
        states = self.adam.state.values() if self.adam else ()
        return [*self.copies, *(part for state in states for part in state.values())]


class AdamW(FloatSteps):
    """torch's AdamW on all weights that are trained, fused on a GPU."""

    def __init__(self, model: FloatQwen, lr: float) -> None:
        super().__init__(model, lr)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.adam = _torch_adamw(trained, self.lr)

    def finish(self) -> None:
        """Step all of them."""
        self.adam.step()
        self.adam.zero_grad()

    def state_tensors(self) -> list[Tensor]:
        """List what is kept between steps besides the weights of the model."""
        return [part for state in self.adam.state.values() for part in state.values()]


def _torch_adamw(weights: Iterable[Tensor], lr: Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        weights, lr=lr, betas=BETAS, weight_decay=0.0, fused=lr.is_cuda or None,
        capturable=lr.is_cuda,
    )  # fmt: skip


class Adapters(AdamW):
    """AdamW on adapters of low rank: w + 2 b a, the weights being frozen.

    Source: E. Hu et al., "LoRA", https://arxiv.org/abs/2106.09685

    Args:
        model: whose weights they adapt.
        lr: learning rate.
        rank: of the adapters.
        names: matrices of a block that have one.
    """

    def __init__(self, model: FloatQwen, lr: float, rank: int, names: tuple[str, ...]) -> None:
        model.requires_grad_(False)
        for matrices, factors in zip(model.matrices, model.factors, strict=True):
            for name in names:
                factors[name] = nn.ParameterDict(_adapter(matrices[name], rank))
        super().__init__(model, lr)


def _adapter(weight: Tensor, rank: int) -> dict[str, nn.Parameter]:
    rows, columns = weight.shape
    a = torch.randn(rank, columns, device=weight.device) / columns**0.5
    return {"a": nn.Parameter(a), "b": nn.Parameter(torch.zeros(rows, rank, device=a.device))}


class WholeStep:
    """A step of training: forward, backward and updates, on a GPU as one CUDA graph where it can.

    Args:
        model: to train.
        updates: of its weights.
        accum: micro-batches of a step, whose gradients are added up in the dtype of the weights.
    """

    EAGER_STEPS = 3

    def __init__(self, model: FloatQwen, updates: FloatSteps, accum: int = 1) -> None:
        self.model, self.updates, self.accum, self.done = model, updates, accum, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if updates.lr.is_cuda and updates.repeats else None

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Step by a batch, (accum B, T) int64 each; return the loss before, a float32 scalar."""
        self.updates.next_step()
        if self.stream is None:
            return self._compute(ids, targets)
        if self.graph is None and self.done == self.EAGER_STEPS:
            self.batch = (ids.clone(), targets.clone())
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with capturing(self.graph, stream=self.stream):
                self.loss = self._compute(*self.batch)
        self.done += 1
        if self.graph is None:
            with side_stream(self.stream):
                return self._compute(ids, targets)
        for held, new in zip(self.batch, (ids, targets), strict=True):
            held.copy_(new)
        self.graph.replay()
        return self.loss

    def state_bytes(self) -> int:
        """Add up the bytes of the weights, and of what is kept with them."""
        tensors = [*self.model.parameters(), *self.updates.state_tensors()]
        return sum(tensor.nbytes for tensor in tensors)

    def _compute(self, ids: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=ids.device)
        pairs = zip(ids.chunk(self.accum), targets.chunk(self.accum), strict=True)
        for number, pair in enumerate(pairs, 1):
            self.updates.is_adding = number < self.accum
            loss = self.model.loss(*pair, tokens=targets.numel())
            loss.backward()
            total += loss.detach()
        self.updates.finish()
        return total


EVERY_MATRIX = ("q", "k", "v", "o", "gate", "up", "down")
KINDS: dict[str, Callable[[FloatQwen, float], FloatSteps]] = {
    "bf16 Adafactor": ReleasedAdafactor,
    "bf16 AdamW": ReleasedAdamW,
    "bf16 AdamW, eight bits": ReleasedAdamW8,
    "BAdam": BlockAdam,
    "LoRA 256": lambda model, lr: Adapters(model, lr, 256, EVERY_MATRIX),
    "LoRA 16": lambda model, lr: Adapters(model, lr, 16, ("q", "k", "v", "o")),
    "LoRA 16, all matrices": lambda model, lr: Adapters(model, lr, 16, EVERY_MATRIX),
}
"""How bf16 weights are tuned, by kind."""


def dynamic_codes(signed: bool) -> Tensor:
    """List the 256 values of the dynamic data type for optimizers, ascending, float32, up to 1.

    An exponent of ten, counted by zeros, and the rest of the bits for a linear fraction.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1)
        magnitudes = (10.0 ** (exponent - 6) * (ends[:-1] + ends[1:]) / 2).tolist()
        values += magnitudes + [-value for value in magnitudes if signed]
    return torch.tensor(sorted(values))


@torch.compile(dynamic=False)
def _adafactor_matrix(
    weight: Tensor, grad: Tensor, rows: Tensor, columns: Tensor, lr: Tensor, decays: Tensor
) -> None:
    squares, decay = grad.float().square() + 1e-30, decays[0]
    rows.lerp_(squares.mean(1), 1 - decay)
    columns.lerp_(squares.mean(0), 1 - decay)
    update = grad.float() * (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()
    _round(weight, lr * update / update.square().mean().sqrt().clamp(min=1.0))


@torch.compile(dynamic=False)
def _adafactor_vector(
    weight: Tensor, grad: Tensor, squares: Tensor, lr: Tensor, decays: Tensor
) -> None:
    squares.lerp_(grad.float().square() + 1e-30, 1 - decays[0])
    update = grad.float() * squares.rsqrt()
    _round(weight, lr * update / update.square().mean().sqrt().clamp(min=1.0))


@torch.compile(dynamic=False)
def _adamw(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, lr: Tensor, corrections: Tensor
) -> None:
    averaged, squared = _averages(grad.float(), mean.float(), square.float())
    mean.copy_(averaged)
    square.copy_(squared)
    _round(weight, lr * _adam(averaged, squared, corrections))


@torch.compile(dynamic=False)
def _adamw_of_codes(
    weight: Tensor, grad: Tensor, mean: Tensor, mean_size: Tensor, square: Tensor,
    square_size: Tensor, signed: Tensor, unsigned: Tensor, lr: Tensor, corrections: Tensor,
) -> None:  # fmt: skip
    averaged, squared = _averages(
        grad.float().view(mean.shape),
        signed[mean.int()] * mean_size,
        unsigned[square.int()] * square_size,
    )
    for moment, codes, size, values in (
        (averaged, mean, mean_size, signed),
        (squared, square, square_size, unsigned),
    ):
        size.copy_(moment.abs().amax(1, keepdim=True))
        between = (values[1:] + values[:-1]) / 2
        codes.copy_(torch.bucketize(moment / size.clamp(min=1e-30), between))
    _round(weight, lr * _adam(averaged, squared, corrections).view(weight.shape))


def _averages(grad: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    return mean.lerp(grad, 1 - BETAS[0]), square.lerp(grad.square(), 1 - BETAS[1])


def _adam(mean: Tensor, square: Tensor, corrections: Tensor) -> Tensor:
    return mean / corrections[0] / ((square / corrections[1]).sqrt() + EPS)


def _round(weight: Tensor, step: Tensor) -> None:
    """Step bf16 weights, and round them stochastically."""
    bits = (weight.float() - step).view(torch.int32)
    bits = bits + torch.randint_like(bits, 0, 2**16)
    weight.copy_((bits & -(2**16)).view(torch.float32).to(torch.bfloat16))
