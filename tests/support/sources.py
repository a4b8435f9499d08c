"""The library's modules, parsed once for all tests that read them."""

import ast
from functools import cache
from pathlib import Path

import ddp_from_scratch

PACKAGE = Path(ddp_from_scratch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a module, in the order of `ast.walk`."""
    return list(ast.walk(ast.parse(path.read_text())))
