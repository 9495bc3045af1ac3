"""The closed forms of the appendix against autograd and against their own definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gare.theory.trust_region import coupled_step, infonce_gradients, learned_step, step_error, uncoupled_step


def batch(num=5, dim=7):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return random(num, dim), 0.5 * random(num, num, dim), random(num, num, dim)


@pytest.mark.parametrize("direction", ["text_to_video", "video_to_text", "symmetric"])
@pytest.mark.parametrize("shared_video", [False, True])
def test_gradients_equal_autograd(direction, shared_video):
    text, increment, video = batch()
    video = video[0] if shared_video else video
    text.requires_grad_()
    increment.requires_grad_()
    scores = F.cosine_similarity(text[:, None] + increment, video, dim=-1) / 0.05
    target = torch.arange(len(text))
    rows, columns = F.cross_entropy(scores, target), F.cross_entropy(scores.mT, target)
    loss = {"text_to_video": rows, "video_to_text": columns, "symmetric": (rows + columns) / 2}[direction]
    text_gradient, increment_gradient = torch.autograd.grad(loss, [text, increment])
    ours = infonce_gradients(text, increment, video, temperature=0.05, direction=direction)
    torch.testing.assert_close(ours.increment_TVD, increment_gradient, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(ours.text_TD, text_gradient, atol=1e-12, rtol=1e-9)


def test_uncoupled_step_is_the_steepest_of_its_length():
    _, _, gradient = batch()
    radius = torch.rand(5, 5, dtype=torch.float64) + 0.1
    step = uncoupled_step(gradient, radius)
    torch.testing.assert_close(step.norm(dim=-1), radius)
    torch.testing.assert_close((step * gradient).sum(-1), -radius * gradient.norm(dim=-1))


def test_coupled_step_lands_on_its_radius_and_descends():
    _, increment, gradient = batch()
    radius = increment.norm(dim=-1) * 1.5
    step = coupled_step(increment, gradient, radius)
    assert step.feasible_TV.all()
    assert (step.length_TV > 0).all()
    torch.testing.assert_close(step.increment_TVD.norm(dim=-1), radius)
    moved = step.increment_TVD - increment
    torch.testing.assert_close(moved, -step.length_TV[..., None] * F.normalize(gradient, dim=-1))
    assert ((moved * gradient).sum(-1) < 0).all()
    torch.testing.assert_close(learned_step(increment, step.increment_TVD, gradient), step.length_TV)


def test_coupled_step_from_zero_is_the_uncoupled_one():
    _, increment, gradient = batch()
    radius = torch.rand(5, 5, dtype=torch.float64)
    step = coupled_step(torch.zeros_like(increment), gradient, radius)
    torch.testing.assert_close(step.increment_TVD, uncoupled_step(gradient, radius))


@pytest.mark.parametrize(
    ("size", "dtype"), [(1e-30, torch.float64), (1e-200, torch.float64), (1e-30, torch.float32)]
)
def test_the_size_of_a_gradient_changes_nothing(size, dtype):
    """At temperature 0.01 most gradients of a batch are shorter than 1e-12."""
    _, increment, gradient = (x.to(dtype) for x in batch())
    radius = increment.norm(dim=-1) * 1.5
    short = gradient * size
    whole, step = coupled_step(increment, gradient, radius), coupled_step(increment, short, radius)
    assert step.feasible_TV.all()
    torch.testing.assert_close(step.increment_TVD, whole.increment_TVD)
    torch.testing.assert_close(step.length_TV, whole.length_TV)
    torch.testing.assert_close(step.increment_TVD.norm(dim=-1), radius)
    torch.testing.assert_close(uncoupled_step(short, radius), uncoupled_step(gradient, radius))
    torch.testing.assert_close(
        learned_step(increment, step.increment_TVD, short),
        learned_step(increment, step.increment_TVD, gradient),
    )


def test_without_a_gradient_there_is_no_step():
    _, increment, gradient = batch()
    radius = increment.norm(dim=-1) * torch.tensor([1.5, 1.0, 0.5, 1.0, 1.5], dtype=torch.float64)
    step = coupled_step(increment, torch.zeros_like(gradient), radius)
    assert torch.equal(step.increment_TVD, increment)
    assert not step.length_TV.any()
    assert torch.equal(step.feasible_TV, radius == increment.norm(dim=-1))  # it stands there already


def test_gradients_of_a_pair_that_is_all_but_certain_keep_their_direction():
    """1 − softmax of the positive would be 0 or rounding; the softmax of its negatives is neither."""
    text = torch.eye(3, dtype=torch.float64)
    text[0, 1] = 0.1
    increment = torch.zeros(3, 3, 3, dtype=torch.float64)
    found = infonce_gradients(text, increment, torch.eye(3, dtype=torch.float64), temperature=0.01)
    assert 0 < found.increment_TVD[0, 0].norm() < 1e-30
    step = uncoupled_step(found.increment_TVD, torch.full((3, 3), 0.5, dtype=torch.float64))
    torch.testing.assert_close(step[0, 0].norm(), torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_increment_that_has_its_radius_can_keep_it_across_any_gradient(dtype):
    """|Δ|² and radius² differ by rounding, of either sign; its radius is not out of reach for that."""
    generator = torch.Generator().manual_seed(0)
    increment, gradient = torch.randn(2, 20, 10, 8, generator=generator, dtype=dtype)
    along = (gradient * increment).sum(-1, keepdim=True) / increment.square().sum(-1, keepdim=True)
    radius = increment.norm(dim=-1)
    step = coupled_step(increment, gradient - along * increment, radius)
    assert step.feasible_TV.all()
    torch.testing.assert_close(
        step.length_TV, torch.zeros_like(radius), atol=100 * torch.finfo(dtype).eps, rtol=0
    )


def test_a_radius_out_of_reach_is_said_and_the_closest_point_given():
    increment = torch.tensor([[[0.0, 2.0]]])
    gradient = torch.tensor([[[1.0, 0.0]]])
    step = coupled_step(increment, gradient, torch.tensor([[1.0]]))
    assert not step.feasible_TV.any()
    torch.testing.assert_close(step.increment_TVD, increment)  # already the closest on its line


def test_step_error_is_a_distance():
    assert step_error(torch.tensor([[1.0]]), torch.tensor([[3.0]])).item() == 2


def test_unequal_numbers_of_texts_and_videos_are_refused():
    text, increment, video = batch()
    with pytest.raises(ValueError, match="as many of each"):
        infonce_gradients(text[:3], increment[:3], video[:3], temperature=0.1)
