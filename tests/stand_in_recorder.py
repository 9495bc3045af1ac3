"""Records steps on a CPU as a GPU would: what a recording holds is really copied, seeded and attached."""

from __future__ import annotations

import torch

from gare import GARE


class StandIn:
    """Records like a GPU: what a step leaves has places of its own and is nonsense until it is replayed."""

    def __init__(self, model: GARE) -> None:
        self.parameters = list(model.parameters())
        self.warmed, self.recorded, self.replayed, self.fails = 0, 0, 0, ""

    def warm_up(self, step):
        self.warmed += 1
        return step()

    def record(self, step):
        self.recorded += 1
        with torch.random.fork_rng([]):
            loss = step()
        if self.fails:  # in the middle of it
            raise RuntimeError(self.fails)
        places = [*tensors_of(loss), *gradients_of(self.parameters)]
        for place in places:
            place.fill_(float("nan"))
        return StandInRecording(self, step, places, loss)

    def start_anew(self):
        pass


class StandInRecording:
    def __init__(self, recorder, step, places, loss):
        self.recorder, self.step, self.places, self.loss = recorder, step, places, loss

    def replay(self, seed):
        self.recorder.replayed += 1
        parameters = self.recorder.parameters
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            loss = self.step()
        for place, new in zip(self.places, [*tensors_of(loss), *gradients_of(parameters)], strict=True):
            place.copy_(new)
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def tensors_of(loss):
    return [loss.total, *loss.terms.values()]


def gradients_of(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
