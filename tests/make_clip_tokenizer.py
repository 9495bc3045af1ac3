"""Writes CLIP's tokenizer.json from the list of byte-pair merges that OpenAI published.

    python tests/make_clip_tokenizer.py bpe_simple_vocab_16e6.txt.gz

The first line of that file is a heading and CLIP uses the 48,894 merges after it. The same merges always
give the same bytes; a test makes the file again from the merges in it and compares.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

import gare.encoders.clip_tokenizer as clip_tokenizer

NUM_MERGES = 48_894
START, END = "<|startoftext|>", "<|endoftext|>"
# Contractions, runs of letters, single digits, runs of anything else but spaces.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def make_tokenizer(merges: list[tuple[str, str]]) -> bytes:
    """The packed tokenizer.json for a list of merges, earliest learned first."""
    # CLIP numbers the bytes in the order of GPT-2's table: printable ones first, then the rest.
    codes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in codes] + [chr(256 + n) for n in range(256 - len(codes))]
    word_ends = [letter + "</w>" for letter in letters]
    tokens = [*letters, *word_ends, *("".join(pair) for pair in merges), START, END]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>", unk_token=END))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, ids[START]), (END, ids[END])]
    )
    return gzip.compress(_compact(tokenizer.to_str()).encode(), compresslevel=9, mtime=0)


def read_merges(packed: bytes) -> list[tuple[str, str]]:
    """The merges of a packed tokenizer.json."""
    return [(left, right) for left, right in json.loads(gzip.decompress(packed))["model"]["merges"]]


def _compact(text: str) -> str:
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    lines = gzip.decompress(Path(sys.argv[1]).read_bytes()).decode().splitlines()
    pairs = [(left, right) for left, right in map(str.split, lines[1 : NUM_MERGES + 1])]
    target = Path(clip_tokenizer.__file__).with_name(clip_tokenizer.TOKENIZER_FILE)
    target.write_bytes(make_tokenizer(pairs))
