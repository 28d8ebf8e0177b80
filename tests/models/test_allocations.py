"""Counted allocations of a forward and backward pass: a change that brings back passes over large tensors shows here.

Counts do not depend on the machine, nor on what else it does.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.small import SMALL, language_model, lively, model, usual_batch
from xlme_ds.config import ObjectiveConfig
from xlme_ds.models import attention_cpu
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives.clm import CausalMasking
from xlme_ds.objectives.electra import ElectraObjective

# No two of these sizes are alike: 3 heads, rows of 40 tokens, 4 of them, 5003 ids of width 24, tiles of 128 ids.
VOCABULARY, CHUNK, LAYERS = 5003, 128, 5
SCORES = 4 * 3 * 40 * 40
TABLE = VOCABULARY * 24


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations make, by their numbers of elements; views and what is written in place are
    none."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and not each.is_sparse]
        given = {each.untyped_storage().data_ptr() for each in tensors}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_sparse and tensor.untyped_storage().data_ptr() not in given:
                self.sizes[tensor.numel()] += 1
        return out


def allocated() -> Counter[int]:
    electra = model(vocabulary=VOCABULARY, head_chunk=CHUNK, generator_layers=2, discriminator_layers=3)
    objective, batch = ElectraObjective(ObjectiveConfig()), usual_batch()
    with Allocations() as counted:
        objective.sums(electra(batch), batch).sum().backward()
    return counted.sizes


@pytest.fixture(scope="module")
def sizes() -> Counter[int]:
    return allocated()


def test_attention_makes_five_tensors_of_the_scores_size(sizes: Counter[int]) -> None:
    """Rows as short as these share a tile: forward the scores and their softmax, backward both again and the scores'
    gradient."""
    assert sizes[SCORES] == 5 * LAYERS


def test_attention_has_the_scores_of_an_item_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item allocates the softmax forward, and backward the softmax again and the scores' gradient; each pass has
    one buffer for the scores."""
    monkeypatch.setattr(attention_cpu, "_TILE_COST", 0)
    sizes = allocated()
    lengths = [end - first for _, first, end in attention_cpu.items_of(usual_batch().segments_BT)]
    expected = Counter({3 * max(lengths) ** 2: 2 * LAYERS})
    expected[3 * 40**2] += 2 * LAYERS  # of the size of d of all pairs, whose gradients each layer makes and adds
    for length in lengths:
        expected[3 * length**2] += 3 * LAYERS
    assert {size: sizes[size] for size in expected} == expected
    assert sizes[SCORES] == 0


def test_tiles_of_a_mask_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = 3 * 40 * 40  # the heads of one row
    monkeypatch.setattr(attention_cpu, "TILE_BYTES", 4 * tile // torch.get_num_threads())
    causal = lively(
        LanguageModel(
            replace(SMALL, vocabulary=VOCABULARY, discriminator_layers=2),
            CausalMasking(random_fraction=0.0, keep_fraction=1.0),
        )
    )
    with Allocations() as counted:
        causal(usual_batch()).nll_M.sum().backward()
    assert counted.sizes[SCORES] == 0
    # Of each pass the scores, of each row three; as large is d of all pairs, whose gradients each layer makes and adds.
    assert 2 * (2 + 3 * 4) <= counted.sizes[tile] <= 2 * (2 + 3 * 4 + 2)


def test_lookups_make_no_gradient_of_the_tables_size(sizes: Counter[int]) -> None:
    """The masked head does; what the two encoders looked up is added to it, under such a mode not in place."""
    assert sizes[TABLE] <= 2


@pytest.mark.parametrize("build", (model, language_model))
def test_lookups_gradients_join_the_softmaxs_in_place(build: Any) -> None:
    whole = build(vocabulary=VOCABULARY, head_chunk=CHUNK)
    loss = whole(usual_batch()).nll_M.sum()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as measured:
        loss.backward()
    on_tables = [
        event.name for event in measured.events() if event.input_shapes and event.input_shapes[0] == [VOCABULARY, 24]
    ]
    assert "aten::add_" in on_tables
    assert not {"aten::copy_", "aten::clone", "aten::zeros"} & set(on_tables)


def test_logits_exist_a_tile_at_a_time(sizes: Counter[int]) -> None:
    masked = len(usual_batch().masked_M)
    tiles = -(-VOCABULARY // CHUNK)
    assert sizes[masked * VOCABULARY] == 0
    # Forward one tensor a tile (float32 needs no copy), backward one; the last is narrower, and padded forward.
    assert 2 * (tiles - 1) <= sizes[masked * CHUNK] <= 2 * tiles
