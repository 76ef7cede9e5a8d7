"""Finding and installing the server, without the network."""

from __future__ import annotations

import subprocess

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving import triton_install


def test_the_home_is_the_argument_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTPIPE_TRITON_HOME", str(tmp_path / "variable"))
    assert triton_install.triton_home(tmp_path / "argument") == tmp_path / "argument"
    assert triton_install.triton_home() == tmp_path / "variable"
    monkeypatch.delenv("AGENTPIPE_TRITON_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert triton_install.triton_home() == tmp_path / ".cache" / "agentpipe" / "triton"


def test_an_interrupted_installation_is_none(tmp_path):
    folder = triton_install._folder(tmp_path)
    (folder / "server").mkdir(parents=True)
    assert triton_install.find_triton(tmp_path) is None


def test_a_package_that_cannot_be_had_is_a_typed_error_and_leaves_nothing_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_install.venv, "create", lambda path, with_pip: path.mkdir(parents=True))
    refused = subprocess.CompletedProcess([], 1, "", "ERROR: no network")
    monkeypatch.setattr(triton_install.subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(ServiceError, match="no network"):
        triton_install.install_triton(tmp_path)
    assert triton_install.find_triton(tmp_path) is None


def test_a_python_without_a_shared_library_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(triton_install, "Path", lambda *_: tmp_path)
    with pytest.raises(ServiceError, match="apt-get install libpython"):
        triton_install.python_library()
