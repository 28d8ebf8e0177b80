"""Adds up the gradients of DeepSpeed's BF16_Optimizer (0.19.8) in fewer passes over memory, and sums them over ranks,
by default in float32.

The gradients of a parameter group add up in one flat buffer, in float32 or bf16 (`build.resolve_gradient_precision`).
DeepSpeed itself would convert every gradient into a new buffer before adding it. Then it would copy all flat buffers
into one, all-reduce this buffer in bf16 and copy the result back, even on one process. The operating system maps new
buffers page by page, so filling a new buffer with a Base model's gradients takes as long as computing several layers.
The largest gradient, which the vocabulary softmax gives the embedding, is added tile by tile and never exists as one
tensor. docs/lab/engines.md has the time that each change saves.

A reduce-scatter sums a group's gradients over the ranks, since a rank needs only the sum of its own part. A
reduce-scatter in float32 sends as many bytes as an all-reduce in bf16. The error of a sum in bf16 would grow with the
number of ranks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from .state_shards import initial_state

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
_SLICE_SIZE = 2**18  # number of elements that `_accumulate` adds at a time on the CPU
# Number of elements that are updated at a time: few enough for a CPU's caches, enough to keep a GPU busy.
_PIECE_SIZES = {"cpu": 2**19, "cuda": 2**26}


def split_param_groups(optimizer: torch.optim.Optimizer, module: nn.Module, size: float) -> None:
    """Cut the optimizer's groups into smaller ones, which have at most `size` elements or only one parameter. Sort the
    new groups in the order in which the backward pass completes their gradients: from the last layer to the first.

    The groups of the vocabulary tables come last and are marked `late`, because the tables get gradients at both ends
    of the model.
    """
    backward_order = {p: index for index, p in enumerate(reversed(list(module.parameters())))}
    prefixes = "embedding_", "difference_"
    tables = {p for name, p in module.named_parameters() if name.split(".")[-1].startswith(prefixes)}
    new_groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters = sorted(group["params"], key=lambda p: (p in tables, backward_order[p]))
        for index, p in enumerate(parameters):
            fits = index > 0 and sum(member.numel() for member in new_groups[-1]["params"]) + p.numel() <= size
            if fits and new_groups[-1]["late"] == (p in tables):
                new_groups[-1]["params"].append(p)
            else:
                new_groups.append(group | {"params": [p], "late": p in tables})
    new_groups.sort(key=lambda group: (group["late"], backward_order[group["params"][-1]]))
    optimizer.param_groups[:] = new_groups


def reduce_in_buffers(engine: Any, bf16_buffers: bool = False) -> None:
    """Make a DeepSpeed engine add and reduce gradients in the groups' flat buffers, if its optimizer is a
    BF16_Optimizer.

    `bf16_buffers`: the buffers are bf16, like the gradients from the backward pass. The sums over ranks are in the
    engine's `communication_data_type`.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer):
        return
    if bf16_buffers:
        _use_bf16_buffers(optimizer)
    reducer = _GradientReducer(engine)
    if bf16_buffers or reducer.replicas > 1:  # else DeepSpeed's own `step` reads only the rank's gradients, in float32
        optimizer.optimizer.step = partial(_step_in_pieces, optimizer, reducer, optimizer.optimizer.step)
        optimizer.step = partial(_step, optimizer, reducer)
    optimizer._update_hp_grad = partial(_add_gradient, optimizer, reducer)
    optimizer.clear_hp_grads = partial(_mark_gradients_stale, optimizer)
    engine.buffered_allreduce_fallback = reducer.finish
    for group, parameters in enumerate(optimizer.bf16_groups):
        for index, parameter in enumerate(parameters):
            parameter.gradient_adder = partial(_gradient_adder, optimizer, parameter, group, index)


class _GradientReducer:
    """Reduces gradients over the replicas, the ranks that hold the same parameters. `parts` holds, for every group,
    this rank's part of the gradients: first their sum over the replicas, then their mean.

    All ranks send the groups in the same order, whatever the order in which gradients arrive. A group that is not
    `late` is sent during the step's last backward pass, once the gradients of this group and of all groups before it
    are complete. `late` groups are sent after the last backward pass. Without `overlap_comm`, and in a pipeline, all
    groups are sent then: the gradient of a pipeline's tied table arrives only then.
    """

    def __init__(self, engine: Any):
        self.engine, self.optimizer = engine, engine.optimizer
        self.dtype, self.replicas = engine.communication_data_type, engine.dp_world_size
        self.parts: list[Any] = list(self.optimizer.fp32_groups_gradient_flat_partition)
        overlaps = self.replicas > 1 and engine.zero_overlap_comm() and not engine.pipeline_parallelism
        # Number of groups sent in the backward pass: all but the `late` ones, which `split_param_groups` puts last.
        early = [not group.get("late", True) for group in self.optimizer.param_groups]
        self.early_group_count = sum(early) if overlaps else 0
        # For each group, the indices of its parameters that get a gradient: all but the fillers (`zero.py`).
        parameters = set(engine.module.parameters())
        self.trained_indices = [
            {index for index, parameter in enumerate(group) if parameter in parameters}
            for group in self.optimizer.bf16_groups
        ]
        self._begin_step()

    def _begin_step(self) -> None:
        self.sent = 0  # number of groups sent in this step
        # The running reductions, each with the buffer that it reads, which must not be freed before the reduction ends.
        self.in_flight: list[tuple[dist.Work, Tensor]] = []
        self.missing = [set(group) for group in self.trained_indices]  # by group: parameters without a gradient so far

    def mark_arrived(self, group: int, index: int) -> None:
        """Record that a parameter's gradient of one micro-batch was added; send the groups that are complete."""
        if self.early_group_count and self.engine.is_gradient_accumulation_boundary():
            assert group >= self.sent, "a gradient came after its group was sent"
            self.missing[group].discard(index)
            while self.sent < self.early_group_count and not self.missing[self.sent]:
                self._send()

    def _send(self) -> None:
        """Start the reduction of the next group; `finish` waits for it."""
        group, optimizer = self.sent, self.optimizer
        self.sent += 1
        arrived = optimizer.fp32_groups_has_gradients[group]
        for index in self.trained_indices[group]:
            if not arrived[index]:  # the parameter's buffer still holds the gradient of the step before
                optimizer.fp32_groups_gradients[group][index].zero_()
        arrived[:] = [True] * len(arrived)
        if self.replicas == 1:
            return
        flat, part = optimizer.fp32_groups_gradients_flat[group], optimizer.fp32_groups_gradient_flat_partition[group]
        if flat.dtype != self.dtype:
            # Wait until at most two copies exist: more copies would take the memory that bf16 saves.
            for work, _ in self.in_flight[:-1]:
                work.wait()
            del self.in_flight[:-1]
            flat, part = flat.to(self.dtype), torch.empty_like(part, dtype=self.dtype)
        self.parts[group] = part
        work = _reduce_scatter(part, flat, group=optimizer.real_dp_process_group[group], async_op=True)
        self.in_flight.append((work, flat))

    def finish(self, **_: Any) -> None:
        """Replaces `buffered_allreduce_fallback` after the last backward pass: send the remaining groups, and wait."""
        while self.sent < len(self.parts):
            self._send()
        for work, _flat in self.in_flight:
            work.wait()
        if self.replicas > 1:
            for part in self.parts:
                part.mul_(1 / self.replicas)
        self._begin_step()

    def norm(self) -> Tensor:
        """The norm of all gradients, over the replicas and the pipeline stages; collective."""
        optimizer = self.optimizer
        pieces = [piece for part in self.parts for piece in part.split(_PIECE_SIZES[part.device.type])]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]
        squares = torch.stack(norms).double().square().sum()
        dist.all_reduce(squares, group=optimizer.dp_process_group)
        if optimizer.mpu is not None:
            dist.all_reduce(squares, group=optimizer.mpu.get_model_parallel_group())
        return squares.sqrt().float()


def _use_bf16_buffers(optimizer: BF16_Optimizer) -> None:
    """Replace the gradients' buffers by bf16 buffers, before the first backward pass. DeepSpeed's names for the buffers
    say fp32 whatever their type."""
    for group, weights in enumerate(optimizer.bf16_groups_flat):
        # The old buffer must be free before the new one is made.
        optimizer.fp32_groups_gradients_flat[group] = optimizer.non_expert_gradients[group] = None
        optimizer.fp32_groups_actual_gradients_flat[group] = optimizer.fp32_groups_gradient_flat_partition[group] = None
        optimizer.fp32_groups_gradients[group].clear()
        flat = torch.zeros_like(weights)
        sizes = [parameter.numel() for parameter in optimizer.bf16_groups[group]]
        numel = optimizer.fp32_groups_flat_partition[group].numel()  # the size of this rank's part
        start = dist.get_rank(optimizer.real_dp_process_group[group]) * numel
        optimizer.fp32_groups_gradients_flat[group] = optimizer.non_expert_gradients[group] = flat
        optimizer.fp32_groups_gradients[group][:] = optimizer._split_flat_tensor(flat, sizes)
        optimizer.fp32_groups_actual_gradients_flat[group] = flat[: sum(sizes)]
        optimizer.fp32_groups_gradient_flat_partition[group] = flat[start : start + numel]
    optimizer.grad_acc_dtype = torch.bfloat16


@torch.no_grad()
def _step(optimizer: BF16_Optimizer, reducer: _GradientReducer) -> None:
    """Replaces `step` of BF16_Optimizer. DeepSpeed's would read all gradients on every rank and, if they are bf16, clip
    them in bf16 and convert all of them at once."""
    norm = reducer.norm()
    optimizer.overflow = not 0 <= float(norm) < math.inf  # true for NaN too
    optimizer._global_grad_norm = math.inf if optimizer.overflow else norm
    if optimizer.overflow:
        optimizer.clear_lp_grads()
    else:
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
    optimizer.clear_hp_grads()
    reducer.parts[:] = optimizer.fp32_groups_gradient_flat_partition  # frees copies that `_send` made in another type


def _step_in_pieces(optimizer: BF16_Optimizer, reducer: _GradientReducer, take_step: Callable[[], object]) -> None:
    """Replaces `step` of torch's optimizer. Calls the original (`take_step`) for each piece of this rank's part in
    turn, so that bf16 gradients are converted to float32 one piece at a time; collective."""
    clip_divisor = ((optimizer._global_grad_norm + 1e-6) / optimizer.clip_grad).clamp(min=1)
    is_fused = optimizer.optimizer.defaults.get("fused", False)
    if is_fused:  # torch's fused optimizers themselves divide gradients by `grad_scale`
        optimizer.optimizer.grad_scale = clip_divisor
    groups, states = optimizer.optimizer.param_groups, optimizer.optimizer.state
    group_parameters = [group["params"] for group in groups]
    for group in groups:  # `take_step` updates all groups, so only the group of the current piece has a parameter
        group["params"] = []
    for group, master, part in zip(groups, optimizer.fp32_groups_flat_partition, reducer.parts, strict=True):
        state = states[master] = states[master] or initial_state(group["kinds"], master)
        in_pieces = [_pieces(tensor, master) for tensor in (master.detach(), part, *state.values())]
        for piece, gradient, *values in zip(*in_pieces, strict=True):
            piece.grad = gradient.float() if is_fused else gradient.float().div_(clip_divisor)
            group["params"] = [piece]
            states[piece] = piece_state = dict(zip(state, values, strict=True))
            take_step()
            piece.grad = None
            del states[piece]
        # Each piece counted the step in its own copy of the counter; the copies are equal, so the last one is taken.
        state["step"].copy_(piece_state["step"])
        group["params"] = []
    for group, parameters in zip(groups, group_parameters, strict=True):
        group["params"] = parameters
    optimizer.update_lp_params()


def _pieces(tensor: Tensor, master: Tensor) -> list[Tensor]:
    """One entry for each piece of `master`: the same slice of a flat `tensor`, or a copy of a scalar (the step
    count)."""
    size = _PIECE_SIZES[master.device.type]
    if tensor.dim():
        return list(tensor.split(size))
    return [tensor.clone() for _ in range(0, master.numel(), size)]


def _gradient_adder(
    optimizer: BF16_Optimizer, parameter: nn.Parameter, group: int, index: int
) -> Callable[[Any, Tensor], object]:
    """Return a function (rows, gradient) that adds a gradient of some rows of `parameter` to the step's sum; `rows` is
    a slice, or `...` for all rows. The first gradients of a step overwrite the previous step's sum, so the calls of one
    backward pass must cover every row once (as in `models.masked_head`)."""
    total = optimizer.fp32_groups_gradients[group][index].view_as(parameter)
    arrived = optimizer.fp32_groups_has_gradients[group]
    is_first = not arrived[index]
    arrived[index] = True
    parameter._hp_grad = total  # type: ignore[attr-defined]  # as DeepSpeed's own `_update_hp_grad` does
    return lambda rows, gradient: _accumulate(total[rows], gradient, overwrite=is_first)


@torch.no_grad()
def _add_gradient(
    optimizer: BF16_Optimizer,
    reducer: _GradientReducer,
    parameter: nn.Parameter,
    group: int,
    index: int,
    clear_lp_grads: bool,
) -> None:
    """Replaces `_update_hp_grad`: adds a parameter's gradient to the step's sum."""
    if parameter.grad is None:
        return
    add = _gradient_adder(optimizer, parameter, group, index)
    add(..., parameter.grad)
    if clear_lp_grads:
        parameter.grad.zero_()
    reducer.mark_arrived(group, index)


def _accumulate(total: Tensor, gradient: Tensor, overwrite: bool = False) -> None:
    """Add a gradient of any type, sparse or dense, to `total`, or `overwrite` it with the gradient. On the CPU, bf16 is
    added to float32 slice by slice, because torch would first convert the whole bf16 tensor."""
    if gradient.is_sparse:  # from an embedding lookup
        if overwrite:
            total.zero_()
        # A frequent token's row gets many gradients: they add up in float32, whatever `total` is.
        rows = torch.sparse_coo_tensor(
            gradient._indices(), gradient._values().float(), gradient.shape, check_invariants=False
        ).coalesce()
        total.index_add_(0, rows.indices()[0], rows.values().to(total.dtype))
    elif overwrite:
        total.copy_(gradient)
    elif total.is_cuda or total.dtype == gradient.dtype:
        total.add_(gradient)
    else:
        totals, gradients = total.view(-1).split(_SLICE_SIZE), gradient.reshape(-1).split(_SLICE_SIZE)
        for total_slice, gradient_slice in zip(totals, gradients, strict=True):
            total_slice.add_(gradient_slice)


def _mark_gradients_stale(optimizer: BF16_Optimizer) -> None:
    """Replaces `clear_hp_grads`, which would fill the buffers with zeros. The next gradients overwrite the buffers
    anyway."""
    optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]
