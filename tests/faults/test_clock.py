"""Nothing that decides reads the time of day or the date of a file: a clock that jumps changes nothing."""

import ast

import pytest

from tests.launch import ROOT

TIME_OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "os.path.getmtime"}
DATES = {"st_mtime", "st_ctime", "st_atime", "st_mtime_ns", "st_ctime_ns"}
DECIDES_NOTHING = {
    "data_prep/encode/shared_work.py",  # the name of a temporary folder, with the number of the process
    "xlme_ds/train/run_folder.py",  # the date that a run's record shows
}


@pytest.mark.parametrize("package", ["xlme_ds", "data_prep"])
def test_no_time_of_day(package: str) -> None:
    durations = 0
    for path in sorted((ROOT / package).rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert where in DECIDES_NOTHING or name not in TIME_OF_DAY, (
                f"{where}: {name}, use time.monotonic or perf_counter"
            )
            assert name.rpartition(".")[2] not in DATES, f"{where}: {name}"
            imported = node.names if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime") else []
            assert not imported, f"{where}: import the module, so that this test sees what of it is used"
            durations += name in ("time.monotonic", "time.perf_counter")
    assert durations, "the scan sees nothing"
