"""The masked head's vocabulary softmax (`masked_head.py`) as Triton kernels: logits exist only in registers.

A program computes the logits X Wᵀ + b, [BM, K], of BM positions (in `_sample`, of one) and the K = GROUP_SIZE ids of
one group, in float32. X are the hidden states, W the embeddings and b the biases. The program reads BK of the D columns
of X and W at a time. Neighbouring programs have the same group (except in `_sample`), so the embeddings of its ids are
read from memory once; the hidden states stay in the L2 cache. Each number is written by one program, and every sum has
a fixed order: the same inputs give the same bits.

M masked positions, V vocabulary, C ids of a tile, G groups of K ids, D width, S sums of a group, N runs of POSITIONS
positions. A comment above each operator counts its FLOPs (a multiply-add is two) and the bytes that it moves if each
input is read from memory once. e is the number of bytes of a hidden state's element.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import GROUP_SIZE

# POSITIONS is the BM of `_group_sums` and `_gradient`. With it and TILE_OPTIONS, two programs fit on a multiprocessor,
# and registers spill only with a z-loss, up to 64 bytes (tests/models/test_masked_head_kernels.py).
POSITIONS = 128
TILE_OPTIONS = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
SAMPLE_OPTIONS = {"num_warps": 4, "num_stages": 2}
K = tl.constexpr(GROUP_SIZE)
# Without this list, Triton would compile a kernel again when one of these arguments is 1 or a multiple of 16.
NOT_SPECIALISED = ["positions", "size", "first_id", "first_group", "groups"]


@triton.jit
def _logits(x, table, bias, start, group, positions, size, BM: tl.constexpr, BK: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of one group at positions `start` … `start` + BM − 1, float32 [BM, K]. For ids past the last of the
    `size` ids, the logits are −inf. Positions past the last one repeat the logits of the last one."""
    row = tl.minimum(tl.arange(0, BM), positions - start - 1)[:, None]
    n = tl.arange(0, K)
    last = size - group * K - 1
    id, column = tl.minimum(n, last)[:, None], tl.arange(0, BK)[None, :]
    x_at = x + start.to(tl.int64) * D + row * D + column
    table_at = table + group.to(tl.int64) * K * D + id * D + column
    acc = tl.zeros([BM, K], tl.float32)
    for _ in range(0, D, BK):
        acc = tl.dot(tl.load(x_at), tl.trans(tl.load(table_at)), acc, input_precision="ieee")
        x_at, table_at = x_at + BK, table_at + BK
    return acc + tl.load(bias + group * K + n, n <= last, other=float("-inf")).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _group_sums(  # type: ignore[no-untyped-def]
    x, table, bias, targets, highest, sums, at_target,
    positions, size, first_id, first_group, groups, inverse,
    TEMPERED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write for one group at BM positions: to `highest` [M, G] the highest logit h, and to `sums` the sum of
    exp(logit − h) [M, G]. If `TEMPERED`, `sums` also has, after all of these, the sum of exp((logit − h) · `inverse`)
    [M, G], where `inverse` is 1 / temperature. Write the target's logit to `at_target` [M] if the target is in this
    group."""
    tiles = tl.cdiv(positions, BM)
    start, group = tl.program_id(0) % tiles * BM, tl.program_id(0) // tiles
    logits = _logits(x, table, bias, start, group, positions, size, BM, BK, D)
    m = start + tl.arange(0, BM)
    top = tl.max(logits, 1)
    at = m.to(tl.int64) * groups + first_group + group
    tl.store(highest + at, top, m < positions)
    tl.store(sums + at, tl.sum(tl.exp(logits - top[:, None]), 1), m < positions)
    if TEMPERED:
        at = (m.to(tl.int64) + positions) * groups + first_group + group
        # This is (logits − top) · inverse, but registers would spill if both sums used one tile of logits − top.
        # The minimum is needed because the rounded result may be above 0.
        scaled = tl.minimum(logits * inverse - (top * inverse)[:, None], 0.0)
        tl.store(sums + at, tl.sum(tl.exp(scaled), 1), m < positions)
    offset = tl.load(targets + m, m < positions, other=-1) - first_id - group * K
    in_group = (offset >= 0) & (offset < tl.minimum(size - group * K, K))
    logit = tl.sum(tl.where(tl.arange(0, K)[None, :] == offset[:, None], logits, 0.0), 1)
    tl.store(at_target + m, logit, in_group)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _sample(  # type: ignore[no-untyped-def]
    x, table, bias, chosen, maximum, threshold, ids,
    positions, size, first_id, first_group, inverse, BK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write to `ids` [2, M], for one position, the sample (if the program's second index is 0) or the most likely id
    (if it is 1). Nothing is written if the group that `chosen` [2, M] names is not in this block."""
    m, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.load(chosen + which * positions + m).to(tl.int32) - first_group
    if (group >= 0) & (group * K < size):
        n, column = tl.arange(0, K), tl.arange(0, BK)
        last = tl.minimum(size - group * K, K) - 1
        table_at = table + group.to(tl.int64) * K * D + tl.minimum(n, last)[:, None] * D + column[None, :]
        x_at = x + m * D + column
        acc = tl.zeros([K, BK], tl.float32)
        for _ in range(0, D, BK):
            acc += tl.load(table_at).to(tl.float32) * tl.load(x_at).to(tl.float32)[None, :]
            x_at, table_at = x_at + BK, table_at + BK
        logits = tl.sum(acc, 1) + tl.load(bias + group * K + n, n <= last, other=float("-inf")).to(tl.float32)
        # The sample is found as in masked_head.inverse_cdf. tl.cumsum adds in a tree, so a sum may be rounded to less
        # than the sum before it; the first sum above the threshold is taken.
        if which == 0:
            weights = tl.exp((logits - tl.load(maximum + m)) * inverse).to(tl.float64)
            passed = (weights > 0) & (tl.cumsum(weights, 0) > tl.load(threshold + m))
            offset = tl.minimum(tl.min(tl.where(passed, n, K), 0), tl.max(tl.where(weights > 0, n, 0), 0))
        else:
            offset = tl.minimum(tl.argmax(logits, 0), last)  # if there are NaNs, argmax may return any number
        tl.store(ids + which * positions + m, first_id + group * K + offset)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _gradient(  # type: ignore[no-untyped-def]
    x, table, bias, targets, lse, grad, part, sums,
    positions, size, width, first_id, twice_z,
    PENALISED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits, (exp(logit − lse) − 1[id is the target]) · grad, to `part` [M, `width`], and
    its sum over the program's positions to `sums`. Both are 0 past the last id. If `PENALISED`, the exponential is
    multiplied by 1 + `twice_z` · lse."""
    tiles = tl.cdiv(positions, BM)
    start, group = tl.program_id(0) % tiles * BM, tl.program_id(0) // tiles
    logits = _logits(x, table, bias, start, group, positions, size, BM, BK, D)
    m, n = start + tl.arange(0, BM), tl.arange(0, K)
    row = tl.minimum(m, positions - 1)
    offset = tl.load(targets + row) - first_id - group * K
    p = tl.exp(logits - tl.load(lse + row)[:, None])
    if PENALISED:
        p *= (1.0 + twice_z * tl.load(lse + row))[:, None]
    p -= (n[None, :] == offset[:, None]).to(tl.float32)
    p *= tl.load(grad + m, m < positions, other=0.0)[:, None]
    at = m.to(tl.int64)[:, None] * width + group * K + n[None, :]
    tl.store(part + at, p.to(part.dtype.element_ty), (m < positions)[:, None])
    tl.store(sums + tl.program_id(0) % tiles * width + group * K + n, tl.sum(p, 0))


# Custom operators, into which torch.compile does not trace.
# 2·M·V·D FLOPs; e·D·(V + M) + e·V + 8·M·G bytes.
@torch.library.custom_op("xlme_ds::masked_head_group_sums", mutates_args=())
def group_sums(
    hidden_MD: Tensor, blocks: list[Tensor], bias_V: Tensor, targets_M: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (highest logit h of each group [M, G], sums of exponentials relative to h [S, M, G], targets' logits
    [M]) over all blocks, all float32.

    The first sum adds up exp(logit − h). If the temperature t is not 1, a second sum adds up exp((logit − h) / t).
    """
    out = _empty_sums(hidden_MD, blocks, temperature)
    first_id = first_group = 0
    for block in blocks:
        size, groups = len(block), triton.cdiv(len(block), GROUP_SIZE)
        tensors = hidden_MD, block, bias_V[first_id:], targets_M, *out
        scalars = len(hidden_MD), size, first_id, first_group, out[0].shape[1], 1 / temperature
        grid = (triton.cdiv(len(hidden_MD), POSITIONS) * groups,)
        _launch(_group_sums, grid, *tensors, *scalars, TEMPERED=temperature != 1.0, BM=POSITIONS, **TILE_OPTIONS)
        first_id, first_group = first_id + size, first_group + groups
    return out


# 4·M·K·D FLOPs; 2·e·M·K·D bytes, from L2 where positions share a group.
@torch.library.custom_op("xlme_ds::masked_head_sample", mutates_args=())
def sample(
    hidden_MD: Tensor,
    blocks: list[Tensor],
    bias_V: Tensor,
    sampled_M: Tensor,
    best_M: Tensor,
    maximum_M: Tensor,
    threshold_M: Tensor,
    temperature: float,
) -> Tensor:
    """The samples (row 0) and the most likely ids (row 1), int64 [2, M]. The arguments of shape [M] are the results of
    `masked_head._choose_groups`."""
    chosen_2M = torch.stack([sampled_M, best_M])
    ids_2M = torch.empty_like(chosen_2M)
    first_id = first_group = 0
    for block in blocks:
        tensors = hidden_MD, block, bias_V[first_id:], chosen_2M, maximum_M, threshold_M, ids_2M
        scalars = len(hidden_MD), len(block), first_id, first_group, 1 / temperature
        _launch(_sample, (len(hidden_MD), 2), *tensors, *scalars, **SAMPLE_OPTIONS)
        first_id, first_group = first_id + len(block), first_group + triton.cdiv(len(block), GROUP_SIZE)
    return ids_2M


# 2·M·C·D FLOPs; e·D·(C + M) + e·C + e·M·C + 4·C·M/BM bytes.
@torch.library.custom_op("xlme_ds::masked_head_gradient", mutates_args=())
def tile_gradient(
    hidden_MD: Tensor,
    rows_CD: Tensor,
    bias_C: Tensor,
    targets_M: Tensor,
    lse_M: Tensor,
    grad_M: Tensor,
    first_id: int,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Returns (gradient of a tile's logits [M, C], its sums over runs of POSITIONS positions [⌈M / POSITIONS⌉, C]).
    Here C is rounded up to whole groups; the values past the tile's last id are 0."""
    part_MC, sums_NC = _empty_gradients(hidden_MD, rows_CD)
    tensors = hidden_MD, rows_CD, bias_C, targets_M, lse_M, grad_M, part_MC, sums_NC
    scalars = len(hidden_MD), len(rows_CD), part_MC.shape[1], first_id, 2 * z_loss
    grid = (len(sums_NC) * part_MC.shape[1] // GROUP_SIZE,)
    _launch(_gradient, grid, *tensors, *scalars, PENALISED=z_loss != 0.0, BM=POSITIONS, **TILE_OPTIONS)
    return part_MC, sums_NC


def _empty_sums(hidden_MD: Tensor, blocks: list[Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    groups, sums = sum(triton.cdiv(len(block), GROUP_SIZE) for block in blocks), 1 + (temperature != 1.0)
    shapes = (len(hidden_MD), groups), (sums, len(hidden_MD), groups), (len(hidden_MD),)
    highest_MG, sums_SMG, at_target_M = (hidden_MD.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return highest_MG, sums_SMG, at_target_M


def _empty_gradients(hidden_MD: Tensor, rows_CD: Tensor) -> tuple[Tensor, Tensor]:
    width, programs = triton.cdiv(len(rows_CD), GROUP_SIZE) * GROUP_SIZE, triton.cdiv(len(hidden_MD), POSITIONS)
    return hidden_MD.new_empty(len(hidden_MD), width), hidden_MD.new_empty(programs, width, dtype=torch.float32)


group_sums.register_fake(
    lambda hidden_MD, blocks, bias_V, targets_M, temperature: _empty_sums(hidden_MD, blocks, temperature)
)
sample.register_fake(lambda hidden_MD, blocks, bias_V, sampled_M, *others: torch.stack([sampled_M, sampled_M]))
tile_gradient.register_fake(lambda hidden_MD, rows_CD, *others: _empty_gradients(hidden_MD, rows_CD))


def block_k(width: int) -> int:
    """BK for a width of hidden states: the largest of 64, 32 and 16 that divides the width."""
    return next(size for size in (64, 32, 16) if width % size == 0)


def _launch(kernel: Any, grid: tuple[int, ...], *inputs: Any, **options: int) -> None:
    """Run `kernel`. The first of `inputs` must be the hidden states."""
    width = inputs[0].shape[1]
    assert all(tensor.is_contiguous() for tensor in inputs if isinstance(tensor, Tensor))
    kernel[grid](*inputs, D=width, BK=block_k(width), **options)
