"""Rules of this code base that no linter checks."""

import ast
import builtins
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "api_server",
    "benchmarks",
    "crds",
    "distribution",
    "examples",
    "kube",
    "operator",
    "planning",
    "programs",
    "protocol",
    "tests",
    "tools",
    "worker_image",
)
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PROGRAMS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
PRODUCT = [path for path in PROGRAMS if "src" in path.relative_to(ROOT).parts]
MAX_MODULE_LINES = 700
MAX_CLASS_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_MODULES = 15
MAX_SHARED_NAMES = 21
"""How many names of modules the product uses more than once; lower it when there are fewer."""
MAX_COLLABORATORS = 7
MANY_COLLABORATORS = {
    "CausalAttention": 10,  # megatron-core calls it
    "Context": 35,
    "MegatronModel": 9,
}
"""Classes whose constructor takes more; the numbers may only fall."""


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def classes(path: Path) -> list[ast.ClassDef]:
    return [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]


def longer_than(
    limit: int, nodes: Sequence[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]
) -> list[str]:
    sizes = [(node.name, (node.end_lineno or 0) - node.lineno) for node in nodes]
    return [f"{name}: {size} lines" for name, size in sizes if size > limit]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_classes_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES, "split the module"
    assert longer_than(MAX_CLASS_LINES, classes(path)) == [], "give a subject its own class"
    assert longer_than(MAX_FUNCTION_LINES, functions(path)) == [], "split the function"


def test_no_folder_is_a_hall() -> None:
    modules = Counter(
        str(path.parent.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py"
    )
    halls = {path: count for path, count in modules.items() if count > MAX_MODULES}

    assert halls == {}, "divide the folder by subject"


def test_few_modules_share_a_name() -> None:
    names = Counter(path.name for path in PRODUCT if not path.name.startswith("__"))
    shared = sorted(name for name, count in names.items() if count > 1)

    assert len(shared) == MAX_SHARED_NAMES, f"name the part of each, or lower it: {shared}"


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def is_frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(each) for each in node.decorator_list)


def required_fields(node: ast.ClassDef) -> list[str]:
    """Return the types of the fields without a default, which each caller of a dataclass gives."""
    fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return [ast.unparse(each.annotation) for each in fields if each.value is None]


def collaborators(sources: Sequence[str]) -> dict[str, int]:
    """Count what constructors take, by class: those of `__init__` and of dataclasses of services.

    A dataclass is a service if it can change, has an asynchronous method, or takes such a class.
    """
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    known = [node for node in nodes if isinstance(node, ast.ClassDef)]
    changing = {
        node.name
        for node in known
        if (is_dataclass(node) and not is_frozen(node))
        or any(isinstance(each, ast.AsyncFunctionDef) for each in node.body)
        or "__init__" in {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    }
    found = {}
    for node in known:
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                found[node.name] = len([*each.args.args, *each.args.kwonlyargs]) - 1
        types = required_fields(node)
        words = {word for each in types for word in re.findall(r"\w+", each)}
        if is_dataclass(node) and (node.name in changing or words & changing):
            found[node.name] = len(types)
    return found


def test_constructors_take_few_collaborators() -> None:
    found = collaborators([path.read_text() for path in PRODUCT])
    many = {name: count for name, count in found.items() if count > MAX_COLLABORATORS}

    assert many == MANY_COLLABORATORS, "give a subject its own class, or lower its number"


def test_what_constructors_take_is_counted() -> None:
    changing = "class Plain:\n    def __init__(self, a, *, b): ...\n"
    service = "@dataclass(frozen=True)\nclass Service:\n    parts: list[Plain]\n    size: int = 0\n"
    value = "@dataclass(frozen=True)\nclass Value:\n    size: int\n"

    assert collaborators([changing, service, value]) == {"Plain": 2, "Service": 1}


def stateful_classes(source: str) -> list[str]:
    """Return the classes of a module that are neither frozen dataclasses nor enums."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [
        node.name
        for node in classes
        if not is_frozen(node)
        and not any(ast.unparse(base).endswith("Enum") for base in node.bases)
    ]


@pytest.mark.parametrize("folder", ["children", "decide", "spec"])
def test_the_folders_in_which_the_operator_decides_hold_no_state(folder: str) -> None:
    paths = sorted((ROOT / "operator/src/tinkercloud_operator" / folder).rglob("*.py"))
    found = {path.name: stateful_classes(path.read_text()) for path in paths}

    assert paths
    assert {name: classes for name, classes in found.items() if classes} == {}, "move them to run/"


def test_a_class_that_can_change_is_found() -> None:
    changing = "@dataclass(slots=True)\nclass Index:\n    names: set[str]\n"
    frozen = "@dataclass(frozen=True, slots=True)\nclass Claim:\n    names: frozenset[str]\n"
    chosen = "class Stage(IntEnum):\n    FIRST = 1\n"

    assert stateful_classes(changing + frozen + chosen) == ["Index"]


def test_a_public_class_has_a_name_of_its_own_in_its_package() -> None:
    names = Counter(
        (path.relative_to(ROOT).parts[0], node.name)
        for path in PRODUCT
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert [name for name, count in names.items() if count > 1] == []


def test_generated_pages_are_up_to_date() -> None:
    subprocess.run([sys.executable, "tools/write_docs.py", "--check"], cwd=ROOT, check=True)


def test_every_test_is_named_as_a_sentence() -> None:
    short = [
        f"{path.name}: {node.name}"
        for path in SOURCES
        if path.name.startswith("test_")
        for node in functions(path)
        if node.name.startswith("test_") and node.name.count("_") < 3
    ]

    assert short == []


def test_the_make_targets_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    mentioned = set(re.findall(r"`make ([a-z][a-z0-9-]*)", readme))
    defined = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))

    assert mentioned
    assert mentioned <= defined


_OF_THIS_CODE = {
    "asynccontextmanager",
    "cache",
    "cached_property",
    "classmethod",
    "contextmanager",
    "property",
    "staticmethod",
}
"""Decorators of functions that nothing but this code calls."""


def is_of_framework(base: ast.expr) -> bool:
    """Return whether methods of classes with this base may be called by their name."""
    name = ast.unparse(base).partition("[")[0]
    return name != "Protocol" and not hasattr(builtins, name)


def called_by_frameworks(tree: ast.Module) -> set[ast.stmt]:
    """Return the functions that a decorator or a base class may have called by their name."""
    methods = {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(map(is_of_framework, node.bases))
        for statement in node.body
    }
    found: set[ast.stmt] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(each) for each in node.decorator_list}
            is_inherited = node in methods and "property" not in decorators
            if is_inherited or decorators - _OF_THIS_CODE:
                found.add(node)
    return found


def used_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that a module refers to, also in a string that is nothing but a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unused_functions(trees: Mapping[str, ast.Module], used_elsewhere: Set[str]) -> list[str]:
    """Return the functions that no module of the product refers to."""
    used = used_elsewhere | {name for tree in trees.values() for name in used_names(tree)}
    unused = []
    for path, tree in trees.items():
        exempt = called_by_frameworks(tree)
        unused += [
            f"{path}:{node.lineno} {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not (node.name.startswith("__") or node in exempt or node.name in used)
        ]
    return unused


def test_no_function_of_the_product_is_named_by_tests_only() -> None:
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PRODUCT}
    templates = [path for folder in FOLDERS for path in (ROOT / folder).glob("src/**/*.html")]
    used = {word for path in templates for word in re.findall(r"\w+", path.read_text())}

    assert templates
    assert unused_functions(trees, used) == [], "a caller was lost, or the function is not needed"


def test_a_function_that_is_only_mentioned_or_named_like_a_variable_is_found() -> None:
    source = """
class Store(dict):
    @property
    def mentioned(self):
        "See `mentioned` and `like_a_variable`."

    def like_a_variable(self):
        like_a_variable = getattr(self, "named_in_a_string"), self.an_attribute

    def named_in_a_string(self): ...

    def an_attribute(self): ...

@app.command("list")
def called_by_its_decorator(): ...

class Page(HTMLParser):
    def handle_data(self): ...
"""

    trees = {"a.py": ast.parse(source)}
    assert unused_functions(trees, set()) == ["a.py:4 mentioned", "a.py:7 like_a_variable"]
    assert unused_functions(trees, {"mentioned"}) == ["a.py:7 like_a_variable"]


MAX_PRIVATE_USES = 112
"""How often tests may use private attributes of other objects; lower it when there are fewer."""
_OF_SGLANG = ROOT / "tests/support/tinkercloud_testing/sglang"
"""Runs functions of SGLang by their own names."""


def private_uses(source: str) -> list[str]:
    """Return the private attributes that a module uses of other objects than its own."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [
        ast.unparse(node)
        for node in attributes
        if re.match("_[a-zA-Z]", node.attr)
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
        and ast.unparse(node) != "os._exit"
    ]


def test_tests_reach_into_objects_less_and_less() -> None:
    paths = (path for path in (ROOT / "tests").rglob("*.py") if path.parent != _OF_SGLANG)
    found = [f"{path.name}: {use}" for path in paths for use in private_uses(path.read_text())]

    assert len(found) <= MAX_PRIVATE_USES, "use what is public, or a helper of tests/support"
    assert len(found) > MAX_PRIVATE_USES - 10, f"lower MAX_PRIVATE_USES to {len(found)}"


def test_uses_of_private_attributes_are_found() -> None:
    source = "self._a; super()._b; cls._c; os._exit(1); a.__doc__; a.b"

    assert private_uses(source) == []
    assert set(private_uses("self.a._b.c; f()._d")) == {"self.a._b", "f()._d"}
