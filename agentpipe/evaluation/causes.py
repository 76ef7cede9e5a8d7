"""From replays to causes: pure functions and what they add up to (see :mod:`agentpipe.evaluation.attribution`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import DISTURBANCE_KINDS
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.statistics import group_by, success_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

    Bools = npt.NDArray[np.bool_]

SINGLES = tuple((kind,) for kind in DISTURBANCE_KINDS)
PAIRS = (("sensor", "network"), ("sensor", "load"), ("network", "load"))
CAUSES = (*DISTURBANCE_KINDS, "compound", "policy_or_information")
WITNESSES = ("another_player_succeeded", "oracle_failed", "none")
"""What the other players of the evaluation say of an episode; see :func:`witnesses`."""


def column_name(kinds: Sequence[str]) -> str:
    """Column that holds the outcome with ``kinds`` switched off, such as ``sensor_network_off``."""
    return "_".join((*kinds, "off"))


def decide_causes(helped: dict[tuple[str, ...], Bools]) -> npt.NDArray[np.int64]:
    """Index into :data:`CAUSES` for each episode [n] from which replays succeeded, keyed by the kinds switched off."""
    singles = np.stack([helped[single] for single in SINGLES])
    alone = singles.sum(axis=0)
    any_pair = np.any([helped[pair] for pair in PAIRS], axis=0)
    compound, rest = CAUSES.index("compound"), CAUSES.index("policy_or_information")
    return np.select([alone == 1, alone > 1, any_pair], [singles.argmax(axis=0), compound, compound], default=rest)


def witnesses(table: pa.Table, player: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index into :data:`WITNESSES` for each of ``player``'s rows, given by number among its own rows.

    Where a player that sees no more than the policy succeeded in the same episode, the information was there: the
    policy lacked skill. Where even the oracle failed, hardly anybody could have succeeded.
    """
    names, success = column(table, "player"), column(table, "success")
    others = [name for name in dict.fromkeys(names.tolist()) if name not in (player, "oracle", "random")]
    nobody = np.zeros(rows.size, dtype=np.bool_)
    someone = np.any([nobody, *(success[names == name][rows] for name in others)], axis=0)
    oracle = success[names == "oracle"]
    beyond = ~oracle[rows] if oracle.size else nobody
    return np.select([someone, beyond], [0, 1], default=2)


def _breakdown(labels: npt.NDArray[Any], cause: npt.NDArray[Any]) -> dict[str, dict[str, int]]:
    return {name: {key: int(np.sum(cause[part] == key)) for key in CAUSES} for name, part in group_by(labels).items()}


def cause_figures(table: pa.Table, failures: int) -> dict[str, Any]:
    """Shares of causes over the replayed rows."""
    replayed = column(table, "replayed")
    cause, cluster = column(table, "cause")[replayed], column(table, "environment_id")[replayed]
    base = {"failures": failures, "sampled": table.num_rows, "replayed": int(replayed.sum())}
    if not cause.size:
        status = "NO_FAILURES" if not failures else "NOT_REPLAYABLE"
        empty = {key: {"count": 0, "share": None} for key in CAUSES}
        return {**base, "status": status, "attributed": None, "ci95": [None, None], "causes": empty, "rest": {}}
    witness = column(table, "witness")[replayed][cause == "policy_or_information"]
    estimate = success_interval(cause != "policy_or_information", cluster)
    counts = {key: int(np.sum(cause == key)) for key in CAUSES}
    return {
        **base,
        "status": "OK",
        "attributed": estimate.value,
        "ci95": estimate.ci95(),
        "causes": {key: {"count": count, "share": count / cause.size} for key, count in counts.items()},
        "rest": {name: int(np.sum(witness == name)) for name in WITNESSES},
        "by_segment": _breakdown(column(table, "failed_segment")[replayed], cause),
        "by_cell": _breakdown(column(table, "cell")[replayed], cause),
    }
