"""What needs a GPU is known in one place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[2] / "worker_image" / "src" / "tinkercloud_worker"
SEAM = {"device/accelerator.py", "megatron_trainer/cpu.py", "megatron_trainer/gpu.py"}
"""The second and third are for megatron-core, which asks CUDA by itself."""
OTHERS = [
    path for path in sorted(WORKER.rglob("*.py")) if str(path.relative_to(WORKER)) not in SEAM
]


def names_of_cuda(source: str) -> list[str]:
    """Return where a module's code names CUDA or NCCL; what it explains to readers may do so."""
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
    """Return the strings that a program uses: none that stands for itself, as docstrings do."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_the_seam_is_where_the_rule_says() -> None:
    assert [path for path in SEAM if not names_of_cuda((WORKER / path).read_text())] == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(WORKER)))
def test_cuda_is_named_in_the_accelerator_and_for_megatron_core_only(path: Path) -> None:
    assert names_of_cuda(path.read_text()) == [], "say in accelerator.py what is needed of a GPU"


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
def test_a_line_that_needs_cuda_is_found(code: str) -> None:
    assert names_of_cuda(code) != []


def test_what_is_said_of_cuda_is_no_line_that_needs_it() -> None:
    assert names_of_cuda('"""Of `cuda`."""\nx = 1  # for torch.cuda\n"""As NCCL does."""') == []
