"""The benches' figures by hand: what is timed stands still here, and the clock goes by given seconds."""

import json
import math
import re
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import step as step_bench
from bench.gpu import __main__ as gpu
from bench.gpu import commands, kernels
from bench.gpu.parity import CASES, ON_A_GPU, parity
from bench.gpu.steps import (
    busy_and_pauses,
    measure_matmul,
    median_seconds,
    planner_options,
    run_config,
    step_tokens,
)
from bench.measure import by_turns, listing, markdown, memory, stamp
from bench.peers.steps import HuggingFaceStep, MaskedPositions, PlainTorchStep
from bench.rehearsal import __main__ as rehearsal
from bench.rehearsal.__main__ import Jobs, Rehearsal, finished_tasks
from bench.step import sized
from bench.synthetic import SyntheticSource, synthetic_rows
from xlme_ds.counting import flops_per_step
from xlme_ds.data.rows import BOS, EOS
from xlme_ds.models.tiles import Tiling

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `perf_counter`, to be set."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_figures_as_text() -> None:
    figures = {"rate": 1234.5678, "inner": {"rows": 7, "deep": {"share": 0.5}}}
    assert listing(figures).splitlines() == [
        f"{'rate':<44}{'1,234.6':>12}", "inner", f"  {'rows':<42}{'7':>12}", "  deep", f"    {'share':<40}{'0.5':>12}"
    ]  # fmt: skip
    assert markdown(["a", "b|c"], [["1", "2|3"]]) == "| a | b\\|c |\n| --- | --- |\n| 1 | 2\\|3 |\n"


def test_figures_have_a_date_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stamp()["commit"] == "unknown to git" and re.fullmatch(r"\d{4}-\d\d-\d\d", stamp()["date"])


def test_memory_is_the_kernels_in_bytes() -> None:
    assert memory("VmHWM") == pytest.approx(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.01)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert memory("VmRSS") == pytest.approx(pages * resource.getpagesize(), rel=0.01)
    with pytest.raises(ValueError, match="has no VmNone"):
        memory("VmNone")


def test_a_time_is_the_median_after_the_warm_up(clock: list[float]) -> None:
    runs = iter((100.0, 50.0, 3.0, 9.0, 5.0))

    def run() -> None:
        clock[0] += next(runs)

    assert median_seconds(CPU, {"run": run}, 1, 3, warm_up=2) == {"run": 5.0}


def test_the_rate_of_a_product(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten products of 2·m·k·n operations in 5 s."""

    def product(a: Tensor, b: Tensor) -> None:
        assert (a.shape, b.shape, a.dtype) == ((20, 30), (30, 40), torch.bfloat16)
        clock[0] += 0.5

    monkeypatch.setattr(torch, "mm", product)
    assert measure_matmul(CPU, "bf16", (20, 30, 40), 3)["tflops"] == pytest.approx(2 * 20 * 30 * 40 / 0.5 / 1e12)


def test_what_a_measured_step_tells_the_planner() -> None:
    """237.4 TFLOP/s (docs/results/gpu.json) of the 989.4 in the data sheet."""
    assert planner_options("NVIDIA H200", 237.4) == {"plan_with": "--gpu h200 --utilisation 0.24"}
    assert planner_options("NVIDIA A100-SXM4-80GB", 124.8) == {"plan_with": "--gpu a100-80g --utilisation 0.4"}
    assert planner_options("CPU, x86_64", 1.0) == {}, "the planner does not know it"


def test_a_kernels_time_is_that_of_one_launch(clock: list[float]) -> None:
    def launch(seconds: Iterator[float]) -> None:
        clock[0] += next(seconds)

    runs = {
        name: partial(launch, iter([each for ms in times for each in [ms / 1000] * kernels.LAUNCHES]))
        for name, times in (("a", (3.0, 1.0, 2.0)), ("b", (7.0, 7.0, 4.0)))
    }
    assert median_seconds(CPU, runs, kernels.LAUNCHES, 3, 0) == pytest.approx({"a": 2e-3, "b": 7e-3})


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_every_legal_form_of_a_kernel_is_tried(kernel: str) -> None:
    """Scores of 256 to 1,024 a warp, in the forward pass to 2,048; 16 queries a warp, or keys."""
    forms = set(kernels.candidate_tilings(kernel))
    if kernel == "_backward_distances":
        assert forms == {Tiling(64, 64, warps, stages) for warps in (4, 8) for stages in (2, 3)}
        return
    legal = set()
    for queries in (16, 32, 64, 128):
        for keys in (16, 32, 64, 128):
            if max(queries, keys) > (64 if kernel == "_backward_queries" else 128) or queries * keys in (256, 16384):
                continue
            for warps in (4, 8):
                scores, length = queries * keys / warps, keys if kernel == "_backward_keys" else queries
                if 256 <= scores <= (2048 if kernel == "_forward" else 1024) and length / warps >= 16:
                    legal |= {Tiling(queries, keys, warps, stages) for stages in (2, 3, 4)}
    assert forms == {form for form in legal if (form.queries, form.keys) in kernels.TILES} and len(forms) > 5


def test_what_a_kernel_leaves_unwritten_is_an_error() -> None:
    out = torch.empty(2, 2)
    exact = [torch.tensor([[1.0, -4.0], [2.0, 0.0]]).double()]
    near, part = (
        kernels.Launch(lambda rows=rows: out[:rows].copy_(exact[0][:rows] + 0.5), [out], lambda: [out])
        for rows in (2, 1)
    )
    assert near.errors(exact) == [0.125]
    out.copy_(exact[0])  # of an earlier form
    assert math.isnan(part.errors(exact)[0])


def test_the_reference_of_the_kernels() -> None:
    """Softmax of q·k / √size + gate · d over the keys of the query's item, in loops; gradients by differences."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, tokens, size = 2, 2, 5, 3
    qkv, grad = (torch.randn(shape, generator=generator, dtype=torch.float64)
                 for shape in ((rows, tokens, 3, heads, size), (rows, tokens, heads, size)))  # fmt: skip
    gate = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (size, size, heads))
    distance = torch.randn(heads, 2 * tokens - 1, generator=generator, dtype=torch.float64)
    first = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 2, 2, 2]])
    end = torch.tensor([[5, 5, 5, 5, 5], [2, 2, 5, 5, 5]])
    names = {"qkv": qkv, "gate": gate, "distance": distance, "first": first, "end": end, "grad": grad}
    found = kernels.expected(names)

    def output(qkv: Tensor, u: Tensor, r: Tensor, w: Tensor, d: Tensor) -> Tensor:
        out = torch.zeros(rows, tokens, heads, size, dtype=torch.float64)
        for n in range(rows):
            for h in range(heads):
                for i in range(tokens):
                    q = qkv[n, i, 0, h]
                    alpha, rho = torch.sigmoid(q @ u), torch.sigmoid(q @ r)
                    seen = range(int(first[n, i]), int(end[n, i]))
                    scores = torch.stack([
                        q @ qkv[n, j, 1, h] / size**0.5
                        + (1 + alpha + (1 - alpha) * w[h] * rho) * d[h, j - i + tokens - 1] for j in seen
                    ])  # fmt: skip
                    out[n, i, h] = scores.softmax(0) @ qkv[n, list(seen), 2, h]
        return out

    torch.testing.assert_close(found["_forward"][0], output(qkv, *gate, distance))
    inputs = [qkv, *gate, distance]
    results = [torch.stack([*found["_backward_queries"][:1], *found["_backward_keys"]], 2),
               *found["_backward_queries"][1], found["_backward_queries"][2],
               *found["_backward_distances"]]  # fmt: skip
    for index, gradient in enumerate(results):
        direction = torch.randn(inputs[index].shape, generator=generator, dtype=torch.float64)
        ends = [output(*inputs[:index], inputs[index] + way * 1e-6 * direction, *inputs[index + 1 :])
                for way in (1, -1)]  # fmt: skip
        slope = ((ends[0] - ends[1]) * grad).sum() / 2e-6
        assert float((gradient.detach() * direction).sum()) == pytest.approx(float(slope.detach()), rel=1e-4), index


def test_parity_tells_the_worst_tensor_by_its_bound() -> None:
    """An error of a third of its bound in floats, of half of it in integers, of which one of 200 differs."""

    def case(device: torch.device, dtype: torch.dtype, off: float = 1e-2) -> dict[str, Tensor]:
        wrong = dtype != torch.float64
        values, numbers = torch.tensor([1.0, -4.0]).double(), torch.arange(200)
        values[0] += 4 * off * wrong
        return {"values": values, "numbers": numbers + wrong * (numbers == 7)}

    found = parity(case, CPU, "bf16")
    assert found == {"worst": "numbers", "error": 0.005, "bound": 0.01, "ok": True, "compared": 2}
    found = parity(partial(case, off=0.04), CPU, "bf16")
    assert (found["worst"], found["ok"]) == ("values", False) and found["error"] == pytest.approx(0.04)


def test_synthetic_steps() -> None:
    """Four rows of each task in micro-batches of two, of which no two are alike; of a run that takes turns, of text."""
    run = run_config("base_zero1", 4, 2, True)
    source = SyntheticSource(run, 64)
    one, two = source.micro_batches(0)
    assert one.task_B.tolist() == two.task_B.tolist() == [0, 0, 1, 1] and not torch.equal(one.tokens_BT, two.tokens_BT)
    assert source.micro_batches(5) == source.micro_batches(0) and source.probe() is one
    assert step_tokens(run) == 8 * 64
    turns = SyntheticSource(replace(run, data=replace(run.data, alternate=True)), 64)
    assert {task for batch in turns.micro_batches(0) for task in batch.task_B.tolist()} == {0}
    assert len(SyntheticSource(run, 64, world=2).micro_batches(0)) == 1
    dense = SyntheticSource(replace(run, objective=replace(run.objective, mask_fraction=0.3)), 64).probe()
    text = dense.task_of_masked() == 0
    assert int(text.sum()) == 2 * round(0.3 * 62)  # of the 62 ordinary tokens of each row
    rows = synthetic_rows(np.random.default_rng(0), 20, 128, 500, pairs=True)
    sides = []
    for tokens, row_items in zip(rows.tokens, rows.item_counts, strict=True):
        starts = (tokens == BOS).nonzero()[0]
        ends = (tokens == EOS).nonzero()[0]
        assert len(starts) == row_items and len(ends) == 2 * row_items
        for number, start in enumerate(starts):
            middle, end = ends[2 * number : 2 * number + 2]
            sides += [middle - start - 1, end - middle - 1]
    assert min(sides) == 128 // 16 + 1 and max(sides) == 128 // 6 - 1 and len(rows.languages) == len(sides)


def test_a_peers_loss_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean −log p of the masked tokens, and λ times the mean cross-entropy of which tokens were replaced."""
    pytest.importorskip("transformers")
    run = sized("tiny")
    run = replace(run, objective=replace(run.objective, discriminator_weight=7.0))
    for peer in (PlainTorchStep(run), HuggingFaceStep(run)):
        peer.model.eval()
        ids, chosen = peer.batch.tokens_BT, peer.batch.masked_M
        masked = ids.clone().view(-1)
        masked[chosen] = run.model.vocabulary - 1
        logits, loss = peer._generate(masked.view_as(ids))
        expected = F.cross_entropy(logits.float(), ids.view(-1)[chosen])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for shift in (0, 1):  # the samples are all right, or all wrong
            samples = (ids.view(-1)[chosen] + shift) % 100
            right = samples == ids.view(-1)[chosen]
            monkeypatch.setattr(torch, "multinomial", lambda *_, samples=samples: samples[:, None])
            read = ids.clone().view(-1)
            read[chosen] = samples
            scores = peer._discriminate(read.view_as(ids)).float().view(-1)
            labels = torch.zeros(ids.numel())
            labels[chosen[~right]] = 1
            both = expected + 7 * F.binary_cross_entropy_with_logits(scores, labels)
            assert peer.loss().item() == pytest.approx(both.item(), rel=1e-5)
    few = MaskedPositions(run)
    few.model.load_state_dict(peer.model.state_dict(), strict=False)
    few.model.eval()
    for one, other in zip(few._generate(masked.view_as(ids)), (logits, loss), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_rounds_are_no_measurement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"--rounds is 0: it must be at least 1"):
        by_turns({"ours": lambda: 1.0}, 0)
    monkeypatch.setattr(sys, "argv", ["step", "--rounds", "0"])
    with pytest.raises(SystemExit) as ended:
        step_bench.main()
    assert ended.value.code == 2 and "--rounds is 0: it must be at least 1" in capsys.readouterr().err


def test_pauses_between_kernels_by_hand() -> None:
    """b runs inside a, c begins when a ends, and d overlaps e."""
    spans = [(0.0, 50.0, "a"), (10.0, 20.0, "b"), (50.0, 60.0, "c"), (80.0, 100.0, "d"), (90.0, 120.0, "e")]
    spans.append((2120.0, 2121.0, "f"))
    busy, pauses = busy_and_pauses(spans[::-1])
    assert busy == 60 + 40 + 1
    assert pauses == [{"ms": 2.0, "after": "e", "before": "f"}, {"ms": 0.02, "after": "c", "before": "d"}]


def test_a_steps_figures_are_medians_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours runs with each peer in turn; two rounds warm up; a ratio is of the same round."""
    seconds = {
        "ours": [[2, 4, 6], [8, 2, 2]], "huggingface": [[6, 8, 6]], "plain_torch": [[4, 2, 4]],
        "matmul": [[1, 1, 1], [3, 3, 3]],
    }  # fmt: skip
    peaks = {"ours": 8, "huggingface": 4, "plain_torch": 2, "matmul": 1}
    closed = []

    class Answers:
        def __init__(self, module: str, name: str, size: str):
            rounds = [99, 99, *seconds[name].pop(0)]
            self.name, self.rows = name, iter([(s, peaks[name] - 5 + n) for n, s in enumerate(rounds, 1)])

        def ask(self) -> dict[str, float]:
            s, gib = next(self.rows)
            return {"wall": float(s), "memory": gib * GIB}

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(step_bench, "Worker", Answers)
    found = step_bench.measure("tiny", 3)
    run = sized("tiny")
    flops, peak = flops_per_step(run, 64), 2.0 * 4096**3 / 2
    assert (found["ratio_vs_huggingface"], found["ratio_vs_plain_torch"]) == (2.0, 1.0)
    assert found["matmul_peak_gflops"] == pytest.approx(peak / 1e9) and len(closed) == 6
    assert found["contenders"].keys() == {"ours", "huggingface", "plain_torch"}
    for name, median in (("ours", 3.0), ("huggingface", 6.0), ("plain_torch", 4.0)):
        assert found["contenders"][name] == pytest.approx({
            "tokens_per_s": 4 * 64 / median, "gflops": flops / median / 1e9, "step_s": median,
            "fraction_of_matmul_peak": flops / median / peak, "memory_gib": peaks[name],
        })  # fmt: skip
    assert found["fraction_of_matmul_peak"] == pytest.approx(flops / 3 / peak)
    assert found["memory_vs_huggingface"] == 2.0
    lines = step_bench.table("tiny", found).splitlines()
    rows = {cells[0]: cells for line in lines if line.startswith("| ") for cells in [line.strip("| ").split(" | ")]}
    assert rows["huggingface"][-2:] == ["4.00", "2.00"] and rows["ours"][-2:] == ["8.00", "1.00"]
    assert lines[-1].endswith("which is 3.00 s a step")


def test_a_gpu_report(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, {"quick": True})
    assert report.matmul_tflops() == 0.0 and report.ok
    report.add("machine", {"device": "H9"})
    for dtype, tflops in (("fp32", 900.0), ("bf16", 800.5), ("bf16", 700.0), ("bf16", None)):
        row: dict[str, Any] = {"dtype": dtype} | ({"left_out": "no time"} if tflops is None else {"tflops": tflops})
        report.add("matmul", row)
    assert report.matmul_tflops() == 800.5 and report.ok
    report.add("profile", {"step_ms": 12345.6, "settings": {"compile": "none"},
                           "kernels": [{"name": "k", "ms": 0.25}]})  # fmt: skip
    text = (tmp_path / "gpu.md").read_text()
    assert "## matmul (H9)\n\n| dtype | tflops | left_out |\n| --- | --- | --- |\n| fp32 | 900 |  |\n" in text
    assert "| step_ms | settings |\n| --- | --- |\n| 12,346 | compile none |\n\n| name | ms |" in text
    assert "## steps" not in text and json.loads((tmp_path / "gpu.json").read_text()) == report.figures
    report.add("parity", {"ok": False})
    assert not report.ok
    report.figures["parity"].clear()
    report.add("machine", {"failed": "no GPU"})
    assert not report.ok and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("cuda", "quick"), [(True, False), (True, True), (False, True)])
def test_every_case_of_a_gpu_is_known(cuda: bool, quick: bool) -> None:
    cases = list(gpu.cases(cuda, quick))
    sections = [section for section, _ in cases]
    assert sections[0] == "machine" and set(sections[1:]) == set(gpu.SECTIONS) - ({"kernels"} if not cuda else set())
    compared = [labels["case"] for section, labels in cases if section == "parity"]
    assert sorted(compared) == sorted(2 * list(CASES | ON_A_GPU if cuda else CASES))
    for section, labels in cases:
        if section in ("steps", "profile"):
            run_config(labels["recipe"], 64, labels["micro_batch"], quick, **labels["settings"])
    assert len([section for section in sections if section in ("steps", "profile")]) == (10 if not quick else 4)


def test_a_command_says_succeeds_fails_hangs_or_is_left_out(tmp_path: Path) -> None:
    def run(code: str, seconds: float = 60) -> dict[str, Any]:
        (tmp_path / "log").unlink(missing_ok=True)
        return commands._run([sys.executable, "-S", "-c", code], tmp_path / "log", time.monotonic() + seconds)

    fine = run("print('a'); print('b')")
    assert fine.pop("seconds") > 0 and fine == {"said": "a / b"}
    failed = run("import sys; sys.exit('broken')")
    assert failed["failed"] == "exit code 1: broken" and "said" not in failed
    hanging = run("import time; time.sleep(60)", 0.5)
    assert hanging["failed"].startswith("no end after ") and hanging["seconds"] >= 0.4
    assert run("", -1) == {"left_out": "the time of this section is up"}


def test_a_resumed_run_is_compared_with_an_undisturbed_one(tmp_path: Path) -> None:
    """By its losses, norms, weights and number of steps; a last line may be half written."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"

    def write(run: Path, count: int = commands.STEPS, norm: float = 1.0, weights: bytes = b"w", at: int = 7) -> None:
        (run / "model").mkdir(parents=True, exist_ok=True)
        (run / "model/model.safetensors").write_bytes(weights)
        lines = [json.dumps({"step": n, "loss": 2.0, "grad_norm": norm if n >= at else 1.0, "tokens_per_s": run.name})
                 for n in range(1, count + 1)]  # fmt: skip
        (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))

    write(alone)
    write(killed)
    same = {"steps": commands.STEPS, "first_that_differs": None, "same_weights": True, "ok": True}
    assert commands._compared(alone, killed) == same
    write(killed, norm=1.5)
    assert commands._compared(alone, killed) == same | {"first_that_differs": 7, "ok": False}
    write(killed, weights=b"v")
    assert commands._compared(alone, killed) == same | {"same_weights": False, "ok": False}
    write(killed, count=commands.STEPS - 1)
    assert commands._compared(alone, killed) == same | {"first_that_differs": commands.STEPS, "ok": False}
    write(alone, count=commands.STEPS - 1)
    assert commands._compared(alone, killed) == same | {"steps": commands.STEPS - 1, "ok": False}


def test_the_text_of_the_commands(tmp_path: Path) -> None:
    """The German of a pair is its English with every word spelled backwards; a word's tag follows from its length."""
    commands.write_text(tmp_path)
    english, german = ((tmp_path / f"para/X.de-en.{code}").read_text().splitlines() for code in ("en", "de"))
    assert all(re.fullmatch("([b-df-tr][aeiou])+", word) for line in english for word in line.split())
    assert len(english) == 1000 and german == [" ".join(word[::-1] for word in line.split()) for line in english]
    assert (tmp_path / "source").read_text().splitlines() == german[:20]
    assert (tmp_path / "reference").read_text().splitlines() == english[:20]
    for code in ("de", "en"):
        documents = (tmp_path / f"mono/{code}.txt").read_text().strip().split("\n\n")
        assert len(documents) == 100 and {len(document.splitlines()) for document in documents} == {10}
    tagged = [line.split("\t") for line in (tmp_path / "tags/test-de.tsv").read_text().splitlines() if line]
    assert all(tag == commands.TAGS[len(word) % 5] for word, tag in tagged) and len(tagged) > 300


def test_a_rehearsal_does_nothing_twice(tmp_path: Path) -> None:
    settings = Rehearsal(0.5, tmp_path / "source", tmp_path / "out")
    jobs, calls = Jobs(settings), []
    for _ in range(2):
        jobs.once("checks", "planted", lambda: calls.append(1) or {"lines": 7})
    again = Jobs(replace(settings, keep=True, options=("--nodes=3",)))
    again.once("checks", "planted", lambda: calls.append(2))
    assert calls == [1] and again.done["checks"] == {"planted": {"lines": 7}}
    for changes in ({"gigabytes": 0.6}, {"kills": False}, {"rows": 5}):
        with pytest.raises(ValueError, match=r"rehearsal\.json has other settings: choose another --out"):
            Jobs(replace(settings, **changes))
    stages = {
        "text": {"seconds": 12.6, "files": 7, "kills": []},
        "mix": {"seconds": 3, "files": 1, "kills": ["a", "b"]},
    }
    table = rehearsal.report({"stages": stages, "settings": {"rows": "5"}}).splitlines()
    assert table[2:4] == ["| text | 13 | 7 | - |", "| mix | 3 | 1 | a, b |"]


def test_finished_tasks_are_counted_by_their_markers(tmp_path: Path) -> None:
    for name in ("tasks/1.json", "tasks/1.begun.json", "a/tasks/2.json", "a/tasks/3.begun.json", "a/4.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert finished_tasks(tmp_path) == 2 and finished_tasks(tmp_path / "none") == 0
