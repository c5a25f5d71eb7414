"""Training, one step at a time: what a run computes, and nothing of its files."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from arbcli.checkpoint import Checkpoint, check_layout
from arbcli.config.training import TrainConfig
from arbcli.data import Texts, batch, digest, evaluation_batches
from arbcli.device import COMPUTE, tell_compiler
from arbcli.errors import ArbError
from arbcli.infer.load import is_export
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.train.compiled_twin import compile_twin, side_stream
from arbcli.train.float_optimizer import FloatOptimizer
from arbcli.train.schedule import learning_rate
from arbcli.train.step import TrainingStep
from arbcli.train.updater import Updater

EAGER_STEPS = 3
"""Steps before a step is captured: kernels compile and libraries make up their minds in them."""
EVAL_BATCHES = 40
"""Of an evaluation."""


def text_digest(texts: Texts) -> str:
    """Name the content of both texts of a run."""
    return f"{digest(texts.train)}-{digest(texts.val)}"


class Trainer:
    """A model with its updates and its text, one step at a time.

    Args:
        config: what to compute.
        texts: what to read.
        capture: after a few steps, replay the step as one CUDA graph: the same kernels and the same
            bits without the launches' cost. Hooks on the model see nothing of a replayed step. A
            float twin is compiled besides, which moves its last bits.
    """

    def __init__(self, config: TrainConfig, texts: Texts, *, capture: bool = False) -> None:
        self.config, self.texts = config, texts
        self.device = torch.device(config.device)
        dtype = COMPUTE[config.compute]
        with torch.device(self.device):
            self.model = build_model(
                config.model, dtype, recompute=config.recompute, fp8=config.compute == "fp8"
            )
        capture = capture and config.backend == "triton"
        self.step = 0
        self.between_steps = True
        """Whether the state is that of a whole number of steps; an error may end one half-way."""
        self.loss_parts: dict[str, Tensor] = {}
        """Parts of the last step's loss, float32 scalars by name."""
        self.updater: Updater | None = None
        self.optimizer: FloatOptimizer | None = None
        with use_backend(config.backend):
            self.model.initialise(config.seed)
        if config.model.weights == "ternary":
            tensors = self.model.weights().values()
            self.updater = Updater(tensors, config.seed, dtype)
            for tensor in tensors:
                tensor.sink = self.updater
        else:
            self.optimizer = FloatOptimizer(self.model, config.optimizer, compiled=capture)
        self._updates = self.updater or self.optimizer
        self._compute = TrainingStep(self.model, self._updates, config.accum)
        self._warm_up_stream: torch.cuda.Stream | None = None
        if capture and self.optimizer:
            tell_compiler()
            compile_twin(self.model)
            self._warm_up_stream = torch.cuda.Stream(self.device)
        self._capture_at = EAGER_STEPS if capture else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: Tensor | None = None

    @property
    def captures(self) -> bool:
        """Whether steps are, or will be, one CUDA graph."""
        return self._capture_at is not None

    @property
    def num_weights(self) -> int:
        """Weights that are trained."""
        if self.updater:
            return self.updater.num_weights
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.step)

    def train_step(self, reached: Callable[[str], None] = lambda stage: None) -> Tensor:
        """Do one step.

        Args:
            reached: is told of each stage that ends, see `TrainingStep`; not of a replayed step's.

        Returns:
            The loss before it, a float32 scalar tensor in nats a byte; reading it waits for a GPU.
        """
        self._load_batches()
        self._updates.set_step(self.step, self.lr, self.config.accum)
        if self._graph is None and self._capture_at == self.step:
            self._capture()
        self.between_steps = False
        with use_backend(self.config.backend):
            if self._graph is not None:
                self._graph.replay()
                self.loss_parts = self._captured_parts
            else:
                with side_stream(self._warm_up_stream):
                    self.loss_parts = self._compute(self._micro_batches, reached)
            loss = self.loss_parts["text"].clone()  # a replay overwrites its own
        self.step += 1
        self.between_steps = True
        return loss

    def fetch(self, micro: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Draw a micro-batch of the next step: inputs and targets, (B, T) int64 each."""
        return batch(
            self.texts.train,
            seed=self.config.seed,
            step=self.step,
            micro=micro,
            batch_size=self.config.batch,
            context=self.config.model.ctx,
            device=device,
        )

    def _load_batches(self) -> None:
        """Fetch the micro-batches of this step, on a GPU into the buffers that a graph reads."""
        batches = [self.fetch(micro, "cpu") for micro in range(self.config.accum)]
        if self.device.type == "cuda":
            loaded = torch.stack([torch.stack(pair) for pair in batches]).pin_memory()
            if self._batches is None:
                self._batches = loaded.to(self.device)
            self._batches.copy_(loaded, non_blocking=True)
            batches = list(self._batches)  # (2, B, T) int64 each
        self._micro_batches = batches

    def _capture(self) -> None:
        """Record a step as a CUDA graph. Recording executes nothing, so no state changes."""
        torch.cuda.empty_cache()  # what the steps before it held is held by the graph from now on
        self._graph = torch.cuda.CUDAGraph()
        with use_backend(self.config.backend), torch.cuda.graph(self._graph):
            self._captured_parts = self._compute(self._micro_batches)

    @torch.no_grad()
    def evaluate(self, num_batches: int = EVAL_BATCHES) -> float:
        """Average the loss over fixed batches of the held-out text, in nats a byte."""
        losses = []
        with use_backend(self.config.backend):
            for ids, targets in evaluation_batches(
                self.texts.val,
                num_batches=num_batches,
                batch_size=self.config.batch,
                context=self.config.model.ctx,
                device=self.device,
            ):
                losses.append(self.model.loss(ids, targets))
        return float(torch.stack(losses).mean())

    def state_bytes(self) -> int:
        """Count what survives a step."""
        state = [*self.model.buffers(), *self.model.parameters()]
        if self.optimizer:
            state += self.optimizer.state_tensors()
        return sum(tensor.nbytes for tensor in state)

    def checkpoint(self, text_digest: str, init_digest: str | None = None) -> Checkpoint:
        """Gather the whole state, and the settings that made it.

        Args:
            text_digest: of both texts.
            init_digest: of the checkpoint that the run began with; None if it began with none.
        """
        settings = self.config.decisive() | {"init_from": init_digest}
        seed = settings.pop("seed")
        return Checkpoint(
            step=self.step,
            config=dataclasses.asdict(self.config.model),
            counters=self.updater.counters(),
            data={
                "digest": text_digest,
                "seed": seed,
                "position": self.step,
                "settings": settings,
            },
            tensors=self.model.state_dict(),
        )

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Begin with the state of a checkpoint, at step 0 and with counters of 0.

        Raises:
            ArbError: it is of another model.
        """
        if is_export(checkpoint):
            raise ArbError(
                "the file has the weights alone, and no state to train on from",
                hint="name a checkpoint of the run that it is an export of",
            )
        check_layout(checkpoint.tensors, self.model.state_dict())
        self.model.load_state_dict(checkpoint.tensors)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint.

        Raises:
            ArbError: it is of another model.
        """
        self.take_weights(checkpoint)
        self.updater.restore(checkpoint.counters)
        self.step = checkpoint.step
        if self._capture_at is not None:
            self._graph, self._capture_at = None, self.step + EAGER_STEPS
