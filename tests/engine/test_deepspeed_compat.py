"""Another DeepSpeed than the proven one is refused in a sentence, before anything is built; what goes to a disk."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch

from xlme_ds.config import EngineConfig
from xlme_ds.engine.deepspeed_compat import TESTED_VERSION, _cut_to_alignment, check_deepspeed
from xlme_ds.engine.ranks import SharedError, start_process_group

REDUCE = "runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback"


def test_the_installed_one_is_the_proven_one() -> None:
    check_deepspeed()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.19.5+local")
    for name in ("RANK", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SharedError, match=f"0.19.5.local is installed, .* tested with {TESTED_VERSION}.*deepspeed=={TESTED_VERSION}"
    ):
        start_process_group(EngineConfig(deepspeed="zero1"))


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, grads: object = None) -> None:
        """One argument less."""

    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "buffered_allreduce_fallback", changed)
    with pytest.raises(
        ValueError,
        match=f"{deepspeed.__version__} is installed, .* in which {REDUCE} has the parameters.*--force-reinstall",
    ):
        check_deepspeed()


def test_a_part_that_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine:DeepSpeedEngine.gone has the parameters \(self\), not \(missing\)"):
        check_deepspeed({"runtime.engine:DeepSpeedEngine.gone": "self"})


def test_only_the_aligned_part_of_a_gradient_goes_to_the_disk() -> None:
    """Cut at multiples of 128 elements of its buffer; the ends keep no memory but their own."""
    swapper = SimpleNamespace(numel_alignment=128, is_swappable_tensor=lambda tensor: tensor.numel() > 200)
    buffer = torch.arange(1000.0)
    places = [(100, 400), (512, 812), (812, 900), (128, 384)]  # first and last element + 1
    parts, starts = _cut_to_alignment(swapper, [buffer[a:b] for a, b in places], [a for a, _ in places])
    assert starts == [100, 128, 384, 512, 768, 812, 128]
    assert [len(part) for part in parts] == [28, 256, 16, 256, 44, 88, 256]
    for part, start in zip(parts, starts, strict=True):
        assert torch.equal(part, buffer[start : start + len(part)])
        assert (part.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()) == (len(part) == 256)
