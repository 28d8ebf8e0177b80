"""Order, loss and learning rates of fine-tuning, and the scores."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch
from seqeval.metrics import f1_score
from sklearn.preprocessing import MultiLabelBinarizer

from tests.small import SMALL, lively
from xlme_ds.cli import config_from_file
from xlme_ds.config import DataConfig, EngineConfig, OptimizerConfig, TrainConfig
from xlme_ds.data.schema import BOS, EOS, PAD
from xlme_ds.engine.optimizer import build_optimizer, set_learning_rate
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS as TASKS
from xlme_ds.finetune.features import IGNORED, Feature, TaskLoader, collate_features
from xlme_ds.finetune.objective import TaskModel, TaskObjective
from xlme_ds.finetune.predictions import logits_of, score_predictions
from xlme_ds.finetune.settings import FinetuneSettings, TuningConfig, grid, jobs, parse, run_config
from xlme_ds.finetune.task_files import Question, Sentence, TextPair
from xlme_ds.io.files import write_versioned


def features(kind: str, count: int = 10) -> list[Feature]:
    rng = np.random.default_rng(0)
    out = []
    for number in range(count):
        size = int(rng.integers(3, 12))
        ids = np.array([BOS, *rng.integers(4, 90, size), EOS], np.int32)
        labels = {
            "tokens": np.where(rng.random(size + 2) < 0.5, rng.integers(0, 3, size + 2), IGNORED),
            "pair": rng.integers(0, 3, 1),
            "span": np.sort(rng.integers(1, size, 2)),
        }[kind]
        out.append(Feature(ids, labels, number, np.flatnonzero(labels != IGNORED)))
    return out


def read(loader: TaskLoader, step: int) -> list[tuple[int, ...]]:
    batches = loader.micro_batches(step)
    return [tuple(row[row != PAD].tolist()) for batch in batches for row in batch.tokens_BT]


def test_an_epoch_reads_every_example_once_whatever_the_ranks() -> None:
    every = features("pair")
    seen = {}
    for world, micro in ((1, 4), (1, 1), (2, 2), (4, 1)):
        loaders = [TaskLoader(every, "pair", DataConfig(4, 0, micro), 1, rank, world) for rank in range(world)]
        seen[world, micro] = [sorted(row for loader in loaders for row in read(loader, step)) for step in range(5)]
    assert all(value == seen[1, 4] for value in seen.values())
    two_epochs = sorted(row for step in seen[1, 4] for row in step)
    assert two_epochs == sorted([tuple(feature.ids.tolist()) for feature in every] * 2), "20 numbers of 10 examples"
    named = [int(number) for number in loaders[0].describe_rows(2).removeprefix("examples ").split(", ")]
    assert sorted(tuple(every[number].ids.tolist()) for number in named) == seen[1, 4][2]
    for loader in [TaskLoader(every, "pair", DataConfig(8, 0, 2), 1, rank, 2) for rank in range(2)]:
        batches = loader.micro_batches(1)
        assert len(batches) == 2
        for micro_batch, batch in enumerate(batches):  # the examples of that micro-batch of this rank
            told = [int(n) for n in loader.describe_rows(1, micro_batch).removeprefix("examples ").split(", ")]
            assert [every[n].ids.tolist() for n in told] == [row[row != PAD].tolist() for row in batch.tokens_BT]
    another = TaskLoader(every, "pair", DataConfig(4, 0, 4), 2, 0, 1)
    assert [another.describe_rows(step) for step in range(2)] != [loaders[0].describe_rows(step) for step in range(2)]


@pytest.mark.parametrize("kind", ["tokens", "pair", "span"])
def test_all_that_is_trained_on_is_in_the_fingerprint(kind: str) -> None:
    def fingerprint(changed: list[Feature]) -> dict[str, str]:
        return TaskLoader(changed, kind, DataConfig(2, 0, 2), 1, 0, 1).fingerprints

    every = features(kind)
    last = every[-1]
    changes = {"ids": last.ids + (last.ids == last.ids[-2]), "labels": last.labels + 1, "language": 1}
    prints = [fingerprint([*every[:-1], last._replace(**{name: value})]) for name, value in changes.items()]
    prints += [fingerprint(every), fingerprint(every[::-1]), fingerprint(every[:-1])]
    assert len({tuple(one.items()) for one in prints}) == len(prints)
    assert fingerprint(features(kind)) == fingerprint(every)


def test_every_epoch_has_an_order_and_dropout_of_its_own() -> None:
    every = features("pair")
    ones = TaskLoader(every, "pair", DataConfig(1, 0, 1), 1, 0, 1)
    orders = [tuple(read(ones, 10 * epoch + step)[0] for step in range(10)) for epoch in range(6)]
    assert len(set(orders)) == 6 and len({tuple(sorted(order)) for order in orders}) == 1
    loader = TaskLoader(every, "pair", DataConfig(len(every), 0, len(every)), 1, 0, 1)
    epochs = [loader.micro_batches(step)[0] for step in range(6)]
    orders = [[tuple(row[row != PAD].tolist()) for row in batch.tokens_BT] for batch in epochs]
    keys = [dict(zip(order, batch.seeds_B.tolist(), strict=True)) for order, batch in zip(orders, epochs, strict=True)]
    assert all(len({epoch[row] for epoch in keys}) == 6 for row in orders[0]), "what is dropped of an example"
    assert len({key for epoch in keys for key in epoch.values()}) == 6 * len(every)
    again = TaskLoader(every, "pair", DataConfig(len(every), 0, len(every)), 1, 0, 1)
    assert torch.equal(again.micro_batches(4)[0].seeds_B, epochs[4].seeds_B), "a resumed run goes on with the same"
    assert torch.equal(again.micro_batches(4)[0].tokens_BT, epochs[4].tokens_BT)


def test_examples_of_a_length_are_run_together() -> None:
    every = features("pair")
    longest = sorted(len(feature.ids) for feature in every)[1::2]
    for world in (1, 5):
        loaders = [TaskLoader(every, "pair", DataConfig(10, 0, 2), 1, rank, world) for rank in range(world)]
        assert [batch.tokens_BT.shape[1] for loader in loaders for batch in loader.micro_batches(0)] == longest


@pytest.mark.parametrize("kind", ["tokens", "pair", "span"])
def test_the_mean_does_not_depend_on_the_cut(kind: str) -> None:
    """Sum over count of micro-batches, padded to other widths, equals torch's own mean of each example alone; so does
    the accuracy."""
    objective = TaskObjective(kind, 3, dropout=0.0)
    model = lively(objective.build(SMALL)).eval()
    every = features(kind)
    batches = [collate_features(every, kind), *[collate_features(every[i : i + 3], kind) for i in range(0, 10, 3)]]
    sums = [objective.sums(model(batch), batch) for batch in batches]
    counts = [objective.counts(batch) for batch in batches]
    mean = sums[0] / counts[0]
    torch.testing.assert_close(sum(sums[1:]) / sum(counts[1:]), mean, check_dtype=False)
    losses, right = [], []
    for feature in every:
        logits = model(collate_features([feature], kind))[0]
        if kind == "pair":
            logits = logits[None]
        elif kind == "span":
            logits = logits.T
        wanted = torch.from_numpy(feature.labels)
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none")[wanted != IGNORED])
        right.append((logits.argmax(-1) == wanted)[wanted != IGNORED])
    torch.testing.assert_close(torch.cat(losses).mean().view(1), mean, check_dtype=False)
    counted = [objective.statistics(model(batch), batch) for batch in batches]
    found = objective.summarise(sums[0].detach(), counts[0], counted[0])
    assert found == pytest.approx({"loss": mean.item(), "accuracy": float(torch.cat(right).double().mean())})
    assert 0 < found["accuracy"] < 1 and sum(counted[1:]) == counted[0]


def test_dropout_follows_from_the_batch() -> None:
    model = lively(TaskModel(SMALL, "pair", 3, dropout=0.5)).train()
    first, second = (collate_features(features("pair"), "pair", range(start, start + 10)) for start in (1, 20))
    once = model(first)
    torch.manual_seed(7)
    assert torch.equal(model(first), once) and not torch.isclose(model(second), once).any()
    alone = torch.cat([model(collate_features([one], "pair", [1 + n])) for n, one in enumerate(features("pair"))])
    torch.testing.assert_close(alone, once)  # an example's follows from its number, whatever stands beside it
    assert torch.equal(model.eval()(first), model(second))


def test_the_heads_input_is_dropped_too() -> None:
    model = lively(TaskModel(SMALL, "tokens", 3, dropout=0.25)).train()
    seen: dict[str, torch.Tensor] = {}
    model.encoder.register_forward_hook(lambda module, given, output: seen.update(states=output))
    model.head.register_forward_pre_hook(lambda module, given: seen.update(read=given[0]))
    model(collate_features(features("tokens"), "tokens", range(1, 11)))
    kept = seen["read"] != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(seen["read"][kept], seen["states"][kept] / 0.75)


def test_pre_trainings_dropout_is_not_that_of_fine_tuning() -> None:
    cfg = replace(SMALL, dropout=0.5, attention_dropout=0.5)
    model, batch = lively(TaskModel(cfg, "pair", 3, dropout=0.0)), collate_features(features("pair"), "pair")
    torch.testing.assert_close(model.train()(batch), model.eval()(batch))


def test_predictions_do_not_depend_on_the_batch() -> None:
    model = lively(TaskModel(SMALL, "tokens", 3))
    every = features("tokens")
    for one, other in zip(logits_of(model, every, batch_size=4), logits_of(model, every, batch_size=1), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_rate_falls_from_layer_to_layer() -> None:
    """ERNIE-M's decay: the head whole, then a factor for every layer downwards, the embedding lowest."""
    model = TaskModel(replace(SMALL, language_embeddings=("de", "en")), "pair", 3)
    objective = TaskObjective("pair", 3, dropout=0.0)
    optimizer = build_optimizer(model, OptimizerConfig(layer_decay=0.5), objective)
    set_learning_rate(optimizer, 8.0)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rate[id(p)] for name, p in model.named_parameters()}
    assert len(found) == len(rate) and "encoder.encoder.languages" in found
    for name, value in found.items():
        expected = (
            8.0 if name.startswith("head.") else 4.0 if ".layers.1." in name else 2.0 if ".layers.0." in name else 1.0
        )
        assert value == expected, name
    set_learning_rate(plain := build_optimizer(model, OptimizerConfig(), objective), 8.0)
    assert {group["lr"] for group in plain.param_groups} == {8.0}


def test_every_setting_of_the_optimizer_reaches_it() -> None:
    """Those of `TuningConfig` under their names; the others are Adam's usual ones."""
    given = {"learning_rate": 3e-4, "weight_decay": 0.03, "clip": 0.7, "layer_decay": 0.8}
    tuning = TuningConfig(batch=8, epochs=1, warmup=0.25, **given).completed(TASKS["pawsx"], SMALL)
    optimizer = run_config("pawsx", tuning, SMALL, EngineConfig(kind="plain"), TrainConfig(), 1, 80, "").optimizer
    assert asdict(optimizer) == given | {
        "warmup_steps": 2, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "discriminator_rate": 1.0
    }  # fmt: skip


def test_the_published_grids() -> None:
    assert len(grid("pos", TuningConfig())) == 9 and len(grid("mlqa", TuningConfig())) == 9
    assert {one.learning_rate for one in grid("ner", TuningConfig())} == {5e-6, 6e-6, 7e-6, 8e-6, 9e-6}
    assert [one.epochs for one in grid("tydiqa", TuningConfig(learning_rate=3e-5))] == [10, 20, 40]


def test_runs_of_a_command_know_how_many_settings_there_are() -> None:
    """By that a dev set is held out: no choice goes by the tests."""
    command = FinetuneSettings("mlqa", Path("model"), (Path("data"),), Path("out"), seeds=(1, 2), grid=True)
    runs = jobs(command)
    assert len({job.out for job in runs}) == len(runs) == 18 and {job.tuning_count for job in runs} == {9}
    fixed = replace(command, tuning=TuningConfig(learning_rate=1e-5, batch=8, epochs=1))
    assert (
        {job.tuning_count for job in jobs(fixed)}
        == {job.tuning_count for job in jobs(replace(command, grid=False))}
        == {1}
    )
    assert [job.out for job in jobs(replace(command, grid=False, seeds=(7,)))] == [Path("out")]


@pytest.mark.parametrize("task", TASKS)
def test_every_run_of_a_grid_has_a_folder_of_its_own(task: str) -> None:
    of = TASKS[task]
    command = FinetuneSettings(task, Path("run"), (Path("data"),), Path("out"), seeds=(1, 2), grid=True)  # type: ignore[arg-type]
    every = jobs(command)
    assert len({job.out for job in every}) == len(every)
    assert len(every) == 2 * len(of.learning_rates) * len(of.batch_sizes) * len(of.epochs)


def test_steps_and_warm_up() -> None:
    def of(task: str, examples: int, warmup: float | None = None) -> tuple[int, int]:
        tuning = TuningConfig(warmup=warmup).completed(TASKS[task], SMALL)
        done = run_config(task, tuning, SMALL, EngineConfig(), TrainConfig(), 1, examples, "")
        return done.train.steps, done.optimizer.warmup_steps

    assert of("ner", 20_000) == (25_000, 2_500)
    assert of("xnli", 392_702) == (122_720, 12_500), "XNLI's published warm-up is in steps"
    assert of("ner", 81) == (102, 10)
    assert of("xnli", 392_702, 0.1) == (122_720, 12_272), "ERNIE-M's, a tenth, where it is asked for"
    assert of("ner", 20_000, 0.0) == (25_000, 0)
    assert of("xnli", 6_400) == (2_000, 1_000)


def test_settings_of_a_run_or_a_file_are_given_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags replace them; what only pre-training reads stays out."""
    tuning = TuningConfig(learning_rate=3e-5, train_languages=("en", "de"), held_out=True).completed(
        TASKS["ner"], SMALL
    )
    run = run_config(
        "ner", tuning, SMALL, EngineConfig("plain", precision="fp32"), TrainConfig(log_every=7), 5, 81, "x"
    )
    write_versioned(tmp_path / "config.json", {"config": asdict(run), "versions": {}, "run": "x"})
    (tmp_path / "ours.toml").write_text('task = "ner"\nseeds = [3, 4]\n[tuning]\nheld_out = true\nepochs = 2\n')

    def parsed(name: str, more: str = "") -> FinetuneSettings:
        words = f"--config {tmp_path / name} --model base --data panx --out out {more}"
        return parse("xlme finetune", words.split())

    command = parsed("config.json")
    assert (command.task, command.seeds, command.tuning, command.engine) == ("ner", (5,), tuning, run.engine)
    assert replace(run.train, steps=0, eval_every=0) == replace(command.train, steps=0, eval_every=0)
    changed = parsed("config.json", "--seeds 6 7 --tuning.no-held-out --tuning.learning-rate 1e-5")
    assert (changed.seeds, changed.tuning) == ((6, 7), replace(tuning, held_out=False, learning_rate=1e-5))
    command = parsed("ours.toml")
    assert (command.seeds, command.tuning) == ((3, 4), TuningConfig(held_out=True, epochs=2))
    for every in ("true", "false"):
        (tmp_path / "ours.toml").write_text(f'task = "ner"\ngrid = {every}\n')
        assert parsed("ours.toml").grid == (every == "true") and not parsed("ours.toml", "--no-grid").grid
        assert parsed("ours.toml", "--engine.kind deepspeed --engine.kind plain").engine.kind == "plain"
    for text, said in (
        ("name = 'x'\n[objective]\nz_loss = 0.1", "has settings of pre-training: name a file with settings of fine"),
        ("[engine]\nbalance = [1, 2]", "--engine.balance is for pre-training and has no effect here: leave it out"),
    ):
        (tmp_path / "ours.toml").write_text(text)
        with pytest.raises(ValueError, match=said):
            parsed("ours.toml")
    (tmp_path / "ours.toml").write_text("[tuning]\nepochs = 2")
    for name in ("config.json", "ours.toml"):
        with pytest.raises(ValueError, match=f"{name} has settings of fine-tuning: name a file with settings of pre-"):
            config_from_file(tmp_path / name)
    with pytest.raises(ValueError, match=r"none\.json is not a file: name a run's config\.json, or a TOML file"):
        parsed("none.json")
    (tmp_path / "ours.toml").write_text("[tuning]\nepoch = 2")
    with pytest.raises(SystemExit):
        parsed("ours.toml")
    assert "there is no --tuning.epoch: did you mean --tuning.epochs?" in capsys.readouterr().err


def test_windows_overlap_by_half_and_leave_room_for_the_context() -> None:
    most = SMALL.max_positions
    for longest, stride, question in ((most, most // 2, most // 4), (17, 8, 4)):
        done = TuningConfig(max_tokens=longest).completed(TASKS["xquad"], SMALL)
        assert (done.max_tokens, done.stride, done.question_tokens) == (longest, stride, question)
    done = TuningConfig(max_tokens=16, stride=8, question_tokens=3).completed(TASKS["xquad"], SMALL)
    assert (done.stride, done.question_tokens) == (8, 3)
    with pytest.raises(ValueError, match="max_tokens 15 leaves no room for text"):
        TuningConfig(max_tokens=15).completed(TASKS["xquad"], SMALL)


def test_batches_of_any_length_are_not_compiled_for() -> None:
    tuning = TuningConfig().completed(TASKS["ner"], SMALL)
    model = replace(SMALL, compile="layers")
    assert run_config("ner", tuning, model, EngineConfig(), TrainConfig(), 1, 81, "").model.compile == "none"


def test_scores() -> None:
    tags = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    given = [["B-PER", "I-PER", "O", "B-ORG"], ["O", "B-ORG"]]
    sentences = [Sentence(["w"] * len(one), one) for one in tags]
    assert score_predictions("ner", TASKS["ner"], sentences, given, "en") == {"f1": pytest.approx(100 * 2 / 3)}
    cut = [["B-PER", "O", "O", "B-LOC"], ["O", "B-ORG"]]
    assert score_predictions("ner", TASKS["ner"], sentences, cut, "en") == {"f1": pytest.approx(100 * 2 / 3)}, (
        "half an entity is none"
    )
    pairs = [TextPair("a", "b", "1"), TextPair("a", "b", "0")]
    assert score_predictions("pawsx", TASKS["pawsx"], pairs, ["1", "1"], "en") == {"accuracy": 50.0}
    questions = [Question("1", "?", "c", [("the Rhein", 0)]), Question("2", "?", "c", [("x", 0)])]
    assert score_predictions("xquad", TASKS["xquad"], questions, ["Rhein", "y"], "de") == {"f1": 50.0, "em": 50.0}


def entities_of(tags: list[str]) -> set[tuple[str, int, int]]:
    """(kind, first word, word after the last) of every entity as CoNLL's rules have it: it begins at a B-, and at an I-
    that goes on with nothing of its kind."""
    found, start = set(), 0
    for n, tag in enumerate([*tags, "O"]):
        before = tags[n - 1] if n else "O"
        if before != "O" and (tag[:1] != "I" or tag[1:] != before[1:]):
            found.add((before[2:], start, n))
        if tag != "O" and (tag[0] == "B" or tag[1:] != before[1:]):
            start = n
    return found


@pytest.mark.parametrize("task", ["ner", "conll"])
def test_entities_by_scikit_learn(task: str) -> None:
    """Micro-averaged F1 of the sets of entities, of any tags, also of those that no entity begins with."""
    rng = np.random.default_rng(0)
    labels = np.array(TASKS[task].labels)
    tags = [rng.choice(labels, rng.integers(1, 12)).tolist() for _ in range(300)]
    given = [[tag if rng.random() < 0.8 else str(rng.choice(labels)) for tag in one] for one in tags]
    found = score_predictions(task, TASKS[task], [Sentence(["w"] * len(one), one) for one in tags], given, "en")
    sets = MultiLabelBinarizer().fit([entities_of(one) for one in [*tags, *given]])
    right, ours = (sets.transform([entities_of(one) for one in of]) for of in (tags, given))
    expected = sklearn.metrics.f1_score(right, ours, average="micro")
    assert 0.3 < expected < 0.9 and found["f1"] == pytest.approx(100 * expected, abs=1e-9)


@pytest.mark.parametrize("task", ["xnli", "pawsx"])
def test_labels_by_scikit_learn(task: str) -> None:
    rng = np.random.default_rng(0)
    right, given = (rng.choice(TASKS[task].labels, 500).tolist() for _ in range(2))
    found = score_predictions(task, TASKS[task], [TextPair("a", "b", label) for label in right], given, "de")
    assert found == {"accuracy": pytest.approx(100 * sklearn.metrics.accuracy_score(right, given))}


def runs_of(tags: list[str]) -> set[tuple[str, int, int]]:
    """(tag, first word, last word) of every run of equal tags."""
    found, start = set(), 0
    for end in range(1, len(tags) + 1):
        if end == len(tags) or tags[end] != tags[start]:
            found.add((tags[start], start, end - 1))
            start = end
    return found


def test_parts_of_speech_count_by_runs_of_equal_tags() -> None:
    """By hand, counted again on random sentences, and seqeval itself where it reads a tag in a way of its own."""

    def pos(tags: list[list[str]], given: list[list[str]]) -> dict[str, float]:
        return score_predictions("pos", TASKS["pos"], [Sentence(["w"] * len(one), one) for one in tags], given, "en")

    # Runs: DET | NOUN NOUN | VERB against DET | NOUN | VERB VERB: one of three, three words of four.
    hand = pos([["DET", "NOUN", "NOUN", "VERB"]], [["DET", "NOUN", "VERB", "VERB"]])
    assert hand == {"f1": pytest.approx(100 / 3), "accuracy": pytest.approx(75.0)}

    rng = np.random.default_rng(0)
    every = np.array(TASKS["pos"].labels)
    # seqeval takes off a tag's first letter, and S and I mean something to it: SCONJ, SYM, INTJ; CCONJ is SCONJ then,
    # and X is O.
    plain = every[[label not in ("SCONJ", "SYM", "INTJ", "CCONJ", "X") for label in every]]
    for labels in (plain, plain[:3], every):
        for _ in range(20):
            tags = [labels[rng.integers(0, len(labels), rng.integers(1, 12))].tolist() for _ in range(8)]
            given = [[tag if rng.random() < 0.7 else str(rng.choice(labels)) for tag in one] for one in tags]
            found = pos(tags, given)
            words = [(a, b) for one, other in zip(tags, given, strict=True) for a, b in zip(one, other, strict=True)]
            assert found["accuracy"] == pytest.approx(100 * sum(a == b for a, b in words) / len(words))
            if labels is every:
                with warnings.catch_warnings(action="ignore"):
                    expected = 100 * f1_score(tags, given)
            else:
                right, ours, theirs = (
                    sum(len(choose(runs_of(a), runs_of(b))) for a, b in zip(tags, given, strict=True))
                    for choose in (set.intersection, lambda a, b: b, lambda a, b: a)
                )
                expected = 100 * 2 * right / (ours + theirs)
            assert found["f1"] == pytest.approx(expected)
    with warnings.catch_warnings(action="error"):
        pos([["NOUN"]], [["VERB"]])  # seqeval's warnings of tags that are no entities stay within
