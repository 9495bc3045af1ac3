"""MTEB itself ranks with our models, and its nDCG@10 is the one of our own scores."""

from __future__ import annotations

import math
from pathlib import Path

import datasets
import mteb
import pytest
import torch
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from PIL import Image

from clips import write_video
from dual_encoders import save_family
from gare import GARE, GareConfig
from gare.errors import EvaluationError
from gare.integrations.mteb_models import MtebEncoder, MtebSearch
from gare.library.search.stage1 import stage1_queries, stage1_vectors

COLOURS = [
    "red",
    "orange",
    "gold",
    "green",
    "teal",
    "blue",
    "navy",
    "purple",
    "pink",
    "brown",
    "gray",
    "white",
]
CAPTIONS = [text for colour in COLOURS for text in (f"{colour} light", f"a room turns {colour}")]
# Two grades of relevance: the caption's own video, and the one after it.
RELEVANT = {
    f"q{number}": {f"d{number // 2}": 2, f"d{(number // 2 + 1) % len(COLOURS)}": 1}
    for number in range(len(CAPTIONS))
}


class LocalRetrieval(AbsTaskRetrieval):
    """A task whose data is handed over; its scores include nDCG@10 before MTEB rounds it to five digits."""

    metadata = TaskMetadata(
        type="Any2AnyRetrieval",
        name="GareLocalRetrieval",
        main_score="ndcg_at_10",
        description="Coloured videos, made by a test.",
        dataset={"path": "local", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        date=("2025-01-01", "2025-01-01"),
        domains=[],
        task_subtypes=[],
        license="cc0-1.0",
        annotations_creators="derived",
        dialect=[],
        modalities=["text"],
        sample_creation="created",
        bibtex_citation="",
    )

    def __init__(self, category, queries, corpus, relevant, top_ranked=None):
        sides = {"t": "text", "i": "image", "v": "video"}
        modalities = list(dict.fromkeys(sides[letter] for letter in category.replace("2", "")))
        self.metadata = type(self).metadata.model_copy(
            update={"category": category, "modalities": modalities}
        )
        super().__init__()
        split = {
            "queries": queries,
            "corpus": corpus,
            "relevant_docs": relevant,
            "top_ranked": top_ranked,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True

    def task_specific_scores(self, scores, qrels, results, hf_split, hf_subset):
        self.results = results
        values = [each["ndcg_cut_10"] for each in scores.values()]
        return {"exact_ndcg_at_10": sum(values) / len(values)}


def ndcg_at_10(
    scores_QN: torch.Tensor, relevant: dict[str, dict[str, int]], queries: str, corpus: str
) -> float:
    """By the formula, one query after the other."""

    def gain(grades):
        return sum(grade / math.log2(place + 2) for place, grade in enumerate(grades[:10]))

    total = 0.0
    for number, scores_N in enumerate(scores_QN):
        wanted = relevant[f"{queries}{number}"]
        order = sorted(range(len(scores_N)), key=lambda n: -scores_N[n].item())
        ranked = [wanted.get(f"{corpus}{place}", 0) for place in order]
        total += gain(ranked) / gain(sorted(wanted.values(), reverse=True))
    return total / len(scores_QN)


def run(model, task) -> float:
    result = mteb.evaluate(model, task, cache=None, co2_tracker=False, show_progress_bar=False)
    scores = result.task_results[0].scores["test"][0]
    assert scores["ndcg_at_10"] == pytest.approx(scores["exact_ndcg_at_10"], abs=6e-6)
    return scores["exact_ndcg_at_10"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> list[Path]:
    """Real files; each fades from its colour into another."""
    folder = tmp_path_factory.mktemp("mteb")
    paths = []
    for number, colour in enumerate(COLOURS):
        other = COLOURS[(number * 5 + 3) % len(COLOURS)]
        start, end = (Image.new("RGB", (64, 48), name) for name in (colour, other))
        pictures = [Image.blend(start, end, step / 6) for step in range(4)]
        path = folder / f"{number}.mp4"
        paths.append(write_video(path, [0.0, 1.0, 2.0, 3.0], pictures=pictures))
    return paths


@pytest.fixture(scope="module")
def corpus(videos):
    """A `Video` column: bytes in the dataset for one half, paths for the other."""
    cells = [
        {"bytes": path.read_bytes(), "path": None} if number % 2 else {"bytes": None, "path": str(path)}
        for number, path in enumerate(videos)
    ]
    rows = datasets.Dataset.from_dict({"id": [f"d{n}" for n in range(len(videos))], "video": cells})
    return rows.cast_column("video", datasets.Video())


@pytest.fixture(scope="module")
def queries():
    return datasets.Dataset.from_dict({"id": [f"q{n}" for n in range(len(CAPTIONS))], "text": CAPTIONS})


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(3)
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()
    for weights in model.interaction.parameters():  # else the increments would be small
        torch.nn.init.normal_(weights, std=0.3)
    return model


@pytest.fixture(scope="module")
def plain() -> GARE:
    torch.manual_seed(4)
    values = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}, "interaction": {"name": "mean"}}
    return GARE(GareConfig.load(values)).eval()


def own_features(model, videos):
    return model.encode_text(CAPTIONS), model.encode_video([str(path) for path in videos])


def test_pair_scores_rank_a_task_as_our_own_scores_do(model, videos, queries, corpus):
    text, video = own_features(model, videos)
    expected = ndcg_at_10(model.score(text, video), RELEVANT, "q", "d")
    cosines = ndcg_at_10(stage1_queries(text.text_TD) @ stage1_vectors(model, video).mT, RELEVANT, "q", "d")
    assert abs(expected - cosines) > 1e-3  # else increments would not be seen
    search = MtebSearch(model)
    assert isinstance(search, mteb.SearchProtocol)
    task = LocalRetrieval("t2v", queries, corpus, RELEVANT)
    assert run(search, task) == pytest.approx(expected, abs=1e-6)
    for number, name in enumerate(queries["id"]):
        scores = torch.tensor([task.results[name][f"d{place}"] for place in range(len(videos))])
        torch.testing.assert_close(scores, model.score(text, video)[number], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gare-mini", "clip"])
def test_the_shipped_model_and_one_of_transformers(name, videos, queries, corpus, tmp_path):
    given = name if name == "gare-mini" else save_family(name, tmp_path)
    own = GARE.from_pretrained(given)
    expected = ndcg_at_10(own.score(*own_features(own, videos)), RELEVANT, "q", "d")
    found = run(MtebSearch(given), LocalRetrieval("t2v", queries, corpus, RELEVANT))
    assert found == pytest.approx(expected, abs=1e-6)


def test_videos_find_texts_and_pictures_are_videos(model, videos, queries, corpus):
    text, video = own_features(model, videos)
    wanted = {f"d{n}": {f"q{2 * n}": 1, f"q{2 * n + 1}": 1} for n in range(len(videos))}
    expected = ndcg_at_10(model.score(text, video).mT, wanted, "d", "q")
    found = run(MtebSearch(model), LocalRetrieval("v2t", corpus, queries, wanted))
    assert found == pytest.approx(expected, abs=1e-6)
    pictures = [Image.new("RGB", (40 + n, 30), colour) for n, colour in enumerate(COLOURS)]
    shown = datasets.Dataset.from_dict({"id": [f"d{n}" for n in range(len(COLOURS))], "image": pictures})
    expected = ndcg_at_10(model.score(text, model.encode_video([[x] for x in pictures])), RELEVANT, "q", "d")
    found = run(MtebSearch(model), LocalRetrieval("t2i", queries, shown, RELEVANT))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("category", ["t2v", "v2t"])
def test_an_encoder_gives_stage_1(category, model, plain, videos, queries, corpus):
    for each in (model, plain):
        text, video = own_features(each, videos)
        products = stage1_queries(text.text_TD) @ stage1_vectors(each, video).mT
        encoder = MtebEncoder(each)
        assert isinstance(encoder, mteb.EncoderProtocol)
        assert not isinstance(encoder, mteb.SearchProtocol)
        if category == "t2v":
            expected = ndcg_at_10(products, RELEVANT, "q", "d")
            task = LocalRetrieval(category, queries, corpus, RELEVANT)
        else:
            wanted = {f"d{n}": {f"q{2 * n}": 1} for n in range(len(videos))}
            expected = ndcg_at_10(products.mT, wanted, "d", "q")
            task = LocalRetrieval(category, corpus, queries, wanted)
        assert run(encoder, task) == pytest.approx(expected, abs=1e-6)
        if each is plain:  # then stage 1 is the score
            assert run(MtebSearch(each), task) == pytest.approx(expected, abs=1e-6)


def test_texts_with_texts_have_plain_cosines(model, queries):
    corpus = queries.rename_column("text", "body").add_column("text", CAPTIONS).remove_columns("body")
    corpus = corpus.add_column("title", ["seen:"] * len(CAPTIONS))
    wanted = {f"q{n}": {f"q{n}": 1} for n in range(len(CAPTIONS))}
    titled = model.encode_text([f"seen: {text}" for text in CAPTIONS])
    expected = ndcg_at_10(model.similarity(model.encode_text(CAPTIONS), titled), wanted, "q", "q")
    for wrapped in (MtebSearch(model), MtebEncoder(model)):
        found = run(wrapped, LocalRetrieval("t2t", queries, corpus, wanted))
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_task_may_name_candidates(model, queries, corpus):
    candidates = {
        f"q{n}": [f"d{(n + step) % len(COLOURS)}" for step in range(4)] for n in range(len(CAPTIONS))
    }
    task = LocalRetrieval("t2v", queries, corpus, RELEVANT, top_ranked=candidates)
    run(MtebSearch(model), task)
    assert {name: set(found) for name, found in task.results.items()} == {
        name: set(named) for name, named in candidates.items()
    }


def test_what_mteb_is_told_of_a_model(model, tmp_path):
    model.save_pretrained(tmp_path / "my run")
    meta = MtebSearch(tmp_path / "my run").mteb_model_meta
    assert (meta.name, meta.revision) == ("gare/my-run", model.fingerprint())
    assert meta.modalities == ["text", "image", "video"]
    assert MtebEncoder("gare-mini").mteb_model_meta.name == "gare/gare-mini"


def test_inputs_of_several_kinds_and_damaged_videos_are_refused(model, queries, corpus, tmp_path):
    with pytest.raises(EvaluationError, match="has text and video in one input"):
        run(MtebSearch(model), LocalRetrieval("t2vt", queries, corpus, RELEVANT))
    with pytest.raises(ValueError, match="call index before search"):
        MtebSearch(model).search(queries, task_metadata=LocalRetrieval.metadata, top_k=3)
    cells = [{"bytes": b"no video", "path": None}] * len(corpus)
    broken = corpus.remove_columns("video").add_column("video", cells).cast_column("video", datasets.Video())
    with pytest.raises(Exception, match="not a video that can be read"):
        run(MtebSearch(model), LocalRetrieval("t2v", queries, broken, RELEVANT))
