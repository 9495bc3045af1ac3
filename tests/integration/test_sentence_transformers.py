"""A saved model is one of sentence-transformers too: stage-1 vectors there, pair scores by `PairScorer`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer

from clips import steady, write_video
from gare import GARE, GareConfig
from gare.integrations.pair_scorer import PairScorer
from gare.integrations.sentence_module import (
    make_sentence_transformer,
    save_sentence_transformer,
)
from gare.library.search.stage1 import stage1_queries, stage1_vectors

TEXTS = ["a dog runs", "rain falls on a roof and it goes on and on", "two cats"]


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("videos")
    return [str(write_video(folder / f"{n}.mp4", steady(seconds))) for n, seconds in enumerate((1.5, 3.0))]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_sentence_transformer(model, folder)
    return folder


def test_stage_1_vectors_of_a_saved_folder(model, videos, folder):
    theirs = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    text, video = model.encode_text(TEXTS), model.encode_video(videos)
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(videos)
    assert queries.shape == (3, model.dim + 1) == (3, theirs.get_embedding_dimension())
    np.testing.assert_allclose(queries, stage1_queries(text.text_TD).numpy(), atol=1e-5)
    np.testing.assert_allclose(documents, stage1_vectors(model, video).numpy(), atol=1e-5)
    assert theirs.similarity_fn_name == "dot"
    torch.testing.assert_close(
        theirs.similarity(queries, documents), torch.from_numpy(queries @ documents.T), atol=1e-5, rtol=0
    )
    assert theirs.encode_query(TEXTS[0]).shape == (model.dim + 1,)


def test_pictures_and_dictionaries(model, videos):
    theirs = make_sentence_transformer(model)
    picture = Image.new("RGB", (50, 40), "teal")
    shown = theirs.encode([{"video": videos[0]}, {"video": videos[1]}])
    np.testing.assert_allclose(shown, stage1_vectors(model, model.encode_video(videos)).numpy(), atol=1e-5)
    expected = stage1_vectors(model, model.encode_video([[picture]])).numpy()
    np.testing.assert_allclose(theirs.encode([picture]), expected, atol=1e-5)
    with pytest.raises(ValueError, match="mixes multiple modalities"):
        theirs.encode([TEXTS[0], picture])
    with pytest.raises(ValueError, match="texts and videos in one batch"):
        theirs[0].preprocess([TEXTS[0], picture])
    assert theirs.supports("video")
    with pytest.raises(ValueError, match="an input is one of text, image, video"):
        theirs[0].preprocess([{"audio": "x.wav"}])
    with pytest.raises(ValueError, match="train it with gare train"):
        theirs[0].train()(theirs[0].preprocess(TEXTS))
    theirs.eval()


def test_the_folder_is_a_gare_model_still(model, folder):
    assert json.loads((folder / "modules.json").read_text())[0]["type"].startswith("gare.")
    again = GARE.from_pretrained(folder)
    assert again.fingerprint() == model.fingerprint()


def test_what_sentence_transformers_saves_again_is_the_same_model(model, folder, tmp_path):
    theirs = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    theirs.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    assert GARE.from_pretrained(tmp_path / "again").fingerprint() == model.fingerprint()


def test_saving_keeps_other_files(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save_sentence_transformer(model, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "modules.json").is_file()


def test_it_loads_without_trust_only_by_our_function(folder):
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(folder), device="cpu")
    assert make_sentence_transformer(folder).encode_query(TEXTS).shape[0] == 3


def test_pairs_have_the_scores_of_the_model(model, videos):
    picture = Image.new("RGB", (50, 40), "teal")
    pairs = [
        (TEXTS[0], videos[1]),
        (videos[0], TEXTS[2]),
        (TEXTS[0], videos[0]),
        (TEXTS[1], [picture, picture]),
    ]
    text = model.encode_text(TEXTS)
    video = model.encode_video([*videos, [picture, picture]])
    scores_TV = model.score(text, video).detach()
    expected = [scores_TV[0, 1], scores_TV[2, 0], scores_TV[0, 0], scores_TV[1, 2]]
    scorer = PairScorer(model)
    for size in (1, 3, 32):
        found = scorer.predict(pairs, batch_size=size)
        np.testing.assert_allclose(found, torch.stack(expected).numpy(), atol=1e-5)
    assert scorer.predict(pairs[0]) == pytest.approx(expected[0].item(), abs=1e-5)
    assert scorer.predict([]).shape == (0,)
    as_tensor = scorer.predict(pairs, convert_to_tensor=True, activation_fn=torch.sigmoid)
    torch.testing.assert_close(as_tensor, torch.stack(expected).sigmoid(), atol=1e-5, rtol=0)


def test_ranking_documents_for_a_query(model, videos):
    scorer = PairScorer(model)
    scores = scorer.predict([(TEXTS[0], video) for video in videos])
    ranked = scorer.rank(TEXTS[0], videos, return_documents=True)
    best = int(scores.argmax())
    assert [hit["corpus_id"] for hit in ranked] == [best, 1 - best]
    assert ranked[0]["text"] == videos[best]
    assert ranked[0]["score"] == pytest.approx(scores[best])
    assert len(scorer.rank(videos[0], TEXTS, top_k=2)) == 2


@pytest.mark.parametrize("pair", [("a", "b"), ("a.mp4", "b.mp4"), ("a",), "ab", 3])
def test_what_is_no_pair_is_refused(model, pair):
    with pytest.raises(ValueError, match="a pair is a text and a video"):
        PairScorer(model).predict([pair])


def test_the_how_to_page_works(shared, tmp_path, monkeypatch):
    for name, source in {"boy.avi": "v_SoccerJuggling_g23_c01.avi", "speech.mp4": "video176.mp4"}.items():
        shutil.copyfile(shared / "data/clips" / source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs/how-to/mteb-and-sentence-transformers.md"
    mteb_part, *others = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict = {}
    exec("\n".join([mteb_part, *others]), names)
    gare_mini = GARE.from_pretrained("gare-mini")
    text = gare_mini.encode_text(["a boy juggles a ball", "a man gives a speech"])
    exact = gare_mini.score(text, gare_mini.encode_video(["boy.avi", "speech.mp4"])).detach()
    torch.testing.assert_close(names["near"], exact, atol=0.02, rtol=0)
    np.testing.assert_allclose(names["scores"], exact[:, 0].numpy(), atol=1e-5)
    assert [hit["corpus_id"] for hit in names["ranked"]] == [1]
