"""What no source may do: run what it reads (W-71), or wait for a device in a step (W-66)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.meta.sources import PACKAGE, found_in_sources

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib", "pty"}
BUILTINS = {"eval", "exec", "compile", "__import__", "input"}
# (object, attribute) that start a shell, or objects from bytes.
CALLS = {
    *(("os", "system"), ("os", "popen"), ("np", "fromregex")),
    *(("subprocess", "getoutput"), ("subprocess", "getstatusoutput")),
    *(("yaml", "unsafe_load"), ("yaml", "full_load")),
}
# PersiaServiceCtx hands functions to processes that it starts, through files of its own in a
# directory that only its user can enter. No socket and no file of anybody else's leads there.
FUNCTIONS_OF_THE_USER = PACKAGE / "_cli/run.py"
# An export hands its model to a child of its own, and the child what it traced back, through a
# directory that only its user can enter. No file of a bundle leads there.
MODEL_OF_THE_USER = (PACKAGE / "_serving/export.py", PACKAGE / "_serving/export_child.py")


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            yield from ((node.lineno, n) for n in names if n.partition(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in dangers_of_call(node))


def dangers_of_call(call: ast.Call) -> Iterator[str]:
    words = {word.arg: word.value for word in call.keywords}
    if isinstance(call.func, ast.Name) and call.func.id in BUILTINS:
        yield call.func.id
    for word, safe in (("shell", False), ("allow_pickle", False)):
        if word in words and not is_literal(words[word], safe):
            yield word
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return
    name = (call.func.value.id, call.func.attr)
    if name in CALLS:
        yield ".".join(name)
    if name == ("torch", "load") and not is_literal(words.get("weights_only"), True):
        yield "torch.load of more than weights"
    if name == ("np", "load") and "allow_pickle" not in words:
        yield "np.load"
    if name == ("yaml", "load") and "Loader" not in words:
        yield "yaml.load"


def is_literal(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_w71_nothing_runs_what_it_reads() -> None:
    pattern = rf"\b({'|'.join(MODULES)}|eval|exec|system|popen)\s*(\(|$)"
    allowed = (FUNCTIONS_OF_THE_USER, *MODEL_OF_THE_USER)
    assert not found_in_sources(dangers, pattern, *allowed)
    text = (PACKAGE / "utils.py").read_text()
    bases = re.findall(r"^class _UniqueKeyLoader\((.*)\):", text, re.MULTILINE)
    assert bases == ["yaml.SafeLoader"]


def test_each_danger_is_seen() -> None:
    for code in (
        *("import pickle", "from cloudpickle import dumps", "eval('1')", "os.system('ls')"),
        *("subprocess.run('ls', shell=True)", "subprocess.run('ls', shell=flag)"),
        *("torch.load(file)", "torch.load(file, weights_only=False)", "yaml.load(text)"),
        *("np.load(file)", "np.load(file, allow_pickle=True)"),
    ):
        assert list(dangers(ast.parse(code))), code


# --- devices --------------------------------------------------------------------------------

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
    assert not found_in_sources(waits, r"\btorch\.cuda\b")
    step = "def step():\n    torch.cuda.synchronize()\n    torch.cuda.Stream(device)\n"
    assert [line for line, _ in waits(ast.parse(step))] == [2, 3]


def test_no_named_tuple_has_another_base() -> None:
    """Python 3.10 refuses it when the class is made."""

    def mixed(tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            bases = [ast.unparse(base) for base in getattr(node, "bases", ())]
            if isinstance(node, ast.ClassDef) and len(bases) > 1 and "NamedTuple" in bases:
                yield node.lineno, node.name

    assert not found_in_sources(mixed, r"(?!)")
    assert list(mixed(ast.parse("class Both(NamedTuple, Generic[T]): ...")))
