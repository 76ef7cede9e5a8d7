"""A real Triton for development machines, without Docker: the server inside the ``nvidia-pytriton`` wheel.

It serves on the CPU and has the Python backend only, so our ``onnxruntime`` backend is put beside it, and the stub
process that runs it gets an environment of its own: Triton's Python backend needs numpy 1 (with numpy 2 the server
says it is ready and answers zeros).
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentpipe.errors import ServiceError
from agentpipe.progress import Progress, silent
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

WHEEL: Final = "nvidia-pytriton==0.7.0"  # tritonserver 2.51.0 (24.10)
HOME_VARIABLE: Final = "AGENTPIPE_TRITON_HOME"
_LAYOUT: Final = 1  # raise when what is installed changes, so that old folders are not taken for it
_BACKEND: Final = Path(__file__).with_name("onnxruntime_backend.py")


@dataclass(frozen=True)
class TritonInstallation:
    """An installed server: ``root`` holds binary and backends, ``environment`` the stub's Python."""

    root: Path
    environment: Path

    @property
    def binary(self) -> Path:
        """The server."""
        return self.root / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        """The folder of backends."""
        return self.root / "backends"


def triton_home(home: Path | None = None) -> Path:
    """``home``, else ``$AGENTPIPE_TRITON_HOME``, else ``~/.cache/agentpipe/triton``."""
    return home or Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "agentpipe" / "triton")


def _folder(home: Path | None) -> Path:
    runtime = importlib.metadata.version("onnxruntime")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return triton_home(home) / f"{WHEEL.replace('==', '-')}-onnxruntime-{runtime}-python-{python}-{_LAYOUT}"


def installed_version(home: Path | None = None) -> str | None:
    """Name and versions of what is installed, or None where there is nothing."""
    folder = _folder(home)
    return folder.name if (folder / "complete").is_file() else None


def find_triton(home: Path | None = None) -> TritonInstallation | None:
    """The installed server, or None where there is none for this Python and this ONNX Runtime."""
    folder = _folder(home)
    if not (folder / "complete").is_file():
        return None
    installation = TritonInstallation(folder / "server" / "pytriton" / "tritonserver", folder / "environment")
    # The backend is ours and small: the one of this very version is used, whenever the rest was installed.
    target = installation.backends / "onnxruntime" / "model.py"
    if not target.is_file() or target.read_bytes() != _BACKEND.read_bytes():
        write_bytes(target, _BACKEND.read_bytes())  # whole or not at all: a server may be loading it
    return installation


def install_triton(home: Path | None = None, *, progress: Progress = silent) -> TritonInstallation:
    """Installs the server (about 330 MB, from the package registry) unless it is there; an interrupted one starts over.

    Raises:
        ServiceError: a package cannot be had, the server has no stub for this Python, or this Python has no shared
            library for the stub to load.
    """
    found = find_triton(home)
    if found is not None:
        return found
    python_library()
    folder = _folder(home)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    environment = folder / "environment"
    progress("install triton", 0, 3, "environment of the stub")
    try:
        venv.create(environment, with_pip=True)
    except subprocess.CalledProcessError as error:
        remedy = "make Python's venv module work: on Debian, apt-get install python3-venv"
        raise ServiceError("no environment can be made for Triton's stub", file=environment, remedy=remedy) from error
    pip = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "2",
    ]
    progress("install triton", 1, 3, "onnxruntime")
    _run([*pip, "numpy<2", f"onnxruntime=={importlib.metadata.version('onnxruntime')}"])
    progress("install triton", 2, 3, WHEEL)
    _run([*pip, "--no-deps", "--no-compile", "--target", str(folder / "server"), WHEEL])
    _finish(folder / "server" / "pytriton" / "tritonserver")
    (folder / "complete").touch()
    progress("install triton", 3, 3, str(folder))
    installation = find_triton(home)
    assert installation is not None
    return installation


def _finish(root: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServiceError(f"{WHEEL} has no stub for Python {python}", remedy="use Python 3.11 or 3.12")
    target = root / "backends" / "python" / stub.name
    shutil.copy(stub, target)
    for binary in (target, root / "bin" / "tritonserver"):
        binary.chmod(0o755)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - fixed commands
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        remedy = "is the package registry reachable? Nothing but the live server needs this"
        raise ServiceError(f"cannot install {command[-1]}: {' '.join(last)}", remedy=remedy)


def python_library() -> Path:
    """The shared library of this Python, which Triton's stub process loads.

    Raises:
        ServiceError: there is none.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = (Path(str(sysconfig.get_config_var("LIBDIR"))), Path(sys.base_prefix) / "lib", Path("/usr/lib"))
    for folder in folders:
        for candidate in (folder / name, folder / multiarch / name):
            if candidate.exists():
                return candidate
    remedy = f"install it: on Debian, apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}"
    raise ServiceError(f"{name} is not here, Triton's stub needs it", remedy=remedy)


def stub_environment(installation: TritonInstallation) -> dict[str, str]:
    """Environment variables under which the server finds the stub's Python and its library."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    variables["PATH"] = f"{installation.environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    variables["LD_LIBRARY_PATH"] = str(python_library().parent)
    variables["TMPDIR"] = tempfile.gettempdir()
    return variables
