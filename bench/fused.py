"""What `torch.compile` makes of a layer, counted: the graphs that inductor is given, and into how many kernels what
lies between their products is fused.

Everything but products, attention and other operators of their own is fused: with what it reads or is read by, as long
as no product lies between the two. Such a kernel reads what comes from outside once and writes what is read outside of
it; a sum over the rows of a matrix, as for the gradient of a bias, takes two more. Inductor decides by the same rules
but for their limits (registers, loops of different shapes), so that this is the best that it can do.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from bench.counted import Counter, moved

_SUMS = {"sum", "mean", "amax", "var_mean", "prod"}


def compiled(counter: Counter) -> Callable[..., Any]:
    """In place of `models.execution.compiled`: the same function of (layer, *inputs), whose operations
    `counter` counts as fused."""
    made: dict[Any, Any] = {}

    def compiler(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        kernels = [*_kernels(counter, graph)]

        def run(*values: Any) -> Any:
            for name, *numbers in kernels:
                counter.add(name, *numbers)
            with counter.paused():
                return graph(*values)

        return make_boxed_func(run)

    def of(function: Callable[..., Any], how: str) -> Callable[..., Any]:
        def call(layer: nn.Module, *inputs: Any) -> Any:
            flat, form = tree_flatten((dict(layer.named_parameters()), inputs))
            where = [n for n, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
            key = form, *((flat[n].shape, flat[n].dtype, flat[n].requires_grad) for n in where)
            if key not in made:

                def again(*tensors: Tensor) -> Any:
                    leaves = list(flat)
                    for n, tensor in zip(where, tensors, strict=True):
                        leaves[n] = tensor
                    parameters, given = tree_unflatten(leaves, form)
                    with _reparametrize_module(layer, parameters):
                        return function(layer, *given)

                made[key] = aot_function(
                    again,
                    fw_compiler=compiler,
                    bw_compiler=compiler,
                    partition_fn=min_cut_rematerialization_partition,
                    decompositions=select_decomp_table(),
                )
            with counter.paused():
                return made[key](*(flat[n] for n in where))

        return call

    return of


def _kernels(counter: Counter, graph: fx.GraphModule) -> Any:
    """Name, FLOPs, bytes, kernels and kind of every kernel of a graph."""
    level = _levels(counter, graph)
    group: dict[fx.Node, fx.Node] = {}  # of each fused node, another one of its group, at last the first

    def first(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in graph.graph.nodes:
        if node.op == "call_function" and _alone(node, counter):
            yield _of_one(counter, node)
        elif node.op == "call_function":
            group[node] = node
            for each in node.all_input_nodes:
                if each in group and level[each] == level[node]:
                    group[first(each)] = node
    members = defaultdict(list)
    for node in group:
        members[first(node)].append(node)
    for nodes in members.values():
        inside = set(nodes)
        if all(_is_view(node) for node in nodes):
            continue
        # A view is what it is a view of: that is read or written once. Of several outputs one is taken.
        edges = [(each, node) for node in nodes for each in node.all_input_nodes if each not in inside]
        reads = {(_base(each), _size(each if isinstance(each.meta["val"], Tensor) else node)) for each, node in edges}
        writes = {_base(node) for node in nodes if any(user not in inside for user in node.users)} & inside
        sums = sum(_over_rows(node) for node in nodes)
        moves = sum(size for _, size in reads) + sum(map(_size, writes))
        yield "fused", 0.0, moves, 1 + 2 * sums, "products"


def _levels(counter: Counter, graph: fx.GraphModule) -> dict[fx.Node, int]:
    """How many products come before a node, on the longest way; of a fused one, as late as those let it that read
    it."""
    level: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        above = max((level[each] for each in node.all_input_nodes), default=0)
        level[node] = above + (node.op == "call_function" and _alone(node, counter))
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function" and not _alone(node, counter):
            users = [user for user in node.users if user.op == "call_function"]
            level[node] = max([level[node], *sorted(level[user] - _alone(user, counter) for user in users)[:1]])
    return level


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _name(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::") if hasattr(node.target, "_schema") else ""


def _alone(node: fx.Node, counter: Counter) -> bool:
    name = _name(node)
    return name in counter.formulas or (bool(name) and counter.multiplies(node.target))


def _is_view(node: fx.Node) -> bool:
    return not _name(node) or node.target.is_view


def _of_one(counter: Counter, node: fx.Node) -> tuple[Any, ...]:
    name, values = _name(node), fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    (args, kwargs), out = values, node.meta["val"]
    if name in counter.formulas:
        return name, *counter.formulas[name](args, out)
    flops, kind = counter.flops(node.target, name, args, kwargs, out)
    return name, flops, moved(name, node.target, args, kwargs, out), 1, kind


def _size(node: fx.Node) -> float:
    values = node.meta.get("val")
    return sum(
        float(each.numel() * each.element_size()) for each in tree_flatten(values)[0] if isinstance(each, Tensor)
    )


def _over_rows(node: fx.Node) -> bool:
    """Whether it sums over the rows of a matrix; over its columns, a row's sum stays in the kernel."""
    if _name(node).split(".")[0] not in _SUMS or len(node.args) < 2:
        return False
    dims = {dim % max(node.args[0].meta["val"].dim(), 1) for dim in node.args[1]}
    return node.args[0].meta["val"].dim() - 1 not in dims
