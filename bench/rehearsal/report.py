"""The table of a rehearsal, and what its rates say of the whole corpus."""

from typing import Any

from bench.rehearsal.checks import RATES, predicted

FULL = 2_394 * 1024**3 + 150e9  # bytes of text
ENGLISH = 300.8 * 1024**3
FULL_ROWS = 2 * 256_000_000
NETWORK, FILES, CORES = 100e6, 2e9, 64


def report(found: dict[str, Any], gigabytes: float, rows: int) -> str:
    """Stages and what they took, with the kills; then hours of the whole corpus."""
    heading = ("stage", "seconds", "CPU s", "GB in", "GB out", "MiB", "open", "files", "predicted s", "killed")
    lines = [heading]
    seconds = predicted(gigabytes, rows)
    for name, taken in found["stages"].items():
        guess = seconds.get(name) or seconds.get(name.split(".")[0] if not name.endswith("many") else "")
        lines.append((
            name, f"{taken['seconds']:.0f}", f"{taken['cpu_seconds']:.0f}", f"{taken['read'] / 1e9:.2f}",
            f"{taken['written'] / 1e9:.2f}", f"{taken['peak_bytes'] / 2**20:.0f}", f"{taken['open_files']:.0f}",
            str(taken["files"]), f"{guess:.0f}" if guess else "-", ", ".join(taken["kills"]) or "-",
        ))  # fmt: skip
    return "\n".join([*_aligned(lines), "", *_aligned(_full(found["stages"], gigabytes, rows))])


def _full(stages: dict[str, Any], gigabytes: float, rows: int) -> list[tuple[str, ...]]:
    """Hours by stage for 2,394 GiB of CC-100 and 150 GB of pairs: the processor's at the measured rates, or those of
    the file system, or of the one process that reads English, whichever are more."""
    text, made = FULL / (gigabytes * 1e9), FULL_ROWS / (2 * rows)
    lines = [("of the whole corpus", "CPU h", *(f"{nodes} x {CORES} cores, h" for nodes in (1, 8, 64)))]
    lines.append(("download", "-", *(f"{0.22 * FULL / NETWORK / 3600:.1f}",) * 3))
    alone = {"vocap": ENGLISH / RATES["vocap"], "encode": ENGLISH / RATES["xz"]}
    for name, scale in (("vocap", text), ("encode", text), ("mix", made), ("verify", made)):
        parts = [stages[part] for part in (name, f"{name}.mono", f"{name}.para") if part in stages]
        cpu = scale * sum(part["cpu_seconds"] for part in parts)
        moved = scale * sum(part["read"] + part["written"] for part in parts) / FILES
        hours = (max(cpu / CORES / nodes, moved, alone.get(name, 0.0)) / 3600 for nodes in (1, 8, 64))
        lines.append((name, f"{cpu / 3600:.0f}", *(f"{value:.1f}" for value in hours)))
    return lines


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
