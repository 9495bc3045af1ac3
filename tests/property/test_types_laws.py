"""The algebra of features: joining, padding, taking rows, the mean frame and the digest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from features import random_text, random_video
from gare import TextFeatures, VideoFeatures
from gare.types import digest_tensors

SEEDS, SIZES = st.integers(0, 2**31 - 1), st.integers(1, 6)
KINDS = pytest.mark.parametrize("kind", [TextFeatures, VideoFeatures], ids=["texts", "videos"])


def random_features(kind, seed, rows, tokens, dim=4):
    generator = torch.Generator().manual_seed(seed)
    make = random_text if kind is TextFeatures else random_video
    return make(generator, rows, tokens, dim)


def tensors(features):
    """Padding set to zero: what it holds is no part of the features."""
    tokens, mask = (
        (features.words_TWD, features.mask_TW)
        if isinstance(features, TextFeatures)
        else (features.frames_VFD, features.mask_VF)
    )
    own = {"text": features.text_TD} if isinstance(features, TextFeatures) else {}
    return {**own, "tokens": tokens.masked_fill(~mask[..., None], 0), "mask": mask}


def assert_same(ours, theirs):
    ours, theirs = tensors(ours), tensors(theirs)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def num_tokens(features):
    return tensors(features)["mask"].shape[1]


@KINDS
def test_padding_adds_masked_tokens_and_nothing_else(kind):
    @given(SEEDS, SIZES, SIZES, SIZES, SIZES)
    def check(seed, rows, tokens, first, second):
        features = random_features(kind, seed, rows, tokens)
        padded = features.pad(tokens + first)
        assert (len(padded), num_tokens(padded)) == (rows, tokens + first)
        found, expected = tensors(padded), tensors(features)
        assert not found["mask"][:, tokens:].any()
        assert not found["tokens"][:, tokens:].any()
        assert torch.equal(found["tokens"][:, :tokens], expected["tokens"])
        assert_same(features.pad(tokens), features)
        assert_same(padded.pad(tokens + first + second), features.pad(tokens + first + second))
        with pytest.raises(ValueError, match=f"{tokens + first} tokens do not fit into {tokens}"):
            padded.pad(tokens)

    check()


@KINDS
def test_joining_and_taking_rows_undo_each_other(kind):
    @given(SEEDS, SIZES, SIZES, st.integers(1, 7))
    def check(seed, rows, tokens, size):
        features = random_features(kind, seed, rows, tokens)
        blocks = list(features.blocks(size))
        assert [len(block) for block in blocks[:-1]] == [size] * (len(blocks) - 1)
        assert sum(map(len, blocks)) == rows
        assert_same(kind.cat(blocks), features)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        assert_same(features[order][order.argsort()], features)

    check()


@KINDS
def test_joining_pads_to_the_longest_and_does_not_care_how_it_is_grouped(kind):
    @given(SEEDS, st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=5), st.integers(1, 4))
    def check(seed, sizes, cut):
        parts = [random_features(kind, seed + i, *size) for i, size in enumerate(sizes)]
        whole = kind.cat(parts)
        longest = max(tokens for _, tokens in sizes)
        assert (len(whole), num_tokens(whole)) == (sum(rows for rows, _ in sizes), longest)
        start = 0
        for part in parts:
            assert_same(whole[start : start + len(part)], part.pad(longest))
            start += len(part)
        grouped = [kind.cat(group) for group in (parts[:cut], parts[cut:]) if group]
        assert_same(kind.cat(grouped), whole)

    check()


@given(SEEDS, st.lists(SIZES, min_size=1, max_size=5), st.integers(0, 3))
def test_stacking_clips_is_joining_videos_of_one(seed, lengths, extra):
    generator = torch.Generator().manual_seed(seed)
    clips = [torch.randn(length, 4, generator=generator) for length in lengths]
    single = [VideoFeatures(clip[None], torch.ones(1, len(clip), dtype=torch.bool)) for clip in clips]
    assert_same(VideoFeatures.stack(clips), VideoFeatures.cat(single))
    width = max(lengths) + extra
    assert_same(VideoFeatures.stack(clips, width), VideoFeatures.cat(single).pad(width))
    for clip, row, mask in zip(clips, *_rows(VideoFeatures.stack(clips)), strict=True):
        assert torch.equal(row[mask], clip)
    if max(lengths) > 1:
        with pytest.raises(ValueError, match="tokens do not fit into 1"):
            VideoFeatures.stack(clips, 1)


def _rows(video):
    return video.frames_VFD, video.mask_VF


@given(SEEDS, SIZES, SIZES, SIZES, st.sampled_from([0.0, 1e6, float("nan"), float("inf")]))
def test_the_mean_is_that_of_the_real_frames(seed, rows, tokens, padding, content):
    video = random_features(VideoFeatures, seed, rows, tokens)
    expected = torch.stack([frames[mask].mean(dim=0) for frames, mask in zip(*_rows(video), strict=True)])
    torch.testing.assert_close(video.mean(), expected)
    padded = video.pad(tokens + padding)
    dirty = padded.frames_VFD.masked_fill(~padded.mask_VF[..., None], content)
    torch.testing.assert_close(VideoFeatures(dirty, padded.mask_VF).mean(), expected)


@KINDS
def test_the_digest_changes_with_every_number_and_with_nothing_else(kind):
    @given(SEEDS, SIZES, SIZES)
    def check(seed, rows, tokens):
        features = random_features(kind, seed, rows, tokens)
        digest = features.digest()
        assert len(digest) == 16
        assert digest == random_features(kind, seed, rows, tokens).digest()
        assert digest == features[torch.arange(rows)].digest()  # other memory, the same numbers
        assert digest != features.to(torch.float32).digest()
        assert digest != features.pad(tokens + 1).digest()
        if rows > 1:
            assert digest != features[1:].digest()
        changed = random_features(kind, seed, rows, tokens)
        generator = torch.Generator().manual_seed(seed)
        tensors = [value for value in vars(changed).values() if value is not None]
        chosen = tensors[int(torch.randint(len(tensors), (1,), generator=generator))]
        flat = chosen.view(-1)
        place = int(torch.randint(len(flat), (1,), generator=generator))
        flat[place] = (
            ~flat[place] if flat.dtype == torch.bool else torch.nextafter(flat[place], flat[place] + 1)
        )
        assert digest != changed.digest()

    check()


@given(SEEDS)
def test_the_digest_of_tensors_knows_their_names_and_not_their_order(seed):
    a, b = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)).unbind()
    digest = digest_tensors({"a": a, "b": b})
    assert digest == digest_tensors({"b": b, "a": a})
    assert digest == digest_tensors({"a": a.mT.contiguous().mT, "b": b})  # however it lies in memory
    assert digest != digest_tensors({"b": a, "a": b})
    assert digest != digest_tensors({"a": a.reshape(4, 3), "b": b})


@KINDS
def test_another_precision_and_back_keeps_the_masks(kind):
    features = random_features(kind, 0, 3, 4)
    half = features.to(torch.bfloat16)
    assert torch.equal(tensors(half)["mask"], tensors(features)["mask"])
    assert half.to(torch.float64).to("cpu").dim == features.dim
    assert_same(features.to("cpu"), features)


def test_a_sentence_vector_alone_is_its_one_word():
    vectors = torch.randn(3, 4)
    text = TextFeatures.from_vectors(vectors)
    assert torch.equal(text.words_TWD[:, 0], vectors)
    assert text.mask_TW.all()
