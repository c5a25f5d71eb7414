"""The optimizer steps as `arb train` does, and wrong uses are refused in a line."""

import copy
import math
import pickle

import pytest
import torch
from states import assert_same, default_dtype, state_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel

import arbcli
from arbcli.base.errors import ArbError
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.model.updater import Updater
from arbcli.nn.weights import Anchored


def build(rule: str = "moment", lr: float = 0.2, **settings):
    """Return a model, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 20)
    )
    optimizer = arbcli.to_integers(model, rule=rule, lr=lr, **settings)
    generator = torch.Generator().manual_seed(1)
    return model, optimizer, torch.randint(20, (4, 6), generator=generator)


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def equal(a: dict, b: dict) -> bool:
    return {*a} == {*b} and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
@pytest.mark.parametrize(("accumulation", "direction"), [(1, "factored"), (3, None)])
def test_steps_equal_those_of_the_updater(rule, accumulation, direction):
    model, optimizer, ids = build(rule, accumulation=accumulation, direction=direction)
    twin = copy.deepcopy(model)
    tensors = [part for part in twin.modules() if isinstance(part, Anchored)]
    updater = Updater(tensors, 0, torch.float32)
    for tensor in tensors:
        tensor.sink = updater
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.2 / (step + 1)
        for micro in range(accumulation):
            updater.begin(step, 0.2 / (step + 1), micro, accumulation)
            loss(twin, ids).backward()
            with default_dtype(torch.bfloat16):  # on which nothing depends
                loss(model, ids).backward()
        updater.finish()
        optimizer.step()
    assert_same(state_of(model), state_of(twin))


def digits(model: nn.Module) -> dict:
    """Return z, in units of the remainder, of all packed tensors."""
    levels = {}
    for name, part in model.named_modules():
        if isinstance(part, Anchored):
            trits = unpack_trits(part.trits, part.in_features).int()
            below = part.rule.digits(part.state)["remainder"][0].int()
            levels[name] = trits * part.rule.radix + below
    return levels


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
def test_a_step_that_ends_early_steps_weights_and_scales(rule):
    model, optimizer, ids = build(rule, accumulation=4, lr=2.0)
    before, state_before = digits(model), state_of(model)
    for _ in range(3):
        loss(model, ids).backward()
    # `carry` steps with each gradient
    assert equal(before, digits(model)) == (rule != "carry")
    optimizer.step()
    assert all(not torch.equal(part, before[name]) for name, part in digits(model).items())
    fractions = {name: part for name, part in state_of(model).items() if name.endswith("fraction")}
    assert any(not torch.equal(part, state_before[name]) for name, part in fractions.items())
    loss(model, ids).backward()  # the next step begins
    assert optimizer.state_dict()["state"][0]["step_of_run"] == 1


@pytest.mark.parametrize("rule", ["moment", "nibble", "carry"])
def test_layers_of_some_backward_passes_step_once(rule):
    """Branches with equal weights and gradients, in the first or the last backward of a step."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
    model[1].load_state_dict(model[0].state_dict())
    optimizer = arbcli.to_integers(model, rule=rule, lr=1.0, accumulation=2)
    x, slopes = torch.randn(32, 32), torch.randn(32, 32)
    before = digits(model)
    for _ in range(6):
        for branch in model:
            (branch(x) * slopes).sum().backward()
        optimizer.step()
    first, last = (part - before[name] for name, part in digits(model).items() if "weight" in name)
    steps = first.flatten().float(), last.flatten().float()
    assert nn.functional.cosine_similarity(*steps, dim=0) > 0.8
    lengths = [step.norm().item() for step in steps]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)
    if rule == "moment":
        moments = [branch.weight_packed.moment.float().norm().item() for branch in model]
        assert moments[1] == pytest.approx(moments[0], rel=0.1)


def test_training_continues_from_its_state():
    """A state that is loaded within a step begins it again."""
    model, optimizer, ids = build(accumulation=2)

    def step(model, optimizer):
        for _ in range(2):
            loss(model, ids).backward()
        optimizer.step()

    step(model, optimizer)
    saved = pickle.dumps(get_state_dict(model, optimizer))
    step(model, optimizer)
    other, again, _ = build(accumulation=2, seed=5)
    for interrupted in (False, True):
        if interrupted:
            loss(other, ids).backward()
        of_model, of_optimizer = pickle.loads(saved)
        set_state_dict(other, again, model_state_dict=of_model, optim_state_dict=of_optimizer)
        assert again.param_groups[0]["seed"] == 0
        step(other, again)
        assert_same(state_of(model), state_of(other))
    with pytest.raises(RuntimeError, match="was saved with `rule='carry'`, not 'nibble'"):
        build("nibble")[0].load_state_dict(build("carry")[0].state_dict())


def test_gradients_and_rates_that_are_not_finite_step_nothing():
    model, optimizer, ids = build()
    before = state_of(model)
    (loss(model, ids) * torch.nan).backward()
    optimizer.step()
    assert_same(before, state_of(model))
    # two matrices and their biases, gain, bias and embedding
    assert optimizer.counters() == {"nonfinite_steps": 1, "refused": 7}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.counters() == {"nonfinite_steps": 1, "refused": 7}
    optimizer.param_groups[0]["lr"] = math.nan  # as of a schedule of no steps
    with pytest.raises(ArbError, match="of step 1 is not finite"):
        loss(model, ids).backward()
    assert_same(before, state_of(model))


def test_interrupted_backward_leaves_no_gradient():
    """A layer is used twice, and the backward ends between its uses."""
    layer = arbcli.nn.Linear(8, 8)
    optimizer = arbcli.nn.IntegerOptimizer(layer)
    twin, x = copy.deepcopy(layer), torch.randn(3, 8)
    before = state_of(layer)

    def interrupt(_):
        raise ZeroDivisionError

    between = layer(x)
    between.register_hook(interrupt)
    with pytest.raises(ZeroDivisionError):
        layer(between.tanh()).sum().backward()
    optimizer.zero_grad()
    assert_same(before, state_of(layer))
    own = arbcli.nn.IntegerOptimizer(twin)
    for module, stepping in ((layer, optimizer), (twin, own)):
        module(module(x).tanh()).sum().backward()
        stepping.step()
    assert_same(state_of(layer), state_of(twin))


def test_copies_are_models_of_their_own():
    model, optimizer, ids = build()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(state_of(copied), state_of(model))
        before = state_of(model)
        with pytest.raises(ArbError, match="no optimizer that consumes it"):
            loss(copied, ids).backward()
        own = arbcli.nn.IntegerOptimizer(copied)
        loss(copied, ids).backward()
        own.step()
        assert_same(before, state_of(model))
        assert not equal(before, state_of(copied))
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArbError, match="cannot be copied or pickled"):
            duplicate(optimizer)


def test_no_gradient_is_stored_and_frozen_models_pass_gradients_on():
    model, optimizer, ids = build()
    loss(model, ids).backward()
    assert all(value.grad is None for value in model.parameters())
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)
    before = state_of(model)
    x = model[0](ids).requires_grad_()
    model[4](model[3](model[2](model[1](x)))).sum().backward()
    optimizer.step()
    assert x.grad.abs().sum() > 0
    assert_same(before, state_of(model))
    model.bfloat16()
    assert optimizer._updater_now.dtype == torch.bfloat16  # of products on a GPU


def test_wrong_uses_are_refused():
    model, optimizer, ids = build(accumulation=2)
    copied, adapter = pickle.loads(pickle.dumps(model)), nn.Module()
    other, older = torch.optim.AdamW(copied.parameters()), arbcli.nn.IntegerOptimizer(copied)
    arbcli.nn.IntegerOptimizer(copied)
    adapter.base_layer = model[2]  # as PEFT does
    assert copied.load_state_dict(dict(copied.named_parameters()), strict=False).missing_keys
    graph = loss(model, ids)
    graph.backward(retain_graph=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    further = {"params": [nn.Parameter(torch.zeros(3))]}
    for use, said in (
        (graph.backward, "changed between a forward and its backward"),
        (lambda: scaler.step(optimizer), "finds no gradients"),
        (older.step, "newer `IntegerOptimizer` trains these weights"),
        (lambda: adapter.merge(), "cannot be merged into integer weights"),
        (other.step, "AdamW has integer weights among its parameters"),
        (lambda: optimizer.add_param_group(further), "a single group of parameters"),
        (lambda: optimizer.load_state_dict(other.state_dict()), "state was not saved"),
        (lambda: optimizer.load_state_dict({}), "state was not saved"),
        (lambda: arbcli.nn.IntegerOptimizer(nn.Linear(3, 3)), "has no integer weights"),
        (lambda: build(accumulation=0), "`accumulation` is 0"),
        (lambda: build(accumulation=2.0), "`accumulation` is 2.0"),
        (model[2].weight_packed._replicate_for_data_parallel, "several GPUs"),
        (lambda: AveragedModel(model, use_buffers=True), "cannot average integer weights"),
    ):
        with pytest.raises(ArbError, match=said):
            use()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -0.1}, {"lr": math.nan}, {"weight_decay": -1.0}, {"weight_decay": math.inf},
        {"seed": 1 << 31}, {"seed": 0.5}, {"lr": "1e-4"},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(settings):
    """And the model is not converted."""
    layer = nn.Linear(4, 4)
    with pytest.raises(ArbError, match="out of range"):
        arbcli.to_integers(layer, **settings)
    assert type(layer) is nn.Linear
    with pytest.raises(ArbError, match="out of range"):
        arbcli.nn.IntegerOptimizer(arbcli.nn.Linear(4, 4), **settings)


def test_settings_that_change_within_a_step_are_those_of_the_next():
    model, optimizer, ids = build(accumulation=2)
    loss(model, ids).backward()
    optimizer.param_groups[0]["accumulation"] = 3
    loss(model, ids).backward()
    with pytest.raises(ArbError, match="backward 3 of a step, which has `accumulation=2`"):
        loss(model, ids).backward()
    optimizer.step()
    loss(model, ids).backward()
    with pytest.warns(UserWarning, match="ends a step, whose gradients have trained"):
        optimizer.zero_grad()  # which begins the step again
    for _ in range(3):
        loss(model, ids).backward()
    optimizer.step()
    assert optimizer.step_number == 3  # one was dropped


def test_a_compiled_step_compiles_no_kernels():
    model, optimizer, ids = build()
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def step():
        loss(model, ids).backward()
        optimizer.step()

    step()
    assert counter.frame_count <= 5
    assert optimizer.step_number == 1
