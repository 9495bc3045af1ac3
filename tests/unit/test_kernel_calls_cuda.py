"""Kernels are launched as they were compiled, as long as Triton would compile them alike."""

from __future__ import annotations

import sys
from copy import copy, deepcopy
from pickle import dumps, loads
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from features import random_interaction, random_text, random_video
from gare.interaction import GapAwareConfig, gap_aware_cuda, kernel_calls_cuda
from gare.interaction.fused_cards import fuse
from gare.interaction.kernel_calls_cuda import Launch, Replayed, is_watched, launch


class Kernel:
    """Stands for a kernel of Triton: counts how often it is compiled, remembers its launches."""

    def __init__(self):
        self.compiled, self.launches = 0, []

    def __getitem__(self, grid):
        def first(*arguments, **named):
            self.compiled += 1
            self.launches.append((grid, *arguments[1:], *named.values()))
            return Compiled(self.launches)

        return first


class Compiled(SimpleNamespace):
    packed_metadata = ()

    def __init__(self, launches):
        super().__init__(launches=launches)

    def run(self, *arguments):
        """As Triton's: the grid, where it runs, what it is, hooks; then the kernel's own, addresses first."""
        self.launches.append((arguments[:3], *arguments[10:]))

    function = None


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls_cuda, "_compiled", {})
    active = SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(kernel_calls_cuda, "driver", SimpleNamespace(active=active))


def test_it_is_compiled_again_where_triton_would():
    kernel, tensor = Kernel(), torch.zeros(32)

    def call(x=tensor, number=32, size=64, scale=0.5):
        launch(kernel, lambda meta: meta["SIZE"], (x,), (number, scale), {"SIZE": size})
        return kernel.compiled

    assert call() == 1
    assert call(number=48) == call(scale=0.25) == 1  # another multiple of 16, another float
    assert kernel.launches[-1] == ((64, 1, 1), 32, 0.25, 64)
    assert call(number=33) == 2
    assert call(number=35) == 2
    assert call(number=1) == 3
    assert call(number=2**31) == 4
    assert call(size=128) == 5
    assert call(tensor.double()) == 6
    assert call(tensor[1:]) == 7  # whose address is no multiple of 16
    assert call(tensor[1:]) == 8  # and is not kept
    assert call() == 8


class Triton36:
    """Stands for Triton's launcher: the method, and the function in C within."""

    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0
    __module__ = "triton36"

    def __init__(self):
        self.direct, self.around = [], []

    def launch(self, *arguments):
        self.direct.append(arguments)

    def __call__(self, *arguments):
        self.around.append(arguments)


def test_the_function_in_c_is_called_where_it_takes_what_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton36", SimpleNamespace(_BASE_ARGS_FORMAT="iiiKKppOOOOOO"))
    run = Triton36()
    compiled = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    Launch(compiled, {"SIZE": 64})(12, 1, (1024, 2048), (3, 0.5))
    hooks, own = (None, None, None), (1024, 2048, 3, 0.5, 64)
    assert run.direct == [(12, 1, 1, 71, 5, False, True, None, None, (4, 1, 0), *hooks, *own)]
    assert not run.around

    run.global_scratch_size = 16  # which the method around it allocates
    Launch(compiled, {"SIZE": 64})(12, 1, (1024, 2048), (3, 0.5))
    monkeypatch.setitem(sys.modules, "triton36", SimpleNamespace())  # another version
    run.global_scratch_size = 0
    Launch(compiled, {"SIZE": 64})(12, 1, (1024, 2048), (3, 0.5))
    assert run.around == [(12, 1, 1, 71, 5, (4, 1, 0), *hooks, *own)] * 2
    assert len(run.direct) == 1


def test_the_triton_installed_here_is_called_directly():
    """Where this fails, another Triton is pinned: look at what its launcher takes, and change _LAYOUT."""
    assert nvidia._BASE_ARGS_FORMAT == kernel_calls_cuda._LAYOUT
    assert {"launch_cooperative_grid", "launch_pdl"} < set(nvidia.CudaLauncher.__init__.__code__.co_names)


def test_a_profiler_is_told_of_every_launch(monkeypatch):
    kernel, tensor = Kernel(), torch.zeros(32)
    assert not is_watched()
    for calls, compiled in (([], 1), ([], 1), ([print], 2), ([print], 3)):  # which Triton has at hand
        knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=calls)))
        monkeypatch.setattr(kernel_calls_cuda, "knobs", knobs)
        launch(kernel, lambda _: 1, (tensor,), (), {})
        assert kernel.compiled == compiled
    monkeypatch.setattr(kernel_calls_cuda, "knobs", SimpleNamespace(runtime=SimpleNamespace()))
    assert not is_watched()


@torch.no_grad()
def test_cards_keep_how_they_are_scored(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    video = random_video(generator, 6, 3, 16, torch.float32)
    interaction = random_interaction(generator, GapAwareConfig(), 16, torch.float32)
    cards = interaction.cards(video)
    cards = type(cards)(cards.config, cards.pool, cards.increment, fuse(cards))
    text_TD = random_text(generator, 8, 2, 16, torch.float32).text_TD
    looked_up, again = [], []

    def look_up(kernel, num_programs, tensors, numbers, constants, **more):
        looked_up.append([tensor.data_ptr() for tensor in tensors])
        constants = constants | {"TEXTS": 64, "COLUMNS": 32}
        made = SimpleNamespace(constants=constants, expected=(num_programs(constants), numbers))

        class Again:
            constants = made.constants

            def __call__(self, num_programs, device, addresses, numbers):
                again.append(addresses)
                assert (num_programs, numbers) == made.expected

        return Again()

    monkeypatch.setattr(gap_aware_cuda, "launch", look_up)

    def score(text_TD, cards):
        looked_up.clear()
        again.clear()
        assert gap_aware_cuda.score(text_TD, cards).shape == (len(text_TD), len(cards))
        return len(looked_up), len(again)

    assert score(text_TD, cards) == (2, 0)
    first = [list(addresses) for addresses in looked_up]
    assert score(text_TD, cards) == (0, 2)
    # Text, its numbers and scores are new ones, what lies between is where it was.
    assert again[0][:2] == (text_TD.data_ptr(), first[0][1])
    assert again[1][0] == text_TD.data_ptr()
    assert again[1][1] == again[0][2]
    assert list(again[1][2:-1]) == first[1][2:-1]
    assert score(text_TD[:4], cards) == (2, 0)
    assert score(text_TD[:4], cards) == (0, 2)
    assert score(text_TD.flatten()[1:65].view(4, 16), cards) == (2, 0)  # whose address is no multiple of 16
    for other in (cards[:4], copy(cards), deepcopy(cards), loads(dumps(cards)), cards.to("cpu")):
        assert score(text_TD, other) == (2, 0)
        assert score(text_TD, other) == (0, 2)
    for gaps in (cards[::2], interaction.cards(video)):  # what the kernel reads is made for each call
        assert [score(text_TD, gaps) for _ in range(2)] == [(2, 0), (2, 0)]
    for num_texts in range(1, 3 * gap_aware_cuda._MOST_CALLS):
        score(text_TD[:1].expand(num_texts, -1), cards)
    assert len(cards.calls) <= gap_aware_cuda._MOST_CALLS


def test_on_a_cpu_a_function_is_called_as_it_is():
    calls = []
    replayed = Replayed()

    def function(*arguments):
        calls.append(arguments)
        return len(calls)

    assert [replayed(function, torch.ones(2), number) for number in (3, 3, 4)] == [1, 2, 3]
    assert [settings for _, *settings in calls] == [[3], [3], [4]]


def test_what_a_gpu_cannot_record_is_called_as_it_is(monkeypatch, caplog):
    class Device:
        type = "cuda"

    class Tensor:
        shape, dtype, device = (2,), "float32", Device()

        def clone(self):
            raise RuntimeError("operation not permitted when stream is capturing")

    streams = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "its own")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    replayed, tensor = Replayed(), Tensor()
    assert [replayed(lambda _, number: number, tensor, 3) for _ in range(4)] == [3, 3, 3, 3]
    assert streams == ["its own"]
    assert [record.getMessage() for record in caplog.records] == [
        "the first pass of exact searches is not replayed, which costs time: "
        "operation not permitted when stream is capturing"
    ]
