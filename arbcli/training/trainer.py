"""The trainer: model, updates and texts of a run, without its files."""

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbcli.base.errors import ArbError, quoted, setting_error
from arbcli.base.lazy import imported
from arbcli.config.model import VOCABULARY
from arbcli.config.training import TrainConfig
from arbcli.data.text import (
    EVAL_SEED,
    Text,
    Texts,
    batch_at,
    batch_starts,
    digest,
    evaluation_starts,
    num_evaluation_batches,
)
from arbcli.families import BYTE_KINDS, OBJECTIVES
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import COMPUTE, EAGER_STEPS, capturing, set_compiler_determinism
from arbcli.model.build import build_model
from arbcli.model.checkpoint import (
    FLOAT_STATE,
    TOKENIZER_DIGEST,
    Checkpoint,
    check_layout,
    check_trainable,
    tensor_digest,
)
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import pass_gradients
from arbcli.model.rules import stage_rule
from arbcli.model.updater import HELD_BYTES, Updater
from arbcli.training.parallel.group import Group
from arbcli.training.schedule import fade_stage, learning_rate
from arbcli.training.step import TrainingStep, total_loss

if TYPE_CHECKING:
    from arbcli.training.float_optimizer import FloatOptimizer
    from arbcli.training.parallel.shared_updater import SharedUpdater
    from arbcli.training.step_inputs import StepInputs

RELOAD = "continue from the last checkpoint with `--resume`; if it recurs, a GPU may be faulty"
AVERAGE = ".average"
"""Suffix of the names of averages of weights."""
STATISTICS = (".row_statistic", ".column_statistic")
"""Endings of the names of a direction's statistics."""
WIRE = ".wire_exponent"
"""Suffix of the names of buffers that only runs with several processes have."""


def check_shares(config: TrainConfig, size: int) -> None:
    """Check that a run can be shared by `size` processes.

    Raises:
        ArbError: it cannot.
    """
    if config.accum % size:
        raise setting_error(
            f"{config.accum} micro-batches cannot be divided evenly among {size} processes",
            f"use a number of processes that divides it, or start a run with `accum={size}`",
        )
    if size > 1 and config.model.weights == "ternary" and config.reduce_dtype is None:
        raise setting_error(
            "uncompressed gradients cannot be shared across processes",
            "use one process, or start a run with `reduce_dtype=int16`",
        )


def check_areas(config: TrainConfig, model: LanguageModel) -> None:
    """Check that the areas of `scale_losses` exist in the model.

    Raises:
        ArbError: an area does not exist.
    """
    known = dict.fromkeys(getattr(weight, "area", None) for weight in model.weights().values())
    for area in itertools.chain(*config.scale_routes.values()):
        if area not in known:
            names = quoted(known)
            raise ArbError(
                f"`scale_losses` names `{area}`, which is not an area of the model",
                f"choose among: {names}",
                fields=("scale_losses",),
            )


def text_digest(texts: Texts) -> str:
    """Return the digest of both texts of a run."""
    return f"{digest(texts.train)}-{digest(texts.val)}"


class Trainer:
    """Trains a model step by step.

    Args:
        config: configuration of the run.
        texts: training and held-out text.
        capture: whether to replay the step as a CUDA graph after a few steps, with the same kernels
            and bits. Hooks on the model are not called in a replay. Float baselines are also
            compiled, which changes their rounding.
        group: the processes that share the run; None is a single process.
        teacher: checkpoint of the teacher of `config`, from `read_teacher`.

    Raises:
        ArbError: the run cannot be shared by the processes.
        ValueError: `config` has a teacher, and `teacher` is None.
    """

    def __init__(
        self,
        config: TrainConfig,
        texts: Texts,
        *,
        capture: bool = False,
        group: Group | None = None,
        teacher: Checkpoint | None = None,
    ) -> None:
        if config.teacher is not None and teacher is None:
            raise ValueError("the teacher must be read first: see `read_teacher`")
        # alternatives to a dense run in one process are imported on use
        self.config, self.texts = config, texts
        self.group = group or Group()
        check_shares(config, self.group.size)
        self.device = torch.device(config.device)
        dtype = COMPUTE[config.compute]
        with torch.device(self.device), use_backend(config.backend):
            self.model = build_model(
                config.model,
                dtype,
                seed=config.seed,
                recompute=config.recompute,
                pack=config.pack,
                number_format=config.compute,
            )
        self.model.tokenizer = texts.tokenizer
        capture = compiled = capture and config.backend == "triton"
        self.step = 0
        self.is_consistent = True
        """Whether the state is consistent; False after an error within a step."""
        self.loss_parts: dict[str, Tensor] = {}
        """Terms of the last step's loss, float32 scalars by name."""
        self.updater: Updater | None = None
        self.shared: SharedUpdater | None = None
        """The updater, if gradients are reduced as integers."""
        self.optimizer: FloatOptimizer | None = None
        if config.model.weights == "ternary":
            tensors = self.model.packed_tensors().values()
            if config.weight_average:
                imported("arbcli.model.averages:declare_averages")(self.model)
                self._start_averages()
            if config.reduce_dtype is None:
                self.updater = Updater(
                    tensors, config.seed, dtype, HELD_BYTES, config.decay, config.weight_average
                )
            else:
                self.model.declare_wire()
                new_updater = imported("arbcli.training.parallel.shared_updater:SharedUpdater")
                self.updater = self.shared = new_updater(tensors, config, dtype, self.group)
            pass_gradients(tensors, self.updater)
            self._updates: Updater | FloatOptimizer = self.updater
        else:
            new_optimizer = imported("arbcli.training.float_optimizer:FloatOptimizer")
            self._updates = self.optimizer = new_optimizer(
                self.model, config.optimizer, config.decay, config.weight_average, compiled=compiled
            )
        self._compute = TrainingStep(self.model, self._updates, config.accum, self.group)
        self._compute.scale_routes = config.scale_routes
        if config.drops:
            from arbcli.training.dropout import DropoutKeys

            self._compute.dropout = DropoutKeys(config, self.model.num_branches, self.device)
        self.teacher_digest = teacher and teacher.digest
        self.teacher: LanguageModel | None = None
        if teacher:
            from arbcli.training.teacher import frozen_model

            self.teacher = frozen_model(teacher, self.device, dtype)
            self._compute.losses = partial(self.model.losses, teacher=self.teacher)
        check_areas(config, self.model)
        self._byte_kinds: dict[Text, Any] = {}
        """Kinds of the bytes of texts, for a composite head."""
        self._local = self.group.local(config.accum)
        if self.optimizer and self.group.size > 1:
            from arbcli.training.parallel.replicas import Replicas

            capture = False
            self._compute.losses = Replicas(self.model, len(self._local))
        self._eager_context: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context of steps that are not replayed."""
        self.is_compiled = compiled and self.optimizer is not None
        """Whether `torch.compile` is used, as for float baselines on a GPU."""
        if self.is_compiled:
            from arbcli.training.compiled_baseline import compile_baseline, side_stream

            set_compiler_determinism()
            compile_baseline(self.model)
            if capture:
                self._eager_context = partial(side_stream, torch.cuda.Stream(self.device))
        self._capture_at = EAGER_STEPS if capture else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tables: Tensor | None = None
        """Argument tables of the graph's merged launches."""
        self._table_numbers = 0
        """Number of integers in the tables of the last eager step."""
        self._step_inputs: StepInputs | None = None
        """Copies windows, and parameters of updates, to a GPU; None on other devices."""
        if self.device.type == "cuda":
            new_inputs = imported("arbcli.training.step_inputs:StepInputs")
            self._step_inputs = new_inputs(config, self.device, self.updater)
        self._measured = False
        """Whether the quantisation scales of gradients are known."""
        self._counts: list[int] | None = None
        """Number of symbols with a loss in each micro-batch of the step: see `_learnt_symbols`."""
        self.digits = config.model.digits
        """Form of the weights as in `ModelConfig`; while they fade, the stage of this step."""
        self._fade()

    @property
    def captures(self) -> bool:
        """Whether steps are, or will be, captured as a CUDA graph."""
        return self._capture_at is not None

    @property
    def num_weights(self) -> int:
        """Number of weights including frozen norms, as `arb count-params` counts them."""
        return self.model.num_weights

    @property
    def num_floats(self) -> tuple[int, int]:
        """Numbers of elements of float parameters and of float buffers; 0 for ternary models."""
        buffers = (buffer for buffer in self.model.buffers() if buffer.is_floating_point())
        parameters = sum(tensor.numel() for tensor in self.model.parameters())
        return parameters, sum(tensor.numel() for tensor in buffers)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.config, self.step)

    def train_step(self, reached: Callable[[str], None] = lambda stage: None) -> Tensor:
        """Run one step.

        Args:
            reached: called at the end of each phase, see `TrainingStep`, except in replays.

        Returns:
            The loss before the update, a float32 scalar in nats per symbol; reading it synchronises
            with the GPU.
        """
        self._load_batches()
        if self._compute.dropout:
            self._compute.dropout.set_step(self.step)
        if self.shared and not self._measured:
            self._measure()
        if not (self._step_inputs and self._step_inputs.updater):
            self._updates.set_step(self.step, self.lr, self.config.accum, self._counts)
        if self._graph is None and self._capture_at == self.step:
            self._capture()
        self.is_consistent = False
        with use_backend(self.config.backend):
            if self._graph is not None:
                self._graph.replay()
                self.loss_parts = self._captured_parts
            else:
                before = self._table_numbers_so_far()
                with self._eager_context():
                    self.loss_parts = self._compute(self._micro_batches, reached)
                self._table_numbers = self._table_numbers_so_far() - before
            loss = self.loss_parts["text"].clone()  # replays overwrite the tensor
        self.step += 1
        self._fade()
        self.is_consistent = True
        return loss

    def fetch(self, micro: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """Sample a micro-batch of the next step, (B, T) int64: see `arbcli.data.text.batch_at`."""
        starts = self._starts(self.step, micro)
        return self._windows(self.texts.train, starts, self.config.seed, self.step, micro, device)

    def _windows(
        self,
        text: Text,
        starts: list[int],
        seed: int,
        step: int,
        micro: int,
        device: torch.device | str,
    ) -> tuple[Tensor, ...]:
        """Read windows of a text as the model learns them.

        A composite head has 256 times the kinds of bytes added to their targets. Some objectives
        mask symbols, or cut holes.

        Args:
            text: training or held-out text.
            starts: starts of the windows.
            seed: seed of masks and holes.
            step: number of the step, or of as many held-out windows.
            micro: number of the micro-batch in the step.
            device: device of the windows.
        """
        model = self.config.model
        batch = batch_at(text, starts, model.ctx, device)
        if model.composite:
            ids, targets = batch
            if text not in self._byte_kinds:
                self._byte_kinds[text] = imported(BYTE_KINDS)(text)
            kinds = self._byte_kinds[text].windows([start + 1 for start in starts], model.ctx)
            return ids, targets + VOCABULARY * kinds.to(targets.device)
        if model.objective not in OBJECTIVES:
            return batch
        prepare = import_module(OBJECTIVES[model.objective]).training_windows
        numbers, windows = self._window_numbers(micro), self.config.accum * self.config.batch
        return prepare(batch, model.vocabulary, seed=seed, step=step, numbers=numbers, of=windows)

    def _window_numbers(self, micro: int) -> range:
        """Return the numbers of a micro-batch's windows in the step, for the objective.

        They spread the shares of hidden symbols evenly over each micro-batch.
        """
        return range(micro, self.config.accum * self.config.batch, self.config.accum)

    def _starts(self, step: int, micro: int) -> list[int]:
        """Draw the starts of the windows of a micro-batch: see `arbcli.data.text.batch_starts`."""
        config = self.config
        text, context = self.texts.train, config.model.ctx
        return batch_starts(text, config.seed, step, micro, config.batch, context)

    def _learnt_symbols(self) -> list[int] | None:
        """Count the symbols with a loss in each micro-batch of the step, of all processes.

        Returns:
            The counts; None if they are always equal, as there is one micro-batch, or no target is
            left out.
        """
        config, model, micros = self.config, self.config.model, range(self.config.accum)
        if config.accum == 1:
            return None
        if self.texts.train.packs:
            starts = (self._starts(self.step, micro) for micro in micros)
            return [self.texts.train.learnt_symbols(batch, model.ctx) for batch in starts]
        if model.fills and not model.is_masked:
            numbers = map(self._window_numbers, micros)
            count = import_module(OBJECTIVES[model.objective]).learnt_symbols
            return [count(model.ctx, step=self.step, numbers=batch) for batch in numbers]
        return None

    def bytes_of_steps(self, steps: range) -> int:
        """Return the number of bytes of text in the windows of steps, without padding."""
        config, text = self.config, self.texts.train
        if not text.packs:
            windows = range(config.batch * config.accum)
            return len(steps) * text.window_bytes(windows, config.model.ctx)
        micros = range(config.accum)
        return sum(
            text.window_bytes(self._starts(step, micro), config.model.ctx)
            for step in steps
            for micro in micros
        )

    def _load_batches(self) -> None:
        """Load the micro-batches of this step; on a GPU into the buffers that a graph reads."""
        batches = [self.fetch(micro, "cpu") for micro in self._local]
        self._counts, weights = self._learnt_symbols(), None
        if self._counts is not None:
            counts = torch.tensor(self._counts, dtype=torch.float64, device="cpu")
            shares = counts * len(counts) / counts.sum().clamp(min=1)
            weights = shares[self._local.start : self._local.stop].float()
        if self._step_inputs:
            self._micro_batches = self._step_inputs.load(self.step, batches, self._counts, weights)
            weights = self._step_inputs.weights
        else:
            self._micro_batches = [
                tuple(part.to(self.device) for part in batch) for batch in batches
            ]
            weights = None if weights is None else weights.to(self.device)
        self._compute.weights = weights

    def _measure(self) -> None:
        """Measure the gradients of the first step, to choose their quantisation scales."""
        shared = self.shared
        if shared is not None and shared.needs_measuring:
            with use_backend(self.config.backend), shared.measuring():
                for micro, inputs in enumerate(self._micro_batches):
                    self.model.forget_uses()
                    losses = self._compute.compute_losses(micro, inputs)
                    weights = self._compute.weights
                    weight = None if weights is None else weights[micro]
                    total_loss(losses, self.model.loss_weights).backward(weight)
                self.model.forget_uses()
        self._measured = True

    def _capture(self) -> None:
        """Capture a step as a CUDA graph; capturing changes no state."""
        torch.cuda.empty_cache()  # the graph has a memory pool of its own
        self._graph = torch.cuda.CUDAGraph()
        self.group.register_graph(self._graph)
        # NCCL's watchdog thread queries events during the capture
        mode = "global" if self.group.size == 1 else "thread_local"
        graph = capturing(self._graph, capture_error_mode=mode)
        from arbcli.kernels.runtime.merged import TABLES

        tables = TABLES.captured(self._table_numbers, self.device)
        with tables as self._tables, use_backend(self.config.backend), graph:
            self._captured_parts = self._compute(self._micro_batches)

    def _table_numbers_so_far(self) -> int:
        """Return the number of integers in all tables of merged launches; 0 without a capture."""
        if self._capture_at is None:
            return 0
        return imported("arbcli.kernels.runtime.merged:TABLES").brought

    def _fade(self) -> None:
        """Switch the rules to the stage of this step, if weights fade."""
        if self.config.model.digits != "fade":
            return
        stage = fade_stage(self.step, self.config.steps, self.config.fades)
        if stage == self.digits:
            return
        self.digits = stage
        assert self.updater is not None
        for tensor in self.updater.tensors:
            if tensor.fades:
                tensor.rule = stage_rule(tensor.rule.name, stage)
        self._capture_again()  # the graph reads weights in the form of the last stage

    def _capture_again(self) -> None:
        """Free the captured graph, and capture steps again after a few."""
        if self._capture_at is not None:
            self.release_graph()
            self._capture_at = self.step + EAGER_STEPS

    def release_graph(self) -> None:
        """Free the captured graph and its memory."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)  # a replay may be running
            self.loss_parts = {name: part.clone() for name, part in self.loss_parts.items()}
            self._captured_parts = {}
            self._graph.reset()
            self._graph = None
            torch.cuda.empty_cache()  # eager steps cannot reuse the graph's pool

    @property
    def num_evaluation_batches(self) -> int:
        """Number of batches in an evaluation, of `batch` windows each."""
        config = self.config
        return num_evaluation_batches(config.batch, config.accum, config.model.ctx)

    def _start_averages(self) -> None:
        if self.optimizer:
            self.optimizer.start_averages()
            return
        with use_backend(self.config.backend):
            imported("arbcli.model.averages:start_averages")(self.model)

    def averaged(self) -> AbstractContextManager[None]:
        """Read averages of the weights, if the run has them, within the block."""
        if not self.config.weight_average:
            return nullcontext()
        if self.optimizer:
            return self.optimizer.averaged()
        return imported("arbcli.model.averages:averaged")(self.model)

    @torch.no_grad()
    def evaluate(self, num_batches: int | None = None) -> float:
        """Compute the mean loss over fixed windows of the held-out text, in nats per symbol.

        It is the mean over all symbols with a loss, or over windows for a masked model. A step of
        as many windows has the same held-out windows, however they are divided into micro-batches.
        Processes share the batches, if these can be divided evenly.

        Args:
            num_batches: number of batches of `batch` windows; None is `num_evaluation_batches`.
        """
        num_batches = num_batches or self.num_evaluation_batches
        group = self.group if num_batches % self.group.size == 0 else Group()
        losses, counts = [], []
        with self.averaged(), use_backend(self.config.backend):
            for number in group.local(num_batches):
                inputs = self._held_out_batch(number)
                losses.append(self.model.loss(*inputs))
                counts.append((inputs[1] >= 0).sum())
        means = torch.stack(group.gather(losses))
        if not self.config.model.is_masked:
            count = torch.stack(group.gather(counts))
            means *= count * len(count) / count.sum()  # integers: exactly 1 if all are equal
        return float(means.mean())

    def _held_out_batch(self, number: int) -> tuple[Tensor, ...]:
        """Return the inputs of a held-out batch on the device."""
        config, text = self.config, self.texts.val
        starts = evaluation_starts(text, number, config.batch, config.model.ctx, config.accum)
        step, part = divmod(number, config.accum)
        return self._windows(text, starts, EVAL_SEED, step, part, self.device)

    def state_bytes(self) -> int:
        """Return the size of the persistent state in bytes."""
        state = [*self.model.buffers(), *self.model.parameters()]
        if self.optimizer:
            state += self.optimizer.state_dict().values()
        return sum(tensor.nbytes for tensor in state)

    def checkpoint(self, text_digest: str, init_digest: str | None = None) -> Checkpoint:
        """Return a checkpoint of the complete state and its settings; collective.

        Only the first process has all tensors.

        Args:
            text_digest: digest of both texts.
            init_digest: digest of the initial checkpoint; None without one.
        """
        settings = self.config.decisive() | {"init_from": init_digest}
        settings |= {"teacher": self.teacher_digest} if self.teacher else {}
        seed = settings.pop("seed")
        tensors, reduced = self.model.state_dict(), {}
        if self.shared:
            reduced = {"wire": self.config.reduce_dtype}
            tensors |= self.shared.gather(self.model)
        if self.optimizer:
            tensors |= self.optimizer.state_dict()
        return Checkpoint(
            step=self.step,
            config=dataclasses.asdict(self.config.model) | {"digits": self.digits},
            counters=self.updater.counters() if self.updater else {},
            data={"digest": text_digest, "seed": seed, "position": self.step, "settings": settings}
            | ({"average": self.config.weight_average} if self.config.weight_average else {})
            | ({TOKENIZER_DIGEST: self.texts.tokenizer.digest} if self.texts.tokenizer else {})
            | reduced,
            tensors=tensors,
        )

    def check_agreement(self) -> None:
        """Check that the replicated state is equal in all processes.

        Raises:
            ArbError: in all processes, if one differs.
        """
        if self.group.size > 1 and self.shared:
            parts = self.shared.replicated_state(self.model)
            digests = {name: tensor_digest(name, part) for name, part in parts.items()}
            self.group.compare(digests, "state", RELOAD)

    @property
    def has_traffic(self) -> bool:
        """Whether the processes of the run exchange gradients as integers."""
        return self.group.size > 1 and self.shared is not None

    def wire_gauges(self) -> dict[str, float]:
        """Return the communication volume of the last step; empty for a single process.

        Returns:
            wire: bytes per weight that a process received in the step.
        """
        if not self.has_traffic or self.shared is None or not self.shared.received:
            return {}
        return {"wire": self.shared.bytes_per_weight()}

    def initialise_from(self, checkpoint: Checkpoint) -> None:
        """Load the state of another run's checkpoint, but start at step 0 with zero counters.

        Averages start at the weights if the checkpoint has none. Statistics of the directions start
        unset if the checkpoint has other directions. Quantisation scales of gradients are measured,
        as they depend on `accum`, `reduce_dtype` and the text. The optimizer of a float baseline
        starts from zero state.

        Raises:
            ArbError: the checkpoint belongs to another model.
        """
        starts_averages = self.config.weight_average and "average" not in checkpoint.data
        saved_statistics, statistics = (
            {name for name in tensors if name.endswith(STATISTICS)}
            for tensors in (checkpoint.tensors, self.model.state_dict())
        )
        skipped: tuple[str, ...] = (WIRE, *FLOAT_STATE)
        if starts_averages:
            skipped += (AVERAGE,)
        if saved_statistics != statistics:
            skipped += STATISTICS
        self._load(checkpoint, skipped)
        if starts_averages:
            self._start_averages()

    def _load(self, checkpoint: Checkpoint, skipped: tuple[str, ...] = ()) -> None:
        """Load the tensors of a checkpoint, except those with a suffix in `skipped`."""
        check_trainable(checkpoint)
        state = self.model.state_dict()
        layout = self.shared.layout(self.model) if self.shared else {}
        if self.optimizer:
            layout = self.optimizer.state_dict()
        tensors, expected = (
            {name: tensor for name, tensor in tensors.items() if not name.endswith(skipped)}
            for tensors in (checkpoint.tensors, state | layout)
        )
        check_layout(tensors, expected)
        if self.optimizer and not skipped:
            self.optimizer.load_state_dict(tensors, checkpoint.step)
        parts = {name: part[: len(state[name])] for name, part in tensors.items() if name in state}
        self.model.load_state_dict(parts, strict=not skipped)
        self._measured = False

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint.

        Raises:
            ArbError: the checkpoint belongs to another model.
        """
        self._load(checkpoint)
        if self.updater:
            self.updater.restore(checkpoint.counters)
        self.step = checkpoint.step
        self._fade()
        self._capture_again()
