"""A replayed step leaves what the step itself would leave: gradients, loss and random numbers."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from gare import GARE, GareConfig
from gare.objective import Loss, ObjectiveConfig
from gare.train.distributed import Processes
from gare.train.gradient_step import PairBatch, compute_gradients, make_encode
from gare.train.optimizers import build_optimizer
from gare.train.replayed_gradients import ReplayedGradients, recorder_for
from gare.train.run_config import OptimizerConfig
from stand_in_recorder import StandIn

CPU = torch.device("cpu")


def make_model(device=CPU, **encoder) -> GARE:
    torch.manual_seed(0)
    config = {"encoder": {"name": "tiny", **encoder}, "temporal": {"num_layers": 1}}
    return GARE(GareConfig.load(config)).to(device).train()  # with dropout in the interaction


def make_batch(seed, size=6, device=CPU) -> PairBatch:
    generator = torch.Generator().manual_seed(seed)
    mask_TW = torch.rand(size, 6, generator=generator) < 0.8
    mask_TW[:, 0] = True
    mask_VF = torch.tensor([[True, True, number > 1] for number in range(size)])
    tensors = (
        torch.randint(512, (size, 6), generator=generator),
        mask_TW,
        torch.randint(256, (size, 3, 3, 32, 32), generator=generator, dtype=torch.uint8),
        mask_VF,
        torch.randint(4, (size,), generator=generator),
    )
    return PairBatch(*(tensor.to(device) for tensor in tensors), num_real_frames=int(mask_VF.sum()))


def make_gradients(model, recorder, device=CPU, **options):
    return ReplayedGradients(
        model,
        ObjectiveConfig(),
        Processes(0, 1, device),
        encode=make_encode(model, autocast=False),
        recorder=recorder,
        **options,
    )


def run(model, step, batches):
    """Train as a run does, and return the losses and the weights."""
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=1e-2, text_learning_rate=1e-2))
    losses = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        losses.append(step(batch, interaction_seed=100 + number))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def run_both(batches):
    eager_model, model = make_model(), make_model()
    encode, alone = make_encode(eager_model, autocast=False), Processes(0, 1, CPU)

    def eager(batch, *, interaction_seed) -> Loss:
        return compute_gradients(
            eager_model, batch, ObjectiveConfig(), alone, encode=encode, interaction_seed=interaction_seed
        )

    recorder = StandIn(model)
    expected = run(eager_model, eager, batches)
    return expected, run(model, make_gradients(model, recorder), batches), recorder


def test_several_steps_of_two_shapes_give_the_same_weights_and_losses():
    batches = [make_batch(number, size=6 if number % 3 else 4) for number in range(12)]
    (losses, weights), (found_losses, found_weights), recorder = run_both(batches)
    assert (recorder.warmed, recorder.recorded, recorder.replayed) == (4, 2, 8)
    for expected, found in zip(losses, found_losses, strict=True):  # also those of former steps
        assert torch.equal(found.total, expected.total)
        assert found.terms.keys() == expected.terms.keys()
        assert all(torch.equal(found.terms[name], term) for name, term in expected.terms.items())
    assert all(torch.equal(found_weights[name], weight) for name, weight in weights.items())
    assert len({float(loss.total) for loss in losses}) == len(losses)


def test_the_random_numbers_of_others_go_on_as_they_would():
    batches = [make_batch(number) for number in range(5)]
    torch.manual_seed(7)
    expected = torch.rand(3)
    model = make_model()
    torch.manual_seed(7)
    run(model, make_gradients(model, StandIn(model)), batches)
    assert torch.equal(torch.rand(3), expected)


def replaying():
    """A model whose steps are replayed from now on."""
    model = make_model()
    recorder = StandIn(model)
    gradients = make_gradients(model, recorder)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0))
    assert recorder.replayed == 1
    return model, gradients, recorder


def grads(model):
    named = model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def test_gradients_that_are_there_are_added_to():
    model, gradients, recorder = replaying()
    first = grads(model)
    gradients(make_batch(0))
    assert recorder.replayed == 1
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, 2 * first[name], msg=name)


def test_weights_that_were_loaded_are_seen_and_weights_that_were_moved_are_recorded_anew():
    model, gradients, recorder = replaying()
    first = grads(model)
    other = {name: 1.5 * tensor for name, tensor in model.state_dict().items()}
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def again():
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0))
        return grads(model)

    model.load_state_dict(other)
    assert not torch.equal(again()["temporal.position"], first["temporal.position"])
    model.load_state_dict(own)
    assert all(torch.equal(gradient, first[name]) for name, gradient in again().items())
    assert recorder.recorded == 1
    weight = model.temporal.position
    weight.data = weight.data.clone()
    for _ in range(3):
        assert all(torch.equal(gradient, first[name]) for name, gradient in again().items())
    assert recorder.recorded == 2
    weight.requires_grad_(False)
    again_three_times = [again() for _ in range(3)]
    assert recorder.recorded == 3
    assert weight.grad is None
    for each in again_three_times:
        assert all(torch.equal(gradient, first[name]) for name, gradient in each.items())


def test_what_is_forgotten_is_recorded_anew():
    model, gradients, recorder = replaying()
    first = grads(model)
    gradients.forget()
    assert all(parameter.grad is None for parameter in model.parameters())
    gradients.forget()
    gradients(make_batch(0))
    assert recorder.recorded == 2
    assert all(torch.equal(gradient, first[name]) for name, gradient in grads(model).items())


def test_a_batch_that_cannot_be_recorded_gets_its_gradients_and_is_said_once(caplog):
    model = make_model()
    recorder = StandIn(model)
    recorder.fails = "CUDA out of memory"
    gradients = make_gradients(model, recorder)
    found = []
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0))
        found.append(grads(model))
    assert recorder.recorded == 1
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in each)
    assert [record.getMessage() for record in caplog.records] == [
        "steps are not replayed as a CUDA graph, which costs time: CUDA out of memory"
    ]


def test_an_error_of_the_step_itself_is_raised(caplog):
    model = make_model()
    recorder = StandIn(model)
    gradients = make_gradients(model, recorder)

    def fail(pixels):
        raise RuntimeError("out of memory")

    model.encoder.image_features = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        gradients(make_batch(0))
    assert caplog.records == []
    del model.encoder.image_features
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0))
    assert recorder.recorded == 1


def test_what_draws_at_random_in_the_towers_is_not_recorded(caplog):
    caplog.set_level(logging.INFO)
    model = make_model()
    recorder = StandIn(model)
    image_features = model.encoder.image_features
    model.encoder.image_features = lambda pixels: nn.functional.dropout(image_features(pixels), 0.1)
    gradients = make_gradients(model, recorder)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0))
    assert recorder.recorded == 0
    assert [record.getMessage() for record in caplog.records] == [
        "steps are not replayed as a CUDA graph: the towers or the loss draw random numbers"
    ]


def test_chunks_teachers_and_other_processes_are_not_replayed():
    model = make_model()
    recorder = StandIn(model)
    chunked = make_gradients(model, recorder, chunk_size=2)
    taught = make_gradients(model, recorder)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        chunked(make_batch(0))
        model.zero_grad(set_to_none=True)
        taught(make_batch(0), teacher_logits_TV=torch.zeros(6, 6))
    assert recorder.warmed == recorder.recorded == 0
    assert recorder_for(CPU) is None


def test_few_kinds_of_batches_are_recorded():
    model = make_model()
    recorder = StandIn(model)
    gradients = make_gradients(model, recorder)
    for size in (2, 3, 4, 5, 6):
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            gradients(make_batch(0, size))
    assert recorder.recorded == 3
    assert recorder.replayed == 6


def test_frames_are_counted_before_a_step_is_recorded():
    """The image tower is shown as many frames as any batch of the kind needs; the host asks for no number."""
    model = make_model()
    recorder = StandIn(model)
    gradients = make_gradients(model, recorder)
    batch = make_batch(0)
    assert batch.num_real_frames == 16
    other = replace(batch, mask_VF=torch.ones_like(batch.mask_VF), num_real_frames=18)
    for each in (batch, other, batch, other, batch, replace(batch, num_real_frames=None)):
        model.zero_grad(set_to_none=True)
        gradients(each)
    assert recorder.recorded == 1
    assert recorder.replayed == 2


def test_a_number_of_frames_that_is_too_large_changes_no_feature(tiny_model):
    batch = make_batch(0)
    expected = tiny_model.encode_frames(batch.frames, batch.mask_VF).frames_VFD
    for num_real in (16, 17, 18):
        found = tiny_model.encode_frames(batch.frames, batch.mask_VF, num_real=num_real).frames_VFD
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="records real CUDA graphs, for which it needs a GPU"
)
def test_a_gpu_replays_steps_of_two_shapes():
    device = torch.device("cuda")
    model = make_model(device)
    replayed, eager = make_gradients(model, recorder_for(device), device), make_gradients(model, None, device)
    torch.manual_seed(7)
    before, losses = torch.cuda.get_rng_state(), []
    for number in range(12):
        batch = make_batch(number, size=6 if number % 3 else 4, device=device)
        found = {}
        for name, gradients in (("eager", eager), ("replayed", replayed)):
            model.zero_grad(set_to_none=True)
            loss = gradients(batch, interaction_seed=number)
            found[name] = (loss, grads(model))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # changes them where they are
        losses.append((found["eager"][0].total, found["replayed"][0].total))
        for name, gradient in found["eager"][1].items():
            difference = (found["replayed"][1][name] - gradient).norm()
            assert difference <= 1e-3 * gradient.norm() + 1e-6, name
    assert len(replayed._recorded) == 2
    for expected, other in losses:
        torch.testing.assert_close(other, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="records real CUDA graphs, for which it needs a GPU"
)
def test_a_gpu_goes_on_after_a_step_that_it_cannot_record(caplog):
    device = torch.device("cuda")
    model = make_model(device)
    image_features = model.encoder.image_features

    def waits(pixels):
        assert float(pixels.sum()) != 1  # asks the GPU
        return image_features(pixels)

    model.encoder.image_features = waits
    gradients = make_gradients(model, recorder_for(device), device)
    found = []
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        gradients(make_batch(0, device=device), interaction_seed=3)
        found.append(grads(model))
    for each in found:
        for name, gradient in each.items():
            torch.testing.assert_close(gradient, found[0][name], msg=name)
    assert len(caplog.records) == 1
    assert torch.rand(3, device=device).isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
