"""What the published methods share: padding made harmless, full precision, costs, and the original weights.

`METHODS.md` of the project says what each computes. A method is one file: its settings, its traps (settings
that follow a mistake of the published code, off by default), and the names of its weights in that code.

Shapes: T texts, V videos, F frames, W words, D embedding.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.errors import CheckpointError
from gare.interaction.interaction import (
    FastScoring,
    Interaction,
    InteractionConfig,
    PairVectors,
    score_in_blocks,
)
from gare.interaction.pair_blocks import full_precision
from gare.interaction.score_cards import ScoreCards, features_of
from gare.types import PairScores, TextFeatures, VideoFeatures

COUNT_PADDING = "Padded positions take part, whatever they hold: a score depends on the amount of padding."


@dataclass(frozen=True)
class PeerConfig(InteractionConfig):
    """The settings of a published method."""


class Peer(Interaction):
    """A published method: `score_pairs` is all it has, in blocks for many pairs."""

    config: Any

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Scores [T, V] in blocks of pairs; half precision in float32."""
        self.check(text, video)
        features, net = features_of(video), self
        if text.text_TD.dtype.itemsize < 4:
            text, features = text.to(torch.float32), features.to(torch.float32)
        if any(tensor.dtype.itemsize < 4 for tensor in self.parameters()):
            net = copy.deepcopy(self).float()
        return score_in_blocks(
            net.score_pairs, text, features, text_block=text_block, video_block=video_block
        )

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
        """Both sides checked, with zeros where a word or a frame is padding, unless padding takes part."""
        self.check(text, video)
        if not self.masks_padding:
            return text, video
        return words_without_padding(text), video.without_padding()

    def flops(self, *, texts: int, videos: int, frames: int, words: int) -> float:
        """Counted on two sizes of each side: some cost is per text, some per video, some per pair."""
        from torch.utils.flop_counter import FlopCounterMode

        # Without gradients wanted: the counter follows modules by their gradient functions.
        net = copy.deepcopy(self).eval().requires_grad_(False)

        def count(num_texts: int, num_videos: int) -> float:
            like = next(self.parameters(), torch.zeros(()))
            words_TWD = like.new_ones(num_texts, words, self.dim)
            frames_VFD = like.new_ones(num_videos, frames, self.dim)
            text = TextFeatures(words_TWD[:, 0], words_TWD, words_TWD[..., 0] == 1)
            video = VideoFeatures(frames_VFD, frames_VFD[..., 0] == 1)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                net.score_pairs(text, video)
            return float(counter.get_total_flops())

        both, more_texts, more_videos, more = count(2, 2), count(4, 2), count(2, 4), count(4, 4)
        pair = (more - more_texts - more_videos + both) / 4
        text = (more_texts - both) / 2 - 2 * pair
        video = (more_videos - both) / 2 - 2 * pair
        once = both - 2 * text - 2 * video - 4 * pair
        return once + texts * text + videos * video + texts * videos * pair


class VectorPeer(Peer):
    """A published method that gives each video one vector whatever the text: a plain dual encoder."""

    fast_scoring: FastScoring = "vectors"

    @abstractmethod
    def video_vectors(self, video: VideoFeatures) -> Tensor:
        """The vector of each video, [V, D]; padded frames hold zeros."""

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        return PairScores(cosines(text.text_TD, self.video_vectors(video)), None)

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Every video goes through the method once, however many texts there are."""
        return super().score(text, video, text_block=len(text), video_block=video_block)

    @torch.no_grad()
    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        text, video = self.prepare(text, video)
        text_TVD = text.text_TD[:, None].expand(-1, len(video), -1)
        vectors_TVD = self.video_vectors(video).expand_as(text_TVD)
        return PairVectors(text_TVD, vectors_TVD, torch.zeros_like(text_TVD))


def words_without_padding(text: TextFeatures) -> TextFeatures:
    """The same texts with zeros where a word is padding."""
    words_TWD = text.words_TWD.masked_fill(~text.mask_TW[..., None], 0)
    return TextFeatures(text.text_TD, words_TWD, text.mask_TW)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one; zeros stay zeros."""
    return F.normalize(full_precision(x), dim=-1)


def cosines(text_TD: Tensor, video_VD: Tensor) -> Tensor:
    """Every text with every video, [T, V]."""
    return unit(text_TD) @ unit(video_VD).mT


def cosine_of_pairs(left: Tensor, right: Tensor) -> Tensor:
    """The cosine over the last dimension."""
    return (unit(left) * unit(right)).sum(dim=-1)


def masked_mean(tokens_OND: Tensor, mask_ON: Tensor) -> Tensor:
    """The mean of the real tokens of each owner, [O, D]."""
    weights_ON = mask_ON.to(tokens_OND.dtype)
    weights_ON = weights_ON / weights_ON.sum(dim=1, keepdim=True)
    return (weights_ON[:, None] @ tokens_OND).squeeze(1)


def pool_by_text(text_TD: Tensor, video: VideoFeatures, temperature: float, *, late_mask: bool) -> Tensor:
    """Frames weighted by softmax(t·f / temperature), [T, V, D].

    `late_mask` masks after the softmax, as the published code does: weights of padded videos sum to less
    than one.
    """
    logits_TVF = torch.einsum("td,vfd->tvf", text_TD, video.frames_VFD) / temperature
    if late_mask:
        weights_TVF = logits_TVF.softmax(dim=-1) * video.mask_VF
    else:
        weights_TVF = logits_TVF.masked_fill(~video.mask_VF, float("-inf")).softmax(dim=-1)
    return torch.einsum("tvf,vfd->tvd", weights_TVF, video.frames_VFD)


LATE_MASK = "Frames are masked after the softmax: padding takes weight, and weights sum to less than one."


def fit(tokens: Tensor, mask: Tensor, size: int, what: str) -> tuple[Tensor, Tensor]:
    """Tokens [O, N, D] brought to the number that a method's weights are made for, with their mask.

    Raises:
        ValueError: more real tokens than that.
    """
    number = mask.shape[1]
    if number > size and mask[:, size:].any():
        raise ValueError(
            f"{number} {what}, but the weights of this method are made for {size}; "
            f"build it with interaction.max_{what}={number}"
        )
    if number >= size:
        return tokens[:, :size], mask[:, :size]
    missing = (len(mask), size - number)
    return (
        torch.cat([tokens, tokens.new_zeros(*missing, *tokens.shape[2:])], dim=1),
        torch.cat([mask, mask.new_zeros(missing)], dim=1),
    )


def start_normal(module: nn.Module, std: float = 0.02) -> None:
    """Linear maps and embeddings N(0, std), biases zero, as the CLIP4Clip family starts new layers."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


# --- weights of the published code --------------------------------------------------------------------------

TEMPORAL_NAMES = (
    (r"(.*?)resblocks\.(\d+)\.attn\.in_proj_(weight|bias)$", r"\1layers.\2.attention_in.\3"),
    (r"(.*?)resblocks\.(\d+)\.attn\.out_proj\.", r"\1layers.\2.attention_out."),
    (r"(.*?)resblocks\.(\d+)\.ln_(\d)\.", r"\1layers.\2.norm\3."),
    (r"(.*?)resblocks\.(\d+)\.mlp\.c_fc\.", r"\1layers.\2.expand."),
    (r"(.*?)resblocks\.(\d+)\.mlp\.c_proj\.", r"\1layers.\2.contract."),
)
"""The layers of the CLIP4Clip family's transformer, under whatever name it has; then its own names apply."""

POOLER_NAMES = (
    (r"cross_attn\.q_proj\.", "query."),
    (r"cross_attn\.k_proj\.", "key."),
    (r"cross_attn\.v_proj\.", "value."),
    (r"cross_attn\.out_proj\.", "out."),
    (r"linear_proj\.", "residual."),
    (r"layer_norm(\d)\.", r"norm\1."),
)
"""The cross-attention of X-Pool, T-MASS and PIG."""


def load_original(
    interaction: Interaction, state: Mapping[str, Tensor], *, without: tuple[str, ...] = ()
) -> None:
    """Load the weights that the published code of a method saved.

    Args:
        without: beginnings of the names of parameters that need not be among them.

    Raises:
        CheckpointError: a weight that the method does not know, or one it misses.
    """
    own = {**dict(interaction.named_parameters()), **dict(interaction.named_buffers())}
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        here = _here(name, interaction.original_names)
        if here is None:
            raise CheckpointError(
                f"'{interaction.config.name}' has no place for the original weight '{name}'"
            )
        if here in own:  # others belong to parts that these settings leave out
            # Position tables are made for more tokens than a method reads; the rest is never looked at.
            found[here] = tensor[: own[here].shape[0]] if tensor.ndim > 1 else tensor
    wanted = {name for name, _ in interaction.named_parameters() if not name.startswith(without)}
    missing = wanted - found.keys()
    if missing:
        raise CheckpointError(f"the original weights lack {', '.join(sorted(missing))}")
    interaction.load_state_dict(found, strict=False)


def _here(name: str, patterns: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, here in TEMPORAL_NAMES:
        if re.match(pattern, name):
            name = re.sub(pattern, here, name)
            break
    for pattern, here in patterns:
        if re.match(pattern, name):
            return "" if not here else re.sub(pattern, here, name, count=1)
    return None
