"""W-66: a step waits for no device, and makes no stream of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.meta.sources import ROOT, python_files

# What makes one is made once: a Converter, and a context's gradients.
ONCE = {"_new_stream", "__init__"}


def waits(tree: ast.AST, inside: str = "") -> Iterator[tuple[int, str]]:
    """Yield the calls that stop everything, and streams that are made more often than once."""
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else inside
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in ("torch.cuda.synchronize", "torch.cuda.empty_cache"):
                yield node.lineno, called
            if called == "torch.cuda.Stream" and name not in ONCE:
                yield node.lineno, f"{called} in {name}"
        yield from waits(node, name)


def test_w66_no_step_synchronises_the_device() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in python_files()
        for line, what in waits(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not wrong


def test_what_would_is_seen() -> None:
    step = "def step():\n    torch.cuda.synchronize()\n    torch.cuda.Stream(device)\n"
    assert [line for line, _ in waits(ast.parse(step))] == [2, 3]
