"""Interactions turn a text and a video into a score: what all of them offer, and what a new one must write.

A new interaction needs two things: a `Config` of its settings and `score_pairs`. Everything else has a
default: scores in blocks, cards, frame weights, the stage-1 slope, its cost. An interaction overrides what
it can do faster or better. `docs/how-to/add-an-interaction.md` shows one from start to end.

Shapes: T texts, V videos, F frames, W words, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.errors import EvaluationError
from gare.interaction.score_bounds import BoundCards, ScoreBounds
from gare.interaction.score_cards import FrameCards, ScoreCards, features_of
from gare.settings import Settings
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from gare.interaction.increment_keys import KeyCards

FastScoring = Literal["vectors", "products", "none"]
"""How exact scores are had faster than by running the whole interaction on each pair:

- vectors: one product of a text vector and a video vector, so a vector index finds the exact best;
- products: both sides are prepared once, and a pair needs the products of its tokens alone;
- none: every pair runs through the network.
"""

SQUARE_FLOOR = 1e-16
"""The least square of a length in a cosine: a vector of no length scores near zero."""
PAIRS_A_SIDE = 128
"""Texts and videos in a block of `score_pairs`, where the caller does not say."""


@dataclass(frozen=True)
class InteractionConfig(Settings):
    """The settings of an interaction; `name` says which one. Each class gives its own name as the default."""

    name: str

    TRAPS: ClassVar[Mapping[str, str]] = {}
    """Settings that follow a mistake of the published code, off by default, and what each one does."""
    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {}
    """Settings by which padded frames take part, each with the value that lets them."""

    @property
    def counts_padding(self) -> bool:
        """Whether padded frames take part."""
        return any(getattr(self, name) == value for name, value in self.COUNTS_PADDING.items())

    def masking_padding(self) -> Self:
        """The same settings with padded frames left out."""
        left_out: dict[str, Any] = {name: not value for name, value in self.COUNTS_PADDING.items()}
        return replace(self, **left_out)


@dataclass(frozen=True)
class PairVectors:
    """The vectors of every pair of a small batch, for analysis: T × V × D numbers each.

    The increment is added to one side of a pair, its *own* vector; the *other* vector stays as it is.
    """

    own_TVD: Tensor
    other_TVD: Tensor
    increment_TVD: Tensor
    """Zero for an interaction without increments."""
    corrected_side: str = "text"
    """Whose vector is the own one: the text's or the video's."""

    def few(self, number: int) -> PairVectors:
        """The first pairs of the batch among themselves."""
        part = slice(0, number)
        return PairVectors(
            self.own_TVD[part, part],
            self.other_TVD[part, part],
            self.increment_TVD[part, part],
            self.corrected_side,
        )


@dataclass(frozen=True)
class PairProducts:
    """The inner products of `PairVectors`, each [T, V]: a cosine score is made of them."""

    own_sq: Tensor
    other_sq: Tensor
    own_other: Tensor
    increment_sq: Tensor
    own_increment: Tensor
    other_increment: Tensor


class Interaction(nn.Module, ABC):
    """Scores every text with every video.

    Args:
        config: the settings; an instance of `Config`.
        dim: D, the width of the encoder's embedding.
    """

    Config: ClassVar[type[InteractionConfig]]
    has_increments: ClassVar[bool] = False
    """Whether `score_pairs` gives an increment for each pair."""
    fast_scoring: FastScoring = "none"
    """Whether exact scores can be had without running all of it on each pair."""
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The loss terms its paper trains with, with their settings, where they are not InfoNCE alone."""
    original_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """From the names of the published code's state dict to those here: regular expressions, the first that
    matches counts. An empty name drops a weight that the published code never uses."""

    def __init__(self, config: Any, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim

    # --- what a new interaction writes ----------------------------------------------------------------------

    @abstractmethod
    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        """The scores [T, V], written plainly: training uses them, and `score` is tested against them."""

    # --- what it may do better ------------------------------------------------------------------------------

    @property
    def masks_padding(self) -> bool:
        """False where padded frames take part, as in the authors' released code."""
        return not self.config.counts_padding

    @property
    def reads_words(self) -> bool:
        """True where the vectors of single words matter, not the sentence vector alone."""
        return False

    @property
    def corrected_side(self) -> str:
        """The side the increment is added to, "text" or "video"."""
        return "text"

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Scores [T, V] in evaluation mode, equal to those of `score_pairs` up to rounding, in blocks."""
        self.check(text, video)
        features = features_of(video)
        return score_in_blocks(
            self.score_pairs, text, features, text_block=text_block, video_block=video_block
        )

    def cards(self, video: VideoFeatures) -> ScoreCards:
        """What `score` computes from the videos alone; it may be kept and scored many times."""
        return FrameCards(self.config, video.frames_VFD, video.mask_VF, video.patches_VFPD)

    def bound_cards(self, video: VideoFeatures, dtype: torch.dtype = torch.float32) -> BoundCards | None:
        """What `bounds` needs of each video, its vectors in `dtype`; None where no bound is known.

        An exact search then scores every item.
        """
        return None

    def bounds(self, text: TextFeatures, cards: BoundCards) -> ScoreBounds:
        """Between which two numbers each score [T, V] lies, from few products; `docs/proof.md` proves it."""
        raise ValueError(f"no bounds are known for the interaction '{self.config.name}'")

    @property
    def has_keys(self) -> bool:
        """Whether there is a second rung of bounds, `key_bounds`."""
        return False

    def key_cards(
        self, video: VideoFeatures, cards: BoundCards, dtype: torch.dtype = torch.float32
    ) -> KeyCards | None:
        """What `key_bounds` needs of each video besides `cards`, its `bound_cards`.

        None where there is no second rung. Vectors are kept in `dtype`; torch.int8 is one.
        """
        return None

    def key_bounds(self, text: TextFeatures, cards: BoundCards, keys: KeyCards) -> ScoreBounds:
        """Bounds as of `bounds`, narrower, from a product with every frame; `docs/proof.md` proves them."""
        raise ValueError(f"the interaction '{self.config.name}' has no keys")

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """How much each frame counts in each score: T × V × F numbers. By default, each real frame alike.

        A hit shows them. Its moment is the frame with the largest cosine with the sentence vector.
        """
        mask_VF = features_of(video).mask_VF
        weights_VF = mask_VF.to(text.text_TD.dtype) / mask_VF.sum(dim=1, keepdim=True)
        return FrameWeights(weights_VF.expand(len(text), -1, -1))

    def stage1_slope(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """The vector [V, D] whose product with a unit text follows the score best; `text` are typical ones.

        A library finds its candidates with it. By default the mean frame at length one.
        """
        return F.normalize(video.mean(), dim=-1)

    @property
    def stage1_is_exact(self) -> bool:
        """Whether a unit text times the stage-1 vector is the score itself: nothing is left to compute."""
        return False

    def for_search(self) -> Interaction:
        """The same scores, made ready for many searches of a few texts each with the same weights."""
        return self

    def without_increments(self) -> Interaction:
        """The same interaction without its increments: how a plain dual encoder scores the same pairs."""
        return self

    def radii(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> Tensor:
        """The length of every increment [T, V]."""
        raise ValueError(f"the interaction '{self.config.name}' has no increments; 'gare' has")

    def pair_vectors(self, text: TextFeatures, video: VideoFeatures) -> PairVectors:
        """Text, video and increment of every pair, for analysis, without dropout."""
        raise EvaluationError(
            f"the interaction '{self.config.name}' has no single vector for a video, so there is no geometry "
            "of pairs to analyse; analyse a model with another interaction"
        )

    def pair_products(self, text: TextFeatures, video: VideoFeatures) -> PairProducts:
        """The inner products of `pair_vectors`, for more pairs than their vectors would fit."""
        return products_of(self.pair_vectors(text, video))

    def flops(self, *, texts: int, videos: int, frames: int, words: int) -> float:
        """Operations to score all pairs in training, one multiply-add counted as two."""
        from torch.utils.flop_counter import FlopCounterMode

        like = next(self.parameters(), torch.zeros(()))
        tokens_TWD, frames_VFD = like.new_zeros(2, words, self.dim), like.new_zeros(2, frames, self.dim)
        text = TextFeatures(tokens_TWD[:, 0], tokens_TWD, tokens_TWD[..., 0] == 0)
        video = VideoFeatures(frames_VFD, frames_VFD[..., 0] == 0)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.score_pairs(text, video)
        return texts * videos / 4 * float(counter.get_total_flops())

    # --- shared ---------------------------------------------------------------------------------------------

    @property
    def has_active_dropout(self) -> bool:
        """Whether two calls of `score_pairs` would differ."""
        return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in self.modules())

    def check(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> None:
        """Refuse features that do not fit together, and cards that another interaction made."""
        check_shapes(text, video)
        if not isinstance(video, ScoreCards) or video.config is self.config:
            return
        if video.config != self.config:
            raise ValueError(
                "these score cards were made by a model with other settings; make them again with score_cards"
            )


def score_in_blocks(
    score_pairs: Callable[[TextFeatures, VideoFeatures], PairScores],
    text: TextFeatures,
    video: VideoFeatures,
    *,
    text_block: int | None = None,
    video_block: int | None = None,
) -> Tensor:
    """The scores that `score_pairs` gives, [T, V], in blocks of pairs: slow, and obviously right."""
    text_block, video_block = text_block or PAIRS_A_SIDE, video_block or PAIRS_A_SIDE
    rows = [
        torch.cat([score_pairs(texts, videos).scores_TV for videos in video.blocks(video_block)], dim=1)
        for texts in text.blocks(text_block)
    ]
    return torch.cat(rows)


def cosine(left_TVD: Tensor, right_TVD: Tensor) -> Tensor:
    """Cosine of each pair; a vector shorter than 1e-8 counts as that long, so that it scores near zero."""
    product_TV = (left_TVD * right_TVD).sum(dim=-1)
    scale_TV = [x.square().sum(dim=-1).clamp_min(SQUARE_FLOOR).rsqrt() for x in (left_TVD, right_TVD)]
    return (product_TV * scale_TV[0] * scale_TV[1]).clamp(-1, 1)


def products_of(vectors: PairVectors) -> PairProducts:
    """The inner products of the vectors of a small batch."""

    def dot(left_TVD: Tensor, right_TVD: Tensor) -> Tensor:
        return (left_TVD * right_TVD).sum(dim=-1)

    own_TVD, other_TVD, increment_TVD = vectors.own_TVD, vectors.other_TVD, vectors.increment_TVD
    return PairProducts(
        own_sq=dot(own_TVD, own_TVD),
        other_sq=dot(other_TVD, other_TVD),
        own_other=dot(own_TVD, other_TVD),
        increment_sq=dot(increment_TVD, increment_TVD),
        own_increment=dot(own_TVD, increment_TVD),
        other_increment=dot(other_TVD, increment_TVD),
    )


# --- what can be wrong with features, said in words ---------------------------------------------------------
# Shapes are checked on every call. Values (NaN, empty masks) cost a pass over the data: `GARE.score` does it.


def check_shapes(text: TextFeatures, video: VideoFeatures | ScoreCards) -> None:
    """Refuse what is not features, is empty, or does not belong together."""
    if not isinstance(text, TextFeatures) or not isinstance(video, (VideoFeatures, ScoreCards)):
        raise ValueError(
            f"texts first, then videos: got {type(text).__name__} and {type(video).__name__} instead of "
            "TextFeatures and VideoFeatures (or ScoreCards)"
        )
    text_TD, frames_VFD = text.text_TD, features_of(video).frames_VFD
    (num_texts, text_dim), (num_videos, num_frames, video_dim) = text_TD.shape, frames_VFD.shape
    if not num_texts or not num_videos:
        raise ValueError(f"nothing to score: {num_texts} texts and {num_videos} videos")
    if not text.words_TWD.shape[1] or not num_frames:
        raise ValueError("texts need at least one word and videos one frame")
    if text_dim != video_dim:
        raise ValueError(
            f"texts of {text_dim} and videos of {video_dim} dimensions; encode both with the same model"
        )
    if text_TD.dtype != frames_VFD.dtype:
        raise _differs("dtype", text_TD.dtype, frames_VFD.dtype)
    if text_TD.device != frames_VFD.device:
        raise _differs("device", text_TD.device, frames_VFD.device)
    if not text_TD.is_floating_point():
        raise ValueError(f"features must be floating point numbers, got {text_TD.dtype}")


def _differs(what: str, ours: object, theirs: object) -> ValueError:
    return ValueError(f"texts are {ours}, videos {theirs}; bring both to one {what} with .to(…)")


def check_text(text: TextFeatures, interaction: Interaction) -> None:
    """Refuse texts without a word, NaN and infinity."""
    if not text.mask_TW.any(dim=1).all():
        raise ValueError("a text without a word; leave it out or mend its mask")
    finite = torch.isfinite(text.text_TD).all()
    if interaction.reads_words:
        finite &= torch.isfinite(text.words_TWD.masked_fill(~text.mask_TW[..., None], 0)).all()
    if not finite:
        raise ValueError("texts contain NaN or infinity; look for a broken input or weights that diverged")


def check_video(video: VideoFeatures, interaction: Interaction) -> None:
    """Refuse videos without a frame, NaN and infinity (in padding only where the interaction uses it)."""
    if not video.mask_VF.any(dim=1).all():
        raise ValueError("a video without a real frame; leave it out or mend its mask")
    frames_VFD = video.frames_VFD
    if interaction.masks_padding:
        frames_VFD = frames_VFD.masked_fill(~video.mask_VF[..., None], 0)
    if not torch.isfinite(frames_VFD).all():
        raise ValueError("videos contain NaN or infinity; look for a broken input or weights that diverged")
