"""What the package shows to the outside: names, types, documentation, and what it needs."""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import callgate
import callgate._errors
import callgate._limiter
import callgate.agent_framework
from callgate import _callgate

from .running import run_program

PACKAGE = Path(callgate.__file__).parent
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STUB = ast.parse((PACKAGE / "_callgate.pyi").read_text())
STUB_CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
PUBLIC = [name for name in STUB_CLASSES if name in callgate.__all__]
INTERNAL = {"Home", "Look", "TracedCall", "Turn"}
"""What the package itself waits with, and traces."""


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a stub defines, by name."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


# --- names ---------------------------------------------------------------------------------------


def test_the_package_exports_what_it_names_and_nothing_else() -> None:
    public = {
        name
        for name, value in vars(callgate).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public | {"__version__"} == set(callgate.__all__)
    assert callgate.__all__ == sorted(callgate.__all__)
    for name in callgate.__all__:
        assert hasattr(callgate, name)


def test_the_front_end_exports_what_it_names() -> None:
    front_end = callgate.agent_framework
    assert set(front_end.__all__) == {"OnRejected", "ToolRateLimit", "ToolRateLimitMiddleware"}
    assert front_end.ToolRateLimit is callgate.ToolRateLimit


def test_the_stub_and_the_extension_define_the_same_names() -> None:
    said = set(defined(STUB.body))
    assert said - {"__version__"} == {name for name in vars(_callgate) if name[:2] != "__"}
    assert set(STUB_CLASSES) == {*PUBLIC, *INTERNAL}


@pytest.mark.parametrize("name", STUB_CLASSES)
def test_a_class_has_the_attributes_that_its_stub_says(name: str) -> None:
    # The last is what `copy` and `pickle` leave on a class.
    every_class_has = {*dir(object), "__module__", "__slotnames__"}
    said = set(defined(STUB_CLASSES[name].body))
    assert said - every_class_has == set(vars(getattr(_callgate, name))) - every_class_has


def parameters(thing: Any) -> list[str]:
    """A callable's parameters as a signature shows them, without types."""
    signature = inspect.signature(thing)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls", "_cls", "_class")
    ]
    return str(inspect.Signature(bare))[1:-1].replace("Ellipsis", "...").split(", ")


def said_parameters(node: ast.FunctionDef) -> list[str]:
    """The same of a function in the stub."""
    arguments = node.args
    named = [argument.arg for argument in arguments.args]
    bare = [None] * (len(named) - len(arguments.defaults))
    said = [
        name if default is None else f"{name}={ast.unparse(default)}"
        for name, default in zip(named, [*bare, *arguments.defaults], strict=True)
        if name not in ("self", "cls")
    ]
    if arguments.kwonlyargs:
        said.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        assert default is not None
        said.append(f"{argument.arg}={ast.unparse(default)}")
    if arguments.kwarg is not None:
        said.append(f"**{arguments.kwarg.arg}")
    return said or [""]


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        ("ToolRateLimit", "__new__"),
        ("ToolRateLimit", "per_minute"),
        ("ToolRateLimit", "parse"),
        ("ToolRateLimit", "quota"),
        ("Limiter", "__new__"),
        ("Limiter", "from_file"),
        ("Limiter", "try_acquire"),
        ("Limiter", "reload"),
        ("Limiter", "snapshot"),
        ("Limiter", "pause"),
    ],
)
def test_a_method_takes_the_arguments_that_its_stub_says(owner: str, method: str) -> None:
    found = getattr(_callgate, owner)
    node = defined(STUB_CLASSES[owner].body)[method]
    assert isinstance(node, ast.FunctionDef)
    runtime = found if method == "__new__" else getattr(found, method)
    assert parameters(runtime) == said_parameters(node)


def test_everything_public_is_documented_in_the_stub_and_at_run_time() -> None:
    for name, node in STUB_CLASSES.items():
        assert ast.get_docstring(node), name
        assert getattr(_callgate, name).__doc__, name
        for method, inner in defined(node.body).items():
            if isinstance(inner, ast.FunctionDef) and not method.startswith("_"):
                assert ast.get_docstring(inner), f"{name}.{method}"
    for name in callgate.__all__:
        if name != "__version__":
            assert getattr(callgate, name).__doc__, name


@pytest.mark.parametrize("name", PUBLIC)
def test_help_says_of_a_class_and_its_methods_what_each_argument_is(name: str) -> None:
    found = getattr(callgate, name)
    for method, node in defined(STUB_CLASSES[name].body).items():
        if not isinstance(node, ast.FunctionDef) or (
            method.startswith("_") and method != "__new__"
        ):
            continue
        said = inspect.getdoc(found if method == "__new__" else getattr(found, method)) or ""
        for argument in said_parameters(node):
            word = argument.split("=")[0].strip("*")
            in_words = (f"`{word}`", f"{word}: ")
            assert not word or any(form in said for form in in_words), f"{name}.{method}: {word}"
        assert ("ConfigError" in said) == ("ConfigError" in documented(node, name)), (name, method)


def documented(node: ast.FunctionDef, owner: str) -> str:
    """The stub's documentation of a method; the class has that of `__new__`."""
    if node.name != "__new__":
        return ast.get_docstring(node) or ""
    # What Python makes of a class of the extension's says it itself.
    made_of_it = getattr(callgate, owner) is not getattr(_callgate, owner)
    return (
        callgate.Limiter.__doc__ or ""
        if made_of_it
        else ast.get_docstring(STUB_CLASSES[owner]) or ""
    )


@pytest.mark.parametrize("method", ["acquire", "acquire_sync", "limit"])
def test_help_says_of_what_waits_what_each_argument_is(method: str) -> None:
    found = getattr(callgate.Limiter, method)
    said = inspect.getdoc(found) or ""
    for argument in parameters(found):
        word = argument.split("=")[0].strip("*")
        assert not word or f"{word}: " in said, word
    assert "ConfigError" in said


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_callgate.pyi").exists()


def test_the_version_is_that_of_the_workspace() -> None:
    manifest = (ROOT / "Cargo.toml").read_text()
    versions = re.findall(r'^version = "(.*)"$', manifest, re.MULTILINE)
    assert [callgate.__version__] == versions


def test_types_are_named_by_the_module_that_exports_them() -> None:
    for name in callgate.__all__:
        if name != "__version__":
            assert getattr(callgate, name).__module__ == "callgate", name


# --- what it needs -------------------------------------------------------------------------------


def without(missing: str) -> dict[str, Any]:
    """How callgate does without a package."""
    said: dict[str, Any] = json.loads(run_program(PROGRAMS / "without.py", missing))
    return said


@pytest.mark.parametrize("missing", ["agent_framework", "opentelemetry"])
def test_callgate_needs_no_framework_and_no_telemetry(missing: str) -> None:
    said = without(missing)
    assert said["alone"] == [True, False, True]
    # The package was missing indeed: what needs it says so.
    assert said["needs"][0].startswith(missing)


def test_the_front_end_says_what_to_install() -> None:
    assert without("agent_framework")["needs"] == [
        "agent_framework",
        "callgate.agent_framework needs Agent Framework: pip install 'callgate[agent-framework]'",
    ]


# --- documentation that runs ---------------------------------------------------------------------


def stub_examples() -> list[doctest.DocTest]:
    """The examples in the stub's docstrings, which are not there at run time."""
    parser = doctest.DocTestParser()
    path = str(PACKAGE / "_callgate.pyi")
    return [
        parser.get_doctest(
            text, {}, f"{getattr(node, 'name', 'module')}", path, node.body[0].lineno
        )
        for node in ast.walk(STUB)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (text := ast.get_docstring(node))
    ]


def module_examples() -> list[doctest.DocTest]:
    """The examples in the docstrings of the package's modules."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [callgate, callgate._errors, callgate.agent_framework]
    found = [example for module in modules for example in finder.find(module, globs={})]
    # It says that it is of the package; its methods know better.
    limiter = finder.find(callgate.Limiter, "callgate.Limiter", callgate._limiter, globs={})
    return found + [example for example in limiter if example.name != "callgate.Limiter"]


EXAMPLES = [example for example in stub_examples() + module_examples() if example.examples]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_in_a_docstring_is_right(example: doctest.DocTest) -> None:
    said = io.StringIO()
    result = doctest.DocTestRunner().run(example, out=said.write)
    assert result.attempted > 0
    assert result.failed == 0, said.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        *("ToolRateLimit", "parse", "per_minute", "quota"),
        *("from_file", "try_acquire", "reload", "snapshot", "pause", "Decision"),
        *(f"callgate.Limiter{method}" for method in ("", ".acquire", ".acquire_sync", ".limit")),
    ],
)
def test_what_people_call_first_has_an_example(name: str) -> None:
    assert name in {example.name for example in EXAMPLES}


FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"[\[({]\s*\.\.\.\s*[])}]")


@pytest.mark.parametrize("page", ["README.md"])
def test_the_python_on_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, Any] = {}
    ran = 0
    for block in FENCE.finditer(text):
        if PLACEHOLDER.search(block[1]):
            continue  # It shows where something goes, and runs with that only.
        line = text.count("\n", 0, block.start(1))
        # As lines of the page, so that a traceback points there.
        exec(compile("\n" * line + block[1], str(ROOT / page), "exec"), namespace)  # noqa: S102
        ran += 1
    assert ran > 0
    assert capsys.readouterr().err == ""
