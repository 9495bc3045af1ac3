"""Public models that are known by name, with facts that stand in their configurations and on their cards.

Nothing here says how good a model is. What was measured with a model of this table is in docs/results.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MANY = "many"
"""Stands for the languages of a model whose texts were not chosen by language."""


@dataclass(frozen=True)
class KnownModel:
    """What is known of a model before it is on this machine."""

    name: str
    """What `--model` takes."""
    dim: int
    """Dimensions of a vector."""
    languages: tuple[str, ...]
    """Codes of ISO 639-1, or `MANY`."""
    licence: str
    """As its card or its repository says."""
    purpose: str
    """What its texts and pictures were."""
    num_weights: int | None = None
    """Counted in its architecture; None for what comes with gare, whose files tell."""

    def reads(self, language: str) -> bool:
        """Whether texts in a language were among those it was trained with."""
        return MANY in self.languages or language in self.languages


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "gare-mini",
            512,
            ("en",),
            "Apache-2.0",
            "short English sentences; comes with gare and needs no network",
        ),
        KnownModel(
            "openai/clip-vit-base-patch32",
            512,
            ("en",),
            "MIT (its repository; the card names none)",
            "English captions of pictures from the web; 224 pixels, patches of 32",
            151_277_313,
        ),
        KnownModel(
            "openai/clip-vit-large-patch14",
            768,
            ("en",),
            "MIT (its repository; the card names none)",
            "English captions of pictures from the web; 224 pixels, patches of 14",
            427_616_513,
        ),
        KnownModel(
            "google/siglip-base-patch16-224",
            768,
            ("en",),
            "Apache-2.0",
            "English captions of pictures from the web (WebLI); 224 pixels, patches of 16",
            203_155_970,
        ),
        KnownModel(
            "google/siglip2-base-patch16-224",
            768,
            (MANY,),
            "Apache-2.0",
            "captions in many languages (WebLI); 224 pixels, patches of 16",
            375_187_970,
        ),
        KnownModel(
            "google/siglip-base-patch16-256-multilingual",
            768,
            (MANY,),
            "Apache-2.0",
            "captions in many languages (WebLI); 256 pixels, patches of 16",
            370_626_050,
        ),
        KnownModel(
            "facebook/metaclip-2-worldwide-huge-quickgelu",
            1024,
            (MANY,),
            "CC-BY-NC-4.0",
            "captions in many languages; not for commercial use; large: ViT-H/14",
            1_858_783_745,
        ),
        KnownModel(
            "BAAI/AltCLIP",
            768,
            ("en", "zh"),
            "CreativeML Open RAIL-M",
            "captions in English and Chinese; the image tower of CLIP ViT-L/14",
            864_186_113,
        ),
        KnownModel(
            "OFA-Sys/chinese-clip-vit-base-patch16",
            512,
            ("zh",),
            "see its card",
            "captions in Chinese; 224 pixels, patches of 16",
            188_262_913,
        ),
    )
}
"""By name, those that need the least first."""

_LANGUAGES_OF_ENCODERS = {"mini": ("en",)}


def languages_of(name: str, encoder: str = "", source: str = "") -> tuple[str, ...]:
    """The languages that a model reads; empty where they are not known.

    Args:
        name: what loads the model.
        encoder: the name of its encoder: every model on top of it reads what it reads.
        source: what the towers of the encoder were loaded from.

    >>> languages_of("runs/mine/best", encoder="mini"), languages_of("runs/yours/best")
    (('en',), ())
    """
    for known in (name, source):
        if known in KNOWN_MODELS:
            return KNOWN_MODELS[known].languages
    return _LANGUAGES_OF_ENCODERS.get(encoder, ())


def model_that_reads(language: str) -> KnownModel | None:
    """The first model of the table whose texts were in this language."""
    return next((model for model in KNOWN_MODELS.values() if model.reads(language)), None)
