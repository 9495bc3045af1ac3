"""Training of published methods, and the nets they bring, against formulas written out in float64.

The goldens have one size, one draw and few heads. Here are other numbers of pairs, words, frames and heads;
values and gradients are compared. Settings are those of the published code, where padding holds numbers and
takes part.
"""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from gare.interaction.peers.ts2_net import weighted_cosines
from gare.objective import ObjectiveConfig, training_loss
from method_formulas import (
    DIM,
    SCALE,
    agree,
    attention,
    by_pair,
    layer_norm,
    linear,
    nce,
    scene,
    share_of_net,
    temporal,
    temporal_layers,
    token_score,
    unit,
)

heads = pytest.mark.parametrize("num_heads", [1, 4])


# --- transformers over tokens -------------------------------------------------------------------------------


@heads
@pytest.mark.parametrize("head", ["lstm", "transformer", "tight"])
def test_clip4clip(head, num_heads):
    method, text, video, _ = scene("clip4clip", head=head, num_layers=2, num_heads=num_heads, max_frames=7)

    def vector(j):
        frames_FD, mask_F = video.frames_VFD[j], video.mask_VF[j]
        if head == "transformer":
            return unit(temporal(method.temporal, frames_FD, mask_F, num_heads))[mask_F].mean(dim=0)
        real_FD, hidden, cell = frames_FD[mask_F], torch.zeros(DIM), torch.zeros(DIM)
        outputs = []
        for frame_D in real_FD:
            gates = method.lstm.weight_ih_l0 @ frame_D + method.lstm.bias_ih_l0
            gates = gates + method.lstm.weight_hh_l0 @ hidden.to(gates) + method.lstm.bias_hh_l0
            enter, forget, new, leave = gates.chunk(4)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return unit(torch.stack(outputs) + real_FD).mean(dim=0)

    def score(i, j):
        if head != "tight":
            return unit(text.text_TD[i]) @ unit(vector(j))
        tokens = torch.cat([text.text_TD[i : i + 1], video.frames_VFD[j]])
        mask = torch.cat([torch.ones(1, dtype=torch.bool), video.mask_VF[j]])
        tight = method.tight
        hidden = temporal_layers(tokens + tight.position[: len(tokens)], tight.layers, mask, num_heads)
        hidden = linear(layer_norm(hidden[0], tight.norm, 1e-12), tight.dense)
        return linear(hidden * torch.sigmoid(1.702 * hidden), tight.output)[0]

    agree(method.score_pairs(text, video).scores_TV, by_pair(len(text), score), method, text, video)


@heads
def test_ts2_net_with_patches(num_heads):
    """Frame-major tokens with a tiled mask; the gradient of the choice is the diagonal part alone."""
    options = {"select_patches": True, "num_selected": 2, "num_layers": 1, "tiled_mask": True}
    method, text, video, generator = scene(
        "ts2_net", patches=5, num_heads=num_heads, max_frames=4, noise_std=0.4, **options
    )
    noise = torch.randn(len(video) * 4, 6, 5, generator=generator, dtype=torch.float64)
    selector = method.selector

    def tokens_of(j, f):
        both = torch.cat([video.frames_VFD[j, f : f + 1], video.patches_VFPD[j, f]])
        hidden = F.gelu(linear(layer_norm(both, selector.norm), selector.enter))
        beside = torch.cat([hidden, hidden[:1].expand_as(hidden)], dim=-1)
        scores_P = linear(F.gelu(linear(beside, selector.mix)), selector.output).squeeze(-1).tanh()[1:]
        drawn = noise[4 * j + f]
        one_hot = torch.zeros(6, 2, 5, dtype=torch.float64)
        for s, noisy in enumerate((scores_P + 0.4 * drawn).tolist()):
            for k, place in enumerate(sorted(sorted(range(5), key=lambda p, n=noisy: -n[p])[:2])):
                one_hot[s, k, place] = 1
        slope = (one_hot * drawn[:, None]).mean(dim=0) / 0.4
        chosen = one_hot.mean(dim=0) + slope * (scores_P - scores_P.detach())
        return torch.cat([both[:1], chosen @ video.patches_VFPD[j, f]])

    rows = []
    for j in range(len(video)):
        tokens = torch.cat([tokens_of(j, f) for f in range(4)])
        after = temporal(method.temporal, tokens, video.mask_VF[j].repeat(3), num_heads)[::3]
        mask_F = video.mask_VF[j].repeat(3)[::3]
        column = []
        for i in range(len(text)):
            cosines = unit(after) @ unit(text.text_TD[i])
            relative = cosines * mask_F / (cosines * mask_F).norm()
            share = (4 * relative).exp() * mask_F
            column.append((share / share.sum() * cosines).sum())
        rows.append(torch.stack(column))
    frames_VFD, mask_VF = method.video_frames(video, noise)
    ours = weighted_cosines(text.text_TD, frames_VFD, mask_VF, 4.0)[0]
    agree(ours, torch.stack(rows, dim=1), method, text, video)


@heads
@pytest.mark.parametrize("is_training", [False, True])
def test_eercf(num_heads, is_training):
    method, text, video, _ = scene(
        "eercf", patches=3, num_layers=2, num_heads=num_heads, max_frames=4, count_padding=True
    )
    number = len(text)
    found = method.train(is_training).score_pairs(text, video)

    def softened(cosines, temperature):
        return (cosines / temperature).softmax(dim=0)

    after = [
        unit(temporal(method.temporal, video.frames_VFD[j], video.mask_VF[j], num_heads))
        for j in range(number)
    ]
    mean = [unit(after[j][video.mask_VF[j]].mean(dim=0)) for j in range(number)]
    text_TD = unit(text.text_TD)
    frames = [unit(video.frames_VFD[j]) for j in range(number)]
    patches = [unit(video.patches_VFPD[j].flatten(0, 1)) for j in range(number)]

    def strong(i, j, tokens, by, temperature):
        weights = softened(tokens[j] @ text_TD[i], temperature)
        return unit(weights.detach() @ by[j] if is_training else weights @ by[j])

    def score(i, j):
        of_frames, of_patches = frames[j] @ text_TD[i], patches[j] @ text_TD[i]
        weak = (softened(of_frames, 0.01) @ method.frame_mix_FF * of_frames).sum()
        patch = (softened(of_patches, 0.01) * of_patches).sum()
        whole = text_TD[i] @ method.bilinear_DD @ mean[j]
        if is_training:
            return 0.5 * whole + 0.5 * weak + 0.05 * patch
        frame_strong = text_TD[i] @ strong(i, j, frames, after, 0.1)
        return 0.5 * whole + 0.8 * weak + 0.2 * frame_strong + 0.2 * patch

    scores = by_pair(number, score)
    if not is_training:
        agree(found.scores_TV, scores, method, text, video)
        return
    objective = ObjectiveConfig(dict(method.published_terms))
    ours = training_loss(found, SCALE, objective, text=text, video=video)
    own = torch.stack([strong(j, j, frames, after, 0.1) for j in range(number)])

    def decorrelated(left, right):
        left, right = ((x - x.mean(dim=0)) / x.std(dim=0) for x in (left, right))
        return 0.14 * ((left.mT @ right / number).diagonal() - 1).square().sum()

    total = 0.8 * nce(scores) + 0.2 * nce(text_TD @ own.mT)
    total = total + 1e-3 * (decorrelated(text_TD, torch.stack(mean)) + decorrelated(text_TD, own))
    agree(ours.total, total, method, text, video)


@heads
@pytest.mark.parametrize("samples", [1, 4])
def test_uatvr(num_heads, samples):
    options = {"num_layers": 2, "num_heads": num_heads, "num_samples": samples, "num_extra": 3}
    method, text, video, generator = scene(
        "uatvr", max_words=6, max_frames=4, zero_padding=True, attend_padding=True, **options
    )
    number = len(text)
    noise = torch.randn(2, number, samples, DIM, generator=generator, dtype=torch.float64)
    found = method.scores(text, video, *noise)
    ours = training_loss(found, SCALE, ObjectiveConfig(dict(method.published_terms)), text=text, video=video)

    def encode(side, tokens_ND, mask_N):
        size = len(tokens_ND)
        hidden = torch.cat([tokens_ND + side.position[:size], side.position[size:]])
        mask = torch.cat([mask_N, torch.ones(3, dtype=torch.bool)])
        hidden = temporal_layers(hidden, method.layers, mask, num_heads)
        return unit(torch.cat([hidden[:size] + tokens_ND, hidden[size:]])), mask

    def attended(pool, tokens_ND):
        hidden, output = pool.attention["1"], pool.attention["2"]
        return linear(
            linear(linear(tokens_ND, hidden).tanh(), output).squeeze(-1).softmax(dim=0) @ tokens_ND,
            pool.project,
        )

    def distribution(side, tokens_ND, mask_N, first):
        counted = mask_N.clone()
        counted[:first] = False
        mean = unit(tokens_ND[counted if counted.any() else mask_N].mean(dim=0))
        centre = unit(layer_norm(mean + attended(side.mean, tokens_ND).sigmoid(), side.mean_norm))
        return centre, attended(side.spread, tokens_ND) + linear(mean, side.spread_pooled)

    sides = []
    for side, tokens, masks, first, drawn in (
        (method.text, text.words_TWD, text.mask_TW, 1, noise[0]),
        (method.video, video.frames_VFD, video.mask_VF, 0, noise[1]),
    ):
        encoded = [encode(side, *each) for each in zip(tokens, masks, strict=True)]
        shares = [share_of_net(x, mask, side.hidden, side.output) for x, mask in encoded]
        spread = [
            distribution(side, x[:-3], mask, first) for (x, _), mask in zip(encoded, masks, strict=True)
        ]
        points = torch.stack([mean + e * log.exp() for (mean, log), e in zip(spread, drawn, strict=True)])
        sides.append((encoded, shares, torch.stack([log for _, log in spread]), points))
    (words, word_shares, _, text_points), (frames, frame_shares, _, video_points) = sides
    scores = by_pair(number, lambda i, j: token_score(*words[i], word_shares[i], *frames[j], frame_shares[j]))
    agree(found.scores_TV, scores, method, text, video)

    def instances(left, right):
        """Every sample of a side against every sample of the other; the right ones are those of its pair."""
        terms = []
        for b, s in ((b, s) for b in range(number) for s in range(samples)):
            log = (right.flatten(0, 1) @ left[b, s]).log_softmax(dim=0).view(number, samples)
            terms.append(-log[b].mean())
        return sum(terms) / len(terms)

    kl = 0.0
    for _, _, log, points in sides:
        kl = kl - 0.5 * (1 + log - points.mean(dim=1).square() - log.exp()).sum()
    both = instances(text_points, video_points) + instances(video_points, text_points)
    agree(ours.total, nce(scores) + 1e-2 * both / 2 + 1e-4 * kl, method, text, video)


@pytest.mark.parametrize(("num_spatial", "num_events", "frames"), [(3, 2, 4), (2, 1, 5)])
def test_prost(num_spatial, num_events, frames):
    method, text, video, _ = scene(
        "prost", pairs=3, frames=frames, patches=4, num_word_prototypes=3, num_spatial=num_spatial,
        num_events=num_events, max_frames=frames, dropout=0.0, count_padding=True,
    )  # fmt: skip

    def multihead(net, query, memory, sees):
        weights, biases = net.in_proj_weight.chunk(3), net.in_proj_bias.chunk(3)
        q, k, v = (x @ w.mT + b for x, w, b in zip((query, memory, memory), weights, biases, strict=True))
        return linear(attention(q, k, v, 1, sees), net.out_proj)

    def feed(layer, x, after):
        return layer_norm(x + linear(linear(x, layer.linear1).relu(), layer.linear2), after)

    def sums(x, hidden, output):
        return linear(linear(x, hidden).relu(), output).relu().mT @ x

    def events_of(j):
        spatial = [
            torch.cat(
                [
                    video.frames_VFD[j, f : f + 1],
                    sums(video.patches_VFPD[j, f], method.patch_hidden, method.patch_output),
                ]
            )
            for f in range(frames)
        ]
        memory = torch.cat(spatial)
        total = len(memory)
        sees = torch.zeros(frames, total, dtype=torch.bool)
        for b in range(frames):
            start = b * (total // frames)
            end = start + total // frames + int(0.2 * total)
            if end > total - 1:
                start, end = max(start - (end - (total - 1)), 0), total
            sees[b, start:end] = True
        query = method.frame_decoder.queries
        for layer in method.frame_decoder.layers:
            query, keys = layer_norm(query, layer.norm1), layer_norm(memory, layer.norm2)
            query = layer_norm(query + multihead(layer.cross, query, keys, sees), layer.norm3)
            query = feed(layer, query, layer.norm4)
        decoded = layer_norm(query, method.frame_decoder.norm)
        memory = (decoded + video.frames_VFD[j]) / 2
        query = method.event_decoder.queries
        every = torch.ones(num_events, num_events, dtype=torch.bool)
        for layer in method.event_decoder.layers:
            query, keys = layer_norm(query, layer.norm1), layer_norm(memory, layer.norm2)
            query = layer_norm(multihead(layer.among, query, query, every), layer.norm3)
            found = multihead(layer.cross, query, keys, torch.ones(num_events, frames, dtype=torch.bool))
            query = feed(layer, layer_norm(query + found, layer.norm4), layer.norm5)
        decoded = layer_norm(query, method.event_decoder.norm)
        return (decoded + video.frames_VFD[j].mean(dim=0)) / 2, torch.stack(spatial)

    def floored(x):
        """A prototype may be zero: its weights are what a ReLU leaves."""
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    made = [events_of(j) for j in range(len(video))]

    def event(i, j):
        return (unit(made[j][0]) @ unit(text.text_TD[i])).max()

    def part(i, j):
        words = floored(sums(text.words_TWD[i], method.word_hidden, method.word_output))
        cosines = torch.einsum("kd,fpd->kfp", words, floored(made[j][1]))
        return cosines.amax(dim=0).amax(dim=0).mean()

    events, parts = by_pair(3, event), by_pair(3, part)
    agree(method.score_pairs(text, video).scores_TV, events + 1.5 * parts, method, text, video)
    objective = ObjectiveConfig(dict(method.published_terms))
    ours = training_loss(method.train().score_pairs(text, video), SCALE, objective, text=text, video=video)
    agree(ours.total, (nce(events) + nce(parts)) / 2, method, text, video)


# --- the rest -----------------------------------------------------------------------------------------------


def test_dmae_hides_what_matters_and_counts_hard_negatives():
    method, text, video, _ = scene("dmae", max_words=6, max_frames=4, zero_padding=True)
    number = len(text)
    found = method.train().score_pairs(text, video)
    ours = training_loss(found, SCALE, ObjectiveConfig(dict(method.published_terms)), text=text, video=video)
    scores = found.scores_TV

    def penalised(s):
        p = (SCALE * s).softmax(dim=1).clamp(1e-6, 1 - 1e-6)
        hard = [
            -(1 - p[i, j]).log()
            for i in range(number)
            for j in range(number)
            if i != j and (s[i, j] > s[i, i] or s[i, j] > s[j, j])
        ]
        return -p.diagonal().log().mean() + 0.5 * (sum(hard) / len(hard) if hard else 0)

    assert any(
        scores[i, j] > scores[i, i] or scores[i, j] > scores[j, j] for i, j in combinations(range(number), 2)
    )
    agree(ours.terms["hard_negative"], (penalised(scores) + penalised(scores.mT)) / 2, method, text, video)

    def importance(net, asking, tokens):
        both = torch.cat([net.mix.weight @ asking, tokens], dim=-1)
        centred = both - both.mean()
        both = centred / (centred.square().mean() + 1e-5).sqrt() * net.norm.weight + net.norm.bias
        weight = linear(F.gelu(linear(both, net.hidden)), net.output).squeeze(-1).sigmoid()
        return weight / weight.sum()

    def kept(share):
        order, total, keep = share.argsort(descending=True).tolist(), 0.0, torch.ones_like(share)
        for place in order:
            total += share[place].item()
            if total < 0.6:
                keep[place] = 0
        return keep[:, None]

    def token(vector, frames, mask, first):
        cosines = frames @ vector * mask
        return (cosines.max() + first * cosines.sum() / mask.sum()) / 2

    total = 0.0
    for b in range(number):
        words, frames = unit(text.words_TWD[b]), unit(video.frames_VFD[b])
        words, frames = words * text.mask_TW[b][:, None], frames * video.mask_VF[b][:, None]
        sentence, mask, first = unit(text.text_TD[b]), video.mask_VF[b].double(), text.mask_TW[b, 0].double()
        of_words = importance(method.word_importance, frames, words)
        fewer = frames * kept(importance(method.frame_importance, sentence[None], frames))
        whole, hidden = unit(of_words @ words), of_words @ (words * kept(of_words))
        for positive, negative in (
            ((sentence, frames), (sentence, fewer)),
            ((whole, frames), (whole, fewer)),
            ((whole, frames), (hidden, frames)),
        ):
            lost = 0.6 - token(*positive, mask, first) + token(*negative, mask, first)
            total = total + lost.clamp_min(0) / number
    agree(ours.terms["partial_margin"], total, method, text, video)


@pytest.mark.parametrize("steps", [1, 7])
def test_diffusion_ret(steps):
    method, text, video, generator = scene(
        "diffusion_ret", num_steps=steps, zero_padding=True, late_mask=True
    )
    number = len(text)
    noisy = torch.randn(number, number, generator=generator, dtype=torch.float64)
    at = torch.arange(number) % steps

    def pooled(i, j):
        logits = video.frames_VFD[j] @ text.text_TD[i]
        return (logits.softmax(dim=0) * video.mask_VF[j]) @ video.frames_VFD[j]

    def denoised(net, query_ND, candidate_ND, scores_N, step):
        angles = [step / 10000 ** (2 * (d // 2) / DIM) for d in range(DIM)]
        wave = torch.tensor([math.cos(a) if d % 2 else math.sin(a) for d, a in enumerate(angles)])
        time = linear(F.silu(linear(wave.double(), net.time_in)), net.time_out)
        logits = (linear(query_ND + time, net.q) * linear(candidate_ND + time, net.k)).sum(dim=-1)
        share = (logits + scores_N).softmax(dim=0)
        found = linear(share @ linear(candidate_ND + time, net.v), net.out)
        both = torch.cat([found.expand_as(candidate_ND), candidate_ND], dim=-1)
        return linear(linear(both, net.hidden).relu(), net.output).squeeze(-1) + share

    pool = by_pair(number, pooled)
    ours = method.denoise_videos(text.text_TD, method.pooled(text, video), noisy, at)
    expected = torch.stack(
        [
            denoised(method.text_denoiser, text.text_TD[i].expand(number, -1), pool[i], noisy[i], int(at[i]))
            for i in range(number)
        ]
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)  # the sinusoid is in float32
    back = method.denoise_texts(text.text_TD, method.pooled(text, video), noisy, at)
    expected = torch.stack(
        [
            denoised(method.video_denoiser, pool[:, j], text.text_TD, noisy[j], int(at[j]))
            for j in range(number)
        ]
    )
    torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-6)
    kept, level = [], lambda time: math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    for i in range(steps):
        beta = min(1 - level((i + 1) / steps) / level(i / steps), 0.999)
        kept.append((kept[-1] if kept else 1.0) * (1 - beta))
    for i in range(number):
        x = noisy[i]
        for step in reversed(range(steps)):
            clean = denoised(
                method.text_denoiser, text.text_TD[i].expand(number, -1), pool[i], x, step
            ).clamp(-1, 1)
            noise = (x - math.sqrt(kept[step]) * clean) / math.sqrt(1 - kept[step])
            before = kept[step - 1] if step else 1.0
            x = math.sqrt(before) * clean + math.sqrt(1 - before) * noise
        sampled = method.sample(text.text_TD[i : i + 1], pool[i : i + 1], noisy[i : i + 1])[0]
        torch.testing.assert_close(sampled, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("off_diagonal", "weighted"), [(0.0, True), (0.05, True), (0.05, False)])
def test_decorrelation_of_drl(off_diagonal, weighted):
    method, text, video, _ = scene("token_wise", zero_padding=True)
    options = {"off_diagonal": off_diagonal, "weighted": weighted, "zero_padding": True}
    objective = ObjectiveConfig({"contrastive": {}, "token_decorrelation": options})
    found = training_loss(method.train().score_pairs(text, video), SCALE, objective, text=text, video=video)

    own, best, shares = ([], []), ([], []), ([], [])
    for b in range(len(text)):
        words, frames = unit(text.words_TWD[b]), unit(video.frames_VFD[b])
        cosines = words @ frames.mT * text.mask_TW[b][:, None] * video.mask_VF[b]
        share = (
            share_of_net(text.words_TWD[b], text.mask_TW[b], method.words_hidden, method.words_output),
            share_of_net(video.frames_VFD[b], video.mask_VF[b], method.frames_hidden, method.frames_output),
        )
        for side, (tokens, others, mask, table) in enumerate(
            ((words, frames, text.mask_TW[b], cosines), (frames, words, video.mask_VF[b], cosines.mT))
        ):
            for n in mask.nonzero().flatten().tolist():
                own[side].append(tokens[n])
                best[side].append(others[table[n].argmax()])
                shares[side].append(share[side][n])
    matrices = []
    for side in range(2):
        a, b = (torch.stack(x[side]) for x in (own, best))
        a, b = ((x - x.mean(dim=0)) / x.std(dim=0) for x in (a, b))
        weight = torch.stack(shares[side])[:, None] / len(text) if weighted else 1 / len(a)
        matrices.append((weight * a).mT @ b)
    matrix = sum(matrices) / 2
    on = (matrix.diagonal() - 1).square().sum()
    off = matrix.square().sum() - matrix.diagonal().square().sum()
    agree(found.terms["token_decorrelation"], 0.11 * on + off_diagonal * off, method, text, video)


@pytest.mark.parametrize(("divisor", "concepts"), [("channels", 2), ("words", 8)])
def test_decorrelation_of_dicosa(divisor, concepts):
    method, text, video, _ = scene("dicosa", num_concepts=concepts, late_mask=True)
    objective = ObjectiveConfig({"contrastive": {}, "concept_decorrelation": {"divisor": divisor}})
    found = training_loss(method.train().score_pairs(text, video), SCALE, objective, text=text, video=video)
    total = 0.0
    for b in range(len(text)):
        weights = (video.frames_VFD[b] @ text.text_TD[b] / 3).softmax(dim=0) * video.mask_VF[b]
        left, right = (x.view(concepts, -1) for x in (text.text_TD[b], weights @ video.frames_VFD[b]))
        left, right = ((x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True) for x in (left, right))
        total = total + left @ right.mT / len(text)
    matrix = total / (DIM // concepts if divisor == "channels" else 6)
    on = (matrix.diagonal() - 1).square().sum()
    off = matrix.square().sum() - matrix.diagonal().square().sum()
    agree(found.terms["concept_decorrelation"], 0.01 * on + 0.005 * off, method, text, video)


def test_support_texts_of_tmass():
    method, text, video, generator = scene("tmass", max_frames=4, dropout=0.0)
    number = len(text)
    noise = torch.rand(number, DIM, generator=generator, dtype=torch.float64)
    pairs = method.training_scores(*method.prepare(text, video), noise)
    net = method.attention

    def pooled(i, j):
        query, context = layer_norm(text.text_TD[i], net.norm1), layer_norm(video.frames_VFD[j], net.norm1)
        logits = linear(context, net.key) @ linear(query, net.query) / math.sqrt(DIM)
        share = logits.exp() * video.mask_VF[j] / (logits.exp() * video.mask_VF[j]).sum()
        hidden = layer_norm(linear(share @ linear(context, net.value), net.out), net.norm2)
        return layer_norm(hidden + linear(hidden, net.residual), net.norm3)

    pool = by_pair(number, pooled)
    points, supports = [], []
    for i in range(number):
        cosines = unit(video.frames_VFD[i]) @ unit(text.text_TD[i]) * video.mask_VF[i]
        length = linear(cosines, method.radius).exp()
        points.append(text.text_TD[i] + noise[i] * length)
        supports.append(text.text_TD[i] + unit(pool[:, i].mean(dim=0) - text.text_TD[i]) * length)
    for ours, made in ((pairs.scores_TV, points), (pairs.parts["scores:support"], supports)):
        agree(ours, by_pair(number, lambda i, j, m=made: unit(m[i]) @ unit(pool[i, j])), method, text, video)


@heads
def test_fusion_of_pig_and_its_loss(num_heads):
    method, text, video, _ = scene("pig", num_layers=1, num_heads=num_heads, max_frames=4, dropout=0.0)
    found = method.train().score_pairs(text, video)
    query_VD, net = found.parts["pseudo_query_VD"], method.fusion

    def vector(j):
        query = linear(layer_norm(query_VD[j : j + 1], net.norm1), net.query)
        context = layer_norm(video.frames_VFD[j], net.norm1)
        sees = video.mask_VF[j][None]
        attended = attention(query, linear(context, net.key), linear(context, net.value), num_heads, sees)
        hidden = layer_norm(linear(attended, net.out), net.norm2)
        return unit(layer_norm(hidden + linear(hidden, net.residual), net.norm3))[0]

    scores = by_pair(len(text), lambda i, j: unit(text.text_TD[i]) @ vector(j))
    objective = ObjectiveConfig(dict(method.published_terms))
    ours = training_loss(found, SCALE, objective, text=text, video=video)
    guess = (2 - 2 * (unit(query_VD) * unit(text.text_TD)).sum(dim=-1)).mean()
    agree(ours.total, 2 * nce(scores) + guess, method, text, video)


@heads
@pytest.mark.parametrize("num_expansion", [0, 3])
def test_levels_and_loss_of_video_colbert(num_heads, num_expansion):
    """Frames, and frames with learned tokens after a transformer; each pair of a level is right or wrong."""
    options = {"num_layers": 2, "num_heads": num_heads, "num_expansion": num_expansion, "max_frames": 4}
    method, text, video, _ = scene("mean_max_sim", **options)
    objective = ObjectiveConfig(dict(method.published_terms))
    ours = training_loss(method.train().score_pairs(text, video), SCALE, objective, text=text, video=video)
    every = torch.ones(num_expansion, dtype=torch.bool)

    def tokens(j):
        mask = torch.cat([video.mask_VF[j], every])
        return temporal(method.temporal, torch.cat([video.frames_VFD[j], method.expansion]), mask, num_heads)[
            mask
        ]

    total = 0.0
    for level in ([video.frames_VFD[j][video.mask_VF[j]] for j in range(5)], [tokens(j) for j in range(5)]):
        scores = by_pair(
            5,
            lambda i, j, level=level: (
                (unit(text.words_TWD[i][text.mask_TW[i]]) @ unit(level[j]).mT).amax(dim=1).mean()
            ),
        )
        for i in range(5):
            for j in range(5):
                logit = method.log_scale.exp() * scores[i, j] + method.bias
                total = total - (logit if i == j else -logit).sigmoid().log() / 5
    agree(ours.total, total, method, text, video)
