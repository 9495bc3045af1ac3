"""What published methods are made of, written out in float64, and scenes to compare with.

The formulas are those of the project's METHODS.md, whose numbers the docstrings give.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from features import random_interaction, random_text, random_video
from gare import TextFeatures, VideoFeatures
from gare.interaction import INTERACTIONS

DIM = 16
SCALE = 20.0


def scene(name, *, seed=0, pairs=5, frames=4, words=6, patches=None, **settings):
    """A method with random weights and pairs whose padding, at random places, holds numbers."""
    generator = torch.Generator().manual_seed(seed)
    text = random_text(generator, pairs, words, DIM)
    video = random_video(generator, pairs, frames, DIM)
    frames_VFD, patches_VFPD = video.frames_VFD.requires_grad_(), None
    if patches:
        shape = (pairs, frames, patches, DIM)
        patches_VFPD = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    text = TextFeatures(text.text_TD.requires_grad_(), text.words_TWD.requires_grad_(), text.mask_TW)
    video = VideoFeatures(frames_VFD, video.mask_VF, patches_VFPD)
    return random_interaction(generator, INTERACTIONS[name].Config(**settings), DIM), text, video, generator


def agree(ours: Tensor, theirs: Tensor, method, text, video) -> None:
    """Values, and the gradients of a random sum of them on features and weights."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    generator = torch.Generator().manual_seed(9)
    inputs = [text.text_TD, text.words_TWD, video.frames_VFD]
    inputs += [x for x in (video.patches_VFPD, *method.parameters()) if x is not None and x.requires_grad]
    upstream = torch.randn(ours.shape, generator=generator, dtype=ours.dtype)
    found, wanted = (
        torch.autograd.grad((x * upstream).sum(), inputs, allow_unused=True, retain_graph=True)
        for x in (ours, theirs)
    )
    assert any(each is not None for each in wanted)
    for mine, other, x in zip(found, wanted, inputs, strict=True):
        mine, other = (torch.zeros_like(x) if each is None else each for each in (mine, other))
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def linear(x, layer):
    return x @ layer.weight.mT + (0 if layer.bias is None else layer.bias)


def layer_norm(x, layer, floor=1e-5):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + floor).sqrt() * layer.weight + layer.bias


def nce(scores, scale=SCALE):
    logits = scores * scale
    both = logits.log_softmax(dim=1).diagonal().mean() + logits.log_softmax(dim=0).diagonal().mean()
    return -both / 2


def by_pair(number, score):
    return torch.stack([torch.stack([score(i, j) for j in range(number)]) for i in range(number)])


def attention(query_ND, key_MD, value_MD, num_heads, sees_NM):
    """Softmax attention, head by head, over what each query sees."""
    parts = []
    for q, k, v in zip(*(x.chunk(num_heads, dim=-1) for x in (query_ND, key_MD, value_MD)), strict=True):
        logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~sees_NM, float("-inf"))
        parts.append(logits.softmax(dim=-1) @ v)
    return torch.cat(parts, dim=-1)


def temporal_layers(x_ND, layers, mask_N, num_heads):
    """0.4: pre-norm blocks with LayerNorm floors of 1e-12 and QuickGELU."""
    for layer in layers:
        query, key, value = linear(layer_norm(x_ND, layer.norm1, 1e-12), layer.attention_in).chunk(3, dim=-1)
        sees = mask_N.expand(len(x_ND), -1)
        x_ND = x_ND + linear(attention(query, key, value, num_heads, sees), layer.attention_out)
        inner = linear(layer_norm(x_ND, layer.norm2, 1e-12), layer.expand)
        x_ND = x_ND + linear(inner * torch.sigmoid(1.702 * inner), layer.contract)
    return x_ND


def temporal(net, frames_FD, mask_F, num_heads):
    return (
        temporal_layers(frames_FD + net.position[: len(frames_FD)], net.layers, mask_F, num_heads) + frames_FD
    )


def share_of_net(tokens_ND, mask_N, hidden, output):
    weights = linear(linear(tokens_ND, hidden).relu(), output).squeeze(-1).exp() * mask_N
    return weights / weights.sum()


def token_score(words_WD, word_mask, word_share, frames_FD, frame_mask, frame_share):
    """0.2: pairs of tokens with padding have the cosine 0."""
    cosines = unit(words_WD) @ unit(frames_FD).mT * word_mask[:, None] * frame_mask
    return ((word_share * cosines.amax(dim=1)).sum() + (frame_share * cosines.amax(dim=0)).sum()) / 2
