"""The inverse of a plan: the size, tokens and steps of the model that an amount of money buys."""

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from ..config import RunConfig
from ..counting import count_parameters, flops_per_step
from ..recipes import RECIPES
from ..validate import validate
from .planner import plan, with_precision
from .speed import GPU

RULE = (
    "Hoffmann et al. (2022, arXiv 2203.15556, Table 3): for a given compute, the best model is the one that is trained "
    "on about 20 tokens per parameter. The parameters of the generator and the embedding are not counted here. The "
    "rule was measured on causal language models; none is published for replaced token detection. Encoders are mostly "
    "smaller and trained for longer: see the recipes"
)
TOKENS_PER_PARAMETER = 20
_MAX_GPU_HOURS = 1e12  # GPU-hours: more than anyone has, and few enough that the number of steps is finite
_PUBLISHED = ("base", "large", "xl")
# Options whose values `affordable_model` chooses.
CHOSEN_BY_BUDGET = (
    "--model.width", "--model.heads", "--model.feed-forward", "--model.discriminator-layers",
    "--model.generator-layers", "--model.norm", "--train.steps", "--optimizer.warmup-steps",
)  # fmt: skip
_HEAD_WIDTH = 64  # width of an attention head, equal in all of XLM-E's sizes
_HEAD_COUNTS = range(4, 65)  # numbers of heads of the models to choose from


def affordable_model(
    run: RunConfig,
    flags: str,
    base: RunConfig,
    dollars: float,
    dollars_per_hour: float,
    gpus: int,
    gpu: GPU,
    utilisation: float,
) -> dict[str, Any]:
    """Returns a dict: `model`, in XLM-E's proportions, that `dollars` can train on the data and vocabulary of `run`;
    `recipes`, the share of each published recipe that `dollars` would buy; `layouts`, the model's fastest layout on
    `gpus` GPUs, or nothing if none fits; and the inputs. `flags`: the command-line options that select `base`,
    which is `run` in another layout.

    Raises ValueError if `dollars` pay for no step or for more than _MAX_GPU_HOURS, if `run` starts from another model
    or cannot be divided among the GPUs, and if a setting of `run` is invalid or does not fit the model.
    """
    if run.start.folder:
        raise ValueError("--budget chooses the model's shape, so the run cannot start from another model's weights")
    # Check the other settings first; placeholders stand for those that the budget chooses.
    without_warmup = replace(run.optimizer, warmup_steps=0)
    validate(replace(run, model=replace(run.model, width=_HEAD_WIDTH, heads=1), optimizer=without_warmup))
    gpu = with_precision(gpu, run.engine.precision)
    gpu_hours = dollars / dollars_per_hour
    flops = gpu_hours * 3600 * gpu.tflops * 1e12 * utilisation
    if gpu_hours > _MAX_GPU_HOURS:
        raise ValueError(f"--budget {dollars:g} buys {gpu_hours:g} hours of a GPU: lower it")

    # The larger a model, the fewer tokens per parameter. Bisection finds the index of the smallest model with at most
    # TOKENS_PER_PARAMETER tokens per parameter. Either it or the next smaller model is nearest to that number.
    def is_large(heads: int) -> bool:
        return _tokens_per_parameter(_shaped(run, heads, flops)[1]) <= TOKENS_PER_PARAMETER

    index = bisect_left(_HEAD_COUNTS, True, key=is_large)
    candidates = [_shaped(run, heads, flops) for heads in _HEAD_COUNTS[max(index - 1, 0) : index + 1]]
    shaped, model = min(
        candidates, key=lambda candidate: abs(math.log(_tokens_per_parameter(candidate[1]) / TOKENS_PER_PARAMETER))
    )
    if not model["steps"]:
        raise ValueError(f"--budget {dollars:g} does not buy a step of the smallest model: raise it")
    try:
        validate(shaped)
    except ValueError as error:
        raise ValueError(f"--budget {dollars:g} buys a run that does not fit its settings: {error}") from None
    return {
        "dollars": dollars,
        "gpu_hours": gpu_hours,
        "gpu": gpu.name,
        "gpus_per_node": gpu.per_node,
        "flops": flops,
        "utilisation": utilisation,
        "rule": RULE,
        "model": model | {"settings": f"{flags} {model['settings']}"},
        "layouts": plan(shaped, gpus, gpu, utilisation, 1, base)["layouts"],
        "recipes": {name: _recipe_cost(RECIPES[name], dollars, gpu_hours, flops) for name in _PUBLISHED},
    }


def _tokens_per_parameter(model: dict[str, Any]) -> float:
    return float(max(model["tokens"], 1) / model["layer_parameters"])


def _shaped(run: RunConfig, heads: int, flops: float) -> tuple[RunConfig, dict[str, Any]]:
    """Returns (`run` with a model of `heads` heads, trained with `flops` operations; a dict of this model's size,
    training tokens, steps and command-line options).

    XLM-E's Base has width 768, 12 discriminator layers and 4 generator layers; XL has width 1,536, 48 discriminator
    layers and 8 generator layers. So here the number of discriminator layers grows as the square of the width, and the
    number of generator layers as the width.
    """
    width = heads * _HEAD_WIDTH
    shape: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "feed_forward": 4 * width,
        "discriminator_layers": max(2, round(12 * (width / 768) ** 2)),
        "generator_layers": max(1, round(4 * width / 768)),
    }
    if run.model.body == "xlme" and shape["discriminator_layers"] > 12:  # deeper than Base, as Large and XL
        shape["norm"] = "pre"
    run = replace(run, model=replace(run.model, **shape))
    row_tokens = run.model.max_positions
    steps = int(flops / flops_per_step(run, row_tokens))
    warmup = min(run.optimizer.warmup_steps, steps // 10)
    options = [f"--model.{name.replace('_', '-')} {value}" for name, value in shape.items()]
    options += [f"--train.steps {steps}", f"--optimizer.warmup-steps {warmup}"]
    run = replace(run, train=replace(run.train, steps=steps), optimizer=replace(run.optimizer, warmup_steps=warmup))
    counts = count_parameters(run)
    main_encoder = next(name for name in counts if name != "embedding")
    return run, {
        "network": main_encoder,
        "parameters": counts[main_encoder],
        "layer_parameters": counts[main_encoder] - counts["embedding"],
        "tokens": steps * int(sum(run.data.mean_rows)) * row_tokens,
        "steps": steps,
        "settings": " ".join(options),
    }


def _recipe_cost(run: RunConfig, dollars: float, gpu_hours: float, flops: float) -> dict[str, float]:
    """Size, steps, GPU-hours and dollars of a whole published `run`, without time for transfers, and `share`: `flops` /
    all operations of that run."""
    share = flops / (flops_per_step(run, run.model.max_positions) * run.train.steps)
    return {
        "parameters": count_parameters(run)["discriminator"],
        "steps": run.train.steps,
        "gpu_hours": gpu_hours / share,
        "dollars": dollars / share,
        "share": share,
    }
