"""``mpinspect run``'s watcher: it finds models in unmodified trainings, and leaves the trainings unchanged."""

import copy
import gc
import io
import math
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from agreeing_reports import analyse
from models import Of
from together import together
from torch import nn
from trainings import closure_of, take_step
from watched_training import train, watched

import mpinspect
from mpinspect.run import watcher
from mpinspect.run.models import launched_inspector, owners

NO_BACKWARD = "no backward ran: there were no gradients to inspect (gradients of torch.func are not inspected)"


class Net(nn.Sequential): ...


def net(width: int = 4, hidden: int = 8) -> Net:
    return Net(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def hooks_of(model: nn.Module) -> int:
    places = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, place)) for module in model.modules() for place in places)
    return on_modules + sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())


# -- found models ------------------------------------------------------------------------------------------------------------


def test_an_unmodified_loop_is_inspected(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        train(model, torch.optim.Adam(model.parameters()), steps=30)
    assert run.names == ["Net"]
    assert run.gradients() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    progress = run.parts.models[0].session.progress
    assert (progress.steps, progress.backwards, progress.sampled_steps) == (30, 30, 12)
    assert mpinspect.Session.load(tmp_path / "Net").progress.steps == 30
    assert hooks_of(model) == 0
    assert run.seen.sentences() == ["1 optimizer was made; 1 model was inspected"]


def test_missing_backwards_are_noted(tmp_path):
    with watched(tmp_path) as nothing:
        pass
    assert nothing.seen.sentences() == [f"no optimizer was made and {NO_BACKWARD}"]
    with watched(tmp_path) as made:
        model = net()
        optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD(net().parameters())]
    assert len(optimizers) == 2
    assert made.seen.sentences() == [f"2 optimizers were made and {NO_BACKWARD}"]
    assert hooks_of(model) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_attaches_no_inspector(tmp_path, mode):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        with mode():
            for _ in range(3):
                model(torch.randn(2, 4))
    assert run.names == []
    assert optimizer.param_groups
    assert run.seen.sentences() == [
        "1 optimizer was made, and 3 forwards ran without a backward: no training was detected"
    ]


class Generator(nn.Sequential): ...


class Discriminator(nn.Sequential): ...


def test_a_gan_has_an_inspector_for_each_network(tmp_path):
    with watched(tmp_path) as run:
        generator, discriminator = Generator(*net(3, 6)), Discriminator(*net(2, 6))
        optimizers = [torch.optim.Adam(network.parameters()) for network in (generator, discriminator)]
        for _ in range(4):
            fake = generator(torch.randn(5, 3))
            take_step(optimizers[1], discriminator(fake.detach()).mean() - discriminator(torch.randn(5, 2)).mean())
            take_step(optimizers[0], discriminator(fake).mean())
    assert run.names == ["Generator", "Discriminator"]
    # The generator's last backward passes through the discriminator after its last step, and is not counted as a step.
    assert [run.steps(0), run.steps(1)] == [4, 4]
    assert len(run.gradients(0)) == len(run.gradients(1)) == 4


def test_a_discriminators_loss_is_not_the_generators(tmp_path):
    with watched(tmp_path) as run:
        generator, discriminator = Generator(*net(3, 6)), Discriminator(*net(2, 6))
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.01) for network in (generator, discriminator)]
        for step in range(3):
            with torch.no_grad():
                fake = generator(torch.randn(5, 3))
            loss = discriminator(fake).mean() * (math.nan if step == 1 else 1)
            take_step(
                optimizers[1], loss, before_step=lambda: [p.grad.nan_to_num_() for p in discriminator.parameters()]
            )
            take_step(optimizers[0], -discriminator(generator(torch.randn(5, 3))).mean())
    events = {model.name: [event.step for event in model.session.events] for model in run.parts.models}
    assert events["Generator"] == []
    assert events["Discriminator"]


def test_two_optimizers_of_one_model_share_an_inspector(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
        for _ in range(3):
            model(torch.randn(5, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert (run.names, run.steps()) == (["Net"], 3)


def test_accumulation_under_a_loss_scaler(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(3):
            for _ in range(4):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(5, 4)).square().mean()
                scaler.scale(loss / 4).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    progress = run.parts.models[0].session.progress
    assert (progress.steps, progress.backwards) == (3, 12)
    assert [change.scale for change in progress.scales] == [256.0]


def test_the_first_event_is_printed_at_once(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(4):
            output = model(torch.randn(5, 4))
            if step >= 2:
                output.register_hook(lambda gradient: gradient * float("inf"))
            take_step(optimizer, output.square().mean())
        said = list(run.said)
    assert len(said) == 1
    assert said[0].startswith("step 2, backward, ")


def test_a_loop_without_torch_optim(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        for _ in range(5):
            model(torch.randn(5, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert (run.names, len(run.gradients())) == (["Net"], 4)
    assert run.steps() == 5


def test_parameters_of_no_module(tmp_path):
    with watched(tmp_path) as run:
        weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for _ in range(3):
            take_step(optimizer, (torch.randn(5, 4) @ weights[0] + weights[1]).square().mean())
    assert (run.names, run.gradients(), run.steps()) == (["Parameters"], {"0", "1"}, 3)
    assert not any("compile" in note for note in run.parts.models[0].session.notes)


def test_tensors_without_module_and_optimizer(tmp_path):
    with watched(tmp_path) as run:
        weight = torch.randn(4, 3, requires_grad=True)
        for _ in range(6):
            (torch.randn(5, 4) @ weight).square().mean().backward()
            weight.data -= 0.1 * weight.grad
            weight.grad = None
    assert run.gradients() == {"0"}
    assert "parameters that belong to no module are named by number: 0 (4, 3)" in " ".join(run.seen.notes)


def subtracts(parameter, update):
    parameter.sub_(update)


def copies_masters(parameter, update):
    master = parameter.__dict__.setdefault("master", parameter.detach().float())
    parameter.copy_(master.sub_(update))


def computed(weights, x):
    return (x @ weights[0].t() + weights[1]).relu() @ weights[2].t() + weights[3]


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("in_module", [False, True])
@pytest.mark.parametrize("update", [subtracts, copies_masters])
def test_updates_that_16_bit_weights_lose_without_an_optimizer_are_named(tmp_path, update, in_module, asks):
    with watched(tmp_path) as run:
        torch.manual_seed(0)
        model = net(hidden=64).bfloat16()
        weights = list(model.parameters())
        if not in_module:
            weights = [weight.detach().requires_grad_() for weight in weights]
        for _ in range(8):
            x = torch.randn(16, 4).bfloat16()
            loss = (model(x) if in_module else computed(weights, x)).float().square().mean()
            if asks:
                gradients = torch.autograd.grad(loss, weights)
            else:
                loss.backward()
                gradients = [weight.grad for weight in weights]
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    update(weight, 1e-4 * gradient.float())
                    weight.grad = None
    found = [each for each in analyse(run.parts.models[0].session).findings if each.id == "buffer-stops-changing"]
    assert [each.severity for each in found] == ["warning"] * (update is subtracts)
    assert all("of the weight '" in each.message and "test_run_watcher.py:" in each.message for each in found)
    assert run.seen.backwards == 8


def test_masters_that_take_gradients_from_autograd_grad_have_their_model_inspected(tmp_path):
    with watched(tmp_path) as run:
        model = net().bfloat16()
        masters = [parameter.detach().float() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1)
        for step in range(6):
            loss = model(torch.randn(5, 4).bfloat16()).float().square().mean() * (torch.inf if step == 4 else 1.0)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
            optimizer.step()
    (part,) = run.parts.models
    assert any("assumed to be master copies" in note for note in run.seen.notes)
    # The first backward attaches.
    assert (part.session.progress.steps, part.session.progress.backwards) == (6, 5)
    (event,) = [event for event in part.session.events if event.step == 4]
    assert (event.what, event.phase) == ("loss", "forward")


def test_autograd_grad_of_another_model_than_the_optimizers_attaches_nothing(tmp_path):
    with watched(tmp_path) as run:
        optimizer = torch.optim.SGD(net().parameters())
        other = nn.Linear(4, 2)
        for _ in range(4):
            torch.autograd.grad(other(torch.randn(3, 4)).sum(), list(other.parameters()))
    assert (run.names, len(optimizer.param_groups)) == ([], 1)


def test_inputs_that_need_gradients_are_not_taken_for_parameters(tmp_path):
    with watched(tmp_path) as run:
        model = net().requires_grad_(False)
        for _ in range(6):
            x = torch.randn(5, 4, requires_grad=True)
            model(x).sum().backward()
            gone = weakref.ref(x)
        del x
    assert run.names == []
    assert gone() is None


def test_master_copies_of_the_weights(tmp_path):
    with watched(tmp_path) as run:
        model = net().to(torch.bfloat16)
        masters = [parameter.detach().clone().float().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1)
        for _ in range(3):
            model(torch.randn(5, 4, dtype=torch.bfloat16)).square().mean().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
    assert (run.names, len(run.gradients())) == (["Net"], 4)
    assert "master copies" in " ".join(run.seen.notes)


def test_lbfgs_and_its_closure(tmp_path):
    with watched(tmp_path) as run:
        model, x = net(), torch.randn(5, 4)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for _ in range(3):
            optimizer.step(closure_of(optimizer, lambda: model(x).square().mean()))
    assert (run.names, run.steps()) == (["Net"], 3)


def test_training_in_a_thread(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        thread = threading.Thread(target=lambda: train(model, torch.optim.SGD(model.parameters())))
        thread.start()
        thread.join()
    assert (run.names, run.steps()) == (["Net"], 3)


def test_several_threads_at_once(tmp_path, monkeypatch):
    def slowly(*given: object) -> object:
        # Long enough for every thread to arrive before the first one leaves.
        arrived.wait(0.2)
        return made(*given)

    made = watcher._Parts
    monkeypatch.setattr(watcher, "_Parts", slowly)
    arrived = threading.Event()
    with watched(tmp_path) as run:
        models = [net() for _ in range(4)]
        together(4, lambda number: train(models[number], torch.optim.SGD(models[number].parameters()), 20))
    assert (len(set(run.names)), run.seen.models, run.seen.optimizers, run.seen.steps) == (4, 4, 4, 80)
    assert [run.steps(number) for number in range(4)] == [20] * 4
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(run.names)
    assert [hooks_of(model) for model in models] == [0] * 4


def test_freeing_an_optimizer_does_not_wait_for_an_attaching_thread(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizers = [torch.optim.SGD(model.parameters())]
        train(model, optimizers[0])
        lock, has_it, may_end = run.watcher._lock, threading.Event(), threading.Event()

        def hold() -> None:
            with lock.held():
                has_it.set()
                may_end.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        assert has_it.wait(30)
        optimizers.clear()
        hooks = hooks_of(model)
        may_end.set()
        thread.join()
        train(model, torch.optim.SGD(model.parameters()))
    assert hooks > 0
    assert (run.names, run.steps()) == (["Net"], 6)


def test_an_optimizer_that_was_unpickled(tmp_path):
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(tmp_path) as run:
        model, optimizer = pickle.loads(pickle.dumps((model, plain)))
        train(model, optimizer, steps=4)
    assert run.names == ["Net"]


class Layer(nn.Module):
    """Defines its own forward, since torch.compile ignores those of torch.nn."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.linear = nn.Linear(given, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(4, 8), Layer(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def compiled_before(model: Branched, backend: object) -> object:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: Branched, backend: object) -> object:
    model.compile(backend=backend, fullgraph=True)
    return model


def compiled_in_part(model: Branched, backend: object) -> object:
    model.a.compile(backend=backend)
    return model


def compiled_function(model: Branched, backend: object) -> object:
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.parametrize(
    ("way", "steps_before"),
    [
        *((compiled_before, None), (compiled_in_place, 0), (compiled_in_part, 2), (compiled_function, None)),
        *((compiled_before, 2), (compiled_function, 0), (compiled_in_part, None)),
    ],
)
def test_the_number_of_compilations_is_unchanged(tmp_path, way, steps_before):
    from torch._dynamo.testing import CompileCounter

    def training() -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        model = Branched()
        call = way(model, counter) if steps_before is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=steps_before or 0)
        call = call if steps_before is None else way(model, counter)
        train(call, optimizer, steps=5)
        return counter.frame_count

    with torch._dynamo.config.patch(error_on_recompile=True):
        alone = training()
        with watched(tmp_path, kernels=True) as run:
            together = training()
    torch._dynamo.reset()
    assert together == alone > 0
    assert (run.names, run.steps(), len(run.gradients())) == (["Branched"], 5 + (steps_before or 0), 4)
    assert any("inside torch.compile" in note for note in run.parts.models[0].session.notes)


@pytest.mark.parametrize("way", [compiled_before, compiled_in_part], ids=lambda way: way.__name__)
def test_sampled_steps_run_eagerly_on_request(tmp_path, way):
    """The number of compilations is unchanged. The model is found at the first backward, so the first step is compiled."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    with watched(tmp_path, eager_samples=True, every=2, dense=0, kinds=("activation",)) as run:
        model = Branched()
        call = way(model, counter)
        train(call, torch.optim.SGD(model.parameters(), lr=0.1), steps=5)
    torch._dynamo.reset()
    session = run.parts.models[0].session
    assert counter.frame_count == 1
    assert session.progress.sampled_steps == 3
    assert session.progress.eager_steps == (2 if way is compiled_before else 3)
    assert {key.name for key in session.totals() if key.kind == "activation"} == {"a.linear", "b.linear"}


def test_the_part_that_is_not_compiled_is_inspected_completely(tmp_path):
    torch._dynamo.reset()
    with watched(tmp_path, kernels=True) as run:
        model = Branched()
        model.a.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=6)
        assert not any(module._forward_hooks for module in model.a.modules())
    torch._dynamo.reset()
    seen = {key.name for key in run.parts.models[0].session.totals() if key.kind == "activation_gradient"}
    assert seen == {"b.linear"}
    assert (run.steps(), len(run.gradients())) == (6, 4)


def test_models_beyond_the_limit_are_not_inspected(tmp_path):
    with watched(tmp_path) as run:
        for _ in range(20):
            model = net()
            train(model, torch.optim.SGD(model.parameters()), steps=1)
    assert len(run.names) == 16
    assert run.names[:2] == ["Net", "Net-2"]
    assert run.seen.notes == ["the first 16 models were inspected, and none after them"]


def test_steps_ends_the_inspection_of_a_model(tmp_path):
    with watched(tmp_path, steps=3) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, steps=3)
        left = hooks_of(model)
        train(model, optimizer, steps=3)
    assert (run.steps(), left, hooks_of(model)) == (3, 0, 0)


# -- memory ------------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_deleted_is_freed_at_once(tmp_path):
    # The first optimizer step of a process imports torch._dynamo, which leaves this optimizer in a reference cycle.
    first = net()
    train(first, torch.optim.Adam(first.parameters()))
    gc.disable()
    try:
        with watched(tmp_path) as run:
            for _ in range(3):
                model = net()
                optimizer = torch.optim.Adam(model.parameters())
                train(model, optimizer)
                gone = weakref.ref(model), weakref.ref(model[0].weight)
                del model, optimizer
                assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
    assert run.names == ["Net", "Net-2", "Net-3"]
    assert [run.steps(number) for number in range(3)] == [3, 3, 3]


def test_a_model_whose_optimizer_is_in_a_cycle_is_freed_by_a_collection(tmp_path):
    with watched(tmp_path):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        train(model, optimizer)
        gone = weakref.ref(model)
        del model, optimizer, scheduler
        gc.collect()
        assert gone() is None


def test_another_optimizer_for_the_same_model_continues_its_record(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        between = hooks_of(model)
        train(model, torch.optim.Adam(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
    assert (run.names, run.steps(), between) == (["Net"], 9, 0)
    assert hooks_of(model) == 0


def test_a_model_that_is_never_called_is_freed(tmp_path):
    with watched(tmp_path):
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert gone() is None


# -- unusual scripts ---------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_of_watched_objects_hold_no_hooks(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        armed = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in armed:
            each(torch.randn(2, 4))
        assert run.seen.models == 0
        train(model, optimizer)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        file = io.BytesIO()
        torch.save(model, file)
        for each in copies:
            each(torch.randn(2, 4)).sum().backward()
    assert b"mpinspect.run" not in file.getvalue()
    assert run.parts.models[0].session.progress.backwards == 3
    assert run.names == ["Net"]


def test_warnings_as_errors_do_not_stop_the_training(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watched(tmp_path / "file" / "x", lint=True, kernels=True) as run:
            (tmp_path / "file").write_text("in the way")
            model = net()
            train(model, torch.optim.SGD(model.parameters()), steps=6)
    assert run.steps() == 6
    assert run.parts.models[0].log_dir is None


def test_a_script_with_an_inspector_of_its_own(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        with mpinspect.Inspector(model, optimizers=optimizer) as own:
            train(model, optimizer, steps=5)
    mine, theirs = run.parts.models[0].session, own.session()
    assert (mine.progress.steps, theirs.progress.steps) == (5, 5)
    assert mine.progress.backwards == theirs.progress.backwards == 5
    ours = {key: window.histogram for key, window in mine.windows[0].tensors.items()}
    assert ours == {key: window.histogram for key, window in theirs.windows[0].tensors.items()}


def test_objects_that_must_not_be_touched(tmp_path):
    touched = []

    class Proxy:
        def __getattribute__(self, name: str) -> object:
            touched.append(name)
            return object.__getattribute__(self, name)

        @property
        def __class__(self) -> type:
            touched.append("__class__")
            return nn.Module

    class Shy(nn.Module):
        __slots__ = ("slot",)

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def __getattr__(self, name: str) -> object:
            if name in ("layer", "_forward_hooks"):
                return super().__getattr__(name)
            raise RuntimeError(f"nobody asks for {name}")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    unfinished = nn.Module.__new__(Shy)
    kept = [[Proxy()], unfinished]
    touched.clear()
    with watched(tmp_path) as run:
        model = Shy()
        train(model, torch.optim.SGD(model.parameters()))
    assert touched == []
    assert len(kept) == 2
    assert (run.names, run.steps()) == (["Shy"], 3)
    # Its configuration can't be asked for, and the modes of the step that was recorded are gone.
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("trained", [False, True], ids=["armed", "attached"])
def test_scripting_exporting_and_tracing(tmp_path, trained):
    x = torch.randn(2, 4)
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, steps=2 * trained)
        hooks = hooks_of(model)
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            outputs = [torch.jit.script(model)(x), torch.jit.trace(model, x)(x), torch.jit.trace(model.forward, x)(x)]
        outputs += [torch.fx.symbolic_trace(model)(x), torch.export.export(model, (x,)).module()(x)]
        after = hooks_of(model)
        train(model, optimizer, steps=2)
        expected = model(x)
    assert all(output.shape == expected.shape for output in outputs)
    # Armed hooks wait for the first call of the model, which removes them.
    assert after == hooks if trained else hooks > 0
    assert (run.names, len(run.gradients())) == (["Net"], 4)


def test_a_tracer_wrapped_during_the_run_keeps_hooks_on_after_it(tmp_path, monkeypatch):
    """torch's compiler wraps torch.jit.trace when it is imported: the watcher's wrapper then survives the run."""
    monkeypatch.setattr(torch.jit, "trace", torch.jit.trace)
    with watched(tmp_path):
        during = torch.jit.trace
        torch.jit.trace = lambda *args: during(*args)
    model = net()
    with mpinspect.Inspector(model) as inspector, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(model, torch.randn(2, 4))
    assert any("torch.jit.trace" in note for note in inspector.session().notes)


def test_modules_in_the_collectors_permanent_generation(tmp_path):
    try:
        with watched(tmp_path) as run:
            model = net()
            gc.freeze()
            train(model, torch.optim.SGD(model.parameters()))
    finally:
        gc.unfreeze()
        owners._frozen.clear()
    assert (run.names, run.steps()) == (["Net"], 3)


def test_an_internal_error_is_noted_and_the_training_continues(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("made for this test")

    with watched(tmp_path) as run:
        monkeypatch.setattr("mpinspect.run.models.attaching.Holders", broken)
        model = net()
        train(model, torch.optim.SGD(model.parameters()))
        changed = model[0].weight.grad is not None
    assert changed
    assert any("made for this test" in note for note in run.seen.notes)


def test_errors_of_the_script_reach_it_unchanged(tmp_path):
    with watched(tmp_path):
        with pytest.raises(ValueError, match="empty parameter list"):
            torch.optim.SGD([])
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()


def test_a_forked_child_is_not_inspected(tmp_path):
    with watched(tmp_path) as run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer)
        run.watcher.abandon()
        # A forked child would lack the thread that writes pending data.
        for thread in threading.enumerate():
            if thread.name == "mpinspect-write":
                thread.join()
        size = (tmp_path / "Net" / "session.mpinspect").stat().st_size
        train(model, optimizer)
    assert run.parts.models == []
    assert hooks_of(model) == 0
    assert (tmp_path / "Net" / "session.mpinspect").stat().st_size == size
    while launched_inspector._inherited:
        launched_inspector._inherited.pop().close()


# -- bit identity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"every": 1, "lint": True, "kernels": True}], ids=["plain", "everything"])
def test_training_is_bit_identical(tmp_path, deterministic_torch, options):
    def training() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 36, 5)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        return [*model.state_dict().values(), torch.get_rng_state()]

    alone = training()
    with watched(tmp_path, **options) as run:
        together = training()
    assert run.steps() == 12
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


#: Every activation of torch.nn without constructor arguments that takes one tensor.
ACTIVATIONS = [
    name
    for name in nn.modules.activation.__all__
    if name not in ("Threshold", "MultiheadAttention", "GLU", "Softmax2d", "Softmin", "Softmax", "LogSoftmax")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_whose_shapes_are_recorded_is_bit_identical_whatever_the_activation(
    dtype, tmp_path, deterministic_torch
):
    def training() -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        branches = [nn.Sequential(nn.Linear(8, 64), getattr(nn, name)(), nn.Linear(64, 5)) for name in ACTIVATIONS]
        model = Of(lambda self, x: torch.stack([each(x) for each in self.branches]), branches=nn.ModuleList(branches))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(torch.randn(32, 8)).square().mean((1, 2)).sum()
            take_step(optimizer, loss)
        return model.state_dict()

    alone = training()
    with watched(tmp_path, lint=True) as run:
        together = training()
    assert run.names == ["Of"]
    assert [name for name, value in alone.items() if not torch.equal(value, together[name])] == []


@pytest.mark.parametrize(
    ("dtype", "lr", "is_told"), [(torch.bfloat16, 1e-4, True), (torch.bfloat16, 0.0, False), (None, 1e-4, False)]
)
def test_weights_that_pass_through_16_bits_between_trainings_are_compared(dtype, lr, is_told, tmp_path):
    model = nn.Linear(16, 16)
    starts = []
    with watched(tmp_path) as run:
        for _ in range(3):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value.to(dtype or torch.float32).float() for name, value in state.items()})
            starts.append(torch.cat([model.weight.detach().flatten(), model.bias.detach()]))
            # A few large updates, and many below half a unit in the last place.
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            for _ in range(3):
                loss = (model(torch.randn(8, 16)) * torch.logspace(-3, 3, 16)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            del optimizer, loss
    session = run.parts.models[0].session
    found = [finding for finding in analyse(session).findings if finding.id == "weights-returned-rounded"]
    assert bool(found) is is_told
    if is_told:
        equal = (starts[1] == starts[0]).float().mean()
        assert found[0].severity == "warning"
        assert found[0].evidence["equal"] == pytest.approx(float(equal))
