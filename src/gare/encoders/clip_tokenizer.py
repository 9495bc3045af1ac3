"""CLIP's byte-pair tokeniser from the tokenizer.json shipped beside this file: no network needed.

A small file of its own: it is read without transformers, which takes a second to import.

`tests/make_clip_tokenizer.py` made that file from OpenAI's list of merges (NOTICE has its licence).
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

TOKENIZER_FILE = "clip_tokenizer.json.gz"
VOCABULARY_SIZE = 49_408


def tokenize(texts: Sequence[str], max_words: int) -> tuple[Tensor, Tensor]:
    """Ids [T, W] padded with zeros, and their mask; start and end token included in `max_words`.

    >>> tokenize(["a dog"], 8)[0]
    tensor([[49406,   320,  1929, 49407]])
    """
    encodings = _tokenizer(max_words).encode_batch(list(texts))
    token_ids_TW = torch.tensor([encoding.ids for encoding in encodings])
    mask_TW = torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.bool)
    return token_ids_TW, mask_TW


@cache
def _tokenizer(max_words: int) -> Tokenizer:
    packed = Path(__file__).with_name(TOKENIZER_FILE).read_bytes()
    tokenizer = Tokenizer.from_buffer(gzip.decompress(packed))
    tokenizer.enable_truncation(max_words)  # the end token stays
    tokenizer.enable_padding(pad_id=0)
    return tokenizer
