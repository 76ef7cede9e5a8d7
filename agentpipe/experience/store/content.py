"""The digest of what a shard holds: the same for equal episodes, whenever and in whatever order they came.

SHA-256 over every episode in the order of (environment, episode): what its row says but for its places in the files;
whether a final record follows; its step records, the final one, its graph. Checksums and time stamps are left out.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import as_words
from agentpipe.experience.store.keys import episode_keys

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_WORDS: Final = 1 << 19  # 4 MiB a block, or one episode where that is longer


@entry
def _gather(  # noqa: PLR0913, PLR0917 - kernels take arrays one by one
    rows: npt.NDArray[np.int64],
    table: npt.NDArray[np.uint64],
    table_width: int,
    row_start: int,
    places: npt.NDArray[np.int64],
    steps: npt.NDArray[np.uint64],
    step_width: int,
    finals: npt.NDArray[np.uint64],
    final_width: int,
    graph: npt.NDArray[np.uint64],
    prefix: int,
    out: npt.NDArray[np.uint64],
) -> int:
    """Lays the content of the episodes ``rows`` one after another into ``out``; returns how many words that are.

    ``places`` int64 ``[e, 5]``: first record, records, final record or -1, first word of the graph, words.
    """
    at = 0
    for i in range(rows.size):
        row = rows[i]
        for word in range(row_start, table_width):
            out[at] = table[row * table_width + word]
            at += 1
        out[at] = np.uint64(places[row, 2] >= 0)
        at += 1
        for record in range(places[row, 0], places[row, 0] + places[row, 1]):
            for word in range(prefix, step_width):
                out[at] = steps[record * step_width + word]
                at += 1
        if places[row, 2] >= 0:
            for word in range(prefix, final_width):
                out[at] = finals[places[row, 2] * final_width + word]
                at += 1
        for word in range(places[row, 3], places[row, 3] + places[row, 4]):
            out[at] = graph[word]
            at += 1
    return at


def word_counts(steps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Words in the graphs of episodes of so many ``steps``, int64."""
    lengths = steps.astype(np.int64)
    return lengths * -(-lengths // 64)


def content_digest(
    steps: npt.NDArray[Any],
    episodes: npt.NDArray[Any],
    finals: npt.NDArray[Any],
    graph: npt.NDArray[np.uint64],
    before: Callable[[], None] = lambda: None,
) -> str:
    """The digest, in hexadecimal; reads in blocks and copies no more than one at a time.

    Args:
        steps: All step records.
        episodes: All rows (``records.EPISODE``).
        finals: All final records.
        graph: All words.
        before: Called before each block; raises where the files are not whole any more.
    """
    digest = hashlib.sha256()
    fields = (episodes["first"], episodes["steps"], episodes["final"], episodes["graph"])
    places = np.stack([*(field.astype(np.int64) for field in fields), word_counts(episodes["steps"])], axis=1)
    prefix, row_start = rec.PREFIX // 8, rec.EPISODE.fields["environment"][1] // 8  # type: ignore[index]
    widths = rec.EPISODE.itemsize // 8, steps.itemsize // 8, finals.itemsize // 8
    sizes = widths[0] - row_start + 1 + places[:, 1] * (widths[1] - prefix) + places[:, 4]
    sizes += (places[:, 2] >= 0) * (widths[2] - prefix)
    order = np.argsort(episode_keys(episodes), kind="stable")
    block = np.cumsum(sizes[order]) // _BLOCK_WORDS
    table, step_words, final_words = as_words(episodes), as_words(steps), as_words(finals)
    for rows in np.split(order, np.flatnonzero(np.diff(block)) + 1) if len(order) else ():
        before()
        out = np.empty(int(sizes[rows].sum()), np.uint64)
        _gather(
            rows, table, widths[0], row_start, places, step_words, widths[1], final_words, widths[2], graph, prefix, out
        )
        digest.update(out.data)
    return digest.hexdigest()
