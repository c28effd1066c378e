import random

import numpy as np
import torch

from tests.training.toys import Net, Toy
from training.evaluation import validate

CPU = torch.device("cpu")


def random_state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


class Drawing(Net):
    def loss(self, batch):
        torch.rand(3), np.random.rand(), random.random()
        return super().loss(batch)


def test_evaluation_leaves_random_state_and_modes_as_they_were():
    model = Drawing()
    model.train()
    model.first.eval()  # a part that the user keeps in eval mode
    before = random_state()
    result = validate(model, Toy().val, 4, None, CPU)
    assert result.samples == 16
    assert random_state() == before
    assert model.training
    assert not model.first.training
    assert model.drop.training


def test_the_loss_is_the_mean_over_samples_whatever_the_batch():
    model = Net()
    losses = [validate(model, Toy().val, size, 15, CPU).loss for size in (1, 4, 15)]
    assert np.allclose(losses, losses[0], atol=1e-6)


def test_o1_evaluation_ends_early_when_a_stop_is_asked_for():
    model, asked = Net(), []

    def stop():
        asked.append(1)
        return len(asked) == 3

    assert validate(model, Toy().val, 4, None, CPU, stop) is None
    assert model._passes[False] == 2
    assert model.training
