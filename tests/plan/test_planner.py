"""The command's figures: keys, legality, ranking, and the paper's own run as a check."""

import itertools
import json
import re
import shlex
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from tests.launch import ROOT
from xlme_ds.cli import parse
from xlme_ds.config import EngineConfig, Training
from xlme_ds.counting import count_parameters
from xlme_ds.plan import run
from xlme_ds.plan.__main__ import PlanSettings, main
from xlme_ds.plan.budget import _shaped
from xlme_ds.plan.layout import ParallelLayout
from xlme_ds.plan.memory import _moments, peak_memory
from xlme_ds.plan.planner import _engines, _search, check_numbers, plan
from xlme_ds.plan.printed import _chosen, _operations, _recipe_layout, _round, _time, print_budget
from xlme_ds.plan.speed import GPU, GPUS, UTILISATION, communication_bytes, parse_gpu, speed
from xlme_ds.recipes import RECIPES, SUMMARIES, recipe
from xlme_ds.validate import validate

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")


@pytest.fixture(scope="module")
def xl() -> dict:
    return plan(recipe("xl_zero3"), 64, parse_gpu("a100-80g"), layouts=1000)


def test_keys(xl: dict) -> None:
    assert {"parameters", "flops", "memory_per_gpu_gib", "fits", "tokens_per_s", "days", "layouts"} <= xl.keys()
    assert {"paper_convention", "standard"} <= xl["flops"].keys()
    memory = xl["memory_per_gpu_gib"]
    assert tuple(memory) == (*KINDS, "total")
    assert sum(memory[kind] for kind in KINDS) == pytest.approx(memory["total"], abs=0.01)


def test_the_command_and_the_api_assume_the_planners_utilisation() -> None:
    """They name it themselves, because the planner loads torch."""
    assert PlanSettings.utilisation == signature(run).parameters["utilisation"].default == UTILISATION


def test_layouts_fit_and_are_ranked(xl: dict) -> None:
    layouts = xl["layouts"]
    assert xl["layouts_that_fit"] >= len(layouts) > 20
    speeds = [one["tokens_per_s"] for one in layouts]
    assert all(later <= earlier + 100 for earlier, later in itertools.pairwise(speeds))
    assert all(one["fits"] and one["memory_per_gpu_gib"]["total"] <= 72 for one in layouts)
    engines = {one["settings"].split("--data")[0] for one in layouts}
    assert any("zero1" in engine and "pipe" not in engine for engine in engines)
    assert any("--engine.offload-optimizer cpu" in engine for engine in engines)
    assert {stages for stages in (2, 4, 8, 16, 32) if any(f"stages {stages} " in engine for engine in engines)} >= {
        2,
        4,
        8,
    }


@pytest.mark.parametrize(
    "command",
    [
        "--recipe xl_zero3",
        "--recipe xl_pipe",
        "--recipe xl_zero3 --engine.offload-optimizer cpu",
        "--recipe base_zero1 --engine.kind pipeline --engine.deepspeed pipe_zero1 --engine.balance 5 7",
    ],
)
def test_settings_are_ready_for_the_command_line(command: str) -> None:
    """Added to the command that the plan was for they give the layout that was priced, and a run of it is legal."""
    run = parse("plan", PlanSettings, "", command.split()).run
    layouts = plan(run, 64, parse_gpu("a100-80g"), layouts=1000)["layouts"]
    for one in [*layouts[:2], *layouts[2::20]]:
        run = parse("plan", PlanSettings, "", [*command.split(), *one.pop("settings").split()]).run
        validate(run, 64)
        again = plan(run, 64, parse_gpu("a100-80g"), layouts=0)
        assert {key: again[key] for key in one} == one


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "quickstart"])
def test_recipes_fit_the_gpus_they_are_for(name: str) -> None:
    """By their summaries: as "fits 4 or more GPUs of 24 GB"."""
    machine = re.search(r"\(fits (?:a GPU|(\d+) or more GPUs) of (\d+) GB\)\.$", SUMMARIES[name])
    assert machine is not None, SUMMARIES[name]
    for gpus in (int(machine[1] or 1), 64):
        result = plan(recipe(name), gpus, parse_gpu(f"{machine[2]},300"), layouts=0)
        assert result["fits"], (gpus, result["memory_per_gpu_gib"])


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("base", "a100-80g"), ("large", "a100-80g"), ("xl", "a100-80g"), ("base", "h200"), ("large", "h200")],
)
def test_recipes_for_any_number_of_gpus_are_near_the_fastest_layout(name: str, gpu: str) -> None:
    """Compared with all layouts. Left out are the recipes with an engine in their names, for less memory or slow
    networks (`_pipe`), and XL on H200s, which have room for larger micro-batches and on 512 are faster with a
    pipeline."""
    for gpus in (8, 64, 512):
        found = plan(recipe(name), gpus, parse_gpu(gpu), layouts=1)
        (fastest,) = found["layouts"]
        assert found["fits"] and found["tokens_per_s"] >= 0.97 * fastest["tokens_per_s"], (gpus, fastest["settings"])


def test_the_engine_follows_the_micro_batches_of_a_step() -> None:
    """Base's 2,048 rows are two micro-batches of 64 on 16 GPUs, and one on 32."""
    stages = [ParallelLayout.of(recipe("base"), gpus, "bf16", 512).zero["stage"] for gpus in (8, 16, 32, 512)]
    assert stages == [1, 1, 3, 3]
    assert [validate(recipe("base"), world).engine.deepspeed for world in (16, 32)] == ["zero1", "zero3"]
    with pytest.raises(ValueError, match=r"engine.deepspeed auto is for pre-training: set it to zero1 or zero3"):
        validate(Training("xnli", engine=EngineConfig(deepspeed="auto")))


def test_layouts_do_not_depend_on_the_one_that_the_run_has() -> None:
    own = EngineConfig(
        kind="pipeline", deepspeed="pipe_zero1", balance=(3, 9), pipeline_stages=2, pipeline_schedule="dualpipev",
        gradient_precision="bf16", offload_optimizer="cpu", offload_parameters="cpu",
    )  # fmt: skip
    assert list(_engines(own, 8)) == list(_engines(EngineConfig(), 8)) and own.nvme_folder == EngineConfig().nvme_folder


def test_translation_is_not_planned_under_zero_3() -> None:
    layouts = plan(recipe("xlm_umt"), 8, layouts=1000)["layouts"]
    assert {one["settings"].partition("zero")[2][0] for one in layouts} == {"1", "2"}


def test_one_replica_holds_no_copies_for_sums_over_ranks() -> None:
    """With one micro-batch its gradients are bf16, and sums over ranks would be float32."""
    run = recipe("base")
    run = replace(run, engine=replace(run.engine, deepspeed="zero1"), data=replace(run.data, micro_batch=2048))
    one, two = (_moments(ParallelLayout.of(run, gpus, "bf16", 512), 0) for gpus in (1, 2))
    assert all(memory["buffers"] == 0 for memory in one.values()) and two["update"]["buffers"] > 0
    # Two buffers of the table's size would be more than all gradients; this rank's half of the sums is kept too.
    parameters = count_parameters(run)["trained_total"]
    assert two["reduction"]["buffers"] == pytest.approx(4 * (parameters + parameters / 2), rel=1e-3)


def test_memory_is_that_of_the_phase_that_predicts_most() -> None:
    run = recipe("base")

    def memory(*fractions: float) -> float:
        steps = (1000,) * (len(fractions) - 1)
        data = replace(run.data, phase_steps=steps, phase_mask_fractions=fractions)
        return sum(peak_memory(ParallelLayout.of(replace(run, data=data), 8, "fp32", 512))[1].values())

    assert memory(0.15, 0.5) == memory(0.5, 0.15) == memory(0.5) > memory(0.15)


def test_exposed_bytes_counted_by_hand() -> None:
    """XL on 64 GPUs, 4 micro-batches: Ψ parameters, of which τ are in tables, whose part of 63/64 is sent."""
    run, gpu = recipe("xl"), GPU("slow", 1000, 1e6, link=1, network=1)  # computing takes no time, sending all of it
    for engine in ("zero1", "zero2", "zero3"):
        chosen = replace(run, engine=EngineConfig(deepspeed=engine))
        layout = ParallelLayout.of(chosen, 64, "bf16", 512)
        sizes, sent = layout.sizes(0), communication_bytes(layout)
        total, tables = (63 / 64 * size for size in (sizes.total, sizes.tables))
        assert layout.accumulation == 4
        if engine == "zero1":
            assert sent["gradients"] == pytest.approx(4 * total) and sent["weights"] == pytest.approx(2 * total)
            assert sent["exposed"] == pytest.approx(4 * tables + 2 * total)
        elif engine == "zero2":  # an all-reduce in every micro-batch
            assert sent["gradients"] == pytest.approx(4 * 2 * 4 * total) and sent["weights"] == pytest.approx(2 * total)
            assert sent["exposed"] == pytest.approx(4 * 2 * 4 * tables + 2 * total)
        else:
            assert sent["gradients"] == pytest.approx(4 * 4 * total) and sent["weights"] == pytest.approx(4 * 2 * total)
            assert sent["exposed"] == pytest.approx(4 * (4 + 2) * tables)
        everything, rate = sent["gradients"] + sent["weights"], 0.7e9
        costs = speed(chosen, layout, gpu, 0.4)
        window = costs["compute"] * {"zero1": 2 / 3 / 4, "zero2": 2 / 3, "zero3": 1}[engine]
        assert costs["transfer"] == pytest.approx(everything / rate - window)


@pytest.mark.parametrize(("gpus", "among_replicas", "among_stages"), [(8, 10, 10), (16, 10, 1), (32, 1, 1)])
def test_what_stays_on_a_node_takes_its_links(gpus: int, among_replicas: int, among_stages: int) -> None:
    """Two stages on nodes of 8, whose links are ten times as fast as those between them; all bytes are exposed."""
    run, gpu = recipe("large_pipe"), GPU("slow", 1000, 1e6, link=10, network=1)
    layout = ParallelLayout.of(replace(run, data=replace(run.data, micro_batch=1)), gpus, "bf16", 512)
    layout = replace(layout, zero={**layout.zero, "overlap_comm": 1})  # as a user's file may have it
    assert len(layout.stages) == 2 and layout.replicas == gpus // 2
    sent, rate = communication_bytes(layout), 0.7e9
    assert sent["exposed"] == sent["total"] == sent["gradients"] + sent["weights"] + sent["stages"]
    expected = sent["stages"] / among_stages + (sent["gradients"] + sent["weights"]) / among_replicas
    assert speed(run, layout, gpu, 0.4)["transfer"] == pytest.approx(expected / rate)
    whole = ParallelLayout.of(recipe("large_zero2"), gpus // 2, "bf16", 512)
    all_sent = communication_bytes(whole)
    found = speed(recipe("large_zero2"), whole, gpu, 0.4)["transfer"]
    at_least = (all_sent["gradients"] + all_sent["weights"]) / rate / among_replicas
    assert 0.9 * at_least < found <= at_least, "little of it is hidden behind such a fast GPU"


def test_weights_on_nvme_are_not_prefetched() -> None:
    """As the engine has it: so fewer are held, and more are gathered again."""
    engine = EngineConfig(deepspeed="zero3", offload_parameters="cpu")
    nvme = replace(engine, offload_parameters="nvme", nvme_folder="/nvme")
    run = replace(recipe("xl"), model=replace(recipe("xl").model, vocabulary_blocks=16))
    ram, disk = (ParallelLayout.of(replace(run, engine=one), 8, "bf16", 512) for one in (engine, nvme))
    assert ram.zero["stage3_prefetch_bucket_size"] == 50_000_000 and disk.zero["stage3_prefetch_bucket_size"] == 0
    assert sum(peak_memory(disk)[1].values()) < sum(peak_memory(ram)[1].values())
    assert communication_bytes(disk)["weights"] > communication_bytes(ram)["weights"]


def test_what_a_number_of_processes_cannot_run_is_not_planned() -> None:
    """On two GPUs a block of XL's table, 1/8 or 1/4 of its 805,306,368 elements, is shared into 50 or 101 million: the
    buffers have 100 million."""
    engine = EngineConfig(deepspeed="zero3", offload_parameters="nvme", nvme_folder="/nvme")
    run = replace(recipe("xl"), engine=engine)
    plan(replace(run, model=replace(run.model, vocabulary_blocks=8)), 2)
    with pytest.raises(ValueError, match=r"engine.offload_parameters nvme has buffers of 100000000 .* to 5$"):
        plan(replace(run, model=replace(run.model, vocabulary_blocks=4)), 2)


@pytest.mark.parametrize("gpus", [1, 8])
def test_offloaded_bytes_counted_by_hand(gpus: int) -> None:
    """XL in micro-batches of 8 of its 2,048 rows: each process moves its share of the optimizer once a step, 12 bytes a
    parameter both ways, 4 of gradients and 2 of weights; and 2 of weights for both passes of every micro-batch."""
    run, times = replace(recipe("xl"), model=replace(recipe("xl").model, vocabulary_blocks=16)), []
    for parameters in ("none", "cpu", "nvme"):
        places = dict(
            offload_optimizer="cpu", offload_parameters=parameters, nvme_folder="/local" if parameters == "nvme" else ""
        )
        engine = EngineConfig(deepspeed="zero3_offload", **places)  # type: ignore[arg-type]
        found = plan(replace(run, engine=engine, data=replace(run.data, micro_batch=8)), gpus, parse_gpu("a100-80g"))
        assert found["accumulation"] == 256 // gpus
        times.append(found["seconds_per_step"]["offload"])
    share = plan(run)["parameters"]["trained_total"] / gpus / 10e9  # seconds of a byte of each, at 10 GB/s
    assert times[0] == pytest.approx((2 * 12 + 4 + 2) * share, rel=1e-3)
    assert times[1] - times[0] == pytest.approx(2 * 256 // gpus * 2 * share, rel=1e-3)
    assert times[2] == times[1]


def test_a_run_in_fp32_is_counted_in_fp32() -> None:
    """An A100's data sheet has 19.5 TFLOP/s in float32 for 312 in bf16, and a weight is twice as large."""
    run = recipe("base_zero1")
    exact = replace(run, engine=EngineConfig(deepspeed="zero1", precision="fp32"))
    half, whole = (plan(each, 8) for each in (run, exact))
    assert whole["seconds_per_step"]["compute"] == pytest.approx(
        half["seconds_per_step"]["compute"] * 312 / 19.5, rel=1e-3
    )
    assert whole["hardware"]["precision"] == "fp32" and whole["hardware"]["peak_tflops"] == 19.5
    assert whole["memory_per_gpu_gib"]["total"] > half["memory_per_gpu_gib"]["total"]
    assert plan(exact, 8, parse_gpu("v100-32g"))["tokens_per_s"] > 0
    with pytest.raises(ValueError, match=r"engine\.precision fp32 has no rate on 80,300: leave it at auto"):
        plan(exact, 8, parse_gpu("80,300"))
    with pytest.raises(ValueError, match=r"engine\.precision bf16 has no rate on v100-32g"):
        plan(replace(run, engine=EngineConfig(deepspeed="zero1", precision="bf16")), 8, parse_gpu("v100-32g"))


def test_the_papers_run() -> None:
    """1.7 days on 64 A100 for Base are 27K tokens/s a GPU: what our count makes of that is a share of the peak."""
    run, published = recipe("base_zero1"), 1.7
    per_gpu = 2 * 2048 * 512 * 125_000 / (published * 86_400 * 64)
    assert per_gpu == pytest.approx(27_900, rel=0.01)
    share = plan(run)["flops"]["per_step"] * 125_000 / (published * 86_400 * 64 * 312e12)
    assert share == pytest.approx(0.083, abs=0.001)
    found = plan(run, 64, parse_gpu("a100-80g"), utilisation=0.1)
    assert 0.05 < found["of_peak"] < 0.1 and 1.4 < found["days"] < 2.8


def test_more_stages_hold_less_of_the_model_and_more_replicas_less_of_the_optimizer() -> None:
    run = recipe("large_pipe")
    two = peak_memory(ParallelLayout.of(run, 2, "bf16", 512))[1]
    assert two["weights"] < peak_memory(ParallelLayout.of(recipe("large_zero2"), 2, "bf16", 512))[1]["weights"]
    assert peak_memory(ParallelLayout.of(run, 64, "bf16", 512))[1]["optimizer"] == pytest.approx(two["optimizer"] / 32)


@pytest.mark.parametrize(
    ("gpus", "stages", "idle"),
    [(64, 2, (1, 8)), (8, 2, (1, 64)), (64, 4, (3, 16)), (16, 16, (15, 256))],
)
def test_the_pipelines_bubble_counted_by_hand(gpus: int, stages: int, idle: tuple[int, int]) -> None:
    """2,048 rows over gpus / stages replicas, 8 a micro-batch, give the working slots; first the last stage waits for
    stages − 1.

    Filling and emptying together, a stage waits stages − 1 times as long as a micro-batch takes, forward and backward.
    """
    run = parse("plan", PlanSettings, "", ["--recipe", "large_pipe", "--engine.pipeline-stages", str(stages)]).run
    of = speed(run, ParallelLayout.of(run, gpus, "bf16", 512), parse_gpu("a100-80g"), 0.4)
    waiting, working = idle
    assert of["bubble"] == pytest.approx(of["compute"] * waiting / working) and of["compute"] > 0
    assert of["step"] == pytest.approx(of["compute"] * (1 + waiting / working) + of["transfer"] + of["offload"])
    assert of["tokens_per_s"] == pytest.approx(2 * 2048 * 512 / of["step"])


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 16])
def test_a_stage_holds_as_many_micro_batches_as_in_deepspeeds_schedule(micro_batches: int) -> None:
    run = parse("plan", PlanSettings, "", ["--recipe", "large_pipe", "--engine.pipeline-stages", "4"]).run
    layout = replace(ParallelLayout.of(run, 4, "bf16", 512), accumulation=micro_batches)
    for stage in range(4):
        commands = itertools.chain(*TrainSchedule(micro_batches, 4, stage).steps())
        held = itertools.accumulate(isinstance(one, ForwardPass) - isinstance(one, BackwardPass) for one in commands)
        assert layout.in_flight(stage) == max(held)


def test_gpus_by_name_and_by_figures() -> None:
    assert parse_gpu("h200") is GPUS["h200"]
    short = {"h100": "h100-80g", "a100": "a100-80g", "v100": "v100-32g", "a10": "a10-24g"}
    assert {name: parse_gpu(name).name for name in short} == short
    assert parse_gpu("48,181.05") == GPU("48,181.05", 48, 181.05)
    assert (parse_gpu("0.001,1000000").memory_gib, parse_gpu("1000000,0.001").tflops) == (0.001, 0.001)
    assert not plan(recipe("xl_zero3"), 1, parse_gpu("a10-24g"), layouts=0)["fits"]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_command_takes_a_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = command(capsys, "--recipe", "large_zero2", "--gpus", "8", "--gpu", "h100-80g", "--utilisation", "0.3")
    assert found["hardware"]["gpus"] == 8 and found["assumptions"]["utilisation"] == 0.3
    faster = command(capsys, "--recipe", "large_zero2", "--gpus", "8", "--gpu", "h100-80g", "--utilisation", "0.6")
    assert faster["tokens_per_s"] > 1.5 * found["tokens_per_s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "3"], "data.mono_rows 2048 cannot be divided among 3 processes: choose 2064 rows, or"),
        (
            ["--gpus", "8", "--data.micro-batch", "100"],
            "data.mono_rows 2048 does not divide into 8 processes × 3 micro-batches",
        ),
        (["--gpus", "0"], "gpus is 0: it must be at least 1"),
        (["--gpu", "a999"], " gpu a999 is not known: choose one of h200"),
        (["--dollars-per-hour", "0"], "--dollars-per-hour 0.0: it must be positive"),
        (["--budget", "500"], "--budget needs the price of a GPU: add --dollars-per-hour"),
        (["--dollars-per-hour", "inf"], "--dollars-per-hour inf: it must be positive"),
        (["--budget", "0", "--dollars-per-hour", "1"], "--budget 0.0: it must be positive"),
        (["--budget", "inf", "--dollars-per-hour", "1"], "--budget inf: it must be positive"),
        (["--budget", "1e300", "--dollars-per-hour", "1e-300"], "--budget 1e+300 buys inf hours of a GPU: lower it"),
        (["--budget", "1e-9", "--dollars-per-hour", "1"], "--budget 1e-09 does not buy a step"),
        (["--budget", "9", "--dollars-per-hour", "1", "--model.vocabulary-blocks", "0"], "vocabulary_blocks is 0"),
        (
            ["--budget", "9", "--dollars-per-hour", "1", "--data.phase-steps", "90000"],
            "buys a run that does not fit "
            "its settings: data.phase_steps 90000 must be positive and add up to less than train.steps",
        ),
        (
            ["--budget", "9", "--dollars-per-hour", "1", "--schedule.name", "wsd", "--schedule.decay-steps", "90000"],
            "and schedule.decay_steps 90000 exceed train.steps",
        ),
        (["--budget", "1e11", "--dollars-per-hour", "1"], "it must be at most 1,000,000,000"),
        (["--budget", "9", "--dollars-per-hour", "1", "--data.mono-rows", "0", "--data.para-rows", "0"], "mono_rows"),
        (["--gpu", "80,inf"], " gpu 80,inf: memory and TFLOP/s must be positive"),
        (["--gpu", "nan,100"], " gpu nan,100: memory and TFLOP/s must be positive"),
        (["--budget", "1e30", "--dollars-per-hour", "1"], "--budget 1e+30 buys 1e+30 hours of a GPU: lower it"),
        (["--gpu", "1e308,1e308"], " gpu 1e308,1e308: memory and TFLOP/s must be positive, from 0.001 to 1,000,000"),
        (["--gpu", "80,1e-320"], "memory and TFLOP/s must be positive, from 0.001"),
        (["--utilisation", "1e-320"], "utilisation is 1e-320: it must be above 0 (1e-6 at least)"),
        (["--details", "--json"], "--details is for a plan in words: leave it out with --budget and --json"),
        (["--details", "--budget", "5", "--dollars-per-hour", "1"], "--details is for a plan in words"),
        (["--utilisation", "1.5"], "utilisation is 1.5: it must be above 0"),
        (
            ["--engine.kind", "pipeline", "--engine.deepspeed", "pipe_zero1", "--gpus", "3"],
            " gpus 3 is not a multiple",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--recipe", "base_zero1", *arguments])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


def test_the_plain_engine_is_not_planned() -> None:
    with pytest.raises(ValueError, match="plan for deepspeed or pipeline"):
        plan(parse("plan", PlanSettings, "", ["--recipe", "base_zero1", "--engine.kind", "plain"]).run)


def test_a_gpu_has_its_name_in_capitals_too() -> None:
    assert parse_gpu("H100") is parse_gpu("h100") is GPUS["h100-80g"]


def test_the_table_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    """Time at a tenth of the peak, and GiB a GPU, of each recipe, in docs/howto/gpus.md: what the command prints."""
    page = (ROOT / "docs/howto/gpus.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(base|large|xl)` \| (.*) \|$", page, re.M)
    assert [name for name, _ in rows] == ["base", "large", "xl"]
    for name, cells in rows:
        for cell, gpus in zip(cells.split(" | "), (8, 64, 512), strict=True):
            first = printed(capsys, "--recipe", name, "--gpus", str(gpus), "--utilisation", "0.1")[0]
            assert f"{name} on {gpus} × a100-80g: {cell.partition(' (')[0]} a GPU, " in first, name


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_the_first_line_is_the_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--recipe", "large", "--gpus", "64", "--gpu", "h100"]
    costs = plan(recipe("large"), 64, parse_gpu("h100"))
    (best, *_) = costs["layouts"]
    days, hours = costs["days"], costs["gpu_hours"]
    assert costs["fits"] and days <= 1.02 * best["days"], "so the recipe's own layout is the answer"
    assert hours == pytest.approx(days * 24 * 64, rel=1e-3)
    first, _, launched, _, hosts, *_ = printed(capsys, *words, "--dollars-per-hour", "2.5")
    said = f"large on 64 × h100-80g: {printed_days(days)}, {costs['memory_per_gpu_gib']['total']:.1f} GiB a GPU, "
    assert first == said + f"{hours:,.0f} GPU-hours, ${2.5 * hours:,.0f} (assumed: 40% of peak)"
    trained = "pretrain --recipe large --data DATA --heldout HELDOUT --out OUT"
    assert launched == f"  xlme launch --hostfile HOSTS --gpus 8 {trained}"
    assert hosts.startswith("HOSTS is a hostfile of 8 machines")
    of_eight = printed(capsys, *words[:2], "--gpus", "8", *words[4:], "--no-details", "--no_json")[2]
    assert of_eight.startswith("  xlme launch --gpus 8 pretrain ") and "--no" not in of_eight
    twelve = ["--recipe", "base", "--data.mono-rows", "48", "--data.para-rows", "48", "--data.micro-batch", "1"]
    odd = printed(capsys, *twelve, "--gpus", "12")  # not twice 8, which is more
    assert odd[2].startswith("  xlme launch --hostfile HOSTS --gpus 6 pretrain ") and "of 2 machines" in odd[4]
    assert printed(capsys, "--recipe=large", "--gpus=64", *words[4:], "--dollars_per_hour", "2.5")[2] == (
        launched.replace("--recipe large", "--recipe=large")
    )
    lines = printed(capsys, *words)
    assert "$" not in lines[0] and len([line for line in lines if "GiB a GPU: --engine.kind" in line]) == 4
    assert len(lines) < 16
    as_json = command(capsys, *words, "--dollars-per-hour", "2.5", "--layouts", "3")
    assert [one["settings"] for one in as_json["layouts"]] == [
        line.rpartition(": ")[2] for line in lines if "GiB a GPU: --engine.kind" in line
    ][:3]
    assert all(costs["dollars"] == 2.5 * costs["gpu_hours"] for costs in (as_json, *as_json["layouts"]))
    details = printed(capsys, *words, "--details")
    assert details[:8] == lines[:8] and any("large: parameters" in line for line in details)


def printed_days(days: float) -> str:
    hours = round(days * 24 * 60) // 60
    return f"{days:.3g} days" if days >= 1 else f"{hours} h {round(days * 24 * 60) % 60:02} min"


def test_the_printed_command_has_each_flag_of_a_layout_once(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model.activation-checkpointing", "--data.micro-batch", "4", "--engine.offload-optimizer=cpu"]
    lines = printed(capsys, "--recipe", "base", "--gpus", "8", "--gpu", "h100", *given)
    (command,) = (line for line in lines if line.startswith("  xlme launch"))
    flags = [word.removeprefix("--model.no-").removeprefix("--model.") for word in command.split() if "--" in word]
    assert len(flags) == len(set(flags)) and "--model.no-activation-checkpointing" in command, command
    own = plan(parse("plan", PlanSettings, "", ["--recipe", "base", *given]).run, 8, parse_gpu("h100"))
    slower = "The layout of the settings takes 1.8 days with"  # offloading is slow
    assert any(line.startswith(slower[:35]) and line.endswith("; the command has the fastest one.") for line in lines)
    assert f"takes {printed_days(own['days'])} with {own['memory_per_gpu_gib']['total']:.1f} GiB a GPU" in str(lines)
    assert "The layout of the settings" not in str(printed(capsys, "--recipe", "base", "--gpus", "8"))
    small = printed(capsys, "--recipe", "base", "--gpu", "a10")
    assert "The layout of the settings does not fit: it needs 30.8 GiB a GPU; the command has the fastest one." in small
    given = ["--data.micro-batch", "16", "--engine.deepspeed=zero1"]  # as fast, by the estimate
    lines = printed(capsys, "--recipe", "base", "--gpus", "8", "--gpu", "h100", *given)
    assert "The layout of" not in str(lines) and f" pretrain --recipe base {' '.join(given)} --data DATA " in lines[2]


@pytest.mark.parametrize("budget", [[], ["--budget", "100", "--dollars-per-hour", "2"]])
def test_a_layout_replaces_that_of_the_recipe_and_of_the_file(
    budget: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not only that of the flags, which the printed command leaves out: with `--recipe xl_pipe` it had four stages, and
    with a file, silently, the file's offloading."""
    (path := tmp_path / "mine.toml").write_text(
        'recipe = "base_zero1"\n[engine]\noffload_optimizer = "cpu"\n', encoding="utf-8"
    )
    for source, flag, value in (("--recipe=xl_pipe", "--engine.pipeline-stages", "2"),
                                (f"--config={path}", "--engine.offload-optimizer", "none")):  # fmt: skip
        own = ["--engine.kind", "deepspeed", "--engine.deepspeed", "zero1", flag, value]
        layout = command(capsys, source, "--gpus", "8", "--layouts", "1", *own, *budget)["layouts"][0]["settings"]
        engine = parse("plan", PlanSettings, "", [source, *layout.split()]).run.engine
        assert (engine.kind, engine.pipeline_stages, engine.offload_optimizer) == ("deepspeed", 2, "none"), layout


def test_micro_batches_that_are_equally_fast_are_one_layout() -> None:
    layouts = _search(recipe("base"), 8, parse_gpu("h100"), UTILISATION)
    ways = plan(recipe("base"), 8, parse_gpu("h100"), layouts=1000)["layouts"]
    kinds = [(re.sub(r"micro-batch \d+", "", one["settings"]), f"{one['tokens_per_s']:.4g}") for one in layouts]
    assert len(set(kinds)) <= len(ways) < len(layouts)
    assert ways[0] == layouts[0] and "--data.micro-batch 128 " in ways[0]["settings"]
    of_first = [one["settings"] for one, kind in zip(layouts, kinds, strict=True) if kind == kinds[0]]
    assert len(of_first) == 8 and sum(one["settings"] in of_first for one in ways) == 1


@pytest.mark.parametrize(("days", "fits", "own"), [(1.02, True, True), (1.021, True, False), (0.5, False, False)])
def test_the_runs_own_layout_is_taken_where_it_is_nearly_as_fast(days: float, fits: bool, own: bool) -> None:
    fastest = {"days": 1.0, "fits": True}
    result = {"days": days, "fits": fits, "layouts": [fastest]}
    assert _chosen(result) is (result if own else fastest)
    assert _chosen(alone := {"days": days, "fits": fits, "layouts": []}) is alone


def test_a_plan_in_fp32_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--recipe", "base_zero1", "--gpu", "v100")[0].endswith("(assumed: 40% of peak, in fp32)")
    assert printed(capsys, "--recipe", "base_zero1", "--gpu", "a100")[0].endswith("(assumed: 40% of peak)")


def test_a_layout_that_only_the_settings_have_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters in host memory, which the planner does not try by itself."""
    offload = ["--engine.deepspeed", "zero3_offload", "--engine.offload-parameters", "cpu"]
    words = ["--recipe", "xl_zero3", "--engine.offload-optimizer", "cpu", "--gpu", "12,100", *offload]
    first, _, launched, *_ = printed(capsys, *words)
    assert "no layout fits" not in first and launched.startswith("  xlme pretrain --recipe xl_zero3 ")
    assert not plan(parse("plan", PlanSettings, "", words[:4] + offload).run, 1, parse_gpu("12,100"))["layouts"]


def test_a_small_model_has_no_time_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--recipe", "quickstart")
    assert lines[0].startswith("quickstart on 1 × a100-80g: less than a minute, 0.2 GiB a GPU, under 0.01 GPU-hours")
    assert not any(" 0 days" in line or "0.00 days" in line for line in lines)
    assert plan(recipe("quickstart"))["days"] > 0


def test_a_thousand_days_have_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = printed(capsys, "--recipe", "xl", "--gpu", "v100-32g")
    hours = int(re.search(r"([\d,]+) GPU-hours", first)[1].replace(",", ""))  # type: ignore[index]
    assert 5_000 < hours / 24 < 6_000 and f": {round(hours / 24, -1):,.0f} days, " in first


def test_numbers_at_their_limits_are_taken() -> None:
    for gpus, utilisation in ((1, 1.0), (None, 1e-6)):
        check_numbers(gpus, utilisation, 1)


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (59 / 86_400, "less than a minute"),
        (60 / 86_400, "1 min 00 s"),
        (0.5, "12 h 00 min"),
        (1.0049, "1 day"),
        (1.0051, "1.01 days"),
        (1.05, "1.05 days"),
        (12.345, "12.3 days"),
        (999.4, "999 days"),
        (999.5, "1,000 days"),
        (12_345.0, "12,300 days"),
    ],
)
def test_a_time_has_three_digits(days: float, text: str) -> None:
    assert _time(days) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0099, "under 0.01"), (0.01, "0.01"), (9.96, "10"), (10.4, "10"), (12_345.6, "12,346")]
)
def test_hours_and_dollars_are_whole_or_have_two_digits(value: float, text: str) -> None:
    assert _round(value) == text


def test_what_a_budget_pays_of_a_recipe_is_a_share_or_a_number_of_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """$100 of 40 hours: half of a run costs $200 and 80 hours, twelve runs $8.3 and 3.3 hours each."""
    monkeypatch.setenv("COLUMNS", "200")
    model = {"network": "encoder", "parameters": 5e6, "tokens": 1e9, "steps": 1234, "settings": "--recipe base"}
    costs = {
        name: {"parameters": 279e6, "steps": 125_000, "gpu_hours": 40 / share, "dollars": 100 / share, "share": share}
        for name, share in (("half", 0.5), ("nine", 9.0), ("twelve", 12.0))
    }
    result = {"dollars": 100.0, "gpu_hours": 40.0, "gpu": "h100-80g", "flops": 1e20, "utilisation": 0.4, "rule": "R"}
    print_budget(result | {"model": model, "recipes": costs, "layouts": []}, gpus=16)
    printed = capsys.readouterr().out
    assert printed.startswith("$100 buys 40 GPU-hours of h100-80g (2 h 30 min on 16 GPUs): ")
    assert "an encoder of 5M parameters on 1B tokens in 1,234 steps" in printed
    assert "Assumed: 40% of the GPU's peak" in printed and "No layout fits: take more GPUs" in printed
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "279M" in line]
    assert [row[2:] for row in rows] == [
        ["125,000", "80", "$200", "50%"],
        ["125,000", "4.4", "$11", "900%"],
        ["125,000", "3.3", "$8.3", "12 times"],
    ]


def test_details_of_phases_and_of_what_fits() -> None:
    """Phases of 20 and 30 steps of four rows of each task of 64 tokens; and a GPU that is just too small."""
    run = recipe("quickstart")
    data = replace(
        run.data, mono_rows=4, para_rows=4, micro_batch=4, phase_steps=(20,), phase_mask_fractions=(0.15, 0.3)
    )
    model = replace(run.model, max_positions=64)
    run = replace(
        run,
        data=data,
        model=model,
        train=replace(run.train, steps=50),
        optimizer=replace(run.optimizer, warmup_steps=5),
    )
    found = plan(run, 1, parse_gpu("80,300"))
    lines = _operations(found)[1].splitlines()
    assert lines[:2] == [
        "phase 1 from step 0: 1.02e+04 tokens in 20 steps, 15% predicted",
        "phase 2 from step 20: 1.54e+04 tokens in 30 steps, 30% predicted",
    ]
    total = found["memory_per_gpu_gib"]["total"]
    for factor, said in ((1.02, "fits"), (0.98, "does not fit")):
        again = plan(run, 1, parse_gpu(f"{total / 0.9 * factor},300"))
        note = " ".join(_recipe_layout(again)[1].split())
        assert f"({again['fullest_at']}): {said} into {total / 0.9 * factor:g} GiB with 10% of it set aside" in note
        assert f"over the whole step {again['of_peak']:.1%} of peak" in note and "40% of 300 TFLOP/s (bf16)" in note


def test_no_layout_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "xl_zero3", "--model.vocabulary", "9000000", "--gpu", "a10"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("xl_zero3 on 1 × a10-24g: no layout fits: take more GPUs")


def test_a_budget_chooses_shape_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--budget", "500", "--dollars-per-hour", "2"]
    for words, said in (
        (["--model.width", "512", "--train.steps=10"], "--budget chooses --model.width, --train.steps: leave them out"),
        (["--model.norm", "post"], "--budget chooses --model.norm: leave it out"),
        (["--recipe", "continue_xlmr"], "--budget chooses the model's shape, so the run cannot start from another"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, *budget])
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_fastest_layout_is_first_however_slow() -> None:
    """fp32 on eight GPUs, and GPUs of 10 GFLOP/s: speeds that rounding to whole hundreds would make equal."""
    fp32 = recipe("base")
    fp32 = replace(fp32, engine=replace(fp32.engine, precision="fp32"))
    for config, gpu in ((fp32, "h100"), (recipe("base"), "80,0.01")):
        days = [layout["days"] for layout in plan(config, 8, parse_gpu(gpu), layouts=9)["layouts"]]
        assert len(days) > 3 and all(first <= next_one * 1.0002 for first, next_one in itertools.pairwise(days)), days


def test_what_a_budget_buys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """$500 at $2.50 an hour are 200 hours; at 40% of 989.4 TFLOP/s 2.85e20 operations, which the model takes."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--budget", "500", "--dollars-per-hour", "2.5", "--gpu", "h100"]
    found = command(capsys, *words)
    assert found["gpu_hours"] == 200 and found["flops"] == pytest.approx(200 * 3600 * 0.4 * 989.4e12)
    model = found["model"]
    assert model["tokens"] == pytest.approx(20 * model["layer_parameters"], rel=0.15)
    run = parse("plan", PlanSettings, "", model["settings"].split()).run
    assert run == validate(run) and (run.train.steps, run.name) == (model["steps"], "base")
    assert run.optimizer.warmup_steps == min(10_000, model["steps"] // 10)
    cost = plan(run, 8, parse_gpu("h100"))
    assert cost["flops"]["standard"]["both"] == pytest.approx(found["flops"], rel=0.01)
    assert cost["parameters"]["discriminator"] == model["parameters"]
    base = found["recipes"]["base"]
    assert base["share"] == pytest.approx(found["flops"] / plan(recipe("base"))["flops"]["standard"]["both"])
    assert base["gpu_hours"] * base["share"] == pytest.approx(200)
    of_sixteen = printed(capsys, *words, "--gpus", "16")
    assert "(12 h 30 min on 16 GPUs): " in of_sixteen[0] and of_sixteen[4].startswith("HOSTS is a hostfile of 2 machin")
    assert of_sixteen[2].startswith("  xlme launch --hostfile HOSTS --gpus 8 pretrain ")
    assert "(8.33 days on 1 GPU): " in printed(capsys, *words, "--gpus", "1")[0]
    lines = printed(capsys, *words)
    (layout,) = found["layouts"]
    assert lines[2].startswith("  xlme launch --gpus 8 pretrain ") and f" {layout['settings']} --data DATA " in lines[2]
    taken = parse("plan", PlanSettings, "", [*model["settings"].split(), *layout["settings"].split()]).run
    needed = plan(taken, 8, parse_gpu("h100"))["memory_per_gpu_gib"]["total"]
    assert needed == layout["memory_per_gpu_gib"]["total"] <= 72 and lines[4] == f"This takes {needed:.1f} GiB a GPU."
    assert lines[0].startswith("$500 buys 200 GPU-hours of h100-80g (1.04 days on 8 GPUs): a discriminator of 1.75B")
    assert "Hoffmann et al. (2022" in " ".join(lines)
    (line,) = (line for line in lines if re.match(r"\W*base\W", line))
    assert base["dollars"] == pytest.approx(2.5 * base["gpu_hours"])
    assert f" ${base['dollars']:,.0f} " in line and f" {base['gpu_hours']:,.0f} " in line


def test_a_budgets_settings_are_those_that_were_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the settings of the command line, and from a file."""
    (path := tmp_path / "my run.toml").write_text('recipe = "base"\n[data]\nmono_rows = 64\n', encoding="utf-8")
    given = ["--config", str(path), "--objective.name", "corrective"]
    model = command(capsys, "--budget", "100", *given, "--dollars-per-hour=2")["model"]
    run = parse("plan", PlanSettings, "", shlex.split(model["settings"])).run
    assert (run.data.mono_rows, run.objective.name, run.train.steps) == (64, "corrective", model["steps"])
    assert model["parameters"] == count_parameters(run)["discriminator"] and run.model.width == 64 * run.model.heads
    model = command(capsys, "--budget", "10", "--dollars-per-hour", "2", "--recipe", "xlm")["model"]
    assert model["network"] == "encoder"
    assert model["tokens"] == model["steps"] * 4096 * 256, "a step reads the rows of one task"


@pytest.mark.parametrize(("heads", "layers", "of_generator"), [(12, 12, 4), (24, 48, 8), (4, 2, 1)])
def test_a_budgets_shapes_are_those_of_base_and_xl(heads: int, layers: int, of_generator: int) -> None:
    _, model = _shaped(recipe("base"), heads, 1e21)
    shape = f"--model.width {64 * heads} --model.heads {heads} --model.feed-forward {256 * heads} "
    shape += f"--model.discriminator-layers {layers} --model.generator-layers {of_generator} "
    assert model["settings"].startswith(shape) and ("--model.norm pre " in model["settings"]) == (layers > 12)
    run = parse("plan", PlanSettings, "", ["--recipe", "base", *model["settings"].split()]).run
    assert run.optimizer.warmup_steps == min(10_000, model["steps"] // 10) and model["steps"] > 0


def test_a_budget_grows_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        command(capsys, "--budget", budget, "--dollars-per-hour", "1")["model"]["layer_parameters"]
        for budget in ("20", "200", "2000", "20000")
    ]
    assert sizes == sorted(set(sizes))
    for_four = command(capsys, "--budget", "100", "--dollars-per-hour", "1", "--recipe", "large")
    assert for_four["model"]["settings"].startswith("--recipe large ")
