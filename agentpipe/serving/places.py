"""Where a bundle can be put into a real Triton: one that is running and takes models on demand, or one started here."""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import NoServerError, RefusedError, ServiceError
from agentpipe.serving import layout
from agentpipe.serving.http_api import HttpServer
from agentpipe.serving.server import TritonServer
from agentpipe.serving.triton_config import MODEL_FILE, read_config
from agentpipe.serving.triton_install import TritonInstallation, find_triton
from agentpipe.serving.wires import GrpcWire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from agentpipe.serving.verify import VerifyReport
    from agentpipe.settings import Settings

OLDEST: Final = (2, 44)  # 24.03: ONNX Runtime 1.17, the first that reads opset 20
INSTALL: Final = "install one: agentpipe bundle install-triton; or name one that runs: AGENTPIPE_TRITON_URL"
_PATIENCE: Final = 120.0
"""seconds that loading a model may take: a laden machine starts a backend's process slowly"""
_GRPC_PATIENCE: Final = 10.0
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/@\[\]]+):[0-9]{1,5}")
_NOT_EXPLICIT: Final = "explicit model load / unload is not allowed"


@dataclass(frozen=True)
class Loaded:
    """A bundle in a server: ``model`` is the name under which it is loaded, ``config`` what was sent."""

    http: HttpServer
    grpc: str
    model: str
    version: str
    config: ModelConfig
    server: dict[str, str]


@dataclass(frozen=True)
class Given:
    """A Triton that runs already, in explicit control mode. What it serves otherwise is not touched."""

    http: str
    grpc: str

    def describe(self) -> str:
        """For figures and messages."""
        return f"running at {self.http}"

    @contextlib.contextmanager
    def serving(self, bundle: Path, report: VerifyReport) -> Iterator[Loaded]:
        """Loads ``bundle`` under a name that nobody else has, from memory; unloads it on leaving.

        Raises:
            NoServerError: it does not answer, is no Triton or too old, takes no models on demand, or is not the server
                at the gRPC address.
            RefusedError: it refuses this bundle.
        """
        server = HttpServer(self.http, timeout=_PATIENCE)
        metadata = _identify(server)
        name = f"agentpipe-check-{report.digest[:12]}-{secrets.token_hex(4)}"
        config = _config(bundle, report, name)
        graph = (bundle / report.model_name / str(report.version) / MODEL_FILE).read_bytes()
        try:
            server.load(name, _as_json(config), {f"{report.version}/{MODEL_FILE}": graph})
        except RefusedError as error:
            if _NOT_EXPLICIT in error.message:
                remedy = "start it with --model-control-mode=explicit"
                raise NoServerError("this Triton takes no models on demand", url=self.http, remedy=remedy) from error
            raise
        try:
            self._check_grpc(name)
            yield Loaded(server, self.grpc, name, str(report.version), config, metadata)
        finally:
            with contextlib.suppress(ServiceError):  # it may be gone, which is said by what failed before
                server.unload(name)

    def _check_grpc(self, model: str) -> None:
        """Whether the model that was loaded over HTTP is there over gRPC."""
        remedy = "name the gRPC address of that server: AGENTPIPE_SERVING__TRITON_GRPC"
        try:
            with GrpcWire(self.grpc, model, timeout=_GRPC_PATIENCE) as wire:
                ready = wire.ready()
        except ServiceError as error:
            text = f"the server at {self.http} does not answer over gRPC: {error.message}"
            raise NoServerError(text, url=self.grpc, remedy=remedy) from error
        if not ready:
            text = f"what answers over gRPC is not the server at {self.http}"
            raise NoServerError(text, url=self.grpc, remedy=remedy)


@dataclass(frozen=True)
class Installed:
    """A Triton that is started for one check, in explicit control mode, with the bundle as its model repository."""

    installation: TritonInstallation

    def describe(self) -> str:
        """For figures and messages."""
        return "started for the check"

    @contextlib.contextmanager
    def serving(self, bundle: Path, report: VerifyReport) -> Iterator[Loaded]:
        """Starts the server, loads ``bundle`` from its own files, unmodified; unloads it and stops on leaving.

        Raises:
            NoServerError: it does not start, or is too old.
            RefusedError: it refuses this bundle.
        """
        with contextlib.ExitStack() as stack:
            try:
                started = stack.enter_context(TritonServer(bundle, self.installation, control="explicit"))
            except ServiceError as error:
                raise NoServerError(error.message, **error.where, remedy=error.remedy) from error
            server = HttpServer(started.http, timeout=_PATIENCE)
            metadata = _identify(server)
            config = _config(bundle, report, report.model_name)
            server.load(report.model_name)
            stack.callback(_unload, server, report.model_name)
            yield Loaded(server, started.grpc, report.model_name, str(report.version), config, metadata)


Place = Given | Installed


def find_place(settings: Settings) -> Place | None:
    """The server that the settings name, else the one that is installed, else None.

    Raises:
        NoServerError: what the settings name is no address.
    """
    if settings.triton_url is not None:
        http = settings.triton_url.removeprefix("http://").rstrip("/")
        if not _ADDRESS.fullmatch(http):
            remedy = "write it as http://127.0.0.1:8000"
            raise NoServerError(f"no address of a Triton: {settings.triton_url!r}", field="triton_url", remedy=remedy)
        return Given(http, settings.serving.triton_grpc or _next_port(http))
    installation = find_triton()
    return None if installation is None else Installed(installation)


def _next_port(http: str) -> str:
    """Triton's own habit: gRPC one port above HTTP."""
    host, _, port = http.rpartition(":")
    return f"{host}:{int(port) + 1}"


def _identify(server: HttpServer) -> dict[str, str]:
    """Name and version of the server; one of the same protocol that is called otherwise is told apart by them.

    Raises:
        NoServerError: it does not answer, has no name or version, or is a Triton that cannot read these graphs.
    """
    try:
        metadata = server.metadata()
    except ServiceError as error:
        raise NoServerError(error.message, **error.where, remedy=error.remedy) from error
    name, version = metadata.get("name"), metadata.get("version")
    if not (isinstance(name, str) and name and isinstance(version, str) and version):
        remedy = "is this the HTTP address of a Triton? AGENTPIPE_TRITON_URL"
        raise NoServerError("this is no Triton: it says no name and version", url=server.address, remedy=remedy)
    number = re.match(r"(\d+)\.(\d+)", version)
    if name == "triton" and number and (int(number[1]), int(number[2])) < OLDEST:
        wanted = ".".join(str(part) for part in OLDEST)
        remedy = f"use Triton {wanted} (24.03) or later: earlier ones cannot read ONNX opset 20"
        raise NoServerError(f"this Triton is too old: {version}", url=server.address, remedy=remedy)
    return {"name": name, "version": version}


def _config(bundle: Path, report: VerifyReport, name: str) -> ModelConfig:
    config = read_config(bundle / report.model_name / layout.CONFIG)
    config.name = name
    return config


def _as_json(config: ModelConfig) -> dict[str, Any]:
    from google.protobuf import json_format

    found: dict[str, Any] = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return found


def _unload(server: HttpServer, model: str) -> None:
    with contextlib.suppress(ServiceError):
        server.unload(model)
