"""Several processes that together do exactly what one would.

Each process encodes its share of the batch, everyone gathers all features, and everyone computes the whole
loss with the same dropout. A process then has the full gradient of the interaction, and of the towers the
part that came through its own share: the sum of those parts is the gradient of one process with the whole
batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gare.errors import LostPeerError, TrainingError
from gare.types import TextFeatures, VideoFeatures

TOWER_PREFIXES = ("encoder.", "temporal.")


@dataclass(frozen=True)
class Processes:
    """This process among all; `rank` 0 writes files and shows progress."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0


def join(device: torch.device | None = None) -> Processes:
    """Join the processes that torchrun or Ray started; without them, this process is the only one."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        with _explain_lost_peer():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(rank, world_size, device)


def leave() -> None:
    """Leave the group of processes, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def refuse_different_steps(step: int, processes: Processes) -> None:
    """Wait until every process has read its checkpoint, and refuse to go on from different ones."""
    steps = _gather(torch.tensor([step], device=processes.device), processes).tolist()
    if len(set(steps)) > 1:
        raise TrainingError(
            f"the processes would go on from different steps ({', '.join(map(str, steps))}). Give every "
            "machine the same --out, a folder that all of them share"
        )


def gather_text(text: TextFeatures, processes: Processes) -> TextFeatures:
    """The texts of all processes in order; gradients reach this process's own."""
    text = text.pad(_largest(text.words_TWD.shape[1], processes))
    return TextFeatures(
        _gather(text.text_TD, processes), _gather(text.words_TWD, processes), _gather(text.mask_TW, processes)
    )


def gather_video(video: VideoFeatures, processes: Processes) -> VideoFeatures:
    """The videos of all processes in order; gradients reach this process's own."""
    return VideoFeatures(_gather(video.frames_VFD, processes), _gather(video.mask_VF, processes))


def gather_index(index: Tensor, processes: Processes) -> Tensor:
    """The video numbers of all processes in order."""
    return _gather(index, processes)


def reduce_gradients(model: nn.Module, processes: Processes, *, average_towers: bool) -> None:
    """Sum what came through each share; average what everyone has in full.

    `average_towers` is the released code's reduction: the more processes, the smaller the towers' gradients.
    """
    if processes.world_size == 1:
        return
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        with _explain_lost_peer():
            dist.all_reduce(parameter.grad)
        if average_towers or not name.startswith(TOWER_PREFIXES):
            parameter.grad.div_(processes.world_size)


def _gather(tensor: Tensor, processes: Processes) -> Tensor:
    if processes.world_size == 1:
        return tensor
    sendable = tensor.detach().contiguous()
    sendable = sendable.to(torch.uint8) if tensor.dtype == torch.bool else sendable
    parts = [torch.empty_like(sendable) for _ in range(processes.world_size)]
    with _explain_lost_peer():
        dist.all_gather(parts, sendable)
    parts = [part.bool() for part in parts] if tensor.dtype == torch.bool else parts
    parts[processes.rank] = tensor
    return torch.cat(parts)


def _largest(size: int, processes: Processes) -> int:
    if processes.world_size == 1:
        return size
    sizes = torch.tensor(size, device=processes.device)
    with _explain_lost_peer():
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    return int(sizes.item())


@contextmanager
def _explain_lost_peer() -> Iterator[None]:
    """Turn the end of a connection into a message; every backend raises some kind of `RuntimeError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise LostPeerError(
            f"another process of this run is gone, or cannot be reached ({reason}). The last checkpoint is "
            "intact: start all processes again, with --resume if there is one"
        ) from error
