"""What preparing the paper's corpora takes: disk and hours by stage, computed from rates of one core.

    python -m bench.prep_plan [--cores 64] [--nodes 1 8] [--encode 20] ...

A stage takes the longest of: its work over all cores; its largest task on one core; its bytes through the file system;
its reads in no order.
"""

from dataclasses import dataclass

import tyro

GIB = 1 << 30
CC100 = 2394.3 * GIB  # text of the 100 languages: sum of Table 6 of Conneau et al. (ACL 2020)
ENGLISH = 300.8 * GIB  # the largest of them, in the same table
LANGUAGES = 100
LINE = 130  # bytes of a line of the sample
ID = 4  # bytes of a token
STRETCH = 1 << 15  # bytes that mix reads at once
PAGE = 1 << 12
NOTE = 28  # bytes that exact_duplicates keeps of a paragraph while a language is encoded


@dataclass(frozen=True)
class Settings:
    """Rates are MB (10^6 bytes) a second."""

    cores: int = 64
    """Cores of a node."""
    nodes: tuple[int, ...] = (1, 8)
    download: float = 100
    """Assumed: from the network."""
    disk: float = 2000
    """Assumed: the shared file system, reading or writing."""
    reads: float = 20_000
    """Assumed: reads in no order a second, of 32 KiB, from the shared file system."""
    compressed: float = 0.22
    """Bytes of .xz a byte of text; the releases are between 0.15 (Amharic) and 0.27 (English)."""
    pairs: float = 150
    """Assumed: GB of parallel text, both sides."""
    decompress: float = 72
    """.xz to text, MB of text on one core."""
    sample: float = 41
    """One pass of vocap: decompressing, cleaning, the filters of `cc100`."""
    curve: float = 1800
    """Seconds for the curve of one language from a million lines, on one core."""
    encode: float = 10
    """Text to shards, with the filters of `cc100`."""
    bytes_a_token: float = 4.4
    bytes_a_paragraph: float = 97
    rows: int = 256_000_000
    """Rows of mix, of each task."""
    row_tokens: int = 512
    mix: float = 120
    """Rows written on one core."""
    mix_reads: float = 1.3
    """Bytes from the disk a byte of rows; between 1.14 (rows) and 1.27 (pairs), measured on cold files."""
    metadata: float = 0.005
    """Bytes of an encoded shard, a byte, that mix reads to find its record batches."""
    verify: float = 400
    """Bytes hashed and looked at on one core."""


@dataclass(frozen=True)
class Stage:
    """Work of one stage: `seconds` of one core, `longest` of them in one task, `bytes` and `reads` in no order from the
    file system."""

    name: str
    disk: float
    seconds: float
    longest: float
    bytes: float
    reads: float = 0

    def hours(self, cores: int, disk: float, reads: float) -> float:
        """Elapsed, on so many cores and a file system that gives so many bytes, and reads in no order, a second."""
        return max(self.seconds / cores, self.longest, self.bytes / disk, self.reads / reads) / 3600


def stages(s: Settings) -> list[Stage]:
    """The stages in their order; `disk` is what each leaves, in bytes."""
    mb = 1e6
    text, pairs = CC100 + s.pairs * 1e9, s.pairs * 1e9
    packed = text * s.compressed
    sample = min(LANGUAGES * 1e6 * LINE, text)
    rows = 2 * s.rows * (s.row_tokens + 4) * ID
    passes = 2 * text / (s.sample * mb)
    tokens = text / s.bytes_a_token * ID
    encoding = text / (s.encode * mb)
    # Of 64 KiB of pairs, two sides, the ids are read once; the list offsets to pack them, and again to write them.
    pieces = s.rows * s.row_tokens * ID / STRETCH * (1 + 3) + s.metadata * tokens / PAGE
    return [
        Stage("download", packed, 0, packed / (s.download * mb), packed),
        Stage("vocap, two passes", sample, passes, 2 * ENGLISH / (s.sample * mb), 2 * packed),
        Stage("vocap, curves", 0, LANGUAGES * s.curve, s.curve, 0),
        Stage("encode", tokens, encoding, ENGLISH / (s.decompress * mb), packed + tokens),
        Stage("encode, meanwhile: notes on duplicates", (text - pairs) / s.bytes_a_paragraph * NOTE, 0, 0, 0),
        Stage("mix", rows, rows / (s.mix * mb), 0, (1 + s.mix_reads) * rows + s.metadata * tokens, pieces),
        Stage("verify", 0, rows / (s.verify * mb), 0, rows),
    ]


def main(settings: Settings) -> None:
    """Print a Markdown table."""
    heads = [f"{nodes} node{'s' * (nodes > 1)} of {settings.cores} cores, h" for nodes in settings.nodes]
    print(f"| stage | disk, TB | {' | '.join(heads)} |\n|---{'|---' * (len(heads) + 1)}|")
    found = stages(settings)
    for stage in found:
        hours = [stage.hours(nodes * settings.cores, settings.disk * 1e6, settings.reads) for nodes in settings.nodes]
        print(f"| {stage.name} | {stage.disk / 1e12:.2f} | {' | '.join(f'{h:.1f}' for h in hours)} |")


if __name__ == "__main__":
    main(tyro.cli(Settings))
