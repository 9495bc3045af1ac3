"""How fast a model encodes: texts one by one, as a search has them, and videos whose frames are at hand.

Where transformers runs the image tower, its own `get_image_features` on the same weights and pictures is
timed beside ours, in turns: the ratio of the least times says what was gained, whatever else is running.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gare.bench.bench_timing import describe_device, median_ms, peak_memory_gb
from gare.library.search.stage1 import AUDIT_SENTENCES
from gare.model import GARE, GareConfig

RANDOM_CLIP = "clip"
"""The name that stands for ViT-B/32 with random weights: its times need no download."""
_ROUNDS = 7


@dataclass(frozen=True)
class EncodeBenchmark:
    """Times of loading and encoding, in seconds or milliseconds as the names say."""

    model: str
    device: str
    frames: int
    load_s: float
    """From the name to a model that is ready to encode, torch already imported."""
    text_ms: float
    """Time of one sentence."""
    texts_per_second: float
    """Texts a second, in batches of 64."""
    video_ms: float
    """Time of one video whose decoded frames are in memory."""
    videos_per_second: float
    batch: int
    """Videos that are encoded at once."""
    batch_ms: float
    """Time of that many."""
    peak_memory_gb: float
    """Before the model of transformers was made."""
    frames_per_second: float | None = None
    """Bytes to vectors, the best of some rounds; None where there is nothing to compare with."""
    transformers_frames_per_second: float | None = None
    """Normalised pixels to vectors by `get_image_features`, in the same rounds."""
    ratio: float | None = None
    least_cosine: float | None = None
    """The least cosine between our vector of a frame and that of transformers."""


@torch.no_grad()
def benchmark_encode(name: str, *, frames: int, device: torch.device, batch: int = 1) -> EncodeBenchmark:
    """Load a model by name and time both towers; videos one by one, and `batch` at once."""
    started = time.perf_counter()
    model = (random_clip() if name == RANDOM_CLIP else GARE.from_pretrained(name)).to(device).eval()
    load_s = time.perf_counter() - started
    size = model.encoder.image_format.size
    frames_VFCHW = torch.randint(256, (1, frames, 3, size, size), dtype=torch.uint8, device=device)
    mask_VF = torch.ones(1, frames, dtype=torch.bool, device=device)
    many = [f"{AUDIT_SENTENCES[n % len(AUDIT_SENTENCES)]} {n}" for n in range(64)]
    text_ms = median_ms(lambda: model.encode_text([AUDIT_SENTENCES[0]]), device)
    texts_ms = median_ms(lambda: model.encode_text(many), device)
    video_ms = median_ms(lambda: model.encode_frames(frames_VFCHW, mask_VF), device, seconds=4.0)
    batch_ms = video_ms
    if batch > 1:
        many_VFCHW = torch.randint(256, (batch, *frames_VFCHW.shape[1:]), dtype=torch.uint8, device=device)
        many_VF = mask_VF.expand(batch, -1)
        batch_ms = median_ms(lambda: model.encode_frames(many_VFCHW, many_VF), device, seconds=4.0)
        del many_VFCHW
    memory = peak_memory_gb()
    compared = _compare(model, frames_VFCHW[0], device)
    return EncodeBenchmark(
        model=name,
        device=describe_device(device),
        frames=frames,
        load_s=load_s,
        text_ms=text_ms,
        texts_per_second=1000 * len(many) / texts_ms,
        video_ms=video_ms,
        videos_per_second=1000 * batch / batch_ms,
        batch=batch,
        batch_ms=batch_ms,
        peak_memory_gb=memory,
        **compared,
    )


def random_clip() -> GARE:
    """ViT-B/32 with random weights that ranks by the plain cosine."""
    torch.manual_seed(0)
    values = {"encoder": {"name": "clip"}, "temporal": {"num_layers": 0}, "interaction": {"name": "mean"}}
    return GARE(GareConfig.load(values))


# --- transformers beside it ---------------------------------------------------------------------------------


def transformers_features(model: GARE) -> Callable[[Tensor], Tensor] | None:
    """`get_image_features` of a fresh transformers model with the same weights; None where it has no such."""
    encoder: Any = model.encoder
    architecture = dict(getattr(encoder.config, "architecture", None) or {})
    if not architecture:
        return None
    from transformers import AutoConfig, AutoModel

    kind = architecture.pop("model_type", "clip")
    theirs: Any = AutoModel.from_config(AutoConfig.for_model(kind, **architecture), dtype=torch.float32)
    vision = getattr(theirs, "vision_model", None)
    projection = getattr(theirs, "visual_projection", nn.Identity())
    if (
        vision is None
        or not _takes(vision, encoder.vision)
        or not _takes(projection, encoder.image_projection)
    ):
        return None
    theirs.eval().to(model.device)

    is_patches = encoder.image_format.fit.mode == "patches"

    def features(pixels_NCHW: Tensor) -> Tensor:
        inputs = encoder.tower_inputs(pixels_NCHW) if is_patches else {"pixel_values": pixels_NCHW}
        output = theirs.get_image_features(**inputs)
        vectors_ND: Tensor = output if isinstance(output, Tensor) else output.pooler_output
        return vectors_ND

    return features


def _takes(theirs: nn.Module, ours: nn.Module) -> bool:
    state = ours.state_dict()
    if {n: x.shape for n, x in theirs.state_dict().items()} != {n: x.shape for n, x in state.items()}:
        return False
    theirs.load_state_dict(state)
    return True


def _compare(model: GARE, bytes_NCHW: Tensor, device: torch.device) -> dict[str, float]:
    reference = transformers_features(model)
    if reference is None:
        return {}
    encoder = model.encoder
    pixels_NCHW = encoder.image_format.normalise(bytes_NCHW)

    def ours() -> Tensor:
        return encoder.project_images(encoder.encode_frames(bytes_NCHW))

    cosine_N = F.cosine_similarity(ours().double(), reference(pixels_NCHW).double())  # and both are warm
    best = {"ours": float("inf"), "theirs": float("inf")}
    for _ in range(_ROUNDS):
        for name, call in (("ours", ours), ("theirs", lambda: reference(pixels_NCHW))):
            best[name] = min(best[name], _seconds(call, device))
    return {
        "frames_per_second": len(bytes_NCHW) / best["ours"],
        "transformers_frames_per_second": len(bytes_NCHW) / best["theirs"],
        "ratio": best["theirs"] / best["ours"],
        "least_cosine": float(cosine_N.min()),
    }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
