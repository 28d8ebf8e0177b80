"""Rules that tests keep, read from their source (docs/architecture.md, Rules)."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like"}


def unseeded(source: str) -> Iterator[str]:
    """Calls that draw from a generator which other tests share, torch's, numpy's or Python's own: line and name."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        module, _, function = ast.unparse(call.func).rpartition(".")
        seeded = any(word.arg == "generator" for word in call.keywords)
        of_torch = module == "torch" and function in DRAWS
        initial = module.endswith("nn.init") and function.endswith(("normal_", "uniform_"))
        of_numpy = module == "np.random" and function[0].islower() and function != "default_rng"
        of_python = module == "random" and function != "Random" and "\nimport random\n" in source
        if ((of_torch or initial) and not seeded) or of_numpy or of_python:
            yield f"{call.lineno} {module}.{function}"


def test_every_draw_has_a_seed_of_its_own() -> None:
    """Else what a test draws depends on which others ran before it."""
    found = {path.relative_to(TESTS): list(unseeded(path.read_text("utf-8"))) for path in sorted(TESTS.rglob("*.py"))}
    assert not {path: calls for path, calls in found.items() if calls}


def test_a_draw_without_a_seed_is_seen() -> None:
    said = ("\nimport random\ntorch.rand(3)", "nn.init.normal_(x)", "np.random.normal()", "random.shuffle(x)")
    assert len(list(unseeded("\n".join(said)))) == len(said)
    fine = ("torch.rand(3, generator=g)", "np.random.default_rng(0).normal()", "random.Random(0).shuffle(x)")
    assert not list(unseeded("\n".join(fine)))
