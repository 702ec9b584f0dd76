"""Only one place in the code depends on CUDA."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[2] / "worker_image" / "src" / "tinkercloud_worker"
SEAM = {
    "device/accelerator.py",
    "megatron_trainer/devices/cpu.py",
    "megatron_trainer/devices/gpu.py",
}
"""The second and third are for megatron-core, which uses CUDA directly."""
OTHERS = [
    path for path in sorted(WORKER.rglob("*.py")) if str(path.relative_to(WORKER)) not in SEAM
]


def names_of_cuda(source: str) -> list[str]:
    """Return where the code of a module names CUDA or NCCL, apart from docstrings and comments."""
    tree = ast.parse(source)
    found = [(line, name) for line, name in _identifiers(tree) if re.search("(?i)cuda|nccl", name)]
    found += [(line, text) for line, text in _texts(tree) if re.search(r"\b(cuda|nccl)\b", text)]
    return [f"line {line}: {name}" for line, name in sorted(found)]


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case _:
                pass


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return all string literals of a program, apart from docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_the_modules_that_may_name_cuda_do() -> None:
    assert [path for path in SEAM if not names_of_cuda((WORKER / path).read_text())] == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(WORKER)))
def test_only_the_accelerator_and_megatron_modules_name_cuda(path: Path) -> None:
    assert names_of_cuda(path.read_text()) == [], "move what needs a GPU to accelerator.py"


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.empty_cache()",
        "from torch import cuda",
        "import torch.cuda.nccl",
        "wait = tensor.is_cuda",
        "kernels = device.type == 'cuda'",
        "backend = 'cpu:gloo,cuda:nccl'",
        "where = f'cuda:{index}'",
        "dist.ProcessGroupNCCL.Options()",
    ],
)
def test_code_that_names_cuda_is_found(code: str) -> None:
    assert names_of_cuda(code) != []


def test_docstrings_and_comments_may_name_cuda() -> None:
    assert names_of_cuda('"""Uses `cuda`."""\nx = 1  # for torch.cuda\n"""As NCCL does."""') == []
