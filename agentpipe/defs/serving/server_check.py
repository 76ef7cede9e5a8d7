"""The bundle of a candidate in a real server, before anything is published or promoted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import check_result, demand, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.checks import SERVER, server_specs
from agentpipe.defs.steps import markdown, step
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult
    from agentpipe.serving.server_check import ServerCheck


@dg.asset(**specification("bundle_server_check"), check_specs=server_specs())
def bundle_server_check(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """The bundle loaded in a real Triton and looked at from all sides: only what passes is published and promoted.

    Its configuration, its answers over HTTP and gRPC against the policy's, batching, and what it must refuse. Where no
    server can be had the check is SKIPPED, which warns, and the bundle is not promoted. A bundle of equal content that
    has passed is not checked again.
    """
    from agentpipe.serving.check_records import CheckRecords, check_once
    from agentpipe.serving.latency import latency_table
    from agentpipe.serving.server_check import gates

    with step(context, workspace) as work:
        bundle = workspace.references.load("triton_bundle", work.partition)
        demand(bundle.figure("gates"), f"no server check of {work.partition}: triton_bundle")
        check, before = check_once(
            workspace.root,
            workspace.root / bundle.path,
            bundle.data_version,
            workspace.settings,
            progress=work.progress,
        )
        judged = gates(check)
        return work.result(
            data_version=digest_bytes(canonical_json([check.bundle, check.status])),
            path=CheckRecords(workspace.root).path(check.bundle),
            figures={
                "status": check.status,
                "reason": check.reason,
                "bundle": check.bundle,
                "server": " ".join(check.server.get(name, "") for name in ("name", "version", "place")).strip(),
                "checked_before": before,
                "latency": check.latency,
                "gates": figures(judged),
            },
            metadata={"latency": markdown(latency_table(bundle.figures, check.latency))},
            checks=_every_check(check, judged),
        )


def _every_check(check: "ServerCheck", judged: "Sequence[GateResult]") -> list[dg.AssetCheckResult]:
    """A result for each check; those that the server check did not come to warn, and say so."""
    found: Mapping[str, Any] = {result.name: check_result(result) for result in judged}
    note = f"{check.status}, not looked at: {check.reason}"
    return [
        found.get(name)
        or dg.AssetCheckResult(
            check_name=name,
            passed=False,
            severity=dg.AssetCheckSeverity.WARN,
            description=note,
            metadata={"gate": 6, "status": check.status},
        )
        for name in SERVER
    ]
