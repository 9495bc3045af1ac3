"""`--model NAME` with what people have: dual encoders of transformers in a folder, of every family.

Towers are random and small, saved by transformers. Scores are compared with what transformers alone gives.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from clips import write_video
from dual_encoders import FAMILIES, SMALL, TEXTS, own_cosine, pictures, save_family, word_tokenizer
from encoder_laws import LAWS
from gare import GARE, Library
from gare.bench.encode_bench import benchmark_encode
from gare.cli.main import app
from gare.data.video import read_frames
from gare.errors import CheckpointError, LibraryError, MissingExtraError
from gare.library.index.index_run import IndexOptions
from toy_data import recipe, write_dataset
from warm import run_gare

ONE = IndexOptions(num_workers=1)


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """Ten videos of one picture each, of ten shapes; two are larger than what gare's own models decode."""
    folder = tmp_path_factory.mktemp("videos")
    for number, picture in enumerate(pictures()):
        size = (picture.width // 2 * 2, picture.height // 2 * 2)
        write_video(folder / f"{number}.mp4", [0.0], pictures=[picture], size=size)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a family, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def run(*arguments) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(folder: Path) -> str:
    """What `from_pretrained` says; the command line prints the same."""
    with pytest.raises(CheckpointError) as error:
        GARE.from_pretrained(folder)
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_library_scores_as_transformers_does(name, folder_of, videos, tmp_path):
    folder = folder_of(name)
    decoded = [read_frames(videos / f"{number}.mp4", 1)[0] for number in range(10)]
    expected_TV = own_cosine(folder, decoded, TEXTS)
    assert expected_TV.std() > 0.02  # else any scores would do
    with Library.open(tmp_path / "library", model=folder) as library:
        library.index(videos, options=ONE)
        for text, expected_V in zip(TEXTS, expected_TV, strict=True):
            found = {int(Path(hit.path).stem): hit.score for hit in library.search(text)}
            scores_V = torch.tensor([found[number] for number in range(10)])
            torch.testing.assert_close(scores_V, expected_V, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_needs_its_folder_no_more(name, folder_of, tmp_path):
    model = GARE.from_pretrained(folder_of(name))
    text, video = model.encode_text(TEXTS), model.encode_video([[each] for each in pictures(3)])
    model.save_pretrained(tmp_path)
    again = GARE.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    torch.testing.assert_close(again.encode_text(TEXTS).text_TD, text.text_TD)
    torch.testing.assert_close(again.encode_video([[x] for x in pictures(3)]).frames_VFD, video.frames_VFD)


@pytest.mark.parametrize("name", ["clip", "siglip", "align", "siglip2_naflex"])
def test_it_keeps_the_laws_of_all_encoders(name, folder_of):
    encoder = GARE.from_pretrained(folder_of(name)).encoder
    for law in LAWS:
        law(encoder)


def test_the_command_line_takes_a_folder_and_the_library_knows_it_again(folder_of, videos, tmp_path):
    library = tmp_path / "library"
    run("index", videos, "--library", library, "--model", folder_of("clip"), "--workers", 1)
    hits = json.loads(run("search", TEXTS[0], "--library", library, "--json"))
    expected_V = own_cosine(folder_of("clip"), [read_frames(Path(h["path"]), 1)[0] for h in hits], TEXTS[:1])
    torch.testing.assert_close(torch.tensor([h["score"] for h in hits]), expected_V[0], atol=1e-5, rtol=0)


def test_nothing_that_transformers_remarks_is_printed(folder_of, videos, tmp_path):
    folder, library = folder_of("siglip"), tmp_path / "library"
    indexed = run_gare("index", videos / "3.mp4", "--library", library, "--model", folder, "--workers", 1)
    searched = run_gare("search", TEXTS[0], "--library", library)
    for done in (indexed, searched):
        assert done.returncode == 0, done.stderr
        assert "transformers" not in done.stderr.replace(str(folder), "")


def test_moments_weights_and_pictures_as_queries_work(folder_of, tmp_path):
    (tmp_path / "videos").mkdir()
    shown = pictures(4)
    write_video(tmp_path / "videos" / "v.mp4", [0, 1, 2, 3], pictures=shown, size=(128, 96))
    with Library.open(tmp_path / "library", model=folder_of("siglip")) as library:
        library.index(tmp_path / "videos", options=ONE)
        (hit,) = library.search(TEXTS[3], explain=True)
        assert len(hit.frame_scores) == 4
        assert hit.moment == hit.frame_times[hit.frame_scores.index(max(hit.frame_scores))]
        assert hit.frame_weights == pytest.approx((0.25,) * 4)
        assert hit.explanation is not None
        assert hit.explanation.radius is None
        assert library.search(image=shown[2])[0].score > 0


def test_a_folder_that_moved_is_the_same_model(folder_of, videos, tmp_path):
    library, moved = tmp_path / "library", tmp_path / "moved"
    shutil.copytree(folder_of("siglip"), tmp_path / "first")
    with Library.open(library, model=tmp_path / "first") as opened:
        opened.index(videos / "0.mp4", options=ONE)
    (tmp_path / "first").rename(moved)
    with Library.open(library) as opened, pytest.raises(LibraryError, match="If it is elsewhere now"):
        opened.search("a dog")
    with Library.open(library, model=moved) as opened:
        assert len(opened.search("a dog")) == 1


@pytest.mark.parametrize("name", ["siglip2_naflex", "align"])
@torch.no_grad()
def test_the_benchmark_has_transformers_beside_it(name, folder_of):
    result = benchmark_encode(str(folder_of(name)), frames=2, device=torch.device("cpu"))
    assert result.ratio is not None
    assert result.least_cosine == pytest.approx(1, abs=1e-5)


# --- what is refused, and what is said ----------------------------------------------------------------------


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_a_pickle_is_refused_with_the_way_to_convert_it(folder_of, tmp_path):
    folder = copied(folder_of("clip"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    from transformers import AutoModel

    torch.save(AutoModel.from_pretrained(folder_of("clip")).state_dict(), folder / "pytorch_model.bin")
    message = refused(folder)
    assert "a pickle (pytorch_model.bin), and reading one can run code" in message
    command = message.splitlines()[-1].strip()
    assert command.startswith('python -c "from transformers')
    import subprocess
    import sys

    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, capture_output=True)
    GARE.from_pretrained(folder)  # what the message said does


def test_a_text_model_is_refused(tmp_path):
    from transformers import BertConfig, BertModel

    BertModel(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ).save_pretrained(tmp_path)
    assert "is a BertModel, a model for texts alone" in refused(tmp_path)


def test_a_picture_model_is_refused(tmp_path):
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)).save_pretrained(tmp_path)
    assert "is a ViTModel, a model for pictures alone" in refused(tmp_path)


def test_a_clip_model_is_refused(tmp_path):
    from transformers import XCLIPConfig, XCLIPModel

    vision = SMALL | {"mit_hidden_size": 32, "mit_intermediate_size": 37, "mit_num_attention_heads": 4}
    config = XCLIPConfig(text_config=SMALL | {"vocab_size": 99}, vision_config=vision, projection_dim=32)
    XCLIPModel(config).save_pretrained(tmp_path)
    assert "is a XCLIPModel, without vectors for pictures" in refused(tmp_path)


def edit(name: str, *place: str, **changes: Any):
    """A damage: settings of a file of JSON, changed; None takes one away."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        part = values
        for key in place:
            part = part[key]
        part |= changes
        for key in [key for key, value in changes.items() if value is None]:
            del part[key]
        (folder / name).write_text(json.dumps(values))

    return damage


PROCESSOR, TOKENIZER = "processor_config.json", "tokenizer_config.json"
HUGE = 10**6
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 605157884\n"
DAMAGES = {
    "config": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged (it has no settings"),
    "no type": (edit("config.json", model_type=None), "does not say which model of transformers this is"),
    "remote code": (lambda f: (f / "config.json").write_text('{"model_type": "jina_clip"}'), "of strangers"),
    "no config of texts": (
        edit("config.json", text_config="x"),
        "has settings that a clip of transformers c",
    ),
    "fewer layers": (
        edit("config.json", "vision_config", num_hidden_layers=1),
        "fewer layers than the weigh",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "has no weights: no file there ends in .saf",
    ),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 99), "cannot be loaded"),
    "git's pointer": (lambda f: (f / "model.safetensors").write_text(POINTER), "Run 'git lfs pull'"),
    "no processor": (
        lambda f: (f / PROCESSOR).unlink(),
        "no image processor that can be used (there is neit",
    ),
    "damaged processor": (lambda f: (f / PROCESSOR).write_text("{"), "no image processor that can be used"),
    "huge pictures": (
        edit(PROCESSOR, "image_processor", size={"shortest_edge": HUGE}),
        "its pictures have a side of 1,000,000 pixels",
    ),
    "no tokeniser": (
        lambda f: [x.unlink() for x in f.glob("tokenizer*")],
        "has no tokeniser that can be used",
    ),
    "no room": (edit(TOKENIZER, model_max_length=2), "have no room for a word; mend model_max_length"),
    "negative room": (edit(TOKENIZER, model_max_length=-3), "have no room for a word; mend model_max_length"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_broken_folder_says_what_is_wrong(damage, message, folder_of, tmp_path):
    folder = copied(folder_of("clip"), tmp_path / "model")
    damage(folder)
    assert message in refused(folder)
    done = CliRunner().invoke(
        app, ["index", str(tmp_path), "--model", str(folder), "--library", f"{tmp_path}/l"]
    )
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert "Traceback" not in done.output


def test_huge_patches_are_refused_too(folder_of, tmp_path):
    folder = copied(folder_of("siglip2_naflex"), tmp_path / "model")
    edit(PROCESSOR, "image_processor", max_num_patches=HUGE)(folder)
    assert "and 4,096 are the most" in refused(folder)


def test_a_folder_of_the_cache_names_the_model_in_it(folder_of, tmp_path):
    model = copied(folder_of("clip"), tmp_path / "models--openai--clip" / "snapshots" / "abc")
    assert refused(tmp_path / "models--openai--clip").endswith(f"Did you mean {model}?")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_in_other_precisions_score_as_transformers_does_in_float32(dtype, folder_of, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(folder_of("clip"), tmp_path / "model")
    state = {key: x.to(dtype) for key, x in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    edit("config.json", dtype=str(dtype).removeprefix("torch."))(folder)
    model = GARE.from_pretrained(folder)
    ours_TV = model.score(model.encode_text(TEXTS), model.encode_video([[each] for each in pictures()]))
    save_file(
        {k: x.float() for k, x in state.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    edit("config.json", dtype="float32")(folder)
    torch.testing.assert_close(ours_TV, own_cosine(folder, pictures(), TEXTS), atol=1e-5, rtol=0)


def test_weights_in_eight_bits_are_refused(folder_of, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(folder_of("clip"), tmp_path / "model")
    state = {key: (10 * x).to(torch.int8) for key, x in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "are integers (quantised)" in refused(folder)


@pytest.mark.parametrize("lost", [None, "model-00002-of-*", "model.safetensors.index.json"])
def test_weights_in_several_files_are_read_whole_or_refused(lost, folder_of, tmp_path):
    from transformers import AutoModel

    folder = copied(folder_of("clip"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    AutoModel.from_pretrained(folder_of("clip")).save_pretrained(folder, max_shard_size="50KB")
    if lost is not None:
        next(folder.glob(lost)).unlink()
        assert "cannot be loaded" in refused(folder)
        return
    ours, whole = (GARE.from_pretrained(each).encode(TEXTS) for each in (folder, folder_of("clip")))
    torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(whole))


def test_weights_that_are_missing_are_not_made_up(folder_of, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(folder_of("clip"), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    del state["text_projection.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 are missing or of another shape (first: text_projection.weight)" in refused(folder)


def test_weights_that_are_no_numbers_are_refused_before_a_library_is_made(folder_of, videos, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(folder_of("clip"), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["visual_projection.weight"].fill_(float("nan"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    done = CliRunner().invoke(
        app, ["index", str(videos), "--model", str(folder), "--library", str(tmp_path / "library")]
    )
    assert done.exit_code == 1
    assert "gives NaN or infinity; its weights are damaged" in str(done.exception)
    assert not (tmp_path / "library").exists()


def test_weights_of_another_shape_are_one_line(folder_of, tmp_path):
    folder = copied(folder_of("clip"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["projection_dim"] = 25
    (folder / "config.json").write_text(json.dumps(config))
    done = run_gare("index", tmp_path, "--model", folder, "--library", tmp_path / "library")
    assert done.returncode == 1
    assert "2 are missing or of another shape (first: text_projection.weight)" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1, 1, 1], "image_std": [1, 1, 1]},
        {"do_normalize": False, "resample": 1},
        {"size": {"height": 40, "width": 40}},
        {"size": {"shortest_edge": 28}},
    ],
    ids=[
        "bytes, normalised",
        "bytes",
        "from -1 to 1",
        "not normalised, Lanczos",
        "squashed, then cropped",
        "black around it",
    ],
)
def test_pixels_are_scaled_as_the_processor_says(settings, folder_of, tmp_path):
    folder = copied(folder_of("clip"), tmp_path / "model")
    values = json.loads((folder / "processor_config.json").read_text())
    values["image_processor"] |= settings
    (folder / "processor_config.json").write_text(json.dumps(values))
    model = GARE.from_pretrained(folder)
    ours_TV = model.score(model.encode_text(TEXTS), model.encode_video([[each] for each in pictures()]))
    torch.testing.assert_close(ours_TV, own_cosine(folder, pictures(), TEXTS), atol=1e-5, rtol=0)


def test_a_processor_that_does_something_else_is_refused(folder_of, tmp_path):
    folder = copied(folder_of("clip"), tmp_path / "model")
    values = json.loads((folder / "processor_config.json").read_text())
    values["image_processor"]["do_center_crop"] = False
    (folder / "processor_config.json").write_text(json.dumps(values))
    assert "in a way that gare cannot follow" in refused(folder)


def test_a_tokeniser_of_another_model_is_refused(folder_of, tmp_path):
    from tokenizers import Tokenizer

    folder = copied(folder_of("clip"), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"word{number}" for number in range(99)] + ["dog2"])
    values = json.loads(tokenizer.to_str())
    values["model"]["vocab"]["dog"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert "the tokeniser does not fit the text tower of this CLIPModel" in refused(folder)


def test_texts_keep_their_case_where_the_tokeniser_does(tmp_path):
    folder = save_family("clip", tmp_path)
    word_tokenizer(tmp_path, lower=False, model_max_length=20).save_pretrained(tmp_path)
    model = GARE.from_pretrained(folder)
    small, large = model.encode_text(["a red car", "A RED CAR"]).text_TD
    assert not torch.allclose(small, large, atol=1e-3)


def test_siglips_first_tokeniser_says_what_to_install_before_weights_are_fetched(
    folder_of, tmp_path, monkeypatch
):
    folder, asked = copied(folder_of("siglip"), tmp_path / "model"), []
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "SiglipTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def fetch(model_id: str, patterns: list[str], **hub_options: Any) -> Path:
        asked.extend(patterns)
        return folder

    monkeypatch.setattr("gare.extras.find_spec", lambda module: None)
    monkeypatch.setattr("gare.encoders.hub_folder._fetch", fetch)
    for name in (str(folder), "someone/siglip"):
        with pytest.raises(MissingExtraError, match=rf"of {name} needs sentencepiece and protobuf, not inst"):
            GARE.from_pretrained(name)
    assert "*.json" in asked
    assert not any("safetensors" in pattern for pattern in asked)


# --- other libraries ----------------------------------------------------------------------------------------


def sentence_transformer(folder: Path, target: Path, *, dense: int = 0) -> Path:
    """A model saved by sentence-transformers, with a map from so many dimensions behind its towers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    model = SentenceTransformer(str(folder), device="cpu")
    torch.manual_seed(0)
    model.append(Dense(dense, 12) if dense else Normalize())
    model.save_pretrained(str(target))
    return target


def test_a_sentence_transformers_folder_is_the_dual_encoder_in_it(folder_of, tmp_path):
    folder = sentence_transformer(folder_of("clip"), tmp_path / "model")
    model, plain = GARE.from_pretrained(folder), GARE.from_pretrained(folder_of("clip"))
    assert model.config.encoder.name == "transformers"
    torch.testing.assert_close(model.encode_text(TEXTS).text_TD, plain.encode_text(TEXTS).text_TD)


def test_other_modules_are_run_by_sentence_transformers(folder_of, videos, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = sentence_transformer(folder_of("siglip"), tmp_path / "model", dense=32)
    with Library.open(tmp_path / "library", model=folder) as library:
        library.index(videos / "3.mp4", options=ONE)
        (hit,) = library.search(TEXTS[1])
    with Library.open(tmp_path / "library") as library:  # by its name
        assert library.search(TEXTS[1])[0].score == hit.score
    theirs = SentenceTransformer(str(folder), device="cpu")
    squashed = read_frames(videos / "3.mp4", 1)[0].resize((32, 32), Image.Resampling.BICUBIC)
    vectors = torch.from_numpy(theirs.encode([squashed], convert_to_numpy=True))
    text = torch.from_numpy(theirs.encode([TEXTS[1]], convert_to_numpy=True))
    assert hit.score == pytest.approx(torch.cosine_similarity(text, vectors).item(), abs=1e-5)


def test_a_sentence_transformers_model_for_texts_is_refused(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    BertModel(small).save_pretrained(tmp_path / "bert")
    word_tokenizer(tmp_path, model_max_length=20).save_pretrained(tmp_path / "bert")
    transformer = Transformer(str(tmp_path / "bert"))
    model = SentenceTransformer(modules=[transformer, Pooling(8)], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    assert "a sentence-transformers model for texts alone" in refused(tmp_path / "model")


def test_open_clip_says_what_to_install():
    from importlib.util import find_spec

    if find_spec("open_clip") is not None:
        pytest.skip("open_clip is installed here")
    with pytest.raises(MissingExtraError, match=r"needs open-clip-torch and torchvision, not installed here"):
        GARE.from_pretrained("open_clip:ViT-B-32/laion2b_s34b_b79k")


# --- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip", "siglip2_naflex"])
def test_gare_is_trained_on_top_of_it_and_comes_back(name, folder_of, videos, tmp_path):
    from gare.train import RunConfig, train

    data = write_dataset(tmp_path / "data", videos=6)
    values = recipe(data, epochs=1)
    values |= {
        "start_from": str(folder_of(name)),
        "model": {
            "encoder": {"name": "transformers", "freeze_image": True},
            "temporal": {"num_layers": 0},
            "interaction": {"name": "gare", "init": "zero_output"},
        },
    }
    values["data"] = {**values["data"], "frames": "cached"}
    best = train(RunConfig.load(values), str(tmp_path / "run"), device=torch.device("cpu"))
    model, start = GARE.from_pretrained(best), GARE.from_pretrained(folder_of(name))
    assert model.interaction.has_increments
    assert model.config.encoder.freeze_image
    trained, before = model.encoder.state_dict(), start.encoder.state_dict()
    assert all(torch.equal(trained[key], before[key]) for key in before if key.startswith("vision."))
    assert any(not torch.equal(trained[key], before[key]) for key in before if key.startswith("text."))
    with Library.open(tmp_path / "library", model=best) as library:
        library.index(videos / "0.mp4", options=ONE)
        assert library.search("red light")


def test_own_captions_train_from_gare_mini_without_the_packages_of_the_extra(tmp_path, monkeypatch):
    def refuse(*wanted: object, **more: object) -> None:
        raise AssertionError(f"asked for {wanted}")

    monkeypatch.setattr("gare.encoders.mini_encoder.require", refuse)
    data, out = write_dataset(tmp_path / "data", videos=4), tmp_path / "run"
    settings = (f"data.manifest={data}", "epochs=1", "batch_size=4")
    run("train", "own_csv", "--out", out, *(word for each in settings for word in ("--set", each)))
    assert GARE.from_pretrained(out / "best").config.encoder.name == "mini"
