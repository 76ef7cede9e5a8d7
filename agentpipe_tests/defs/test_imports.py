"""Start-up stays fast: what takes seconds to import is imported where it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    *("torch", "onnxruntime", "numba", "redis", "plyvel", "tritonclient", "ray"),
    *("pandas", "sklearn", "scipy", "matplotlib", "tensorboard"),
]


@pytest.mark.parametrize(
    "module",
    ["agentpipe.definitions", "agentpipe.cli.main", "agentpipe.settings", "agentpipe.defs.main_job"],
)
def test_nothing_heavy_is_imported_at_module_level(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == []


def test_the_command_line_does_not_import_dagster_before_it_needs_it() -> None:
    code = "import sys, agentpipe.cli.main; print('dagster' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "False"


def test_the_package_imports_with_its_default_dependencies_only() -> None:
    """All but the file that runs inside Triton's Python process."""
    code = (
        "import sys, pkgutil, importlib, agentpipe\n"
        "for name in ('hypothesis', 'pytest', 'playwright'): sys.modules[name] = None\n"
        "for found in pkgutil.walk_packages(agentpipe.__path__, 'agentpipe.'):\n"
        "    if not found.name.endswith(('__main__', 'onnxruntime_backend')): importlib.import_module(found.name)\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
