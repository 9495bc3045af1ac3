"""The transformer over frames."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gare import GARE, GareConfig
from gare.interaction.temporal import TemporalLayer, TemporalTransformer

SMALL_CLIP = {
    "model_type": "clip",
    "projection_dim": 32,
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "vocab_size": 99,
        "max_position_embeddings": 20,
        "bos_token_id": 97,
        "eos_token_id": 98,
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


def test_a_layer_equals_torchs_own_attention():
    torch.manual_seed(0)
    layer = TemporalLayer(16, num_heads=4).double()
    reference = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    reference.load_state_dict(
        {
            "in_proj_weight": layer.attention_in.weight,
            "in_proj_bias": layer.attention_in.bias,
            "out_proj.weight": layer.attention_out.weight,
            "out_proj.bias": layer.attention_out.bias,
        }
    )
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]]).bool()
    normed = layer.norm1(x)
    expected = x + reference(normed, normed, normed, key_padding_mask=~mask, need_weights=False)[0]
    hidden = layer.expand(layer.norm2(expected))
    expected = expected + layer.contract(hidden * torch.sigmoid(1.702 * hidden))
    torch.testing.assert_close(layer(x, mask), expected)


def test_what_padding_holds_does_not_reach_real_frames():
    torch.manual_seed(0)
    temporal = TemporalTransformer(16, num_layers=2, num_heads=2, max_frames=8)
    frames, mask = torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    other = frames.masked_fill(~mask[..., None], 7.0)
    torch.testing.assert_close(temporal(frames, mask)[mask], temporal(other, mask)[mask])


def test_too_many_frames_say_what_to_do():
    temporal = TemporalTransformer(16, num_layers=1, num_heads=1, max_frames=4)
    with pytest.raises(ValueError, match=r"5 frames.*temporal\.max_frames=5"):
        temporal(torch.randn(1, 5, 16), torch.ones(1, 5, dtype=torch.bool))


@pytest.mark.parametrize(("init", "copied"), [("text_tower", True), ("random", False)])
def test_it_starts_from_the_text_tower_of_clip(init, copied):
    """FIDELITY 5: the first layers and the positions of CLIP's text transformer."""
    model = GARE(
        GareConfig.load(
            {
                "encoder": {"name": "clip", "architecture": SMALL_CLIP},
                "temporal": {"num_layers": 2, "max_frames": 12, "init": init},
            }
        )
    )
    text = model.encoder.text
    same_position = torch.equal(model.temporal.position, text.embeddings.position_embedding.weight[:12])
    same_layer = torch.equal(model.temporal.layers[1].expand.weight, text.encoder.layers[1].mlp.fc1.weight)
    query = text.encoder.layers[0].self_attn.q_proj.weight
    same_query = torch.equal(model.temporal.layers[0].attention_in.weight[:32], query)
    assert same_position == same_layer == same_query == copied


def test_a_text_tower_of_another_shape_is_left_alone():
    architecture = {**SMALL_CLIP, "text_config": {**SMALL_CLIP["text_config"], "intermediate_size": 64}}
    model = GARE(GareConfig.load({"encoder": {"name": "clip", "architecture": architecture}}))
    position = model.encoder.text.embeddings.position_embedding.weight
    assert not torch.equal(model.temporal.position[: len(position)], position)
