"""What production says: decisions of the running policy, and people's labels."""

import dataclasses
import datetime as dt

import dagster as dg

from agentpipe.defs.graph import specification
from agentpipe.defs.resources import Workspace
from agentpipe.defs.steps import rows, step


@dg.asset(**specification("production_feedback"))
def production_feedback(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Decisions and labels of one UTC day.

    Takes every JSONL file of the inbox whole; each row lands once, in the Parquet of its own day or in quarantine with
    a reason. Then counts the day: decisions, labels by verdict, decisions without a label. A day without feedback has
    zero rows. Training does not use the labels yet; the weekly report does.
    """
    from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
    from agentpipe.feedback.intake import read_day, take_in
    from agentpipe.feedback.schema import FeedbackShape

    with step(context, workspace) as work:
        assert work.partition is not None
        day, folder = dt.date.fromisoformat(work.partition), workspace.root / "feedback"
        work.progress("take in", 0, 1)
        (folder / "inbox").mkdir(parents=True, exist_ok=True)
        shape = FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)
        report = take_in(folder / "inbox", day, folder / "store", shape=shape)
        content = report.to_json()
        verdicts: dict[str, int] = {}
        for verdict in read_day(folder / "store", day)[1].column("verdict").to_pylist():
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
        # what was consumed is what now lies in the store: the intake has emptied the inbox
        settled = dataclasses.replace(work, consumed=workspace.consumed(work.asset, work.partition))
        return settled.result(
            data_version=report.digest,
            path=report.decisions_path.parent,
            figures={
                **{
                    name: content[name]
                    for name in ("decisions", "labels", "labelled_decisions", "unlabelled_decisions")
                },
                "orphan_labels": report.orphan_labels,
                "files_taken": report.files_taken,
                "quarantined_rows": sum(report.quarantined.values()),
                "verdicts": verdicts,
            },
            metadata={
                "labels_by_verdict": rows([{"verdict": name, "labels": count} for name, count in verdicts.items()]),
                "quarantine": rows([{"reason": name, "rows": count} for name, count in report.quarantined.items()]),
            },
        )
