"""Prints the output of `xlme plan`: the fastest layout, its command, other layouts, and on request tables with all
figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cli import format_duration, format_number
from .speed import DAY


def print_plan(result: dict[str, Any], own_flags: str, recipe_flags: str) -> None:
    """Print a layout, its training command, and the fastest layouts.

    The layout is that of the run itself, with `own_flags`, if it fits and is nearly as fast as the fastest. Otherwise
    it is the fastest one, with `recipe_flags`, which set no layout."""
    layouts, chosen = result["layouts"], _chosen(result)
    print(_answer(result, chosen) + "\n")
    if not chosen["fits"]:
        return
    flags = own_flags if chosen is result else f"{recipe_flags} {chosen['settings']}"
    print(_command(flags, result["hardware"]["gpus"], result["hardware"]["gpus_per_node"]))
    if chosen is not result:
        needs = f"{result['memory_per_gpu_gib']['total']:.1f} GiB a GPU"
        why = f"takes {_time(result['days'])} with {needs}" if result["fits"] else f"does not fit: it needs {needs}"
        print(f"The layout of the settings {why}; the command has the fastest one.")
    if "--data.micro-batch 1 " not in f"{flags} ":
        print("If memory runs out, lower --data.micro-batch: training gets slower.")
    print("\nthe fastest layouts, by estimate:")
    for layout in layouts:
        print(f"  {_time(layout['days'])}, {layout['memory_per_gpu_gib']['total']:.1f} GiB a GPU: {layout['settings']}")


def _command(flags: str, gpus: int, per_node: int) -> str:
    """The command that trains with `flags` on `gpus` GPUs, and, if they are of several machines, what HOSTS means."""
    machines = next(number for number in range(1, gpus + 1) if gpus % number == 0 and gpus // number <= per_node)
    gpu_flags = f"--hostfile HOSTS --gpus {gpus // machines}" if machines > 1 else f"--gpus {gpus}"
    launcher = "" if gpus == 1 else f"launch {gpu_flags} "
    hosts = f"HOSTS is a hostfile of {machines} machines; for Slurm, `xlme slurm` writes job scripts."
    text = f"  xlme {launcher}pretrain {flags} --data DATA --heldout HELDOUT --out OUT\n"
    return f"{text}\n{hosts}" if machines > 1 else text


def _chosen(result: dict[str, Any]) -> dict[str, Any]:
    """The costs of the layout to train with: `result` itself if it fits and takes at most 2% longer than the fastest,
    which is less than the error of the estimate; otherwise the fastest layout, or `result` if none fits."""
    fastest = next(iter(result["layouts"]), result)
    return result if result["fits"] and result["days"] <= 1.02 * fastest["days"] else fastest


def print_details(result: dict[str, Any]) -> None:
    """Print the objective, and parameters, operations and memory by part."""
    console = Console(markup=False, emoji=False)
    objective = result["objective"]
    terms = ", ".join(f"{name} ({objective['quantities'][name]['title']})" for name in objective["terms"])
    console.print(f"\n{result['recipe']}: {objective['description']}; loss = {terms}\n", highlight=False)
    for part in (_parameters, _operations, _recipe_layout):
        table, note = part(result)
        console.print(table)
        console.print(note + "\n", highlight=False)


def print_budget(result: dict[str, Any], gpus: int) -> None:
    """Print the model that a budget buys, the time that it takes on `gpus` GPUs, and the cost of each published
    recipe."""
    console = Console(markup=False, emoji=False)
    model, hours = result["model"], result["gpu_hours"]
    article = "an" if model["network"] == "encoder" else "a"
    command = "No layout fits: take more GPUs or larger ones."
    for layout in result["layouts"]:  # at most one
        command = _command(f"{model['settings']} {layout['settings']}", gpus, result["gpus_per_node"])
        command += f"\nThis takes {layout['memory_per_gpu_gib']['total']:.1f} GiB a GPU."
    console.print(
        f"${_round(result['dollars'])} buys {_round(hours)} GPU-hours of {result['gpu']} ({_time(hours / 24 / gpus)} "
        f"on {gpus} GPU{'s' * (gpus != 1)}): {article} {model['network']} of {_count(model['parameters'])} parameters "
        f"on {_count(model['tokens'])} tokens in {model['steps']:,} steps\n\n"
        f"{command}\n\n{result['rule']}.\n"
        f"Assumed: {result['utilisation']:.0%} of the GPU's peak, {result['flops']:.3g} FLOP in all, no time for "
        "transfers and for logits that are computed again. The learning rate is the recipe's: tune it for this size.\n",
        highlight=False,
        soft_wrap=True,
    )
    rows = [
        (
            name,
            _count(cost["parameters"]),
            f"{cost['steps']:,}",
            _round(cost["gpu_hours"]),
            f"${_round(cost['dollars'])}",
            f"{cost['share']:.0%}" if cost["share"] < 10 else f"{format_number(cost['share'])} times",
        )
        for name, cost in result["recipes"].items()
    ]
    columns = ("recipe", "parameters", "steps", "GPU-hours", "cost", "the budget buys")
    console.print(_table("the published recipes, whole", columns, rows))


def _answer(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """The sentence with time, memory, GPU-hours and cost of the layout `chosen`, or the sentence that no layout
    fits."""
    hardware = result["hardware"]
    head = f"{result['recipe']} on {hardware['gpus']} × {hardware['gpu']}: "
    if not chosen["fits"]:
        return head + "no layout fits: take more GPUs, larger ones, or offload"
    hours = _round(chosen["gpu_hours"])
    cost = f", ${_round(chosen['dollars'])}" if "dollars" in chosen else ""
    precision = ", in fp32" if hardware["precision"] == "fp32" else ""
    return (
        f"{head}{_time(chosen['days'])}, {chosen['memory_per_gpu_gib']['total']:.1f} GiB a GPU, {hours} GPU-hours"
        f"{cost} (assumed: {result['assumptions']['utilisation']:.0%} of peak{precision})"
    )


def _count(number: float) -> str:
    """Parameters or tokens as text, with B for 10^9, as papers write."""
    return format_number(number).replace("G", "B")


def _time(days: float) -> str:
    """`days` as text, to three digits. A time of less than one day is written in hours and minutes."""
    if days >= 999.5:
        return f"{float(f'{days:.3g}'):,.0f} days"
    if days >= 1:
        return f"{days:.3g} days" if days >= 1.005 else "1 day"
    return format_duration(days * DAY) if days * DAY >= 60 else "less than a minute"


def _round(value: float) -> str:
    """Hours or dollars as text, rounded to a whole number. A value below 10 is rounded to two significant digits."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.01 else "under 0.01"


def _table(title: str, columns: Sequence[str], *sections: Iterable[Sequence[str]]) -> Table:
    """A table of text cells, with a line between the sections of rows."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _parameters(result: dict[str, Any]) -> tuple[Table, str]:
    """Returns (table of the parameters by component and by network, note)."""
    by_network = dict(result["parameters"])
    by_component = by_network.pop("components")
    sections = [[(name, f"{size:,}") for name, size in counts.items()] for counts in (by_component, by_network)]
    return _table(f"{result['recipe']}: parameters", ("component", "parameters"), *sections), result["accounting"]


def _operations(result: dict[str, Any]) -> tuple[Table, str]:
    """Returns (table of the operations by the standard and by the paper's count, note)."""
    standard, paper = result["flops"]["standard"], result["flops"]["paper_convention"]
    rows = [
        ("standard", *(f"{standard[kind]:.3g}" for kind in ("mono", "both", "both_para_half"))),
        ("the paper's", f"{paper['mono']:.3g}", "", f"{paper['both']:.3g}"),
    ]
    columns = "count", "mono", "mono + para", "mono + para / 2"
    phases = [
        f"phase {index} from step {phase['first_step']:,}: {phase['tokens']:.3g} tokens in {phase['steps']:,} steps, "
        f"{phase['mask_fraction']:.0%} predicted\n"
        for index, phase in enumerate(result["phases"], 1)
    ]
    table = _table(f"{result['recipe']}: FLOP of the whole run", columns, rows)
    return table, ("".join(phases) if len(phases) > 1 else "") + (
        f"standard: {standard['accounting']}; {result['flops']['per_step']:.4g} a step\nthe paper's: "
        f"{paper['accounting']}; {paper['forward_per_token'] / 1e6:.2f} MFLOP forward a token"
    )


def _recipe_layout(result: dict[str, Any]) -> tuple[Table, str]:
    """Returns (table of the memory of the layout that the recipe sets, note on the step time and the assumptions)."""
    hardware, memory = result["hardware"], result["memory_per_gpu_gib"]
    title = f"{result['recipe']} on {hardware['gpus']} × {hardware['gpu']}: as the recipe is"
    table = _table(title, list(memory), [[f"{size:.2f}" for size in memory.values()]])
    table.columns[0].justify = "right"
    assumed, seconds = result["assumptions"], result["seconds_per_step"]
    parts = ", ".join(f"{name} {seconds[name]:.3g}" for name in ("compute", "bubble", "transfer", "offload"))
    return table, (
        f"GiB a GPU at the fullest moment ({result['fullest_at']}): {'fits' if result['fits'] else 'does not fit'} "
        f"into {hardware['memory_gib']:g} GiB with {assumed['memory_reserved']:.0%} of it set aside\n"
        f"{result['rows_per_micro_batch']} rows a micro-batch, {result['accumulation']} micro-batches a step; a GPU "
        f"sends {result['communication_bytes_per_step']['total'] / 1e9:.3g} GB a step\nestimated "
        f"{result['tokens_per_s']:,} tokens/s ({result['tokens_per_s_per_gpu']:,} a GPU), {_time(result['days'])}; a "
        f"step {seconds['step']:.3g} s ({parts})\nassumed, not measured: {assumed['utilisation']:.0%} of "
        f"{hardware['peak_tflops']:g} TFLOP/s ({hardware['precision']}) while computing, "
        f"{assumed['link_efficiency']:.0%} of the links; over the whole step {result['of_peak']:.1%} of peak\n"
        f"{hardware['source']}"
    )
