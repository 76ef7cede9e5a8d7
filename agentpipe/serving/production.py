"""The installed Triton over what a home serves, on this machine: to try what production would answer."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agentpipe.errors import BundleError, NoServerError, ServingError
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe.serving.client import PolicyClient
from agentpipe.serving.deployment import serving_repository
from agentpipe.serving.server import TritonServer
from agentpipe.serving.triton_install import TritonInstallation, find_triton

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.serving.repository import Published
    from agentpipe.settings import Settings

POLL_SECONDS: Final = 5
"""how often the server looks for another version"""
_START_SECONDS: Final = 120.0
"""that starting may take: a laden machine starts a backend's process slowly"""


@dataclass(frozen=True)
class Production:
    """What there is to serve (``entry`` answers who asks for no version), where it lies, and the server for it."""

    entry: Published
    models: Path
    installation: TritonInstallation

    def start(self, *, http_port: int = 0, grpc_port: int = 0) -> TritonServer:
        """Starts the server on 127.0.0.1, in poll mode; it is ready on return. Port 0 takes a free one.

        Raises:
            ServiceError: a port is in use, or the server does not become ready.
        """
        return TritonServer(
            self.models,
            self.installation,
            control="poll",
            poll_seconds=POLL_SECONDS,
            http_port=http_port,
            grpc_port=grpc_port,
            start_timeout=_START_SECONDS,
        )


def find_production(settings: Settings) -> Production:
    """What the home of ``settings`` serves, and the installed server.

    Raises:
        ServingError: nothing was published yet.
        BundleError: what is served is not what was published, or not on record.
        CorruptError: the record of publications is damaged.
        NoServerError: no Triton is installed.
    """
    repository = serving_repository(settings)
    entry = repository.served()
    if entry is None:
        no_champion = champion_stores(settings.home)[0].current() is None
        why = ": there is no champion" if no_champion else ""
        remedy = "agentpipe run makes one; or agentpipe bundle publish BUNDLE serves a bundle"
        remedy = remedy if no_champion else "agentpipe bundle publish serves the champion's bundle"
        raise ServingError(f"nothing is served yet{why}", file=repository.models, remedy=remedy)
    damage = repository.damage(entry)
    if damage:
        text = f"version {entry.version} is not what was published: {damage}"
        raise BundleError(text, file=repository.models, remedy="agentpipe bundle publish publishes it again")
    installation = find_triton()
    if installation is None:
        raise NoServerError("no Triton is installed here", remedy="agentpipe bundle install-triton")
    return Production(entry, repository.models.resolve(), installation)


def line_to_try(grpc: str) -> str:
    """A line for a shell that asks the server at ``grpc`` for one decision.

    Raises:
        ServiceError: it does not answer, or serves no model of that name.
        BundleError: the model is not one that agentpipe built.
    """
    with PolicyClient(grpc, timeout=_START_SECONDS) as client:
        signature = client.signature
    arrays = [
        f"np.zeros((1, {signature.input('observation').dims[0]}), np.float32)",
        f"np.array([{signature.no_action}])",
        "np.zeros(1, np.float32)",
        f"np.ones((1, {signature.input('mask').dims[0]}), bool)",
        *(["c.fresh_memory(1)"] if signature.memory_size else []),
    ]
    code = (
        "import numpy as np; from agentpipe.serving.client import PolicyClient; "
        f'c = PolicyClient("{grpc}"); print(c.act({", ".join(arrays)}).action)'
    )
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
