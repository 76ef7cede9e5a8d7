"""A home with shards of the built-in line, small enough to be made in a second."""

from __future__ import annotations

import json

import numpy as np

from agentpipe.environments.layout import (
    ACCUMULATING,
    ACTION_COUNT,
    OBSERVATION_SIZE,
    REASONS,
    SIMULATOR_VERSION,
    Purpose,
)
from agentpipe.environments.line_profile import save_profile
from agentpipe.environments.players import RandomPlayer
from agentpipe.environments.table_store import TableStore
from agentpipe.experience.origin import origin
from agentpipe.experience.recorder import Recorder
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import prepare_home, write_json
from agentpipe_tests.environments.line import catalog, make_pool, profile, table

SEED = 3
TIME = 1_800_000_000_000_000_000
DTYPE = rec.step_dtype(OBSERVATION_SIZE, ACTION_COUNT)


def specs(cell="sensor-1", count=6):
    return catalog().environments("train", cell)[:count]


def record_line(
    path, *, cell="sensor-1", environments=None, first_episode=0, steps=40, purpose="COLLECT", ordinal=0, seal=True
):
    """A shard of random play at ``path``; the last episodes are cut."""
    environments = environments or specs(cell)
    pool = make_pool(environments, seed=SEED, purpose=Purpose[purpose], first_episode=first_episode)
    index = np.array([spec.index for spec in environments], np.uint32)
    header = {
        "cell": cell,
        "observation_size": OBSERVATION_SIZE,
        "action_count": ACTION_COUNT,
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table().version,
        "accumulating": ACCUMULATING,
        "origin": origin(SEED, purpose, profile().digest),
        "policies": [],
    }
    recorder, player = Recorder(pool, DTYPE, index), RandomPlayer()
    writer = ShardWriter.open(path, header, holder="a test", capacity=64)
    policy = writer.policy("random", "1.0", ordinal)
    for stamp in range(steps):
        recorder.before()
        decision = player.act(pool)
        pool.step(decision.actions)
        ended = recorder.after(decision.actions, np.log(decision.probabilities), None, policy, TIME + stamp)
        if len(ended):
            writer.append(*recorder.take(ended))
    writer.append(*recorder.cut())
    if not seal:
        return writer
    names = {spec.index: spec.environment_id for spec in environments}
    return writer.seal(path, names=names, reasons=REASONS)


def make_home(home, cells=("sensor-1", "load-2")):
    """A home with the table, the line profile and the current trajectories of some cells."""
    prepare_home(home)
    TableStore(home).refresh(who="a test")
    save_profile(profile(), home / "line_profile" / f"{profile().digest[:16]}.json")
    return {cell: materialise(home, cell) for cell in cells}


def materialise(home, cell, key="0123456789abcdef", **options):
    """The trajectories of a cell and the reference to them."""
    shard = record_line(home / "trajectories" / cell / key, cell=cell, **options)
    refer(home, cell, shard)
    return shard


def refer(home, cell, shard):
    reference = {"partition": cell, "data_version": shard.digest, "path": str(shard.path.relative_to(home))}
    write_json(home / "references" / "trajectories" / f"{cell}.json", reference)


def checkpoint(home, *shards, partition="2026-01-01_manual", name="update-000020-abc", update=20):
    """A checkpoint that names shards of its training."""
    folder = home / "policy_checkpoint" / partition / "feedfacefeedface"
    index = [{"name": shard.path.name, "digest": shard.digest, "steps": len(shard.records)} for shard in shards]
    write_json(
        folder / "checkpoints" / name / "manifest.json", {"content": {"trajectory_index": index, "update": update}}
    )
    return folder


def flip(path, offset, change=0x10):
    """Changes one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= change
    path.write_bytes(data)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def package(home, *shards, partition="2026-01-01_manual", key="feedfacefeedface", counted=None):
    """The package of a training, which names ``shards`` as what it was trained on, and the reference to it."""
    folder = home / "policy_checkpoint" / partition / key
    trajectories = {shard.cell: shard.digest for shard in shards}
    write_json(folder / "package" / "package.json", {"provenance": {"trajectories": trajectories}})
    checkpoints = sorted(path for path in (folder / "checkpoints").glob("*") if path.is_dir())
    figures = {"live_shards": counted} if counted is not None else {}
    figures |= {"checkpoint": str(checkpoints[-1].relative_to(home))} if checkpoints else {}
    reference = {"path": str((folder / "package").relative_to(home)), "figures": figures}
    write_json(home / "references" / "policy_checkpoint" / f"{partition}.json", reference)
    return folder
