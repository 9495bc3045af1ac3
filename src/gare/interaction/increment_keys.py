"""The keys of a video: with them the attention of a pair is known, and with it all of an increment but one.

Attention weights need a product with every key. Everything after them is a quadratic form whose matrix is
kept with the owner: the length of the increment, its product with the mean frame, its distance from the
increment at even attention. Only its product with the text is left open. `docs/proof.md` has the derivation.

Keys may be stored in any precision. What rounding moves them changes a logit by no more than a known number,
a logit changes attention by no more than another, and so on to the radius of a ball around the increment.

Shapes: O owners of C context tokens each, H heads, A = H × C, P others, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.interaction.gap_aware_cards import increment_card
from gare.interaction.increment_net import IncrementWeights
from gare.interaction.score_bounds import (
    SLACK,
    Balls,
    Interval,
    product_dtype,
    product_error,
    stored_products,
)
from gare.interaction.score_cards import map_tensors
from gare.types import Rows

FORM_ROUNDING = 2.0**-22
"""What a quadratic form can be off, as a share of its largest value: its matrix is kept in float32."""
_MOST_ERROR = 300.0  # of a logit; e to twice that is still a number
_LEAST_WEIGHT = 1e-30  # of attention: smaller ones are left out, for numbers near zero are slow to multiply


@dataclass(frozen=True)
class StoredKeys:
    """Vectors in any precision, int8 included, with what storing has moved them."""

    key_OAD: Tensor
    scale_OA: Tensor
    """float64: a key is its stored numbers times this."""
    moved_OA: Tensor
    """float64: how far the key lies from what is stored."""
    length_OA: Tensor
    """float64: of what is stored."""

    @classmethod
    def round(cls, key_OAD: Tensor, dtype: torch.dtype) -> StoredKeys:
        """float64 keys, each scaled to the range of `dtype`."""
        largest = 1.0 if dtype.is_floating_point else float(torch.iinfo(dtype).max)
        scale_OA = key_OAD.abs().amax(dim=-1) / largest
        scale_OA = torch.where(scale_OA > 1e-200, scale_OA, 1.0)
        scaled_OAD = key_OAD / scale_OA[..., None]
        stored_OAD = (scaled_OAD if dtype.is_floating_point else scaled_OAD.round()).to(dtype)
        kept_OAD = stored_OAD.double() * scale_OA[..., None]
        moved_OA = (kept_OAD - key_OAD).norm(dim=-1) * (1 + SLACK) + 1e-14 * key_OAD.norm(dim=-1)
        return cls(stored_OAD, scale_OA, moved_OA, kept_OAD.norm(dim=-1))

    def products(self, text_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The product of each key with each text, [O, A, T], and how far it may be off."""
        flat_ND, dim = self.key_OAD.flatten(0, 1), text_TD.shape[-1]
        product_NT = stored_products(flat_ND, text_TD, product_dtype()).double()
        product_OAT = product_NT.unflatten(0, self.key_OAD.shape[:2]) * self.scale_OA[..., None]
        error_OA = self.moved_OA + product_error(dim, torch.float32) * self.length_OA
        # What numbers too small for float32 add up to; a scaled key has none larger than 32,767.
        lost_OA = dim * 1e-32 * self.scale_OA
        return product_OAT, error_OA[..., None] * text_TD.double().norm(dim=-1) + lost_OA[..., None]


@dataclass(frozen=True)
class OwnerForms:
    """What of the increment net is left of an owner once attention is known: matrices, rows and numbers.

    The increment is Σ_a y_a atom_a + scaled / σ3 + fixed, as in `gap_aware_cards.IncrementCard`.
    """

    mask_OC: Tensor
    gram2_OAA: Tensor
    gram3_OAA: Tensor
    gram_OAA: Tensor
    """float32, and so the two above. The rest is float64."""
    linear3_OA: Tensor
    atom_scaled_OA: Tensor
    atom_fixed_OA: Tensor
    constants_OK: Tensor
    """The same for all owners: |c|² / D, |scaled|², |fixed|², scaled·fixed, ε."""
    wide2_OH: Tensor
    wide3_OH: Tensor
    wide_OH: Tensor
    """How far apart two tokens of a head lie at most: in LayerNorm 2, in LayerNorm 3, as atoms."""
    most2_O: Tensor
    most3_O: Tensor
    most_O: Tensor
    """How long what attention can make of them is at most."""

    @property
    def num_heads(self) -> int:
        return self.wide_OH.shape[1]


@dataclass(frozen=True)
class OwnerRow:
    """The product of one vector of each owner with its atoms: linear in the coefficients of an increment."""

    atom_OA: Tensor
    scaled_O: Tensor
    fixed_O: Tensor
    length_O: Tensor


@dataclass(frozen=True)
class GapCards:
    """What LayerNorm 1 of the gap needs of each video besides its product with the text; float64."""

    variance_O: Tensor
    """The variance of the mean frame over its dimensions."""
    level_O: Tensor
    """The mean of the mean frame over its dimensions."""
    moved_O: Tensor
    """How far the mean frame lies from the stored one."""

    @classmethod
    def of(cls, mean_OD: Tensor, stored: Balls) -> GapCards:
        mean_OD = mean_OD.double()
        moved_O = (mean_OD - stored.centre_OD.double()).norm(dim=-1) * (1 + SLACK)
        return cls(mean_OD.var(dim=-1, correction=0), mean_OD.mean(dim=-1), moved_O)


@dataclass(frozen=True)
class FrameKeys:
    """The keys of a video's frames, and its forms."""

    stored: StoredKeys
    key_mean_OA: Tensor
    bias_OA: Tensor
    forms: OwnerForms
    pooled: OwnerRow
    """With the stored mean frame."""
    even: OwnerRow
    """With the stored increment at even attention."""


@dataclass(frozen=True)
class KeyCards:
    """What the second rung of bounds needs of each video."""

    gap: GapCards
    frames: FrameKeys | None
    """None where the net attends over the words of the text."""

    def __len__(self) -> int:
        return len(self.gap.level_O)

    def __getitem__(self, rows: Rows) -> KeyCards:
        return map_tensors(self, lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> KeyCards:
        """The same cards on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class TokenKeys:
    """Keys and forms of O owners in float64, before anything is rounded but the matrices."""

    key_OAD: Tensor
    bias_OA: Tensor
    atom_OAD: Tensor
    scaled_D: Tensor
    fixed_D: Tensor
    forms: OwnerForms

    @classmethod
    def fold(cls, context_OCD: Tensor, mask_OC: Tensor, net: IncrementWeights) -> TokenKeys:
        """The net folded into context tokens."""
        card = increment_card(context_OCD.double(), mask_OC, net.to(torch.float64))
        constants = [card.constant3, card.scaled_D.square().sum(), card.fixed_D.square().sum()]
        constants += [card.scaled_D @ card.fixed_D, card.constant3.new_tensor(card.eps)]
        grams = (card.gram2_OAA, card.gram3_OAA, card.gram_OAA)
        wide = [_widest(gram_OAA, mask_OC, net.num_heads) for gram_OAA in grams]
        most = [_longest(gram_OAA, mask_OC, net.num_heads) for gram_OAA in grams]
        forms = OwnerForms(
            mask_OC=mask_OC,
            gram2_OAA=card.gram2_OAA.float(),
            gram3_OAA=card.gram3_OAA.float(),
            gram_OAA=card.gram_OAA.float(),
            linear3_OA=card.linear3_OA,
            atom_scaled_OA=card.atom_scaled_OA,
            atom_fixed_OA=card.atom_fixed_OA,
            constants_OK=torch.stack(constants).expand(len(mask_OC), -1),
            wide2_OH=wide[0],
            wide3_OH=wide[1],
            wide_OH=wide[2],
            most2_O=most[0],
            most3_O=most[1],
            most_O=most[2],
        )
        key_OAD = _centre_keys(card.key_OAD, mask_OC, net.num_heads)
        return cls(key_OAD, card.key_bias_OA, card.atom_OAD, card.scaled_D, card.fixed_D, forms)

    def row(self, vector_OD: Tensor) -> OwnerRow:
        """The products of the owner's own vectors with its atoms."""
        vector_OD = vector_OD.double()
        atom_OA = torch.einsum("oad,od->oa", self.atom_OAD, vector_OD)
        return OwnerRow(atom_OA, vector_OD @ self.scaled_D, vector_OD @ self.fixed_D, vector_OD.norm(dim=-1))


@dataclass(frozen=True)
class PairIncrements:
    """For each pair a vector near its increment, by coefficients, and how far off the increment may be.

    The vector is Σ_a y_a atom_a + share · scaled + fixed, exactly.
    """

    y_OAP: Tensor
    share_OP: Tensor
    square_OP: Interval
    """The squared length of the vector."""
    radius_OP: Tensor
    """At most so far from the vector lies the increment."""
    reach_OP: Tensor
    """What the terms of the sum add up to, in length, at most: the scale of its rounding."""

    def along(self, row: OwnerRow) -> Interval:
        """The product with a vector of the owner, [O, P]."""
        value_OP = torch.einsum("oa,oap->op", row.atom_OA, self.y_OAP)
        value_OP = value_OP + row.scaled_O[:, None] * self.share_OP + row.fixed_O[:, None]
        return Interval.of(value_OP, SLACK * row.length_O[:, None] * self.reach_OP)


def pair_increments(logits_OAP: Tensor, error_OAP: Tensor, forms: OwnerForms) -> PairIncrements:
    """The increments of pairs whose attention logits are known up to an error."""
    num_heads = forms.num_heads
    padding_O1C1 = ~forms.mask_OC[:, None, :, None]
    logits_OHCP = logits_OAP.unflatten(1, (num_heads, -1)).masked_fill(padding_O1C1, -torch.inf)
    below_OHCP = (logits_OHCP - logits_OHCP.amax(dim=2, keepdim=True)).clamp_min(-_MOST_ERROR)
    weights_OHCP = below_OHCP.masked_fill(padding_O1C1, -torch.inf).softmax(dim=2)
    error_OHCP = error_OAP.unflatten(1, (num_heads, -1)).masked_fill(padding_O1C1, 0)
    moved_OHP = attention_moved(weights_OHCP, error_OHCP.amax(dim=2))
    weights_OAP = torch.where(weights_OHCP > _LEAST_WEIGHT, weights_OHCP, 0.0).flatten(1, 2)
    constant3, scaled_sq, fixed_sq, scaled_fixed, eps = forms.constants_OK[:, None].unbind(dim=-1)

    # σ2: computed, and between which two numbers it lies.
    off2_OP = torch.einsum("oh,ohp->op", forms.wide2_OH, moved_OHP)
    square2_OP = _quadratic(forms.gram2_OAA, weights_OAP).clamp_min(0)
    length2 = _length_within(square2_OP, FORM_ROUNDING * forms.most2_O.square()[:, None], off2_OP)
    sigma2_OP = (square2_OP + eps).sqrt()
    low2_OP, high2_OP = (length2.low.square() + eps).sqrt(), (length2.high.square() + eps).sqrt()
    away2_OP = torch.maximum(high2_OP - sigma2_OP, sigma2_OP - low2_OP) + SLACK * sigma2_OP

    # N = σ2 σ3, from the length of ζ = Σ a r + σ2 c.
    square3_OP = (
        _quadratic(forms.gram3_OAA, weights_OAP)
        + sigma2_OP * torch.einsum("oa,oap->op", forms.linear3_OA, weights_OAP)
        + sigma2_OP.square() * constant3
    ).clamp_min(0)
    root3 = constant3.clamp_min(0).sqrt()
    off3_OP = torch.einsum("oh,ohp->op", forms.wide3_OH, moved_OHP) + root3 * away2_OP
    most3_OP = forms.most3_O[:, None] + root3 * sigma2_OP
    length3 = _length_within(square3_OP, FORM_ROUNDING * most3_OP.square(), off3_OP)
    divisor_OP = (square3_OP + eps * sigma2_OP.square()).sqrt()
    low_OP = (length3.low.square() + eps * low2_OP.square()).sqrt() * (1 - SLACK)
    high_OP = (length3.high.square() + eps * high2_OP.square()).sqrt() * (1 + SLACK)

    y_OAP, share_OP = weights_OAP / divisor_OP[:, None], sigma2_OP / divisor_OP
    free_sq_OP = (
        _quadratic(forms.gram_OAA, y_OAP)
        + 2 * share_OP * torch.einsum("oa,oap->op", forms.atom_scaled_OA, y_OAP)
        + share_OP.square() * scaled_sq
    ).clamp_min(0)
    square_OP = (
        free_sq_OP
        + 2 * torch.einsum("oa,oap->op", forms.atom_fixed_OA, y_OAP)
        + 2 * share_OP * scaled_fixed
        + fixed_sq
    )
    root_scaled, root_fixed = scaled_sq.clamp_min(0).sqrt(), fixed_sq.clamp_min(0).sqrt()
    free_OP = forms.most_O[:, None] / divisor_OP + share_OP * root_scaled
    reach_OP = free_OP + root_fixed

    # Δ = fixed + Z / N with Z = Σ a atom + σ2 scaled; what is computed divides by its own N.
    off_OP = torch.einsum("oh,ohp->op", forms.wide_OH, moved_OHP) + root_scaled * away2_OP
    image_OP = (free_sq_OP + FORM_ROUNDING * free_OP.square()).sqrt() * divisor_OP
    turn_OP = torch.maximum(1 / low_OP - 1 / divisor_OP, 1 / divisor_OP - 1 / high_OP)
    radius_OP = off_OP / low_OP + image_OP * turn_OP
    return PairIncrements(
        y_OAP,
        share_OP,
        Interval.of(square_OP, FORM_ROUNDING * reach_OP.square()),
        radius_OP * (1 + SLACK) + SLACK * reach_OP,
        reach_OP,
    )


def attention_moved(weights_OHCP: Tensor, error_OHP: Tensor) -> Tensor:
    """How much weight, [O, H, P], can lie elsewhere when each logit is known up to an error.

    Half the sum of all differences of weights: with ε the error and r the weight of all tokens but the
    heaviest, no more than tanh(ε / 2), and r (E − 1)(1 − r) / (1 + r (E − 1)) with E = e^2ε where r is small.
    """
    error_OHP = error_OHP + SLACK  # of the softmax itself
    top_OH1P = weights_OHCP.argmax(dim=2, keepdim=True)
    rest_OHP = weights_OHCP.scatter(2, top_OH1P, 0.0).sum(dim=2) * (1 + SLACK)
    bounded_OHP = error_OHP.clamp_max(_MOST_ERROR)
    grown_OHP = rest_OHP * torch.expm1(2 * bounded_OHP)
    small_OHP = grown_OHP * (1 - rest_OHP) / (1 + grown_OHP)
    is_small_OHP = (rest_OHP * (1 + bounded_OHP.exp()) < 1) & (error_OHP <= _MOST_ERROR)
    moved_OHP = torch.where(is_small_OHP, small_OHP, (error_OHP / 2).tanh()) * (1 + SLACK)
    return moved_OHP + weights_OHCP.shape[2] * _LEAST_WEIGHT  # what `pair_increments` leaves out


def gap_scale(text_mean: Interval, text_TD: Tensor, gap: GapCards, eps: float) -> Interval:
    """One over what LayerNorm 1 divides the gap by, [T, V]; `text_mean` are products with stored means."""
    text_TD, dim = text_TD.double(), text_TD.shape[-1]
    moved_TV = text_TD.norm(dim=-1, keepdim=True) * gap.moved_O
    centred_TV = dim * text_TD.mean(dim=-1, keepdim=True) * gap.level_O
    own_TV = text_TD.var(dim=-1, correction=0, keepdim=True) + gap.variance_O
    slack_TV = SLACK * (own_TV + text_TD.mean(dim=-1, keepdim=True).square() + gap.level_O.square())
    low_TV = own_TV - 2 / dim * (text_mean.high + moved_TV - centred_TV) - slack_TV
    high_TV = own_TV - 2 / dim * (text_mean.low - moved_TV - centred_TV) + slack_TV
    return Interval(
        (high_TV.clamp_min(0) + eps).rsqrt() * (1 - SLACK), (low_TV.clamp_min(0) + eps).rsqrt() * (1 + SLACK)
    )


def scaled_logits(gap_OAP: Tensor, error_OAP: Tensor, scale_OP: Interval) -> tuple[Tensor, Tensor]:
    """Products with the gap over the gap's scale, and how far they may be off."""
    middle_O1P = ((scale_OP.low + scale_OP.high) / 2)[:, None]
    spread_O1P = (scale_OP.high - scale_OP.low)[:, None] / 2
    error_OAP = error_OAP * scale_OP.high[:, None] + gap_OAP.abs() * (spread_O1P + 1e-13 * middle_O1P)
    return gap_OAP * middle_O1P, error_OAP


def _centre_keys(key_OAD: Tensor, mask_OC: Tensor, num_heads: int) -> Tensor:
    """Each head's keys less their mean: attention is the same, and shorter keys lose less when rounded."""
    key_OHCD = key_OAD.unflatten(1, (num_heads, -1))
    share_OC = mask_OC / mask_OC.sum(dim=1, keepdim=True)
    mean_OHD = torch.einsum("oc,ohcd->ohd", share_OC.to(key_OHCD), key_OHCD)
    centred_OHCD: Tensor = key_OHCD - mean_OHD[:, :, None]
    return centred_OHCD.flatten(1, 2)


def _quadratic(gram_OAA: Tensor, x_OAP: Tensor) -> Tensor:
    return (x_OAP * (gram_OAA.double() @ x_OAP)).sum(dim=1)


def _length_within(square_OP: Tensor, rounding_OP: Tensor, off_OP: Tensor) -> Interval:
    """A length whose square was computed, of a vector that may be moved by `off_OP`."""
    low_OP = (square_OP - rounding_OP).clamp_min(0).sqrt() - off_OP
    return Interval(low_OP.clamp_min(0), (square_OP + rounding_OP).sqrt() + off_OP)


def _longest(gram_OAA: Tensor, mask_OC: Tensor, num_heads: int) -> Tensor:
    """The longest token of each head, summed over heads, [O]."""
    length_OHC = gram_OAA.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().unflatten(1, (num_heads, -1))
    longest_O: Tensor = length_OHC.masked_fill(~mask_OC[:, None], 0).amax(dim=-1).sum(dim=-1)
    return longest_O * (1 + SLACK)


def _widest(gram_OAA: Tensor, mask_OC: Tensor, num_heads: int) -> Tensor:
    """How far apart two tokens of each head lie at most, [O, H]."""
    gram_OHCHC = gram_OAA.unflatten(2, (num_heads, -1)).unflatten(1, (num_heads, -1))
    gram_OHCC = gram_OHCHC.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    square_OHC = gram_OHCC.diagonal(dim1=2, dim2=3)
    apart_OHCC = square_OHC[..., None] + square_OHC[..., None, :] - 2 * gram_OHCC
    rounding_OH11 = 1e-12 * square_OHC.amax(dim=-1)[..., None, None]
    both_O1CC = (mask_OC[:, :, None] & mask_OC[:, None])[:, None]
    apart_OHCC = (apart_OHCC + rounding_OH11).clamp_min(0).masked_fill(~both_O1CC, 0)
    widest_OH: Tensor = apart_OHCC.amax(dim=(2, 3)).sqrt()
    return widest_OH
