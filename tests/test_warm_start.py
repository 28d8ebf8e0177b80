"""A run starts from the weights of another one: all of them, or one encoder for both."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor

from data_prep.vocab.extension import extend
from tests.evaluate.folders import write_run
from tests.rows import train_vocabulary
from xlme_ds.checkpoint.__main__ import average, weights
from xlme_ds.config import EncoderName, ModelConfig, ObjectiveConfig, RunConfig, StartConfig
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.export.export_run import export_run
from xlme_ds.first_weights import starting_weights
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.objectives import objective_of
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.trained.runs import TrainedRun, load_run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Two layers in each encoder, a difference of the discriminator's embedding, two blocks."""
    folder = tmp_path_factory.mktemp("source")
    settings = {"generator_layers": 2, "embedding_sharing": "gdes", "vocabulary_blocks": 2}
    return load_run(write_run(folder, layers=2, **settings))


def started(
    take: str,
    source: TrainedRun,
    folder: Path | None = None,
    name: str = "electra",
    data: Vocabulary | None = None,
    into: str = "both",
    decoder_from: Path | str = "",
    **changes: object,
) -> dict[str, Tensor]:
    """The parameters of a model that starts from `source`, on data with its vocabulary, or another."""
    cfg: ModelConfig = replace(source.model, **changes)  # type: ignore[arg-type]
    start = StartConfig(str(folder or source.folder), take, into, str(decoder_from))  # type: ignore[arg-type]
    objective = ObjectiveConfig(name)  # type: ignore[arg-type]
    config = RunConfig("started", model=cfg, objective=objective, start=start)
    known = starting_weights(config, data or source.vocabulary)
    model = objective_of(objective).build(cfg)
    initialise(model, 5, cfg.init_std, initial_values=known)
    return dict(model.state_dict())


def fresh(source: TrainedRun, **changes: object) -> dict[str, Tensor]:
    model = Electra(replace(source.model, **changes))  # type: ignore[arg-type]
    initialise(model, 5, model.cfg.init_std)
    return dict(model.state_dict())


def export(source: TrainedRun, to: Path) -> Path:
    """As `xlme export` does it, with the heads of both."""
    export_run(source.folder, to)
    return to


def test_nothing_named(source: TrainedRun) -> None:
    assert starting_weights(RunConfig("none"), source.vocabulary) is None


@pytest.mark.parametrize("blocks", [1, 3])
def test_everything_in_other_blocks(blocks: int, source: TrainedRun) -> None:
    ours = started("all", source, vocabulary_blocks=blocks)
    for table in ("embedding", "difference"):
        whole = [torch.cat([state[f"{table}_{n}"] for n in range(count)])
                 for state, count in ((ours, blocks), (source.state, 2))]  # fmt: skip
        assert torch.equal(*whole)


def test_a_finished_run_that_was_called_with_other_blocks_is_read(source: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(source.folder, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["vocabulary_blocks"] = 1
    path.write_text(json.dumps(content))
    ours, theirs = (run.encoder().state_dict() for run in (load_run(tmp_path / "run"), source))
    assert torch.equal(ours["embedding_0"], torch.cat([theirs["embedding_0"], theirs["embedding_1"]]))


def test_everything(source: TrainedRun) -> None:
    ours = started("all", source)
    assert ours.keys() == source.state.keys()
    assert all(torch.equal(ours[name], value) for name, value in source.state.items())


@pytest.mark.parametrize("take", ["generator", "discriminator"])
def test_one_encoder_for_both(take: str, source: TrainedRun) -> None:
    """The generator keeps the lower of its source's layers; the discriminator's embedding was a sum."""
    ours, plain = started(take, source, generator_layers=1), fresh(source, generator_layers=1)
    embedding = source.encoder(take).state_dict()  # type: ignore[arg-type]
    for n in range(2):
        assert torch.equal(ours[f"embedding_{n}"], embedding[f"embedding_{n}"])
        assert not ours[f"difference_{n}"].any()
    for name, value in ours.items():
        which, _, rest = name.partition(".")
        if which in ("generator", "discriminator"):
            assert torch.equal(value, source.state[f"{take}.{rest}"]), name
        elif which in ("masked_head", "replaced_head"):
            kept = which == {"generator": "masked_head", "discriminator": "replaced_head"}[take]
            assert torch.equal(value, (source.state if kept else plain)[name]), name


def test_from_an_export(source: TrainedRun, tmp_path: Path) -> None:
    """Another number of blocks."""
    export(source, tmp_path / "export")
    for take in ("generator", "discriminator"):
        ours = started(take, source, tmp_path / "export", vocabulary_blocks=1)
        whole = source.encoder(take).state_dict()  # type: ignore[arg-type]
        assert torch.equal(ours["embedding_0"], torch.cat([whole["embedding_0"], whole["embedding_1"]]))
        for which in ("generator", "discriminator"):
            assert torch.equal(ours[f"{which}.layers.1.up.weight"], whole["encoder.layers.1.up.weight"])


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("sharing", ["tied", "gdes"])
def test_an_export_goes_back_whole(sharing: str, blocks: int, tmp_path: Path) -> None:
    """To the bit, with both heads and the difference, which no subtraction of tables gives back."""
    settings = {"generator_layers": 1, "embedding_sharing": sharing, "vocabulary_blocks": 12}
    run = load_run(write_run(tmp_path / "run", layers=2, **settings))
    folder = export(run, tmp_path / "export")
    ours = started("all", run, folder, vocabulary_blocks=blocks)
    wanted = started("all", run, vocabulary_blocks=blocks)
    assert ours.keys() == wanted.keys() and ("difference_0" in ours) == (sharing == "gdes")
    assert all(torch.equal(ours[name], value) for name, value in wanted.items())
    if sharing == "gdes":
        tables = [
            load_file(folder / path / "model.safetensors")["xlme.embedding.weight"] for path in (".", "generator")
        ]
        difference = torch.cat([run.state[f"difference_{n}"] for n in range(12)])
        assert not torch.equal(tables[0] - tables[1], difference)
    with pytest.raises(ValueError, match=r"has model\.generator_layers 1, this run has 2: set it to the same"):
        started("all", run, folder, generator_layers=2)
    with pytest.raises(ValueError, match=r"has no encoder, which start.take all takes: set start.take to disc"):
        started("all", run, folder, name="mlm")


def test_the_export_of_one_encoder_goes_back_whole(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", layers=2, objective="mlm"))
    folder = export(run, tmp_path / "export")
    ours = started("all", run, folder, name="mlm")
    assert ours.keys() == run.state.keys()
    assert all(torch.equal(ours[name], value) for name, value in run.state.items())
    with pytest.raises(ValueError, match=r"no generator, which start\.take all takes: set start\.take to encoder"):
        started("all", run, folder)


def test_parts_that_are_missing_or_of_another_model(source: TrainedRun, tmp_path: Path) -> None:
    folder = export(source, tmp_path / "export")
    difference = (folder / "difference.safetensors").rename(tmp_path / "difference")
    with pytest.raises(ValueError, match=r"is not the generator's and difference\.safetensors together: export"):
        started("all", source, folder)
    shutil.copy(difference, folder / "difference.safetensors")
    for part in (folder, folder / "generator"):
        whole = load_file(part / "model.safetensors")
        save_file({name: value for name, value in whole.items() if "_head" not in name}, part / "model.safetensors")
        with pytest.raises(ValueError, match=r"in \S+ has no (replaced|masked)_head, which start.take all takes: set"):
            started("all", source, folder)
        save_file(whole, part / "model.safetensors")
    config = json.loads((folder / "generator/config.json").read_text())
    (folder / "generator/config.json").write_text(json.dumps(config | {"relative_max_distance": 99}))
    with pytest.raises(ValueError, match="generator is of another model than"):
        started("all", source, folder)
    shutil.rmtree(folder / "generator")
    with pytest.raises(ValueError, match=r"generator, which start\.take all takes: set start\.take to discriminator"):
        started("all", source, folder)


@pytest.mark.parametrize(
    ("take", "changes", "message"),
    [
        (
            "generator",
            {"discriminator_layers": 3},
            "has 2 layers, and the discriminator takes 3: lower model.discriminator_layers",
        ),
        ("generator", {"norm": "pre"}, "has norm post, model.norm is pre: set it to the same"),
        ("all", {"generator_layers": 1}, "has model.generator_layers 2, this run has 1"),
        ("all", {"embedding_sharing": "tied"}, "has model.embedding_sharing gdes, this run has tied"),
    ],
)
def test_what_does_not_fit(take: str, changes: dict[str, object], message: str, source: TrainedRun) -> None:
    with pytest.raises(ValueError, match=message):
        started(take, source, **changes)


@pytest.mark.parametrize("take", ["all", "discriminator"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("body", "modern"), ("local_window", 64), ("global_every", 2), ("local_rotary_base", 9.0), ("width", 64),
        ("heads", 8), ("feed_forward", 24), ("max_positions", 24), ("norm_epsilon", 1e-12), ("masked_head", "linear"),
        ("embedding_norm", True), ("absolute_positions", False), ("relative_bias", "plain"), ("relative_buckets", 4),
        ("relative_max_distance", 99),
    ],
)  # fmt: skip
def test_weights_are_not_read_by_another_computation(take: str, name: str, value: object, source: TrainedRun) -> None:
    """Also where all parameters would have the same sizes."""
    with pytest.raises(
        ValueError, match=rf"has {name} {getattr(source.model, name)}, model\.{name} is {value}: set it"
    ):
        started(take, source, **{name: value})


def test_without_a_table_of_positions_rows_may_be_longer(tmp_path: Path) -> None:
    source = load_run(write_run(tmp_path / "run", absolute_positions=False))
    state = started("all", source, max_positions=2 * source.model.max_positions)
    assert all(torch.equal(state[name], value) for name, value in source.state.items())


TWO = dict(name="mt", language_embeddings=("de", "en"))
DRAWN = ("languages", "cross_attention", "cross_norm")  # what no encoder of the source has


def sides(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The parameters of encoder and decoder, those that are drawn left out."""
    return {
        side: {
            name.removeprefix(f"{side}."): value
            for name, value in state.items()
            if name.startswith(f"{side}.") and not any(part in name for part in DRAWN)
        }
        for side in ("encoder", "decoder")
    }


@pytest.mark.parametrize("take", ["generator", "discriminator"])
@pytest.mark.parametrize("into", ["both", "encoder", "decoder"])
def test_a_translating_model_starts_from_an_encoder(take: str, into: str, source: TrainedRun) -> None:
    """Bit for bit, all but cross-attention; what is not started is drawn as ever."""
    ours, theirs = started(take, source, into=into, **TWO), source.encoder(take).state_dict()  # type: ignore[arg-type]
    drawn = objective_of(ObjectiveConfig("mt")).build(replace(source.model, language_embeddings=("de", "en")))
    initialise(drawn, 5, drawn.cfg.init_std)
    for side, values in sides(ours).items():
        assert len(values) > 20
        for name, value in values.items():
            from_source = into in ("both", side)
            expected = theirs[f"encoder.{name}"] if from_source else drawn.state_dict()[f"{side}.{name}"]
            assert torch.equal(value, expected), (side, name)
    assert all(torch.equal(ours[f"embedding_{n}"], theirs[f"embedding_{n}"]) for n in range(2))
    for name in [name for name in ours if any(part in name for part in DRAWN)]:
        assert torch.equal(ours[name], drawn.state_dict()[name])
    head = source.state if take == "generator" else drawn.state_dict()
    assert all(torch.equal(ours[name], head[name]) for name in ours if name.startswith("masked_head."))


def test_an_interleaved_decoder_takes_two_layers_for_one(source: TrainedRun) -> None:
    """DeltaLM: self-attention and its feed-forward network from the first, cross-attention and its own from the
    second."""
    ours, theirs = started("discriminator", source, decoder="interleaved", **TWO), source.state
    width = source.model.width
    for name in ("attention.qkv.weight", "attention.gate.update", "attention_norm.bias", "up.weight", "down.bias"):
        assert torch.equal(ours[f"decoder.layers.0.{name}"], theirs[f"discriminator.layers.0.{name}"])
    for kind in ("weight", "bias"):
        qkv = theirs[f"discriminator.layers.1.attention.qkv.{kind}"]
        assert torch.equal(ours[f"decoder.layers.1.attention.query.{kind}"], qkv[:width])
        assert torch.equal(ours[f"decoder.layers.1.attention.key_value.{kind}"], qkv[width:])
        for name in ("attention.output", "attention_norm", "up", "down", "feed_forward_norm"):
            place = f"layers.1.{name}.{kind}"
            assert torch.equal(ours[f"decoder.{place}"], theirs[f"discriminator.{place}"])
    assert not any(name.startswith("decoder.layers.2.") for name in ours)
    with pytest.raises(ValueError, match=r"has 2 layers, and the decoder takes 4: lower model.decoder_layers, or set"):
        started("discriminator", source, decoder="interleaved", decoder_layers=2, **TWO)


def test_a_deep_interleaved_decoder(tmp_path: Path) -> None:
    """Its second layer from the third and fourth; and where the source has no relative bias, that of both sides begins
    at 0."""
    run = load_run(write_run(tmp_path, layers=4, relative_bias="none"))
    ours = started("discriminator", run, decoder="interleaved", decoder_layers=2, relative_bias="plain", **TWO)
    for number, name in ((2, "attention.qkv.weight"), (2, "up.weight"), (3, "down.weight")):
        place = f"layers.{number}.{name}"
        assert torch.equal(ours[f"decoder.{place}"], run.state[f"discriminator.{place}"])
    qkv = run.state["discriminator.layers.3.attention.qkv.weight"]
    assert torch.equal(ours["decoder.layers.3.attention.query.weight"], qkv[: run.model.width])
    assert torch.equal(ours["decoder.layers.3.attention.key_value.weight"], qkv[run.model.width :])
    assert not any(ours[f"{side}.relative.weight"].any() for side in ("encoder", "decoder"))


def test_a_side_that_is_not_started_has_a_drawn_bias(tmp_path: Path) -> None:
    """Also where the source has no relative bias, so that the bias of the side that is started begins at 0."""
    run = load_run(write_run(tmp_path, relative_bias="none"))
    for into, other in (("decoder", "encoder"), ("encoder", "decoder")):
        ours = started("generator", run, into=into, relative_bias="plain", discriminator_layers=1, **TWO)
        assert not ours[f"{into}.relative.weight"].any() and ours[f"{other}.relative.weight"].any()


def test_all_of_a_model_with_another_decoder_is_refused(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, objective="mt", language_embeddings=("de", "en"), decoder_layers=2))
    with pytest.raises(ValueError, match=r"has model.decoder xlm, this run has interleaved: set it to the same"):
        started("all", run, name="mt", decoder="interleaved", decoder_layers=1)


def test_a_decoder_is_not_all_of_another_model(tmp_path: Path) -> None:
    """An encoder with a masked head has the same parts as a translating model, but for the decoder."""
    run = load_run(write_run(tmp_path, objective="mlm"))
    with pytest.raises(
        ValueError, match=r"trained for mlm, whose model has other parts than that of mt: set start.take"
    ):
        started("all", run, **TWO)
    ours = started("encoder", run, **TWO)
    assert torch.equal(ours["decoder.layers.1.up.weight"], run.state["encoder.layers.1.up.weight"])
    assert torch.equal(ours["masked_head.bias"], run.state["masked_head.bias"])


def test_embeddings_of_languages_are_of_the_same_ones_in_their_order(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, objective="mlm", language_embeddings=("de", "en")))
    for take in ("all", "encoder"):
        for codes in ((), ("en", "de"), ("de", "en", "fr")):
            with pytest.raises(
                ValueError, match=r"has embeddings of the languages de en: set model\.language_embeddings"
            ):
                started(take, run, name="mlm", language_embeddings=codes)


def test_a_fine_tuned_model_gives_an_encoder_and_not_all(source: TrainedRun, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(source.folder, folder)
    content = json.loads((folder / "config.json").read_text())
    content["config"]["task"] = "xnli"
    (folder / "config.json").write_text(json.dumps(content))
    tuned = {f"encoder.{name}": value.clone() for name, value in source.encoder().state_dict().items()}
    save_file(tuned, folder / "model/model.safetensors")
    assert advised("all", source, folder) == ["encoder"]
    with pytest.raises(ValueError, match=r"was fine-tuned on xnli: name a run of pre-training"):
        weights(folder, tmp_path / "none")


def advised(take: str, source: TrainedRun, folder: Path, name: str = "electra") -> list[str]:
    """The values of start.take that the refusal of `take` offers, each of which a run can start with."""
    with pytest.raises(ValueError, match="set ") as refused:
        started(take, source, folder, name)
    found = re.search(r"set (?:--which or )?start\.take to (\w+(?: or \w+)*)$", str(refused.value))
    assert found is not None, refused.value
    names = found[1].split(" or ")
    assert all(started(choice, source, folder, name) for choice in names)
    return names


@pytest.mark.parametrize("which", [None, "discriminator", "generator"])
def test_a_refusal_offers_every_encoder_that_there_is(
    which: EncoderName | None, source: TrainedRun, tmp_path: Path
) -> None:
    export_run(source.folder, tmp_path / "export", which=which)
    encoders = [which] if which else ["discriminator", "generator"]
    assert advised("encoder", source, tmp_path / "export") == encoders
    assert advised("all", source, tmp_path / "export", name="mlm") == encoders
    assert advised("encoder", source, source.folder) == ["discriminator", "generator"]


def test_layout_and_new_languages_are_no_obstacle(source: TrainedRun) -> None:
    ours = started("generator", source, name="mlm", layout="xlm", language_embeddings=("de", "en"))
    assert torch.equal(ours["embedding_1"], source.state["embedding_1"])
    assert ours["encoder.languages"].shape == (2, source.model.width)


@pytest.mark.parametrize("into", ["both", "encoder", "decoder"])
def test_a_translating_model_needs_the_layout(into: str, source: TrainedRun) -> None:
    """Its items open and close with the special tokens that it was trained with."""
    with pytest.raises(ValueError, match=r"has layout xlme, model.layout is xlm, .*: set it to xlme, and mix the data"):
        started("generator", source, layout="xlm", into=into, **TWO)


def test_layers_that_are_left_out_are_told(source: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    started("discriminator", source, discriminator_layers=1, **TWO)
    assert capsys.readouterr().err.splitlines() == [
        f"the model in {source.folder} has 2 layers; the {which} starts from the first 1"
        for which in ("encoder", "decoder")
    ]
    started("discriminator", source, **TWO)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("exported", [False, True])
def test_a_decoder_starts_from_a_model_of_its_own(exported: bool, source: TrainedRun, tmp_path: Path) -> None:
    """Embedding, head and encoder from the one, the decoder from the other's encoder, a causal one without relative
    bias."""
    run = write_run(tmp_path / "clm", seed=7, objective="clm", relative_bias="none", like=source.folder)
    theirs = load_run(run).state
    folder = tmp_path / "export" if exported else run
    if exported:
        export_run(run, folder)
    ours = started("generator", source, decoder_from=folder, **TWO)
    encoder = source.encoder("generator").state_dict()
    for name, value in sides(ours)["encoder"].items():
        assert torch.equal(value, encoder[f"encoder.{name}"]), name
    relative = ("decoder.relative.weight", ".gate.")
    for name, value in sides(ours)["decoder"].items():
        if not any(part in f"decoder.{name}" for part in relative):
            assert torch.equal(value, theirs[f"encoder.{name}"]), name
    assert not ours["decoder.relative.weight"].any() and ours["encoder.relative.weight"].any()
    assert torch.equal(ours["embedding_0"], encoder["embedding_0"])
    assert torch.equal(ours["masked_head.bias"], source.state["masked_head.bias"])
    deep = write_run(tmp_path / "wide", objective="clm", feed_forward=24, like=source.folder)
    with pytest.raises(ValueError, match=r"wide has feed_forward 24, model.feed_forward is"):
        started("generator", source, decoder_from=deep, **TWO)
    other = write_run(tmp_path / "xlm", objective="clm", layout="xlm", like=source.folder)
    with pytest.raises(ValueError, match=r"in .*xlm has layout xlm, model.layout is xlme, .*: set it to xlm"):
        started("generator", source, decoder_from=other, **TWO)


def test_other_vocabularies_and_kinds_are_refused(source: TrainedRun, tmp_path: Path) -> None:
    other = train_vocabulary(tmp_path / "other", size=110)
    with pytest.raises(ValueError, match="another vocabulary than the data"):
        starting_weights(RunConfig("small", model=source.model, start=StartConfig(str(source.folder))), other)


# a vocabulary that grew


@pytest.fixture(scope="module")
def larger(source: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The source's vocabulary with pieces of other made-up words; the old one has no letter g."""
    rng = random.Random(3)
    syllables = ["ka", "lo", "mun", "sal", "gor", "per", "vin", "de"]
    lines = [" ".join("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(8)) for _ in range(300)]
    path = tmp_path_factory.mktemp("larger") / "sentencepiece.model"
    path.write_bytes(extend(source.vocabulary.path, lines, source.vocabulary.size + 40, 1.0))
    return Vocabulary(path)


def best_cut(piece: str, vocabulary: Vocabulary) -> list[int]:
    """The likeliest sequence of ids that spells `piece`, of all there are; unknown letters as SentencePiece scores
    them, several in a row as one."""
    scores = {vocabulary.piece(n): vocabulary.processor.get_score(n - 1) for n in range(4, vocabulary.mask_id)}
    ids = {vocabulary.piece(n): n for n in range(4, vocabulary.mask_id)}
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(piece) + 1):
        ways = [(best[begin][0] + scores[part], [*best[begin][1], ids[part]])
                for begin in range(end) if (part := piece[begin:end]) in scores]  # fmt: skip
        ways.append((best[end - 1][0] + min(scores.values()) - 10, [*best[end - 1][1], 3]))
        best.append(max(ways))
    cut = best[-1][1]
    return [n for place, n in enumerate(cut) if n != 3 or cut[place - 1 : place] != [3]]


@pytest.mark.parametrize("take", ["all", "generator", "discriminator"])
@pytest.mark.parametrize("exported", [False, True])
def test_new_pieces_start_from_those_they_were_cut_into(
    take: str, exported: bool, source: TrainedRun, larger: Vocabulary, tmp_path: Path
) -> None:
    folder = export(source, tmp_path / "export") if exported else None
    old = source.vocabulary
    grown = started(take, source, folder, vocabulary=larger.size, vocabulary_blocks=3, data=larger)
    whole = started(take, source, folder)

    def rows(state: dict[str, Tensor], name: str) -> Tensor:
        return torch.cat([state[f"{name}_{n}"] for n in range(3) if f"{name}_{n}" in state])

    tables = [(rows(grown, name), rows(whole, name)) for name in ("embedding", "difference")]
    if take != "discriminator":  # which has no masked head
        tables.append((grown["masked_head.bias"], whole["masked_head.bias"]))
    cuts = [best_cut(larger.piece(token), old) for token in range(old.mask_id, larger.mask_id)]
    assert [3] in [cut[-1:] for cut in cuts] and max(map(len, cuts)) > 3 and len(cuts) == 40
    for found, before in tables:
        assert len(found) == larger.size
        assert torch.equal(found[: old.mask_id], before[: old.mask_id]) and torch.equal(found[-1], before[-1])
        for token, cut in enumerate(cuts, start=old.mask_id):
            torch.testing.assert_close(found[token], before[cut].mean(0))
    tables_of = ("embedding_", "difference_", "masked_head.bias")
    for name, value in whole.items():
        if not name.startswith(tables_of):
            assert torch.equal(grown[name], value), name


def test_a_head_that_is_missing_is_not_drawn(source: TrainedRun, tmp_path: Path) -> None:
    """An export of all-tokens MLM lacks the discriminator's head over the vocabulary, as a run of electra does."""
    run = load_run(write_run(tmp_path / "run", layers=2, objective="all_tokens"))
    words = "has no token_head, which start.take all takes for all_tokens: set "
    with pytest.raises(ValueError, match=f"{words}start.folder to the run .* or start.take to discriminator"):
        started("all", run, export(run, tmp_path / "export"), name="all_tokens")
    electra = load_run(write_run(tmp_path / "electra", layers=2))
    with pytest.raises(ValueError, match=f"{words}start.take to discriminator or generator"):
        started("all", electra, name="all_tokens")
    plain = load_run(write_run(tmp_path / "plain", layers=2, relative_bias="none"))
    ours = started("all", plain, relative_bias="gated", language_embeddings=("de", "en"))
    assert not ours["generator.relative.weight"].any() and "discriminator.languages" in ours


def test_both_heads_of_all_tokens_grow(source: TrainedRun, larger: Vocabulary, tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", layers=2, objective="all_tokens", like=source.folder))
    grown = started("all", run, name="all_tokens", vocabulary=larger.size, data=larger)
    first, mask = run.vocabulary.mask_id, larger.mask_id
    cut = best_cut(larger.piece(first), run.vocabulary)
    for name in ("masked_head.bias", "token_head.bias"):
        before = run.state[name]
        assert torch.equal(grown[name][:first], before[:first]) and grown[name][mask] == before[-1]
        torch.testing.assert_close(grown[name][first], before[cut].mean())


def test_a_vocabulary_that_is_no_extension_is_refused(source: TrainedRun, larger: Vocabulary, tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString(larger.path.read_bytes())
    model.pieces[20].piece, model.pieces[21].piece = model.pieces[21].piece, model.pieces[20].piece
    (tmp_path / "exchanged.model").write_bytes(model.SerializeToString())
    for take in ("all", "generator"):
        with pytest.raises(ValueError, match="another vocabulary than the data: encode the data with its own, or with"):
            started(take, source, vocabulary=larger.size, data=Vocabulary(tmp_path / "exchanged.model"))
        with pytest.raises(ValueError, match=f"has vocabulary {larger.size}, model.vocabulary is 120: set it to the"):
            started(take, source, data=larger)


def test_a_run_goes_on_with_the_start_it_had(source: TrainedRun, tmp_path: Path) -> None:
    first = RunConfig("small", start=StartConfig(str(source.folder), "generator"))
    folder = RunFolder(tmp_path / "run")
    folder.write_config(first, data={}, world=1, parameters={})
    folder.claim(first)
    folder.close()
    for start in (StartConfig(), StartConfig(str(source.folder), "discriminator")):
        with pytest.raises(ValueError, match=r"was started with start.(folder|take) .*, this call has"):
            folder.claim(replace(first, start=start))
        folder.close()


def test_the_mean_of_runs(source: TrainedRun, tmp_path: Path) -> None:
    """Their vocabulary may be in other blocks; what they were fine-tuned on must be the same."""
    settings = {"generator_layers": 2, "embedding_sharing": "gdes", "vocabulary_blocks": 1}
    other = load_run(write_run(tmp_path / "other", seed=2, layers=2, like=source.folder, **settings))
    average([source.folder, other.folder], tmp_path / "mean")
    found, second = load_run(tmp_path / "mean").state, other.state["difference_0"].split(60)[1]
    torch.testing.assert_close(found["difference_1"], (source.state["difference_1"] + second) / 2)
    path = other.folder / "config.json"
    content = json.loads(path.read_text())
    content["config"]["task"] = "xnli"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"has task xnli, .* has pre-training: average models"):
        average([source.folder, other.folder], tmp_path / "none")
    model = sentencepiece_model_pb2.ModelProto.FromString(other.vocabulary.path.read_bytes())
    model.pieces[20].piece, model.pieces[21].piece = model.pieces[21].piece, model.pieces[20].piece
    other.vocabulary.path.write_bytes(model.SerializeToString())
    del content["config"]["task"]
    content["data"]["vocabulary_sha256"] = other.vocabulary.sha256
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"other has another vocabulary than "):
        average([source.folder, other.folder], tmp_path / "none")


def test_settings_of_training_alone_may_differ(source: TrainedRun, tmp_path: Path) -> None:
    """Dropout and masks do not change what trained weights compute, nor does the version that saved an export."""
    settings = {"generator_layers": 2, "embedding_sharing": "gdes", "vocabulary_blocks": 2}
    other = write_run(tmp_path / "other", seed=2, layers=2, like=source.folder, **settings)
    content = json.loads((other / "config.json").read_text())
    content["config"]["model"]["dropout"], content["config"]["objective"]["mask_fraction"] = 0.2, 0.3
    (other / "config.json").write_text(json.dumps(content))
    average([source.folder, other], tmp_path / "mean")
    exports = [tmp_path / "one", tmp_path / "two"]
    for run, place in zip((source.folder, other), exports, strict=True):
        export_run(run, place)
    path = exports[1] / "config.json"
    changed = {"transformers_version": "4.0.0", "hidden_dropout_prob": 0.2}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    average(exports, tmp_path / "mean of exports")
    means = [load_run(tmp_path / "mean").state, started("all", source, tmp_path / "mean of exports")]
    for name in means[0]:
        torch.testing.assert_close(means[1][name], means[0][name], rtol=1e-6, atol=1e-7)
    # Folders of transformers itself have no hash of their vocabulary in config.json.
    model = sentencepiece_model_pb2.ModelProto.FromString((exports[1] / "sentencepiece.bpe.model").read_bytes())
    model.pieces[20].piece, model.pieces[21].piece = model.pieces[21].piece, model.pieces[20].piece
    (exports[1] / "sentencepiece.bpe.model").write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"two has another vocabulary than .*one: average models that have the same"):
        average(exports, tmp_path / "none")
    (exports[1] / "sentencepiece.bpe.model").unlink()
    with pytest.raises(ValueError, match=r"two/sentencepiece\.bpe\.model is missing: copy the vocabulary that"):
        average(exports, tmp_path / "none")


def test_the_mean_of_exports_is_whole(source: TrainedRun, tmp_path: Path) -> None:
    """With GDES the discriminator's table is the sum of the means; exports of other settings are refused."""
    settings = {"generator_layers": 2, "embedding_sharing": "gdes", "vocabulary_blocks": 2}
    other = load_run(write_run(tmp_path / "other", seed=2, layers=2, like=source.folder, **settings))
    exports = [tmp_path / "one", tmp_path / "two"]
    for run, place in zip((source, other), exports, strict=True):
        export_run(run.folder, place)
    average(exports, tmp_path / "mean")
    found = started("all", source, tmp_path / "mean")
    for name, value in source.state.items():
        torch.testing.assert_close(found[name], (value + other.state[name]) / 2, rtol=1e-6, atol=1e-7)
    card = (tmp_path / "mean/README.md").read_text()
    assert card.startswith("---\n") and "\n---\nThe weights are the mean of the weights of `one`, `two`. What" in card
    path = exports[1] / "generator/config.json"
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | {"num_attention_heads": 1}))
    with pytest.raises(ValueError, match=r"two has num_attention_heads 1, .*one has \d+: average models of one kind"):
        average(exports, tmp_path / "none")
    path.write_text(text)
    shutil.copytree(exports[0], tmp_path / "half")
    shutil.rmtree(tmp_path / "half/generator")
    for pair in ([exports[0], tmp_path / "half"], [tmp_path / "half", exports[0]]):
        with pytest.raises(ValueError, match=rf"{pair[1].name} and .*{pair[0].name} differ in .* files of weights"):
            average(pair, tmp_path / "none")
    shutil.copytree(exports[0], tmp_path / "copy")
    with pytest.raises(ValueError, match=r"one and .*copy have the same weights: name each model once"):
        average([exports[0], tmp_path / "copy"], tmp_path / "none")
    (tmp_path / "copy/model.safetensors").rename(tmp_path / "copy/pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin cannot be averaged: save the model's weights as model\.safe"
    ):
        average([tmp_path / "copy", exports[0]], tmp_path / "none")
    path = exports[1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"relative_max_distance": 6}))
    with pytest.raises(ValueError, match=r"has relative_max_distance 6, .* has 12: average models of one kind"):
        average(exports, tmp_path / "none")
    assert not (tmp_path / "none").exists()
