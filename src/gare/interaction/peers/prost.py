"""ProST (Li et al. 2023): prototypes of words, patches, frames and events.

The published method reads every patch of a frame. Features without patches give each frame as its only patch.

Shapes: T texts, V videos, F frames, W words, D embedding, P prototypes of a frame, K of a text, E events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.interaction.interaction import InteractionConfig
from gare.interaction.peers.peer import COUNT_PADDING, Peer, fit, masked_mean, unit
from gare.settings import NonNegativeFloat, PositiveInt, Range
from gare.types import PairScores, TextFeatures, VideoFeatures

WINDOW_FRACTION = 0.2


@dataclass(frozen=True)
class ProstConfig(InteractionConfig):
    """Prototypes on two levels."""

    name: Literal["prost"] = "prost"
    num_word_prototypes: PositiveInt = 28
    num_spatial: PositiveInt = 12
    """Prototypes of a frame, the frame itself among them."""
    num_events: PositiveInt = 3
    num_layers: PositiveInt = 2
    object_weight: NonNegativeFloat = 1.5
    """The weight of the object score at evaluation."""
    max_frames: PositiveInt = 12
    dropout: Annotated[float, Range(least=0, below=1)] = 0.1
    count_padding: bool = False
    """Let padded words and frames take part."""

    COUNTS_PADDING: ClassVar[Mapping[str, bool]] = {"count_padding": True}
    TRAPS: ClassVar[Mapping[str, str]] = {"count_padding": COUNT_PADDING}


class Prost(Peer):
    """The best event's cosine, plus 1.5 times what the word prototypes find among the spatial ones."""

    Config = ProstConfig
    config: ProstConfig
    reads_words = True
    published_terms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "contrastive": {"weight": 0.5},
        "levels": {"weight": 0.5},
    }
    original_names = (
        (r"(patch|word)_prototype_weight\.0\.", r"\1_hidden."),
        (r"(patch|word)_prototype_weight\.2\.", r"\1_output."),
        (r"(frame|event)_decoder\.V", r"\1_decoder.queries"),
        (r"(frame|event)_decoder\.event_decoder\.norm\.", r"\1_decoder.norm."),
        (r"frame_decoder\.event_decoder\.layers\.(\d)\.self_attn\.", ""),
        (r"(frame|event)_decoder\.event_decoder\.layers\.(\d)\.self_attn\.", r"\1_decoder.layers.\2.among."),
        (
            r"(frame|event)_decoder\.event_decoder\.layers\.(\d)\.multihead_attn\.",
            r"\1_decoder.layers.\2.cross.",
        ),
        (r"(frame|event)_decoder\.event_decoder\.layers\.(\d)\.", r"\1_decoder.layers.\2."),
    )

    def __init__(self, config: ProstConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.word_hidden = nn.Linear(dim, dim)
        self.word_output = nn.Linear(dim, config.num_word_prototypes)
        self.patch_hidden = nn.Linear(dim, dim)
        self.patch_output = nn.Linear(dim, max(config.num_spatial - 1, 1))
        options: Any = {"num_layers": config.num_layers, "dropout": config.dropout}
        self.frame_decoder = PrototypeDecoder(dim, config.max_frames, FrameLayer, **options)
        self.event_decoder = PrototypeDecoder(dim, config.num_events, EventLayer, **options)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        text, video = self.prepare(text, video)
        event_TV, object_TV = self.both_scores(text, video)
        if self.training:
            return PairScores(event_TV, None, {"scores:object": object_TV})
        return PairScores(event_TV + self.config.object_weight * object_TV, None)

    def both_scores(self, text: TextFeatures, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """Event and object scores, [T, V] each."""
        frames_VFD, mask_VF = fit(video.frames_VFD, video.mask_VF, self.config.max_frames, "frames")
        counted_VF = torch.ones_like(mask_VF) if self.config.count_padding else mask_VF
        spatial_VFPD = self.spatial_prototypes(video)
        events_VED = self.events(frames_VFD, spatial_VFPD, counted_VF)
        event_TV = torch.einsum("td,ved->tve", unit(text.text_TD), unit(events_VED)).amax(dim=-1)
        cosines = torch.einsum("tkd,vfpd->tvkfp", unit(self.word_prototypes(text)), unit(spatial_VFPD))
        best_TVFP = cosines.amax(dim=2).masked_fill(~counted_VF[..., None], float("-inf"))
        return event_TV, best_TVFP.amax(dim=2).mean(dim=-1)

    def word_prototypes(self, text: TextFeatures) -> Tensor:
        """Weighted sums of the words, [T, K, D]."""
        weights_TWK = self.word_output(self.word_hidden(text.words_TWD).relu()).relu()
        if not self.config.count_padding:
            weights_TWK = weights_TWK * text.mask_TW[..., None]
        prototypes_TKD: Tensor = weights_TWK.mT @ text.words_TWD
        return prototypes_TKD

    def spatial_prototypes(self, video: VideoFeatures) -> Tensor:
        """The frame itself and weighted sums of its patches, [V, F, P, D]."""
        patches_VFPD = video.patches_VFPD
        if patches_VFPD is None:
            patches_VFPD = video.frames_VFD[:, :, None]
        weights = self.patch_output(self.patch_hidden(patches_VFPD).relu()).relu()
        sums_VFKD = weights.mT @ patches_VFPD
        spatial, _ = fit(
            torch.cat([video.frames_VFD[:, :, None], sums_VFKD], dim=2),
            video.mask_VF,
            self.config.max_frames,
            "frames",
        )
        return spatial

    def events(self, frames_VFD: Tensor, spatial_VFPD: Tensor, counted_VF: Tensor) -> Tensor:
        """The event prototypes of each video, [V, E, D]."""
        num_frames, per_frame = spatial_VFPD.shape[1:3]
        outside_FN = window_mask(num_frames, num_frames * per_frame).to(frames_VFD.device)
        padding_VN = ~counted_VF.repeat_interleave(per_frame, dim=1)
        hidden_VFN = outside_FN | padding_VN[:, None]
        # A window that holds padding alone looks at every real frame instead: a softmax needs something.
        hidden_VFN = torch.where(hidden_VFN.all(dim=-1, keepdim=True), padding_VN[:, None], hidden_VFN)
        decoded_VFD = self.frame_decoder(spatial_VFPD.flatten(1, 2), hidden_VFN)
        frames_half_VFD = (decoded_VFD + frames_VFD) / 2
        hidden_VEF = (~counted_VF)[:, None].expand(-1, self.config.num_events, -1)
        decoded_VED = self.event_decoder(frames_half_VFD, hidden_VEF)
        events_VED: Tensor = (decoded_VED + masked_mean(frames_VFD, counted_VF)[:, None]) / 2
        return events_VED


class PrototypeDecoder(nn.Module):
    """Learned queries that attend to a memory."""

    def __init__(
        self,
        dim: int,
        num_queries: int,
        layer: type[FrameLayer | EventLayer],
        *,
        num_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.queries = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_queries, dim)))
        self.layers = nn.ModuleList(layer(dim, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, memory_VND: Tensor, hidden_VQN: Tensor) -> Tensor:
        query_VQD = self.queries.expand(len(memory_VND), -1, -1)
        for layer in self.layers:
            query_VQD = layer(query_VQD, memory_VND, hidden_VQN)
        found: Tensor = self.norm(query_VQD)
        return found


class FrameLayer(nn.Module):
    """Cross-attention within a window and a feed-forward layer, each followed by a LayerNorm."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(dim, 1, dropout=dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query_VQD: Tensor, memory_VND: Tensor, hidden_VQN: Tensor) -> Tensor:
        query_VQD, memory_VND = self.norm1(query_VQD), self.norm2(memory_VND)
        return self.attend(query_VQD, memory_VND, hidden_VQN, self.norm3, self.norm4)

    def attend(
        self, query: Tensor, memory: Tensor, hidden: Tensor, after_attention: nn.Module, after: nn.Module
    ) -> Tensor:
        found = self.cross(query, memory, memory, attn_mask=hidden, need_weights=False)[0]
        query = after_attention(query + self.dropout(found))
        inner = self.linear2(self.dropout(self.linear1(query).relu()))
        output: Tensor = after(query + self.dropout(inner))
        return output


class EventLayer(FrameLayer):
    """The same with attention among the queries first, which replaces them: it has no residual."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__(dim, dropout)
        self.among = nn.MultiheadAttention(dim, 1, dropout=dropout, batch_first=True)
        self.norm5 = nn.LayerNorm(dim)

    def forward(self, query_VQD: Tensor, memory_VND: Tensor, hidden_VQN: Tensor) -> Tensor:
        query_VQD, memory_VND = self.norm1(query_VQD), self.norm2(memory_VND)
        among_VQD = self.among(query_VQD, query_VQD, query_VQD, need_weights=False)[0]
        query_VQD = self.norm3(self.dropout(among_VQD))
        return self.attend(query_VQD, memory_VND, hidden_VQN, self.norm4, self.norm5)


def window_mask(num_queries: int, num_keys: int) -> Tensor:
    """True where a query does not look: query b sees its own frame's keys and a fifth of all behind them."""
    outside = torch.ones(num_queries, num_keys, dtype=torch.bool)
    own, more = num_keys // num_queries, int(WINDOW_FRACTION * num_keys)
    for query in range(num_queries):
        start = query * own
        end = start + own + more
        if end > num_keys - 1:
            start, end = max(start - (end - (num_keys - 1)), 0), num_keys
        outside[query, start:end] = False
    return outside
