"""A bank of captions in the mini encoder: what it takes off a score, and what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gare import GARE, GareConfig
from gare.encoders.caption_bank import CaptionBank
from gare.errors import ConfigError

DIM, PLACE, TAU = 16, 5, 0.05
MINI = {"encoder": {"name": "mini", "dim": DIM, "image_size": 32}, "temporal": {"num_layers": 0}}


def draw(number: int, seed: int) -> torch.Tensor:
    return torch.randn(number, DIM, generator=torch.Generator().manual_seed(seed)) + 0.3


def make_bank(share: float = 0.5) -> CaptionBank:
    bank = CaptionBank(40, DIM, dimension=PLACE, share=share, temperature=TAU)
    bank.fill(draw(40, 0), draw(30, 1))
    return bank


def without_place(vectors: torch.Tensor) -> torch.Tensor:
    vectors = vectors.clone()
    vectors[..., PLACE] = 0
    return F.normalize(vectors, dim=-1)


def test_the_level_is_a_soft_maximum_of_the_cosines_with_the_captions():
    cosines = without_place(draw(7, 2)) @ without_place(draw(40, 0)).T
    expected = [
        TAU * math.log(sum(math.exp(cosine / TAU) for cosine in row) / 40)
        for row in cosines.double().tolist()
    ]
    assert make_bank().levels(draw(7, 2)).tolist() == pytest.approx(expected, abs=1e-5)


def test_an_offset_for_each_picture_is_all_that_it_changes():
    """The cosine, less a share of the level; what is common to all pictures scales with both lengths."""
    bank, text, pictures = make_bank(), draw(6, 3), draw(9, 4)
    offset = bank.share * (bank.levels(pictures) - bank.usual_level)
    lifted, lowered = bank.lift_text(text), bank.lower_pictures(pictures)
    wanted = without_place(text) @ without_place(pictures).T - offset
    wanted = wanted / math.hypot(1, 0.3) / (1 + (offset / 0.3).square()).sqrt()
    found = F.normalize(lifted, dim=-1) @ F.normalize(lowered, dim=-1).T
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_hub_is_lowered_and_a_picture_far_from_all_captions_is_raised():
    bank = make_bank()
    middle = bank.captions_KD.mean(dim=0, keepdim=True)
    hub, stranger = bank.lower_pictures(torch.cat([middle, -middle]))[:, PLACE].tolist()
    assert hub < 0 < stranger


def test_without_a_share_only_its_own_dimension_is_lost():
    lowered = make_bank(share=0.0).lower_pictures(draw(9, 4))
    torch.testing.assert_close(F.normalize(lowered, dim=-1), without_place(draw(9, 4)))


def test_lengths_change_nothing_and_leading_dimensions_are_free():
    bank, frames = make_bank(), draw(12, 5).unflatten(0, (3, 4))
    torch.testing.assert_close(bank.levels(3 * frames), bank.levels(frames))
    torch.testing.assert_close(bank.lower_pictures(frames).flatten(0, 1), bank.lower_pictures(draw(12, 5)))


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load(MINI), pretrained_towers=False).eval()


@torch.no_grad()
def test_a_model_saves_its_bank_and_is_another_model_with_it(model, tmp_path):
    settings = ["encoder.caption_bank=40", f"encoder.bank_dimension={PLACE}"]
    banked = GARE(GareConfig.load(MINI, settings), pretrained_towers=False).eval()
    missing = banked.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert missing == ["encoder.bank.captions_KD", "encoder.bank.usual_level"]
    assert banked.encoder.bank is not None
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    plain = model.encoder.encode_images(pixels)
    banked.encoder.bank.fill(draw(40, 0), plain)
    banked.save_pretrained(tmp_path)
    loaded = GARE.from_pretrained(tmp_path)
    assert loaded.fingerprint() == banked.fingerprint() != model.fingerprint()
    others = [place for place in range(DIM) if place != PLACE]
    found = loaded.encoder.encode_images(pixels)
    torch.testing.assert_close(found[:, others], plain[:, others])
    torch.testing.assert_close(found, banked.encoder.bank.lower_pictures(plain))
    text, own = (each.encode_text(["a dog", "two cats on a bed"]).text_TD for each in (loaded, model))
    torch.testing.assert_close(text, banked.encoder.bank.lift_text(own))


def test_the_level_must_have_a_dimension_that_there_is():
    with pytest.raises(ConfigError, match="bank_dimension must be below dim, 16, not 16"):
        GareConfig.load(MINI, [f"encoder.bank_dimension={DIM}"])
