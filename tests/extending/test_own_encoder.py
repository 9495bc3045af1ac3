"""An encoder of one's own, as docs/how-to/use-your-own-encoder.md shows it: handed over, by name, served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from clips import write_video
from encoder_laws import LAWS, it_costs_something
from gare import GARE, GareConfig, Library
from gare.cli.main import app
from gare.encoders import MODELS, EncoderProtocol
from gare.errors import CheckpointError, ConfigError, EncoderError, LibraryError
from gare.library.index.index_run import IndexOptions
from strangers import as_it_was, blocks, installed

PAGE = "use-your-own-encoder.md"
ONE = IndexOptions(num_workers=1)


@pytest.fixture
def colours():
    """The class of the page."""
    names: dict = {}
    exec(compile(blocks(PAGE, "python")[0], PAGE, "exec"), names)
    return names["Colours"]


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for colour in ("red", "green", "blue"):
        picture = Image.new("RGB", (96, 54), colour)
        write_video(folder / f"{colour}.mp4", [0.0, 1.0], pictures=[picture] * 2, size=(96, 54))
    return folder


def first(library: Library, text: str) -> str:
    return Path(library.search(text)[0].path).stem


def test_the_script_of_the_page_indexes_searches_and_serves(videos, tmp_path):
    """As a stranger: a file of their own, run by Python, with the server asked from outside."""
    script = "\n".join(blocks(PAGE, "python")[:2])
    (tmp_path / "mine.py").write_text(script.replace("~/Videos", str(videos)).replace("8000", "0"))
    command = [sys.executable, "mine.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found, served = process.stdout.readline(), process.stdout.readline()
            assert found.strip().endswith("red.mp4")
            with urlopen(f"{served.split()[-1]}/api/v1/search?q=blue") as answer:
                assert json.load(answer)["hits"][0]["path"].endswith("blue.mp4")
        finally:
            process.terminate()


FAILING = """
class Failing(Colours):
    def encode_texts(self, texts):
        if "boom" in texts[0]:
            raise ConnectionError("the service at 10.0.0.7 is away")
        return super().encode_texts(texts)


if __name__ == "__main__":
    with Library.open("library", model=Failing()) as library:
        library.index({videos!r})
        serve_library(library, port=0)
"""


def test_an_encoder_that_fails_is_named_and_a_server_goes_on(videos, tmp_path):
    """The log of the server has what it said; who asked hears that it failed."""
    own, use = blocks(PAGE, "python")[:2]
    imports = use.split("if __name__")[0]
    (tmp_path / "mine.py").write_text(own + imports + FAILING.replace("{videos!r}", repr(str(videos))))
    command = [sys.executable, "mine.py"]
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            for path, code in (
                ("/api/v1/search?q=boom", b"encoder_failed"),
                ("/?q=boom", b"encoder of this"),
            ):
                with pytest.raises(HTTPError) as refused:
                    urlopen(address + path)
                content = refused.value.read()
                assert refused.value.code == 503
                assert code in content
                assert b"10.0.0.7" not in content
            with urlopen(f"{address}/api/v1/search?q=blue") as answer:
                assert json.load(answer)["hits"][0]["path"].endswith("blue.mp4")
        finally:
            process.terminate()
    assert b"ConnectionError" in (tmp_path / "log").read_bytes()


def test_a_library_keeps_its_name_and_asks_for_it(colours, videos, tmp_path):
    assert isinstance(colours(), EncoderProtocol)
    with Library.open(tmp_path / "library", model=colours()) as library:
        library.index(videos, options=ONE)
        assert library.store.stamp.name == "colours"
        assert first(library, "a green field") == "green"
        assert library.search(image=Image.new("RGB", (40, 30), "blue"))[0].path.endswith("blue.mp4")
    with Library.open(tmp_path / "library", model=colours()) as library:
        assert first(library, "red") == "red"
    with Library.open(tmp_path / "library") as library, pytest.raises(LibraryError) as error:
        library.search("red")
    assert "was made by colours, which cannot be loaded" in str(error.value)
    assert "handed over from Python (model=…)" in str(error.value)
    changed = colours()
    changed.fingerprint = "colours 2"
    with pytest.raises(LibraryError, match=r"as it was before it changed: it has fingerprint .* Encode the"):
        Library.open(tmp_path / "library", model=changed)


def test_the_command_line_finds_it_by_its_entry_point(videos, tmp_path):
    module = blocks(PAGE, "python")[0]
    with as_it_was(MODELS), installed(tmp_path, "my_colours", module, points()):
        library = str(tmp_path / "library")
        for arguments in (
            ["index", str(videos), "--library", library, "--model", "colours", "--workers", "1"],
            ["search", "blue", "--library", library, "--json"],
        ):
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)[0]["path"].endswith("blue.mp4")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def __init__(self): raise OSError('no key')",
            "the model 'colours' cannot be made: OSError: no key",
        ),
        ("def encode_texts(self, texts): 1 / 0", "Mine.encode_texts failed: ZeroDivisionError: division by"),
        (
            "def encode_images(self, images): raise KeyError",
            "Mine.encode_images failed: KeyError: no message",
        ),
    ],
)
def test_the_command_line_says_where_an_encoder_failed(code, message, videos, tmp_path):
    module = f"{blocks(PAGE, 'python')[0]}\n\nclass Mine(Colours):\n    {code}\n"
    entry = "[gare.models]\ncolours = my_colours:Mine\n"
    with as_it_was(MODELS), installed(tmp_path, "my_colours", module, entry):
        line = len(module.splitlines())
        with pytest.raises(EncoderError) as error:
            GARE.from_pretrained("colours")
        assert message in str(error.value)
        assert str(error.value).endswith(f"my_colours.py, line {line})")
        done = CliRunner().invoke(
            app, ["index", str(videos), "--library", f"{tmp_path}/l", "--model", "colours"]
        )
        assert isinstance(done.exception, EncoderError)  # what `main` prints without a traceback
        assert not (tmp_path / "l").exists()


def points() -> str:
    import tomllib

    (own,) = (block for block in blocks(PAGE, "toml") if "entry-points" in block)
    ((group, named),) = tomllib.loads(own)["project"]["entry-points"].items()
    return f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in named.items())


def test_a_model_on_top_of_it_is_saved_and_comes_back(colours, tmp_path):
    mine = colours()
    plain = GARE.from_pretrained(mine)
    config = GareConfig.load({"encoder": plain.config.encoder.to_values(), "temporal": {"num_layers": 0}})
    torch.manual_seed(0)
    model = GARE(config).eval()
    model.save_pretrained(tmp_path)
    again = GARE.from_pretrained(tmp_path)
    text, video = model.encode_text(["red"]), model.encode_video([[Image.new("RGB", (9, 9), "red")]])
    torch.testing.assert_close(again.score(text, video), model.score(text, video))
    mine.fingerprint = "another"
    values = json.loads((tmp_path / "config.json").read_text())
    values["encoder"]["model"] = "nobody's"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        CheckpointError, match="an encoder of someone's own, which this process does not have"
    ):
        GARE.from_pretrained(tmp_path)


def test_settings_find_an_object_that_was_handed_over_by_its_name(colours):
    first, second = colours(), colours()
    first.name = second.name = "handed over"
    second.fingerprint = "newer"
    named = {"encoder": {"name": "own", "model": "handed over"}, "temporal": {"num_layers": 0}}
    with pytest.raises(CheckpointError, match="which this process does not have"):
        GARE(GareConfig.load(named))
    for each in (first, second):
        GARE.from_pretrained(each)
        assert GARE(GareConfig.load(named)).config.encoder.identity == each.fingerprint
    named["encoder"]["identity"] = first.fingerprint
    assert GARE(GareConfig.load(named)).config.encoder.identity == first.fingerprint


def test_it_keeps_the_laws_of_all_encoders(colours):
    encoder = GARE.from_pretrained(colours()).encoder
    for law in LAWS:
        if law is not it_costs_something:  # nobody can count what it does
            law(encoder)


def test_texts_arrive_as_they_were_written(colours):
    seen: list[str] = []

    class Listening(colours):
        def encode_texts(self, texts):
            seen.extend(texts)
            return super().encode_texts(texts)

    texts = ["", "a", "eightchr", "ein Käfer läuft über das Gras 🐞", "红色的汽车", "x" * 5000]
    GARE.from_pretrained(Listening()).encode_text(texts)
    assert seen[-6:] == [" ", *texts[1:5], "x" * 4096]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, r"name must be a string that is not empty"),
        ({"fingerprint": None}, r"fingerprint must be a string that is not empty, not None"),
        ({"encode_images": None}, r"needs the methods encode_texts\(texts\) and encode_images\(images\)"),
        (
            {"encode_texts": lambda texts: np.zeros(3)},
            r"encode_texts must give 1 vectors, and gave the shape \[3\]",
        ),
        ({"encode_texts": lambda texts: np.full((1, 3), np.nan)}, r"encode_texts gave NaN, infinity"),
        ({"encode_texts": lambda texts: None}, r"gave a NoneType that cannot be read as numbers"),
        ({"encode_texts": lambda texts: [["a"] * 6]}, r"gave a list that cannot be read as numbers"),
        ({"encode_texts": lambda texts: np.zeros((1, 6), complex)}, r"its elements are complex128"),
        ({"encode_images": lambda images: [[1.0], [1.0, 2.0]]}, r"gave a list that cannot be read"),
        ({"encode_texts": lambda texts: np.zeros((1, 99))}, r"texts have 99 dimensions and pictures"),
        ({"image_fit": "stretch"}, r"image_fit"),
    ],
)
def test_what_it_lacks_is_said(change, message, colours):
    mine = colours()
    for name, value in change.items():
        setattr(mine, name, value)
    with pytest.raises(ConfigError, match=message):
        GARE.from_pretrained(mine)


def test_a_class_is_not_an_object_of_it(colours):
    with pytest.raises(ConfigError, match=r"Colours is a class; hand over an object of it: Colours\(\)"):
        GARE.from_pretrained(colours)


def test_vectors_keep_their_number_and_length(colours):
    class Changing(colours):
        def encode_images(self, images):
            vectors = super().encode_images(images)
            return vectors if len(images) == 1 else np.pad(vectors, [(0, 0), (0, 1)])

    two = torch.zeros(1, 2, 3, 64, 64, dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match=r"must give 2 vectors of 6 dimensions, and gave the shape \[2, 7\]"
    ):
        GARE.from_pretrained(Changing()).encode_frames(two, torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    "convert",
    [
        lambda vectors: vectors.tolist(),
        lambda vectors: list(torch.from_numpy(vectors).requires_grad_()),
        lambda vectors: torch.from_numpy(vectors).bfloat16().float().double(),
        lambda vectors: vectors.astype(">f4")[:, ::-1][:, ::-1],
    ],
    ids=["lists", "a list of tensors", "a tensor", "an unusual array"],
)
def test_vectors_come_in_any_form(convert, colours):
    class Converted(colours):
        def encode_texts(self, texts):
            return convert(super().encode_texts(texts))

    texts = ["red and blue", "green"]
    found = GARE.from_pretrained(Converted()).encode_text(texts).text_TD
    torch.testing.assert_close(found, torch.tensor(colours().encode_texts(texts), dtype=torch.float32))
