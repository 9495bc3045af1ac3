"""Laws of every encoder, towers against the library that runs them, and tokenisers."""

from __future__ import annotations

import csv
import gzip
import itertools
from pathlib import Path

import pytest
import regex
import torch
from test_temporal import SMALL_CLIP
from transformers import AutoConfig, CLIPModel, SiglipModel

from encoder_laws import LAWS
from gare import GARE, GareConfig
from gare.encoders import ENCODERS, build_encoder, clip_tokenizer
from gare.encoders.clip_layers import PatchEmbedding
from gare.errors import CheckpointError, ConfigError
from make_clip_tokenizer import NUM_MERGES, WORDS, make_tokenizer, read_merges

SMALL_SIGLIP = {
    "model_type": "siglip",
    "text_config": {
        "hidden_size": 48,
        "projection_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 99,
        "max_position_embeddings": 8,
    },
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    },
}


SMALL = {
    "clip": {"architecture": SMALL_CLIP},
    "mini": {"image_size": 64},
    "transformers": {"architecture": SMALL_CLIP, "pictures": {"size": 32}, "texts": {"max_length": 8}},
}
"""Where the default is large: settings of a smaller one."""


NAMES = [name for name in ENCODERS if name != "own"]  # which is an object of someone's: test_own_encoder.py


@pytest.fixture(scope="module")
def encoders():
    configs = {name: ENCODERS[name].Config.load(SMALL.get(name, {})) for name in NAMES}
    torch.manual_seed(0)
    return {name: build_encoder(config, weights=False).eval() for name, config in configs.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_encoder_keeps_the_law(law, name, encoders):
    law(encoders[name])


def test_siglip_keeps_the_laws_too():
    encoder = build(SMALL_SIGLIP).encoder
    for law in LAWS:
        law(encoder)


def build(architecture, **encoder):
    return GARE(
        GareConfig.load({"encoder": {"name": "clip", "architecture": architecture, **encoder}})
    ).eval()


def save_towers(folder, architecture, model_class):
    architecture = dict(architecture)
    torch.manual_seed(1)
    towers = model_class(AutoConfig.for_model(architecture.pop("model_type"), **architecture)).eval()
    towers.save_pretrained(folder)
    return towers


@torch.no_grad()
def test_clip_from_a_folder_gives_the_features_of_transformers(tmp_path):
    towers = save_towers(tmp_path, SMALL_CLIP, CLIPModel)
    model = GARE(GareConfig.load({"encoder": {"name": "clip", "source": str(tmp_path)}})).eval()
    ids = torch.tensor([[97, 5, 6, 98], [97, 7, 98, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    text = model.text_features(ids, mask)
    expected = towers.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
    torch.testing.assert_close(text.text_TD, expected)
    torch.testing.assert_close(text.words_TWD[0, 3], text.text_TD[0])  # the end token is one of the words
    pixels = torch.randn(2, 3, 32, 32)
    expected = towers.get_image_features(pixel_values=pixels).pooler_output
    torch.testing.assert_close(model.encoder.encode_images(pixels), expected)
    assert model.dim == 32
    assert model.config.encoder.architecture["projection_dim"] == 32


@torch.no_grad()
def test_siglip_from_a_folder_gives_the_features_of_transformers(tmp_path):
    towers = save_towers(tmp_path, SMALL_SIGLIP, SiglipModel)
    model = GARE(GareConfig.load({"encoder": {"name": "clip", "source": str(tmp_path)}})).eval()
    ids = torch.randint(99, (2, 8))
    text = model.text_features(ids, torch.ones(2, 8, dtype=torch.bool))
    torch.testing.assert_close(text.text_TD, towers.get_text_features(input_ids=ids).pooler_output)
    torch.testing.assert_close(text.words_TWD[:, -1], text.text_TD)
    pixels = torch.randn(2, 3, 32, 32)
    expected = towers.get_image_features(pixel_values=pixels).pooler_output
    torch.testing.assert_close(model.encoder.encode_images(pixels), expected)
    assert model.dim == 48


@pytest.mark.parametrize("architecture", [SMALL_CLIP, SMALL_SIGLIP], ids=["clip", "siglip"])
def test_random_towers_survive_saving(tmp_path, architecture):
    model = build(architecture)
    model.save_pretrained(tmp_path)
    loaded = GARE.from_pretrained(tmp_path)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_towers_that_cannot_be_had_say_what_to_do():
    with pytest.raises(
        CheckpointError, match="Give a folder saved by transformers, or a hub id while online"
    ):
        GARE(GareConfig.load({"encoder": {"name": "clip", "source": "nobody/nothing"}}))
    with pytest.raises(ConfigError, match="does not describe CLIP or SigLIP towers"):
        build({"model_type": "no_such_model"})
    with pytest.raises(ConfigError, match="'bert' towers are not supported"):
        build(
            {
                "model_type": "bert",
                "hidden_size": 8,
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "vocab_size": 9,
            }
        )


def test_towers_without_a_tokeniser_say_so():
    with pytest.raises(ConfigError, match=r"pass token ids to text_features, or set encoder\.source"):
        build(SMALL_CLIP).encode_text(["a dog"])


def test_clip_tokens_are_those_of_openai():
    ids, mask = clip_tokenizer.tokenize(["a photo of a cat", "A  DIAGRAM", ""], 32)
    assert ids[0].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert ids[1].tolist() == [49406, 320, 22697, 49407, 0, 0, 0]
    assert ids[2].tolist() == [49406, 49407, 0, 0, 0, 0, 0]
    assert mask.sum(dim=1).tolist() == [7, 4, 2]


def test_long_texts_keep_their_end_token():
    ids, mask = clip_tokenizer.tokenize(["dog " * 50], 8)
    assert ids.shape == (1, 8)
    assert ids[0, -1] == 49407
    assert mask.all()


TOKENIZER_FILE = Path(clip_tokenizer.__file__).with_name(clip_tokenizer.TOKENIZER_FILE)


class SlowTokenizer:
    """Byte-pair encoding as CLIP describes it: merge the earliest learned pair until none is left."""

    def __init__(self):
        merges = read_merges(TOKENIZER_FILE.read_bytes())
        self.rank = {pair: i for i, pair in enumerate(merges)}
        codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {code: chr(code) for code in codes}
        for code in range(256):
            if code not in letters:
                letters[code] = chr(256 + len(letters) - len(codes))
        self.letters = letters
        tokens = [
            *letters.values(),
            *(x + "</w>" for x in letters.values()),
            *("".join(pair) for pair in merges),
        ]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.pattern = regex.compile(WORDS, regex.IGNORECASE)

    def __call__(self, text):
        return [
            i for word in self.pattern.findall(" ".join(text.lower().split())) for i in self.encode_word(word)
        ]

    def encode_word(self, word):
        parts = [self.letters[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        while len(parts) > 1:
            ranks = [self.rank.get(pair, len(self.rank)) for pair in itertools.pairwise(parts)]
            best = min(ranks)
            if best == len(self.rank):
                break
            i = ranks.index(best)
            parts[i : i + 2] = ["".join(parts[i : i + 2])]
        return [self.ids[part] for part in parts]


def test_the_tokenizer_file_is_made_from_its_merges_alone():
    packed = TOKENIZER_FILE.read_bytes()
    merges = read_merges(packed)
    assert len(merges) == NUM_MERGES
    assert gzip.decompress(make_tokenizer(merges)) == gzip.decompress(packed)


def test_tokens_of_real_captions_equal_a_slow_reference(shared):
    with open(shared / "annotations/msrvtt/MSRVTT_JSFUSION_test.csv", encoding="utf-8") as file:
        captions = [row["sentence"] for row in csv.DictReader(file)]
    captions += ["naïve café — ¿qué?", "emoji 🐕 2nd's", "it's they'll 3,000"]
    slow = SlowTokenizer()
    ids, mask = clip_tokenizer.tokenize(captions, 77)
    for caption, row, real in zip(captions, ids, mask, strict=True):
        assert row[real].tolist()[1:-1] == slow(caption)[:75], caption


def test_tiny_towers_do_not_depend_on_padding(tiny_model):
    one = tiny_model.encode_text(["a dog"])
    two = tiny_model.encode_text(["a dog", "a much longer text than that one"])
    torch.testing.assert_close(one.text_TD[0], two.text_TD[0])


@pytest.mark.parametrize("size", [(32, 32), (37, 50)])
def test_patches_as_a_product_are_the_convolution(size):
    convolution = torch.nn.Conv2d(3, 10, 16, 16).double()
    pixels_NCHW = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = convolution(pixels_NCHW)
    product = PatchEmbedding.of(convolution)
    torch.testing.assert_close(product(pixels_NCHW), expected, rtol=0, atol=1e-13)


def test_overlapping_patches_are_refused():
    with pytest.raises(ConfigError, match="overlap"):
        PatchEmbedding.of(torch.nn.Conv2d(3, 10, 16, 8))
