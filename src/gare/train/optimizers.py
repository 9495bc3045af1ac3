"""Parameter groups, schedule and the released code's optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gare.encoders import Encoder
from gare.model import GARE
from gare.train.run_config import OptimizerConfig

OptimizerKind = Literal["adamw", "bert_adam"]
# Released code decays everything but biases; these are the ones a clean run leaves alone.
NOT_DECAYED = ("bias", "norm", "position", "log_logit_scale", "class_embedding", "LayerNorm")


def build_optimizer(model: GARE, config: OptimizerConfig) -> Optimizer:
    """AdamW or the released Adam over groups by learning rate and decay; frozen parameters are left out."""
    if config.kind == "bert_adam":
        model.encoder.freeze_first_layer()
    groups = parameter_groups(model, config)
    options: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.kind == "bert_adam":
        return BertAdam(groups, **options)
    fused = next(model.parameters()).is_cuda
    return AdamW(groups, fused=fused, **options)


def parameter_groups(model: GARE, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Image tower, text tower and everything else, each with and without weight decay.

    With the released optimiser all of the encoder belongs to a tower, its projections included, and the
    temperature to the text tower: there both are parts of CLIP.
    """
    rates = {
        "image": config.image_learning_rate,
        "text": config.text_learning_rate,
        "new": config.learning_rate,
    }
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part = _part(name, model.encoder, released=config.kind == "bert_adam")
        if config.kind == "bert_adam":
            decayed = not name.endswith("bias")
        else:
            decayed = parameter.ndim > 1 and not any(word in name for word in NOT_DECAYED)
        group = groups.setdefault(
            (part, decayed),
            {
                "params": [],
                "names": [],
                "lr": rates[part],
                "base_lr": rates[part],
                "weight_decay": config.weight_decay if decayed else 0.0,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _part(name: str, encoder: Encoder, *, released: bool) -> str:
    if not name.startswith("encoder."):
        return "text" if released and name == "log_logit_scale" else "new"
    inner = name.removeprefix("encoder.")
    part = encoder.part_of(inner)
    if part != "projection":
        return part
    if not released:
        return "new"
    return "image" if inner.startswith("image") else "text"


def learning_rate_factor(step: int, num_steps: int, warmup: float, kind: OptimizerKind = "adamw") -> float:
    """Linear from 0 over the warm-up, then half a cosine down to 0.

    The released schedule differs: it starts at 0 itself, so that the first step moves nothing, and its cosine
    begins with the run, not with the end of the warm-up.

    >>> [round(learning_rate_factor(step, 10, 0.2), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.038]
    >>> [round(learning_rate_factor(step, 10, 0.2, "bert_adam"), 3) for step in (0, 1, 2, 6, 9)]
    [0.0, 0.5, 0.905, 0.345, 0.024]
    """
    if kind == "bert_adam":
        progress = step / num_steps
        return progress / warmup if progress < warmup else 0.5 * (1 + math.cos(math.pi * progress))
    num_warmup = round(warmup * num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


class BertAdam(Optimizer):
    """Adam without bias correction and with decoupled decay, each parameter's gradient clipped to norm one.

    As in the released code; it also keeps its moments in the precision of the parameter.
    """

    def __init__(self, params: Iterable[Any], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                nn.utils.clip_grad_norm_([parameter], 1.0)
                gradient: Tensor = parameter.grad
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                parameter.add_(update + group["weight_decay"] * parameter, alpha=-group["lr"])
