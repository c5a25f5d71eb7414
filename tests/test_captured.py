"""Steps that a GPU replays as CUDA graphs have the bits of eager ones, recorded on a CPU too."""

from types import SimpleNamespace

import pytest
import torch
from apparatus.graphs import Graph, recorded_graphs
from cells import Cell, wide

from arbcli.config.presets import preset
from arbcli.data.opening import open_texts
from arbcli.families.hnet.stage import Stage
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model
from arbcli.model.decoding import Phase
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.step_inputs import StepInputs
from arbcli.training.trainer import Trainer

SIZES = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}
SAMPLING = Sampling(temperature=1.5, top_k=90, top_p=0.9, seed=3)


def model(name: str) -> LanguageModel:
    config = preset("tiny", **SIZES)
    if name == "chunks":
        config = wide(Cell("attention", "mlp", 1, "chunked").model())
    return build_model(config, torch.float32)


@pytest.mark.parametrize("name", ["plain", "chunks"])
def test_captured_text_equals_that_of_steps_and_undoes_the_capture(name):
    """Parameters are constants of it; the next text in the slot knows nothing of the last one."""
    lm, texts = model(name), []
    with lm.prepared_weights(), recorded_graphs() as graphs:
        for capture in (False, True):
            decoder = Decoder(lm, 20, backend="torch", capture=capture)
            for sampling in (SAMPLING, SAMPLING, Sampling(temperature=0), Sampling(seed=3)):
                decoder.begin(b"twelve bytes", sampling)
                decoder.device = SimpleNamespace(type="cuda")  # steps before bytes are fetched
                texts.append((b"".join(map(bytes, decoder.stream(7))), decoder.lengths))
                decoder.device = lm.device
    assert texts[:4] == texts[4:]
    assert texts[0] == texts[1]
    assert len({text for text, _ in texts}) == 3
    replays = [graph.replays for graph in graphs]
    assert replays == [14, 7, 7] if name == "plain" else replays[0] == 14


def test_captured_texts_are_those_of_steps():
    lm, texts = model("plain"), []
    ways = {b"a b c": SAMPLING, b"d": Sampling(seed=4)}
    with lm.prepared_weights(), recorded_graphs() as graphs:
        for capture in (False, True):
            decoder = Decoder(lm, 12, 2, backend="torch", capture=capture)
            for slot, (prompt, sampling) in enumerate(ways.items()):
                decoder.begin(prompt, sampling, slot=slot, stream=1 + slot)
            decoder.step(6)
            assert decoder.lengths == {0: 11, 1: 7}
            texts.append([decoder.end(slot, 6)() for slot in range(2)])
    assert texts[0] == texts[1]
    assert [graph.replays for graph in graphs] == [6]  # other parameters need no other step


class JoinedGraphs:
    """Stands for `StepGraph`: deeper phases run where the phase before them says so."""

    def __init__(self, phases: list[Phase], graphs: list, device: torch.device) -> None:
        self.parts = [(phase, graph) for phase, graph in zip(phases, graphs, strict=True)]
        self.begins = [phase.leads_deeper and phase.leads_deeper() for phase in phases]
        for phase in phases:
            if phase.leads_deeper is not None:
                phase.handle.fill_(77)

    def replay(self) -> None:
        deepest = 0
        for (phase, graph), begins in zip(self.parts, self.begins, strict=True):
            if phase.depth <= deepest:
                graph.replay()
                deepest = phase.depth + int(begins) if begins is not None else deepest


def test_no_step_outside_a_graph_sets_a_condition(monkeypatch):
    """The nodes of a capture are gone when the step is captured for another text."""
    monkeypatch.setattr("arbcli.families.hnet.stage.has_conditions", lambda device: True)
    monkeypatch.setattr("arbcli.generation.step_graph.StepGraph", JoinedGraphs)
    lm, texts, handles = model("chunks"), [], []
    step_down = Stage.step_down

    def noted(self, x, ids, inputs, past, *, fused):
        if not Graph.recording:
            handles.append(int(past.handle))
        step_down(self, x, ids, inputs, past, fused=fused)

    monkeypatch.setattr(Stage, "step_down", noted)
    with lm.prepared_weights(), recorded_graphs():
        for capture in (False, True):
            decoder = Decoder(lm, 20, backend="torch", capture=capture)
            for sampling in (SAMPLING, Sampling(temperature=0)):
                decoder.begin(b"some bytes", sampling)
                texts.append(b"".join(map(bytes, decoder.stream(9))))
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    assert {*handles} == {0}


@pytest.mark.parametrize(
    "given",
    [
        {"digits": "fade", "fade_from": 0.4, "fade_to": 0.6, "steps": 11},
        {"accum": 2, "objective": "fill", "reduce_dtype": "int12", "dropout": 0.25},
    ],
    ids=str,
)  # fmt: skip
def test_captured_steps_of_a_run_have_the_bits_of_eager_steps(given, tmp_path, monkeypatch):
    """A graph is freed when weights fade further, and before a run goes back."""
    monkeypatch.setattr("arbcli.training.trainer.EAGER_STEPS", 1)
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"line %d of a text. " % (n * n) for n in range(300)))
    settings = SIZES | {"batch": 2, "steps": 6} | given
    config = new_config(preset="tiny", device="cpu", backend="torch", compute="fp32",
                        data=[str(path)], **settings)  # fmt: skip
    texts, load = open_texts(config.data, None, seed=0, context=16), Trainer._load_batches
    gpu, to = torch.device("cuda"), torch.Tensor.to

    def load_as_on_a_gpu(self) -> None:
        if self._step_inputs is None:
            load(self)
            return
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor,
                "to",
                lambda part, place: part.clone() if place == gpu else to(part, place),
            )
            load(self)

    monkeypatch.setattr(Trainer, "_load_batches", load_as_on_a_gpu)
    outcomes = []
    with recorded_graphs() as graphs:
        for capture in (False, True):
            trainer = Trainer(config, texts)
            if capture:
                trainer._capture_at = 1
                trainer._step_inputs = StepInputs(config, gpu, trainer.updater)
            losses = []
            for _ in range(config.steps):
                losses.append(float(trainer.train_step()))
                losses.append(float(trainer.loss_parts["text"]))
            outcomes.append(
                (losses, [part.clone() for part in trainer.model.state_dict().values()])
            )
        assert [bool(graph.noted) for graph in graphs] == [False, True][-len(graphs) :]
        trainer.restore(trainer.checkpoint("text"))
    (losses, parts), (again, others) = outcomes
    assert losses == again
    assert all(map(torch.equal, parts, others))
    assert len(graphs) == (2 if "digits" in given else 1)  # of all digits, and of the trit
    assert all(graph.replays and not graph.noted for graph in graphs)
