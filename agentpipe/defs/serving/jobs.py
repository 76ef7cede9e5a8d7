"""The job with which a person decides of a held candidate in the UI."""

from enum import Enum

import dagster as dg

from agentpipe.defs.interrupted import mark_process
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.promotion import serve_champion
from agentpipe.defs.sources import champion_events


class Verdict(Enum):
    """What a person can decide."""

    APPROVE = "approve"
    REJECT = "reject"


class Decision(dg.Config):
    """Which held candidate, and what is decided."""

    candidate: str
    """digest of its package, or six or more of its first characters; `agentpipe champion held` lists them"""
    decision: Verdict
    who: str
    why: str


@dg.op
def decide(context: dg.OpExecutionContext, config: Decision, workspace: Workspace) -> None:
    """Approves a held candidate, which promotes it by compare-and-set, or rejects it; recorded with who and why."""
    from agentpipe.learning.succession.promotion import approve_candidate, reject_candidate
    from agentpipe.serving.verify import check_bundle

    mark_process(context.instance, context.run_id)
    if config.decision is Verdict.REJECT:
        held = reject_candidate(workspace.root, config.candidate, who=config.who, reason=config.why)
        context.log.info("%s is rejected", held.candidate[:12])
        return
    entry = approve_candidate(
        workspace.root, config.candidate, who=config.who, reason=config.why, check_bundle=check_bundle
    )
    context.log.info("%s is champion %d", entry.digest[:12], entry.sequence)
    for event in champion_events(context.instance, workspace):
        context.instance.report_runless_asset_event(event)
    context.log.info("production serves %s", serve_champion(workspace))


@dg.job(
    description="A person approves or rejects a held candidate, with a reason. In the launchpad give candidate, "
    "decision, who and why.",
)
def approval() -> None:
    """See the description."""
    decide()
