"""model.compile: the same numbers as without it, and one graph for all layers."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from tests.small import MODERN, SMALL, language_model, model, usual_batch
from xlme_ds.config import ModelConfig, ObjectiveConfig
from xlme_ds.models.attention import TorchBias, fused_attend, item_mask
from xlme_ds.models.execution import compiled, resolve_compile
from xlme_ds.objectives import objective_of
from xlme_ds.objectives.electra import ElectraObjective

BATCH = usual_batch()
OBJECTIVE = ElectraObjective(ObjectiveConfig())
MT = objective_of(ObjectiveConfig("mt", mask_fraction=1.0))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No graph of another test counts."""
    torch.compiler.reset()
    compiled.cache_clear()
    counters.clear()
    yield
    torch.compiler.reset()
    compiled.cache_clear()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile as far as autograd's graphs, which then run as they are: seconds instead of minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def gradients(one: nn.Module) -> dict[str, Tensor]:
    """The loss and its gradients, for XLM-E's loss or for that of the masked tokens alone."""
    output = one(BATCH)
    if "replaced_head.output.weight" in dict(one.named_parameters()):
        loss = (OBJECTIVE.sums(output, BATCH) / OBJECTIVE.counts(BATCH) * OBJECTIVE.weights).sum()
    else:
        loss = output.nll_M.mean()
    loss.backward()
    found = {name: parameter.grad for name, parameter in one.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | {name: gradient.to_dense() for name, gradient in found.items()}


def whole(found: dict[str, Tensor]) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([gradient.flatten().float() for name, gradient in found.items() if name != "loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        dict(dropout=0.1, activation_checkpointing=True),
        dict(dropout=0.1, attention_dropout=0.2, norm="pre", relative_bias="plain"),
        dict(relative_bias="none", embedding_sharing="gdes"),
    ],
)
def test_its_graph_gives_the_same_bits(traced: None, dtype: torch.dtype, settings: dict[str, object]) -> None:
    plain, ours = (gradients(model(compile=how, **settings).to(dtype)) for how in ("none", "layers"))
    assert counters["stats"]["unique_graphs"] == (2 if settings.get("dropout") else 1)  # the generator's drop nothing
    assert plain.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_its_code_gives_the_same_numbers() -> None:
    """In float32; and in bf16 some that are as far from float32's as without it."""
    settings = dict(dropout=0.1, activation_checkpointing=True)
    plain, ours = (gradients(language_model(compile=how, **settings)) for how in ("none", "layers"))
    # Sums of up to 160 terms in another order, through two layers.
    torch.testing.assert_close(ours["loss"], plain["loss"], rtol=1e-6, atol=0)
    error = whole(ours) - whole(plain)
    assert error.abs().max() > 0  # or nothing was compiled
    assert error.norm() < 1e-6 * whole(plain).norm()
    half, compiled_half = (gradients(language_model(compile=how, **settings).bfloat16()) for how in ("none", "layers"))
    errors = [(whole(found) - whole(plain)).norm() / whole(plain).norm() for found in (half, compiled_half)]
    assert 1e-3 < errors[1] < 1.2 * errors[0]


def test_one_graph_for_all_layers_and_none_for_evaluation(traced: None) -> None:
    ours, plain = model(compile="layers", discriminator_layers=4), model(discriminator_layers=4)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for _ in range(2):
        gradients(ours)
    with torch.no_grad():
        shorter = usual_batch(36)
        assert all(torch.equal(a, b) for a, b in zip(ours.eval()(shorter), plain.eval()(shorter), strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_rows_of_two_lengths_in_one_process(traced: None) -> None:
    """As at the border of two phases. ModernBERT's body has three kinds of layers, and only the discriminator drops."""
    settings = {**MODERN, "global_every": 3, "max_positions": 80}
    ours = model(compile="layers", dropout=0.1, discriminator_layers=4, generator_layers=4, **settings).train()
    for tokens in (40, 48):
        batch = usual_batch(tokens)
        output = ours(batch)
        (OBJECTIVE.sums(output, batch) / OBJECTIVE.counts(batch) * OBJECTIVE.weights).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2 * (3 + 3) and not counters["graph_break"]


def test_a_copy_reads_its_own_weights(traced: None) -> None:
    ours = model(compile="layers")
    gradients(ours)
    other, plain = copy.deepcopy(ours), model()
    with torch.no_grad():
        for parameter in (*other.parameters(), *plain.parameters()):
            parameter.mul_(0.5)
    assert torch.equal(gradients(other)["loss"], gradients(plain)["loss"])


def test_auto_compiles_layers_on_a_gpu_alone() -> None:
    auto = ModelConfig()
    assert [resolve_compile(model(), auto, on_gpu=gpu) for gpu in (True, False)] == ["layers", "none"]
    assert (
        resolve_compile(MT.build(replace(SMALL, language_embeddings=("de", "en"))), auto, on_gpu=True) == "none"
    )  # whose sides have any length
    assert resolve_compile(model(), replace(auto, compile="none"), on_gpu=True) == "none"


def test_attention_for_a_gpu_is_one_graph() -> None:
    query, key, value = (torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    distance = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(3))
    bias = TorchBias(item_mask(torch.tensor([[1] * 6 + [2] * 4 + [0] * 2, [1] * 12])), distance)
    gate = torch.rand(2, 3, 12, 1, generator=torch.Generator().manual_seed(4))
    graph = torch.compile(fused_attend, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(graph(query, key, value, gate, bias), fused_attend(query, key, value, gate, bias))


def test_inductor_chooses_the_order_of_sums_without_timing() -> None:
    """Timed, it might choose another at the next start, and a resumed run would leave its curve."""
    modes: list[bool] = []
    with inductor.patch(post_grad_custom_post_pass=lambda graph: modes.append(inductor.deterministic)):
        compiled(lambda x: x.sin().sum(0))(torch.ones(3, 2))
    assert modes == [True]
