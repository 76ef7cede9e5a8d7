"""A bundle in a real server: does it load, answer like the policy, batch, refuse what is wrong, and say so?

Readiness proves nothing: a server can be ready and answer zeros. So values are compared, over both protocols.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.errors import AnswerError, BundleError, ParityError, RefusedError
from agentpipe.evaluation.gates import GateResult
from agentpipe.progress import Progress, silent
from agentpipe.serving.places import INSTALL
from agentpipe.serving.probing import Probe
from agentpipe.serving.verify import verify_bundle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.serving.places import Place

PASSED: Final = "PASSED"
FAILED: Final = "FAILED"
SKIPPED: Final = "SKIPPED"
Status = Literal["PASSED", "FAILED", "SKIPPED"]
FINDINGS: Final = ("loads", "configuration", "values", "empty_mask", "refusals", "batching")
REMEDIES: Final[Mapping[str, str]] = {
    "loads": "read what the server says; a server of another version may not know the graph's operators",
    "configuration": "the server completes or changes configurations: start it with --disable-auto-complete-config",
    "values": "compare the server's ONNX Runtime with the local one; a Python backend needs numpy 1",
    "empty_mask": "build the bundle again",
    "refusals": "the server does not check its input: look at its version and its backend",
    "batching": "the server ignores dynamic_batching: look at its version, and whether it is overloaded",
}
_STAGE: Final = "server check"


@dataclass(frozen=True)
class Finding:
    """One look at a bundle in a server; ``reason`` says what is wrong where it did not pass."""

    name: str
    passed: bool
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerCheck:
    """What became of a bundle in a server.

    ``server`` holds ``name``, ``version`` and ``place``; ``latency`` milliseconds of one decision over gRPC, by how
    many clients asked at once. A skipped check has a reason and nothing else.
    """

    status: Status
    bundle: str
    """content digest"""
    reason: str = ""
    server: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    latency: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The check as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ServerCheck:
        """Reads what :meth:`to_json` wrote; TypeError or KeyError where it is something else."""
        return cls(**{**content, "findings": tuple(Finding(**each) for each in content["findings"])})


def skipped(bundle: str, reason: str) -> ServerCheck:
    """The check of a bundle for which no server could be had."""
    return ServerCheck(SKIPPED, bundle, reason)


def check_in_server(bundle: Path, place: Place, *, progress: Progress = silent) -> ServerCheck:
    """Puts ``bundle`` into a server, looks at it from all sides, and takes it out again.

    What is wrong with the bundle, or with how this server serves it, is a finding, not an error.

    Raises:
        BundleError, ParityError: the bundle is damaged before any server has seen it.
        NoServerError: the server cannot be had: it does not start or answer, is too old, or takes no models on demand.
        ServiceError: it went away in between.
    """
    progress(_STAGE, 0, len(FINDINGS), "verify the bundle")
    report = verify_bundle(bundle)
    server = {"place": place.describe()}
    try:
        with place.serving(bundle, report) as loaded, Probe(bundle, loaded) as probe:
            server |= loaded.server
            findings, latency = _look_around(probe, progress), dict(probe.latency)
    except RefusedError as error:
        findings, latency = [Finding("loads", False, error.message)], {}
    failed = [finding for finding in findings if not finding.passed]
    reason = "; ".join(f"{finding.name}: {finding.reason}" for finding in failed)
    return ServerCheck(FAILED if failed else PASSED, report.digest, reason, server, tuple(findings), latency)


def _look_around(probe: Probe, progress: Progress) -> list[Finding]:
    looks = (probe.configuration, probe.values, probe.empty_mask, probe.refusals, probe.batching)
    findings = [Finding("loads", True)]
    for name, look in zip(FINDINGS[1:], looks, strict=True):
        progress(_STAGE, len(findings), len(FINDINGS), name)
        try:
            findings.append(Finding(name, True, figures=look()))
        except (AnswerError, BundleError, ParityError, RefusedError) as error:
            where = {key: value if isinstance(value, int | float) else str(value) for key, value in error.where.items()}
            findings.append(Finding(name, False, error.message, where))
    return findings


def gates(check: ServerCheck) -> tuple[GateResult, ...]:
    """The check as judgements: of a skipped one, only that there was no server, which warns."""
    had = check.status != SKIPPED
    judged = GateResult(
        6,
        "server_available",
        had,
        "warn",
        None,
        None,
        "" if had else INSTALL,
        {**check.server, **({} if had else {"status": SKIPPED, "reason": check.reason})},
    )
    found = {finding.name: finding for finding in check.findings}
    results = [
        GateResult(
            6,
            f"server_{name}",
            found[name].passed,
            "error",
            None,
            None,
            REMEDIES[name],
            {**found[name].figures, **({} if found[name].passed else {"reason": found[name].reason})},
        )
        for name in FINDINGS
        if name in found
    ]
    return (judged, *results)
