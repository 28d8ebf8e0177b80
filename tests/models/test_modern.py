"""ModernBERT's layers against transformers' model, a mask of all pairs, items that stand alone, and autograd."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ModernBertConfig, ModernBertForMaskedLM

from tests.small import MODERN, SMALL, lively, model, usual_batch
from xlme_ds.config import ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.models.attention import item_mask
from xlme_ds.models.encoder import layer_class
from xlme_ds.models.heads import MaskedLanguageModelHead
from xlme_ds.models.layers import MicroBatchShape, TransformerLayer
from xlme_ds.models.modern import Windows
from xlme_ds.models.text_encoder import TextEncoder, positions_and_segments
from xlme_ds.objectives.mlm import MaskedLanguageModelling
from xlme_ds.trained.modernbert import modernbert_config, modernbert_state
from xlme_ds.validate import validate

CFG: ModelConfig = replace(SMALL, discriminator_layers=4, **MODERN)  # type: ignore[arg-type]


def test_values_and_gradients_are_transformers() -> None:
    """In float64, with padding and rows of more than two windows; transformers rotates in float32 all the same."""
    encoder, head = lively(TextEncoder(CFG)).double(), lively(MaskedLanguageModelHead(CFG), seed=1).double()
    own = {f"masked_head.{name}": value for name, value in head.state_dict().items()}
    theirs = ModernBertForMaskedLM(
        ModernBertConfig(**modernbert_config(CFG), pad_token_id=1, bos_token_id=0, eos_token_id=2)
    ).double()
    state = modernbert_state(encoder, "ForMaskedLM", own)
    theirs.load_state_dict(state | {"decoder.weight": state["model.embeddings.tok_embeddings.weight"]})
    tokens = torch.randint(4, CFG.vocabulary - 1, (2, 37), generator=torch.Generator().manual_seed(2))
    tokens[1, 33:] = 1
    inside = tokens != 1
    found = theirs(input_ids=tokens, attention_mask=inside.long()).logits[inside]
    hidden_MD = encoder(tokens, *positions_and_segments(tokens))[inside]
    logits = head.logits(hidden_MD, encoder.embedding_blocks)
    torch.testing.assert_close(logits, found, rtol=0, atol=1e-6 * float(found.detach().abs().max()))
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
    (logits * weights).sum().backward()
    (found * weights).sum().backward()
    gradients = {f"encoder.{name}": value.grad for name, value in encoder.encoder.named_parameters()}
    there = dict(theirs.named_parameters())
    pairs = {"layers.3.attn.Wqkv": "layers.3.attention.qkv", "layers.2.mlp.Wi": "layers.2.up"}
    pairs |= {
        "layers.1.attn_norm": "layers.1.attention_norm",
        "embeddings.norm": "input_norm",
        "final_norm": "output_norm",
    }
    for name, ours in pairs.items():
        expected, actual = there[f"model.{name}.weight"].grad, gradients[f"encoder.{ours}.weight"]
        assert expected is not None and actual is not None
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [3, 8, 21, 32])
def test_windows_are_a_mask_of_all_pairs(tokens: int) -> None:
    """Rows shorter than a window, as long, and longer, whose items end anywhere."""
    draw = torch.Generator().manual_seed(tokens)
    qkv_BT3HK = torch.randn(2, tokens, 3, 2, 4, generator=draw, dtype=torch.float64).requires_grad_()
    segments_BT = torch.randint(0, 6, (2, tokens), generator=draw).sort(1).values
    found = Windows.of(segments_BT, 8, torch.float64).attend(qkv_BT3HK, None, 0.0, None)
    q, k, v = (qkv_BT3HK[:, :, part].transpose(1, 2) for part in range(3))
    place = torch.arange(tokens)
    allowed = item_mask(segments_BT) & ((place - place[:, None]).abs() <= 4)
    scores = torch.where(allowed, q @ k.mT / 2, float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    (ours,) = torch.autograd.grad((found * weights).sum(), qkv_BT3HK)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), qkv_BT3HK)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_an_item_in_a_packed_row_is_the_item_alone() -> None:
    """Rotary positions restart at every item."""
    encoder = lively(TextEncoder(CFG)).double()
    items = [torch.arange(size) % 80 + 5 for size in (13, 2, 21)]
    row, segments = torch.cat(items)[None], torch.repeat_interleave(torch.arange(1, 4), torch.tensor([13, 2, 21]))[None]
    packed = encoder(row, torch.zeros_like(row), segments)[0].split([len(one) for one in items])
    for one, found in zip(items, packed, strict=True):
        (alone,) = encoder(one[None], torch.zeros_like(one)[None], torch.ones_like(one)[None])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_a_local_layer_makes_no_scores_of_all_pairs() -> None:
    """Rows of 8,192 tokens: nothing grows with their square, forward and backward."""
    cfg, tokens = replace(CFG, local_window=128), 8192
    layer = lively(layer_class(cfg)(cfg, 1))
    x_BTD = torch.zeros(1, tokens, cfg.width, requires_grad=True)
    shared = layer_class(cfg).shared_inputs(cfg, torch.ones(1, tokens, dtype=torch.long), None, torch.float32)
    with Largest() as largest:
        layer(x_BTD, shared).sum().backward()
    assert largest.numel <= tokens * max(2 * cfg.local_window, 6 * cfg.width)


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, tuple):
        return [tensor for value in values for tensor in tensors_in(value)]
    return [values] if isinstance(values, Tensor) else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_autograds(dtype: torch.dtype) -> None:
    """Without dropout, on the CPU; what layers share is counted once."""
    cfg = replace(CFG, width=96, local_window=32, global_every=3, discriminator_layers=4)
    rows, tokens, saved = 2, 128, []
    shared = layer_class(cfg).shared_inputs(cfg, torch.ones(rows, tokens, dtype=torch.long), None, dtype)
    for number in (3, 4, 5, 6):
        layer = lively(layer_class(cfg)(cfg, number)).to(dtype)
        others = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tensors_in(shared))}
        sizes: dict[int, int] = {}
        alive = []

        def keep(
            tensor: Tensor, others: set[int] = others, sizes: dict[int, int] = sizes, alive: list = alive
        ) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in others:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(
                torch.randn(rows, tokens, cfg.width, generator=torch.Generator().manual_seed(number))
                .to(dtype)
                .requires_grad_(),
                shared,
            )
        saved.append(sum(sizes.values()))
    batch = MicroBatchShape(rows, tokens, rows * tokens, dtype.itemsize, on_gpu=False, triton=False, pairs=0)
    assert layer_class(cfg).saved_bytes(cfg, batch) == pytest.approx(sum(saved) / 4, rel=0.01)
    counted = layer_class(cfg).shared_bytes(cfg, batch) - TransformerLayer.shared_bytes(cfg, batch)
    assert counted == sum(tensor.nbytes for tensor in tensors_in(shared)) - tensors_in(shared[0].kernel)[0].nbytes


@pytest.mark.parametrize("layers, global_layers", [(4, 2), (3, 2), (1, 1)])
def test_operations_by_hand(layers: int, global_layers: int) -> None:
    """Width 24, feed-forward 40, windows of 8, rows of 32, every second layer global: four projections, three products,
    scores and sums."""
    linear = 4 * 24 * 24 + 3 * 24 * 40
    attention = global_layers * 2 * 32 * 24 + (layers - global_layers) * 2 * 9 * 24
    assert layer_class(CFG).flops(CFG, layers, 32) == pytest.approx(2 * (layers * linear + attention))
    cfg = replace(CFG, discriminator_layers=layers)
    assert MaskedLanguageModelling(ObjectiveConfig()).flops(cfg, 32).one_layer * layers == pytest.approx(
        2 * (layers * linear + attention)
    )


def test_bf16_gradients_follow_float32() -> None:
    """Linear maps and norms without biases, whose backward passes on the CPU are ours."""
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = lively(layer_class(CFG)(CFG, 1), std=0.1).to(dtype)
        x_BTD = torch.randn(2, 40, CFG.width, generator=torch.Generator().manual_seed(1)).to(dtype)
        shared = layer_class(CFG).shared_inputs(CFG, torch.ones(2, 40, dtype=torch.long), None, dtype)
        layer(x_BTD, shared).square().sum().backward()
        gradients.append({name: parameter.grad.float() for name, parameter in layer.named_parameters()})  # type: ignore[union-attr]
    exact, rounded = gradients
    assert exact.keys() == rounded.keys() and not any(name.endswith("bias") for name in exact)
    for name, value in exact.items():
        assert (rounded[name] - value).norm() < 0.03 * value.norm(), name


def test_every_parameter_of_both_networks_learns() -> None:
    whole = model(discriminator_layers=4, generator_layers=3, **MODERN)
    output = whole(usual_batch())
    (output.nll_M.sum() + output.replaced_logits_BT.sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in whole.parameters())
    biased = {name for name, _ in whole.named_parameters() if name.endswith("bias")}
    assert biased == {"masked_head.bias", "replaced_head.dense.bias", "replaced_head.output.bias"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm": "post"}, "model.norm is post, which model.body modern does not support: set it to pre"),
        ({"relative_bias": "gated"}, "model.relative_bias is gated"),
        ({"embedding_norm": False}, "model.embedding_norm is False, .*: set it to true"),
        ({"masked_head": "linear"}, "model.masked_head is linear, .*: set it to dense"),
        ({"attention_dropout": 0.1}, "model.attention_dropout is 0.1, .*: set it to 0.0"),
        ({"layout": "xlm"}, "model.layout is xlm, .*: set it to xlme"),
        ({"absolute_positions": True}, "model.absolute_positions is True, .*: set it to false"),
        ({"language_embeddings": ("de", "fr")}, "model.language_embeddings is .*: leave it empty"),
        ({"width": 27, "heads": 3}, "rotary positions turn pairs of dimensions"),
        ({"local_window": 7}, "model.local_window is 7: it must be even"),
    ],
)
def test_settings_of_another_body_fail(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        validate(RunConfig("test", model=replace(CFG, **changes)))


@pytest.mark.parametrize("objective", ["ernie_m", "btmlm", "clm"])
def test_objectives_with_another_mask_fail(objective: str) -> None:
    run = RunConfig("test", model=CFG)
    fraction = 1.0 if objective == "clm" else 0.15
    pseudo = (0.1,) if objective == "btmlm" else ()
    changed = replace(run.objective, name=objective, mask_fraction=fraction, pseudo_fractions=pseudo)
    data = replace(run.data, para_rows=0) if objective != "ernie_m" else run.data
    with pytest.raises(
        ValueError, match=f"body modern lets a position see its whole item, and objective.name {objective}"
    ):
        validate(replace(run, objective=changed, data=data))
