"""Another DeepSpeed than the proven one is refused in a sentence, before anything is built."""

import deepspeed
import pytest

from xlme_ds.config import EngineConfig
from xlme_ds.engine.deepspeed_compat import TESTED_VERSION, check_deepspeed
from xlme_ds.engine.ranks import SharedError, start_process_group

REDUCE = "runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback"


def test_the_installed_one_is_the_proven_one() -> None:
    check_deepspeed()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.19.5+local")
    for name in ("RANK", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SharedError, match=f"0.19.5.local is installed, .* proven with {TESTED_VERSION}.*deepspeed=={TESTED_VERSION}"
    ):
        start_process_group(EngineConfig(deepspeed="zero1"))


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, grads: object = None) -> None:
        """One argument less."""

    monkeypatch.setattr(deepspeed.DeepSpeedEngine, "buffered_allreduce_fallback", changed)
    with pytest.raises(ValueError, match=f"{deepspeed.__version__} is installed, .* in which {REDUCE} takes"):
        check_deepspeed()


def test_a_part_that_is_gone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine:DeepSpeedEngine.gone takes \(self\), here it is \(missing\)"):
        check_deepspeed({"runtime.engine:DeepSpeedEngine.gone": "self"})
