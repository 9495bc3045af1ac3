"""Compiles kernels for an H100 or H200, without one, and prints what came out: those of scores, of a GPU's
table, and of encoding with ViT-B/32.

A program of its own: where tests run, Triton interprets its kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gare.encoders import active_product_cuda, add_norm_cuda, short_attention_cuda
from gare.interaction import ball_bounds_cuda, gap_aware_cuda, key_bounds_cuda, pair_scores_cuda
from gare.interaction.cosine_bounds_cuda import TEXTS_AT_ONCE
from gare.interaction.resident_cards import EXTRA_ROWS, FORM_ROUNDING, NUM_NUMBERS, NUM_ROWS, ROUND

HOPPER = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
FRAMES, DIM = 12, 512


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> dict:
    """Arguments but for floats are multiples of 16, as torch gives them."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types.get(name, "fp32").startswith(("*", "i32"))
        },
    )
    compiled = triton.compile(source, target=HOPPER, options=options)
    ptx = compiled.asm["ptx"]
    told = subprocess.run(
        [PTXAS, "-v", "-arch=sm_90a", "-", "-o", "/dev/null"], input=ptx, capture_output=True, text=True
    ).stderr
    return {
        "lines": ptx.count("\n"),
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", told)[1]),
        "shared": compiled.metadata.shared,
        "copies": ptx.count("cp.async.cg"),
        "stores": sorted(set(re.findall(r"st\.global[.a-z0-9]*", ptx))),
    }


def product(shape: Any, *, wide_keys: bool) -> dict:
    """The product kernel in one of its shapes."""
    pointers = dict.fromkeys(["text_ptr", "high_ptr", "low_ptr"], "*i8")
    types = {**pointers, "rows_ptr": "*i64", "product_ptr": "*fp32", "num_texts": "i32", "num_videos": "i32"}
    constants = {
        "DIM": DIM,
        "ATOMS": FRAMES,
        "WIDTH": FRAMES + EXTRA_ROWS,
        "WIDE_KEYS": wide_keys,
        "TEXTS": TEXTS_AT_ONCE,
        **shape.kwargs,
    }
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return compile_kernel(key_bounds_cuda._product_kernel.fn, types, constants, **options)


def bounds(shape: Any, *, corrects_text: bool, pool_mean: bool) -> dict:
    """The kernel that follows it, in one of its shapes."""
    names = ["product", "text_numbers", "numbers", "shared", "lower", "upper"]
    types = {f"{name}_ptr": "*fp32" for name in names}
    types |= {"num_texts": "i32", "num_videos": "i32", "capacity": "i32", "inverse_temperature": "fp32"}
    constants = {
        "DIM": DIM,
        "FRAMES": FRAMES,
        "HEADS": 1,
        "SIGN": 1.0,
        "CORRECTS_TEXT": corrects_text,
        "POOL_MEAN": pool_mean,
        "ROWS": NUM_ROWS,
        "NUMBERS": NUM_NUMBERS,
        "ROUND": ROUND,
        "FORM": FORM_ROUNDING,
        "TEXTS": TEXTS_AT_ONCE,
        **shape.kwargs,
    }
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return compile_kernel(key_bounds_cuda._bounds_kernel.fn, types, constants, **options)


def first(shape: Any) -> dict:
    """The kernel of the first rung in one of its shapes."""
    types = dict.fromkeys(["text_ptr", "high_ptr"], "*i8")
    types |= dict.fromkeys(["text_numbers_ptr", "numbers_ptr", "upper_ptr", "best_ptr"], "*fp32")
    types |= {"here_ptr": "*i1", "place_ptr": "*i32", "inverse_temperature": "fp32"}
    types |= dict.fromkeys(["num_texts", "num_videos", "num_groups", "upper_size", "row_size"], "i32")
    constants = {
        "DIM": DIM,
        "ATOMS": FRAMES,
        "CORRECTS_TEXT": True,
        "POOL_MEAN": False,
        "ROWS": NUM_ROWS,
        "ROUND": ROUND,
        "TEXTS": TEXTS_AT_ONCE,
        "VIDEOS": ball_bounds_cuda.GROUP,
        **shape.kwargs,
    }
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return compile_kernel(ball_bounds_cuda._first_kernel.fn, types, constants, **options)


def pair_scores() -> list[dict]:
    """The kernels that read the frames of a pair, which are kept in float16."""
    constants = {"DIM": DIM, "FRAMES": FRAMES, "ROWS": 16, "COLUMNS": DIM, "MASK_FRAMES": True}
    types = {"frames_ptr": "*fp16", "mask_ptr": "*i1", "text_of_ptr": "*i64"}
    types |= dict.fromkeys(["text_ptr", "shared_ptr", "query_ptr", "pooled_ptr", "mixed_ptr"], "*fp64")
    own = [
        (pair_scores_cuda._query_kernel, {"SIGN": 1, "POOL_MEAN": False}),
        (pair_scores_cuda._attention_kernel, {"HEADS": 1}),
    ]
    return [
        compile_kernel(
            kernel,
            {name: kind for name, kind in types.items() if name in kernel.arg_names},
            constants | more,
            num_warps=8,
            num_stages=1,
        )
        for kernel, more in own
    ]


def scores(shape: tuple[int, ...], *, is_few: bool) -> dict:
    """The kernel of all scores in one of its shapes, cards in bfloat16."""
    types = dict.fromkeys(["text_ptr", "key_ptr", "atom_ptr", "frame_ptr"], "*bf16")
    names = ["text_numbers_ptr", "rows_ptr", "constants_ptr", "scores_ptr"]
    types |= dict.fromkeys(names, "*fp32") | {"forms_ptr": "*fp16"}
    types |= dict.fromkeys(["num_texts", "num_videos", "num_frames", "size"], "i32")
    types |= dict.fromkeys(["eps", "inverse_temperature"], "fp32")
    (config,) = gap_aware_cuda.configs([shape])
    constants = {
        "DIM": DIM,
        "FRAMES": 16,
        "HEADS": 1,
        "FEW": is_few,
        "PRECISION": "tf32",
        "QUERY_IS_TEXT": False,
        "GAP_SIGN": 1.0,
        "NORMALISE": False,
        "CORRECT_TEXT": True,
        "POOL_MEAN": False,
        "MASK_FRAMES": True,
        "SQUARE_FLOOR": 1e-16,
        **config.kwargs,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(gap_aware_cuda._score_kernel.fn, types, constants, **options)


def encoding() -> dict[str, dict]:
    """The kernels of encoding: states in float16, norms and what they add in float32."""
    numbers = {
        "fp16": ["states_ptr", "sums_ptr"],
        "fp32": ["weight_ptr", "bias_ptr", "moved_ptr", "statistics_ptr"],
    }
    numbers["fp32"] += ["weight1_ptr", "bias1_ptr", "weight2_ptr", "bias2_ptr"]
    numbers["bf16"] = ["one_ptr", "other_ptr", "normed_ptr", "embedded_ptr"]
    numbers["bf16"] += ["query_ptr", "key_ptr", "value_ptr", "out_ptr", "mask_ptr"]
    types = {name: f"*{kind}" for kind, names in numbers.items() for name in names}
    types |= dict.fromkeys(["eps", "eps1", "eps2", "scale"], "fp32")
    strides = [f"{tensor}_{axis}" for tensor in ("query", "key", "value", "out") for axis in "nhp"]
    types |= dict.fromkeys(strides, "i32")

    def made(kernel: Any, constants: dict[str, Any], warps: int = 4) -> dict:
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        return compile_kernel(kernel, own, constants, num_warps=warps)

    row = {"WIDTH": 768, "BLOCK_E": 1024}
    norm = {"BRANCHES": 2, "KEEPS_SUM": True, "KEEPS_STATISTICS": False}
    heads = {"HEADS": 12, "PLACES": 50, "WIDTH": 64, "BLOCK_P": 64, "BLOCK_E": 64}
    shape = active_product_cuda.SHAPE
    tile = f"tensordesc<bf16[{shape.rows}, {shape.numbers}]>"
    return {
        "norm": made(add_norm_cuda._kernel, row | norm),
        "embedding": made(add_norm_cuda._embed_kernel, row | {"PLACES": 50}),
        "attention": made(
            short_attention_cuda._forward_kernel, heads | {"HAS_MASK": False, "IS_CAUSAL": False}
        ),
        "attention of one query": made(short_attention_cuda._one_query_kernel, heads),
        "product with activation": compile_kernel(
            active_product_cuda._active_product_kernel,
            {
                "x_desc": tile,
                "weight_desc": f"tensordesc<bf16[{shape.columns}, {shape.numbers}]>",
                "bias_ptr": "*bf16",
                "out_desc": f"tensordesc<bf16[{shape.rows}, {shape.columns // 2}]>",
                "turns": "i32",
            },
            {
                "WIDE": 3072,
                "NARROW": 768,
                "ROWS": shape.rows,
                "COLUMNS": shape.columns,
                "NUMBERS": shape.numbers,
                "IS_FLAT": shape.is_flat,
                "TURNS": 0,
            },
            num_warps=shape.warps,
            num_stages=shape.stages,
        ),
    }


def num_shapes(width: int) -> int:
    """How many shapes the autotuner times for videos of so many columns, asked as it asks."""
    key_bounds_cuda._product_kernel.nargs = {}
    return len(key_bounds_cuda._product_kernel.prune_configs({"WIDTH": width, "grid": None, "warmup": False}))


if __name__ == "__main__":
    found = {
        "first": [first(shape) for shape in ball_bounds_cuda.FIRST_CONFIGS],
        "product": [product(shape, wide_keys=True) for shape in key_bounds_cuda.PRODUCT_CONFIGS],
        "product of bytes": [product(key_bounds_cuda.PRODUCT_CONFIGS[0], wide_keys=False)],
        "bounds": [
            bounds(shape, corrects_text=True, pool_mean=False) for shape in key_bounds_cuda.BOUNDS_CONFIGS
        ],
        "pair scores": pair_scores(),
        "scores": [
            *[scores(shape, is_few=False) for shape in gap_aware_cuda.MANY[:2]],
            *[scores(shape, is_few=True) for shape in gap_aware_cuda.FEW[:2]],
        ],
        "encoding": encoding(),
        "shapes": {width: num_shapes(width) for width in (16, 64, 128)},
    }
    print(json.dumps(found))
