"""CLIP's byte-pair tokeniser from the merges shipped beside this file: no network needed."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY_SIZE = 49_408
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def tokenize(texts: Sequence[str], max_words: int) -> tuple[Tensor, Tensor]:
    """Ids [T, W] padded with zeros, and their mask; start and end token included in `max_words`.

    >>> tokenize(["a dog"], 8)[0]
    tensor([[49406,   320,  1929, 49407]])
    """
    rows = [encoding.ids[: max_words - 2] for encoding in _tokenizer().encode_batch(list(texts))]
    width = max(map(len, rows)) + 2
    token_ids_TW = torch.zeros(len(rows), width, dtype=torch.long)
    mask_TW = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, ids in enumerate(rows):
        token_ids_TW[i, : len(ids) + 2] = torch.tensor([VOCABULARY_SIZE - 2, *ids, VOCABULARY_SIZE - 1])
        mask_TW[i, : len(ids) + 2] = True
    return token_ids_TW, mask_TW


@cache
def _tokenizer() -> Tokenizer:
    packed = files("gare.model.backbones").joinpath("clip_merges.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    merges = [(left, right) for left, right in map(str.split, lines)]
    # CLIP numbers the bytes in the order of GPT-2's table: printable ones first, then the rest.
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    remapped = [256 + n for n in range(256 - len(printable))]
    letters = [chr(code) for code in printable + remapped]
    tokens = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *("".join(pair) for pair in merges),
        START,
        END,
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            end_of_word_suffix="</w>",
            unk_token=END,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
