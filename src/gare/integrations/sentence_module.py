"""Stage 1 of a model as a module of sentence-transformers, and the folder that both libraries read.

`modules.json` names `StageOneModule`. sentence-transformers imports classes of other packages only with
`trust_remote_code=True`; the class is then that of the installed gare, no code comes from the folder.

Shapes: N inputs, V videos, F frames, T texts, W words, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gare.atomic import replacing_folder
from gare.extras import require
from gare.library.search.stage1 import stage1_queries, stage1_vectors
from gare.model import GARE
from gare.model.named_models import ModelLike, load_named
from gare.model.plain_encoding import as_clip, names_a_file

require("sentence-transformers", "gare.integrations.sentence_module")
from sentence_transformers import SentenceTransformer  # noqa: E402  # its absence is explained above
from sentence_transformers.base.modules import InputModule  # noqa: E402

_CONTENT = ("text", "image", "video")


class StageOneModule(InputModule):  # type: ignore[misc]
    """Texts, pictures and videos in, stage-1 vectors out, [N, D + 1].

    A text's vector is (u, 1) and a video's (w, c). Their product is nearly the model's score; for a plain
    encoder it is the score. So it does not matter which side is the query, but use the dot product
    (`similarity_fn_name` "dot"), and compare texts with videos: two videos have no meaningful product.
    """

    save_in_root = True

    def __init__(self, model: GARE) -> None:
        super().__init__()
        self.model = model

    @property
    def modalities(self) -> list[str]:
        """What the module reads."""
        return list(_CONTENT)

    def get_embedding_dimension(self) -> int:
        """The width of a stage-1 vector: one more than the model's."""
        return self.model.dim + 1

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Token ids of texts, or frames of pictures and videos; a batch has one of the two."""
        contents = [_content(each) for each in inputs]
        if all(map(_is_text, contents)):
            texts = [(prompt or "") + text for text in contents]
            token_ids_TW, mask_TW = self.model.encoder.tokenize(texts)
            return {"token_ids": token_ids_TW, "mask": mask_TW}
        if any(map(_is_text, contents)):
            raise ValueError("texts and videos in one batch: encode them one after the other")
        frames_VFCHW, mask_VF = self.model.load_frames([as_clip(each) for each in contents])
        return {"frames": frames_VFCHW, "mask": mask_VF}

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Adds `sentence_embedding`."""
        if self.training:
            raise ValueError("stage-1 vectors are computed from a finished model: train it with gare train")
        if "token_ids" in features:
            text = self.model.text_features(features["token_ids"], features["mask"])
            vectors_NE = stage1_queries(text.text_TD)
        else:
            video = self.model.encode_frames(features["frames"], features["mask"])
            vectors_NE = stage1_vectors(self.model, video)
        return {**features, "sentence_embedding": vectors_NE.float()}

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the model, as `GARE.save_pretrained` does."""
        self.model.save_pretrained(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **_: Any,
    ) -> StageOneModule:
        """Read the model from a folder or the hub."""
        options = {"token": token, "cache_dir": cache_folder, "revision": revision}
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return cls(GARE.from_pretrained(model_name_or_path, local_files_only=local_files_only, **given))


def make_sentence_transformer(model: ModelLike) -> SentenceTransformer:
    """A model as sentence-transformers uses it: `encode_query`, `encode_document`, `similarity`.

    Args:
        model: what `GARE.from_pretrained` takes, or a loaded model.
    """
    module = StageOneModule(load_named(model)[1])
    return SentenceTransformer(modules=[module], similarity_fn_name="dot", device=str(module.model.device))


def save_sentence_transformer(model: ModelLike, folder: str | Path) -> None:
    """Write a folder that both libraries read.

    `SentenceTransformer(folder, trust_remote_code=True)` and `GARE.from_pretrained(folder)` load it. It takes
    the place of an older one when it is complete; other files there are kept.
    """
    with replacing_folder(Path(folder)) as part:
        make_sentence_transformer(model).save_pretrained(str(part), create_model_card=False)


def _content(given: Any) -> Any:
    """What an input is: sentence-transformers also takes {"video": …}."""
    if not isinstance(given, dict):
        return given
    if len(given) != 1 or next(iter(given)) not in _CONTENT:
        raise ValueError(
            f"an input is one of {', '.join(_CONTENT)}; got {', '.join(map(str, given)) or 'none'}"
        )
    kind, value = next(iter(given.items()))
    return Path(value) if kind != "text" and isinstance(value, str) else value


def _is_text(content: Any) -> bool:
    return isinstance(content, str) and not names_a_file(content)
