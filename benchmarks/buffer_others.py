"""Replay buffers of torchrl and cpprb as contestants. They are no dependencies: they are fetched into own folders.

torchrl's compiled part fits one version of torch. Where none that is published fits the one that is installed, it is
compiled from the sources that come with the package, with the compiler of this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.buffer_own import CHUNK, FEATURES, Sizes, chunk, timed
from benchmarks.fetched import fetch, folder
from benchmarks.measure import Contestant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPPRB, TORCHRL = "11.0.0", "0.14.1"
TORCHRL_NEEDS = (
    "tensordict==0.15.3",
    "cloudpickle==3.1.3",
    "pyvers==0.2.3",
    "importlib-metadata==10.2.0",
    "zipp==4.1.2",
    "orjson==3.13.0",
)
ALPHA, BETA = 0.6, 0.4


def torchrl_fits(place: Path) -> bool:
    """Whether the compiled part in ``place`` loads with the torch that is installed."""
    check = [sys.executable, "-c", "import torch, torchrl._torchrl"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    return subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0


def compile_torchrl(place: Path) -> None:
    """Compiles what does not load."""
    if torchrl_fits(place):
        return
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    package = place / "torchrl"
    target = package / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = shutil.which("g++") or "g++"
    command = [compiler, "-O3", "-std=c++20", "-shared", "-fPIC", "-DTORCH_EXTENSION_NAME=_torchrl"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{path}" for path in (sysconfig.get_paths()["include"], *include_paths())]
    command += [str(package / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", "-o", str(target)]
    subprocess.run(command, capture_output=True, text=True, check=True)


def cpprb_contestants(sizes: Sizes) -> tuple[list[Contestant], str]:
    """Its buffers in memory; and why not, where it cannot be had."""
    why_not = fetch(folder(f"cpprb-{CPPRB}"), (f"cpprb=={CPPRB}",))
    if why_not:
        return [], why_not
    try:
        import cpprb  # type: ignore[import-not-found]
    except ImportError as error:
        return [], f"cpprb {CPPRB} does not import here: {error}"

    fields = {
        "observation": {"shape": FEATURES, "dtype": np.float32},
        "action": {"dtype": np.int64},
        "reward": {"dtype": np.float32},
        "terminated": {"dtype": np.bool_},
    }
    source = columns()
    errors = np.random.default_rng(2).exponential(size=sizes.batch)

    def fill(buffer: Any) -> Any:  # noqa: ANN401 - of a library without types
        for _ in range(0, sizes.transitions, CHUNK):
            buffer.add(**source)
        return buffer

    def write() -> float:
        began = time.perf_counter()
        fill(cpprb.ReplayBuffer(sizes.transitions, fields))
        return time.perf_counter() - began

    uniform = fill(cpprb.ReplayBuffer(sizes.transitions, fields))
    prioritised = fill(cpprb.PrioritizedReplayBuffer(sizes.transitions, fields, alpha=ALPHA))
    every = np.arange(sizes.transitions)
    prioritised.update_priorities(every, np.random.default_rng(3).exponential(size=sizes.transitions))

    def sample() -> None:
        uniform.sample(sizes.batch)

    def sample_prioritised() -> None:
        prioritised.sample(sizes.batch, beta=BETA)

    def sample_and_update() -> None:
        drawn = prioritised.sample(sizes.batch, beta=BETA)
        prioritised.update_priorities(drawn["indexes"], errors)

    works = (sample, sample_prioritised, sample_and_update)
    return named("cpprb, in memory", sizes, write, works), ""


def torchrl_contestants(place: Path, sizes: Sizes) -> tuple[list[Contestant], str]:
    """Its memory-mapped storage; and why not, where it cannot be had."""
    import torch

    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # else it tells of every storage on the standard output
    packages = (f"torchrl=={TORCHRL}", *TORCHRL_NEEDS)
    why_not = fetch(folder(f"torchrl-{TORCHRL}-torch-{torch.__version__}"), packages, compile_torchrl)
    if why_not:
        return [], why_not
    try:
        from tensordict import TensorDict  # type: ignore[import-not-found]
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer  # type: ignore[import-not-found]
        from torchrl.data.replay_buffers import samplers  # type: ignore[import-not-found]
    except ImportError as error:
        return [], f"torchrl {TORCHRL} does not import here: {error}"

    source = TensorDict({name: torch.as_tensor(values) for name, values in columns().items()}, [CHUNK])
    errors = torch.as_tensor(np.random.default_rng(2).exponential(size=sizes.batch), dtype=torch.float32)

    def made(where: Path, sampler: Any) -> Any:  # noqa: ANN401 - of a library without types
        storage = LazyMemmapStorage(sizes.transitions, scratch_dir=str(where))
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=sizes.batch)
        for _ in range(0, sizes.transitions, CHUNK):
            buffer.extend(source)
        return buffer

    def write() -> float:
        return timed(place, lambda where: made(where / "own", samplers.RandomSampler()))

    uniform = made(place / "torchrl-uniform", samplers.RandomSampler())
    prioritised = made(place / "torchrl-prioritised", samplers.PrioritizedSampler(sizes.transitions, ALPHA, BETA))
    every = torch.arange(sizes.transitions)
    prioritised.update_priority(every, torch.rand(sizes.transitions) + 0.01)

    def sample_and_update() -> None:
        drawn = prioritised.sample()
        prioritised.update_priority(drawn["index"], errors)

    works = (uniform.sample, prioritised.sample, sample_and_update)
    return named("torchrl, memory-mapped", sizes, write, works), ""


def columns() -> dict[str, Any]:
    """The chunk that agentpipe writes, field by field."""
    steps = chunk().steps
    kinds = {"observation": np.float32, "action": np.int64, "reward": np.float32, "terminated": np.bool_}
    return {name: np.ascontiguousarray(steps[name], kind) for name, kind in kinds.items()}


def named(
    name: str, sizes: Sizes, write: Callable[[], float], works: tuple[Callable[[], Any], ...]
) -> list[Contestant]:
    """One contestant for writing, and one for each way of sampling."""

    def repeated(work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        for _ in range(sizes.batches):
            work()
        return time.perf_counter() - began

    made = [Contestant(f"Writing: {name}", sizes.transitions, write, sizes.transitions)]
    for group, work in zip(("Uniform", "Prioritised", "Prioritised, with update"), works, strict=True):
        count = sizes.batches * sizes.batch
        made.append(Contestant(f"{group}: {name}", count, lambda work=work: repeated(work), sizes.transitions))  # type: ignore[misc]
    return made
