import pytest
import torch

from training.precision import MAX_SKIPPED, Precision

CPU = torch.device("cpu")


def test_g3_the_gradient_scaler_comes_back_as_it_was():
    said = []
    saved = Precision("fp16", CPU, said.append)
    saved.load_state_dict(
        {"name": "fp16", "scaler": {**saved.scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 7}}
    )
    resumed = Precision("fp16", CPU, said.append)
    resumed.load_state_dict(saved.state_dict())
    state = resumed.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], said) == (1024.0, 7, [])


def test_g3_resuming_without_mixed_precision_is_told():
    said = []
    Precision("fp32", CPU, said.append).load_state_dict(Precision("fp16", CPU, said.append).state_dict())
    assert said == ["precision was fp16 and is fp32 now: no gradient scaler is used"]


def test_an_update_with_infinite_gradients_is_not_done_and_not_counted():
    precision = Precision("fp16", CPU, print)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    precision.backward(weight.sum())
    assert precision.update(optimizer)
    assert weight.item() == 0.0
    weight.grad.fill_(float("inf"))
    assert not precision.update(optimizer)
    assert weight.item() == 0.0


def test_gradients_that_never_become_finite_end_training_with_advice():
    precision = Precision("fp16", CPU, print)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(FloatingPointError, match=r"lower optim.lr"):
        for _ in range(MAX_SKIPPED + 1):
            precision.backward(weight.sum() * float("inf"))
            precision.update(optimizer)


def test_an_unknown_precision_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        Precision("fp8", CPU, print)
