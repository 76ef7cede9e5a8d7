"""What production says: decisions of the running policy, and people's labels."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

import dagster as dg

from agentpipe.defs.graph import specification
from agentpipe.defs.resources import Workspace
from agentpipe.defs.steps import rows, step
from agentpipe.errors import RedisServerError

MOST_FILES = 20
"""Files that the metadata of a day names, of those that were not taken."""


@dg.asset(**specification("production_feedback"))
def production_feedback(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Decisions and labels of one UTC day.

    Takes every JSONL, CSV and Parquet file of the inbox whole, and what the Redis stream has; each row lands once, in
    the rows of its own day or in quarantine with a reason. Then counts the day: decisions, labels by verdict and error
    type, decisions without a label. A day without feedback has zero rows. Labels train once: the day's feedback
    candidate, or the night, learns those that no ancestor has.
    """
    from agentpipe.feedback.inbox import ignored
    from agentpipe.feedback.intake import Intake, report_day, rules_for, take
    from agentpipe.feedback.stream import stream_of, take_stream

    with step(context, workspace) as work:
        assert work.partition is not None
        day, folder = dt.date.fromisoformat(work.partition), workspace.root / "feedback"
        work.progress("take in", 0, 1)
        settings = workspace.settings
        rules = rules_for(late_days=settings.feedback.late_days, versions=workspace.known_policies())
        done, away = take(folder / "inbox", folder / "store", rules), ""
        try:
            done += take_stream(stream, folder / "store", rules) if (stream := stream_of(settings)) else Intake()
        except RedisServerError as error:  # what it holds stays there; the inbox is taken in all the same
            away = str(error)
            context.log.warning("the stream was not read: %s", away)
        report = report_day(folder / "store", day, done)
        left = {
            "refused": report.intake.files_refused,
            "waits": report.intake.files_waiting,
            "ignored": ignored(folder / "inbox"),
        }
        state, quarantined = report.state, report.intake.quarantined
        # what was consumed is what now lies in the store: the intake has emptied the inbox
        settled = dataclasses.replace(work, consumed=workspace.consumed(work.asset, work.partition))
        tables = {"labels_by_verdict": state.verdicts, "labels_by_error_type": state.error_types}
        return settled.result(
            data_version=state.digest,
            path=report.folder,
            figures={
                "decisions": state.decisions,
                "labels": state.labels,
                "labelled_decisions": state.labelled,
                "unlabelled_decisions": state.unlabelled,
                "trainable_labels": state.trainable,
                "orphan_labels": state.orphans,
                "files_taken": len(report.intake.files_taken),
                "files_waiting": len(left["waits"]),
                "files_refused": len(left["refused"]),
                "files_ignored": len(left["ignored"]),
                "quarantined_rows": sum(quarantined.values()),
                "verdicts": state.verdicts,
                "error_types": state.error_types,
            },
            metadata={
                **({"stream": away} if away else {}),
                "inbox": rows(_not_taken(left)),
                **{
                    table: rows([{"name": name, "labels": count} for name, count in counts.items()])
                    for table, counts in tables.items()
                },
                "quarantine": rows([{"reason": name, "rows": count} for name, count in quarantined.items()]),
            },
        )


def _not_taken(groups: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    """What was not taken from the inbox, by what became of it, each file with the reason; so many at most."""
    listed = [
        {"file": file[:200], "what": what, "why": why[:300]}
        for what, files in groups.items()
        for file, why in files.items()
    ]
    if len(listed) > MOST_FILES:
        more = (
            f"{len(listed) - MOST_FILES:,} more; agentpipe feedback status and agentpipe feedback quarantine list them"
        )
        listed[MOST_FILES:] = [{"file": "…", "what": "", "why": more}]
    return listed
