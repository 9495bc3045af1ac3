"""Give a model with the mini encoder a bank of training captions: pictures near all of them come first less.

    python experiments/fill_caption_bank.py gare-mini data/msrvtt_frames data/flickr8k --out runs/with-bank \
        --set encoder.bank_share=0.7

Every set gives as many captions, drawn with a fixed seed, and some pictures for the usual level: all from its
training split. `src/gare/encoders/caption_bank.py` says what the bank does; share and temperature are chosen
on val (docs/models/gare-mini.md).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gare import GARE, GareConfig
from gare.data.loader import FrameSource
from gare.data.manifest import find_manifest
from gare.encoders.caption_bank import CaptionBank, least_used_dimension
from gare.encoders.mini_encoder import MiniEncoder
from gare.errors import GareError
from gare.model.model_files import TOKENIZER_FOLDER

NUM_PICTURES = 64
"""Of each set, one frame a video: enough for a mean, and a constant in all scores changes no ranking."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="gare-mini, or the folder of a model with the mini encoder")
    parser.add_argument("data", nargs="+", type=Path, help="what 'gare data prepare' made")
    parser.add_argument("--captions", type=int, default=5000, help="in all; default 5000")
    parser.add_argument("--set", action="append", default=[], help="settings other than the model's")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    try:
        with_bank(chosen.model, chosen.data, chosen.captions, chosen.set).save_pretrained(chosen.out)
    except (GareError, ValueError) as error:
        parser.error(str(error))
    print(f"saved {chosen.out}")


def with_bank(name: str, data: Sequence[Path], num_captions: int, settings: Sequence[str] = ()) -> GARE:
    """A copy of a saved model with a bank that is filled from these sets; a former bank is left behind."""
    values = GARE.from_pretrained(name).config.to_values()
    if values["encoder"]["name"] != "mini":
        raise ValueError(f"{name} has no mini encoder, so it can have no bank of captions")
    plain = copy_of(name, values, ["encoder.caption_bank=0"])
    captions, vectors_ND = training_samples(plain, data, num_captions)
    text_KD = plain.encode_text(captions).text_TD
    dimension = least_used_dimension(text_KD, vectors_ND)
    banked = [f"encoder.caption_bank={len(captions)}", f"encoder.bank_dimension={dimension}"]
    model = copy_of(name, values, [*settings, *banked])
    bank_of(model).fill(text_KD, vectors_ND)
    return model


def copy_of(name: str, values: dict[str, object], settings: Sequence[str]) -> GARE:
    """The model of that name with other settings; weights that both have are the same."""
    tokenizer = Path(name) / TOKENIZER_FOLDER
    start = GARE.from_pretrained(name)
    model = GARE(
        GareConfig.load(values, list(settings)),
        pretrained_towers=False,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
    )
    shared = {key: x for key, x in start.state_dict().items() if not key.startswith("encoder.bank.")}
    found = model.load_state_dict(shared, strict=False)
    assert all(key.startswith("encoder.bank.") for key in found.missing_keys), found.missing_keys
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def bank_of(model: GARE) -> CaptionBank:
    assert isinstance(model.encoder, MiniEncoder)
    assert model.encoder.bank is not None
    return model.encoder.bank


def training_samples(model: GARE, data: Sequence[Path], num_captions: int) -> tuple[list[str], Tensor]:
    """As many captions of every set, in the order of their length, and vectors of some of its pictures."""
    captions: list[str] = []
    pictures = []
    for place in data:
        source = FrameSource.open(find_manifest(place), 1, "uniform")
        chance, known = random.Random(0), source.manifest.captions("train")
        captions += chance.sample(known, min(len(known), num_captions // len(data)))
        videos = source.manifest.videos("train")
        pictures += [source.read(video) for video in chance.sample(videos, min(len(videos), NUM_PICTURES))]
    return sorted(captions, key=len), model.encode_video(pictures).frames_VFD[:, 0]


if __name__ == "__main__":
    main()
