"""Initial values by the documented table, whatever the order of construction."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.small import SMALL
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import has_weight_decay, initialise

WIDE = replace(SMALL, width=96, feed_forward=160, vocabulary=301, embedding_sharing="gdes", vocabulary_blocks=2)


def initial(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialise(model, seed, 0.02)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_every_parameter_follows_the_table(norm: str) -> None:
    values = initial(Electra(replace(WIDE, norm=norm)))
    normal = []
    for name, value in values.items():
        if name.endswith("bias") or name.startswith("difference_"):
            assert not value.any(), name
        elif "norm" in name or name.endswith("gate.scale"):
            assert (value == 1).all(), name
        else:
            normal.append(name)
            tolerance = 5 / value.numel() ** 0.5  # five standard errors of a mean, more of a deviation
            assert abs(float(value.mean())) < 0.02 * tolerance, name
            assert abs(float(value.std()) / 0.02 - 1) < tolerance, name
    for expected in (
        "embedding_0",
        "embedding_1",
        "generator.positions",
        "discriminator.relative.weight",
        "discriminator.layers.1.attention.gate.update",
        "discriminator.layers.1.attention.gate.reset",
        "discriminator.layers.0.attention.qkv.weight",
        "masked_head.dense.weight",
        "replaced_head.output.weight",
    ):
        assert expected in normal
    pairs = [(a, b) for i, a in enumerate(normal) for b in normal[:i] if values[a].shape == values[b].shape]
    assert pairs and not any(torch.equal(values[a], values[b]) for a, b in pairs), "two parameters start alike"


def test_values_do_not_depend_on_the_order_of_construction() -> None:
    names = ("a", "b", "c")
    sizes = {"a": 3, "b": 5, "c": 7}
    forwards = initial(nn.ModuleDict({name: nn.Linear(4, sizes[name]) for name in names}))
    torch.manual_seed(99)
    backwards = initial(nn.ModuleDict({name: nn.Linear(4, sizes[name]) for name in reversed(names)}))
    assert list(forwards) != list(backwards)
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


def test_more_layers_change_no_others_values() -> None:
    few, many = initial(Electra(WIDE)), initial(Electra(replace(WIDE, discriminator_layers=4, generator_layers=3)))
    assert few.keys() < many.keys()
    assert all(torch.equal(few[name], many[name]) for name in few)


def test_the_seed_counts() -> None:
    one, same, other = (initial(Electra(WIDE), seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding_0"], other["embedding_0"])


def test_values_are_drawn_in_float32_for_every_type() -> None:
    exact, rounded = initial(Electra(WIDE)), initial(Electra(WIDE).bfloat16())
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_every_parameter_is_gathered_while_it_is_filled() -> None:
    model = Electra(WIDE)
    held: list[int] = []

    @contextmanager
    def whole(parameter: Tensor) -> Iterator[None]:
        held.append(id(parameter))
        yield

    initialise(model, 1, 0.02, whole)
    assert held == [id(parameter) for parameter in model.parameters()]


def test_decay_spares_vectors() -> None:
    decided = {name: has_weight_decay(value.dim()) for name, value in Electra(WIDE).named_parameters()}
    spared = {name.rsplit(".", 1)[-1] for name, decay in decided.items() if not decay}
    assert spared == {"bias", "weight", "update", "reset", "scale"}
    assert all("norm" in name for name, decay in decided.items() if not decay and name.endswith("weight"))
    assert decided["embedding_0"] and decided["generator.positions"] and decided["generator.relative.weight"]
