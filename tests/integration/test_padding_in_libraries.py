"""A model whose padding takes part, as in the authors' code: in a library nothing depends on neighbours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import gare
from clips import write_video
from gare.errors import LibraryError

QUERIES = ("a dog", "rain on a window")


def released_model(folder: Path) -> gare.GARE:
    torch.manual_seed(0)
    model = gare.GARE(gare.GareConfig.load({"preset": "released", "encoder": {"name": "tiny"}})).eval()
    assert not model.interaction.masks_padding
    model.save_pretrained(folder)
    return model


def scores(library: gare.Library, name: str) -> list[float]:
    found = []
    for query in QUERIES:
        for how in ({}, {"exhaustive": True}, {"exact": True}):
            hits = library.search(query, top=10, **how)
            found += [hit.score for hit in hits if Path(hit.path).name == name]
    return found


def test_a_short_video_scores_the_same_beside_a_longer_one(tmp_path: Path) -> None:
    model = released_model(tmp_path / "model")
    videos = tmp_path / "videos"
    videos.mkdir()
    short = write_video(videos / "short.mp4", [0.0, 0.1, 0.2])
    with gare.Library.open(tmp_path / "library", model=tmp_path / "model") as library:
        library.index(videos)
        alone = scores(library, "short.mp4")
        write_video(tmp_path / "long.mp4", [k / 10 for k in range(40)])
        shutil.move(tmp_path / "long.mp4", videos / "long.mp4")
        library.index(videos)
        assert scores(library, "short.mp4") == pytest.approx(alone, abs=1e-5)
    together = tmp_path / "together"
    with gare.Library.open(together, model=tmp_path / "model") as library:
        library.index(videos)
        assert scores(library, "short.mp4") == pytest.approx(alone, abs=1e-5)
    masked = model.masking_padding()
    with torch.no_grad():
        score_TV = masked.score(masked.encode_text(list(QUERIES)), masked.encode_video([short]))
    assert alone == pytest.approx([float(score) for score in score_TV[:, 0] for _ in range(3)], abs=2e-3)


def test_a_library_of_an_earlier_version_that_counted_padding_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = released_model(tmp_path / "model")
    videos = tmp_path / "videos"
    videos.mkdir()
    write_video(videos / "short.mp4", [0.0, 0.1, 0.2])
    with monkeypatch.context() as earlier:
        earlier.setattr(gare.GARE, "masking_padding", lambda self: self)
        with gare.Library.open(tmp_path / "library", model=tmp_path / "model") as library:
            library.index(videos)
            assert library.store.stamp.fingerprint == model.fingerprint()
    with (
        gare.Library.open(tmp_path / "library") as library,
        pytest.raises(LibraryError, match=f"padding count.*gare index --model {tmp_path / 'model'}"),
    ):
        library.search("a dog")
    with gare.Library.open(tmp_path / "library", model=tmp_path / "model", change_model=True) as library:
        library.index(videos)
        assert len(library.search("a dog")) == 1
