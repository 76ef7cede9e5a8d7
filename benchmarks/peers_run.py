"""One training of the race: a trial of one setting, or a run that is compared; judged after its clock has stopped."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.peers_line import Ground, PeerPlayer, Preparation
from benchmarks.peers_recorder import Recorder
from benchmarks.peers_settings import MASKABLE, ONE_FILE, OURS, OURS_WARM, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.environments.players import Player
    from benchmarks.peers_recorder import End, Snapshot
    from benchmarks.peers_settings import Contestant, Setting, Sizes

    Players = Callable[[Any, str], Player]
    """of weights and a way of playing"""

TRIAL_SEED = 1_000
"""of all trials; no seed of the race"""


def key_of(contestant: Contestant, setting: Setting | None, sizes: Sizes, seed: int, what: str) -> dict[str, Any]:
    """Everything that a training's figures depend on, but the code and the machine."""
    from agentpipe.environments.layout import SIMULATOR_VERSION
    from benchmarks.peers_own import cold_options, default_options
    from benchmarks.peers_sb3 import versions

    own: Any = None
    if contestant.name in (OURS, OURS_WARM):
        ground = Ground(seed, sizes, 1)
        own = (default_options(ground) if setting is None else cold_options(ground, setting)).decisive()
    elif contestant.name in (MASKABLE, PLAIN):
        own = versions()
    return {
        "contestant": contestant.name,
        "setting": None if setting is None else dataclasses.asdict(setting),
        "sizes": dataclasses.asdict(sizes),
        "seed": seed,
        "what": what,
        "options": own,
        "simulator": SIMULATOR_VERSION,
    }


def trained(contestant: Contestant, setting: Setting, ground: Ground, recorder: Recorder) -> Players:
    """Trains; the weights are in the recorder, and what plays them is returned."""
    if contestant.name == OURS:
        from agentpipe.learning.policy.player import PolicyPlayer
        from benchmarks import peers_own

        peers_own.train_cold(ground, setting, recorder)
        return lambda package, _: PolicyPlayer(package, name="peer")
    line = ground.line(setting)
    preparation = Preparation(ground.statistics, last_action=setting.last_action)
    if contestant.name == ONE_FILE:
        from benchmarks import peers_one_file

        agent = peers_one_file.train(line, setting, ground.seed, recorder)
        line.close()

        def play_agent(weights: Any, play: str) -> Player:  # noqa: ANN401 - of torch
            agent.load_state_dict(weights)
            return PeerPlayer(lambda x: peers_one_file.logits_of(agent, x), preparation, play)

        return play_agent
    from benchmarks import peers_sb3

    model = peers_sb3.train(line, setting, ground.seed, recorder, masked=contestant.name == MASKABLE)
    line.close()

    def play_model(weights: Any, play: str) -> Player:  # noqa: ANN401 - of torch
        model.policy.load_state_dict(weights)
        return PeerPlayer(lambda x: peers_sb3.logits_of(model, x), preparation, play)

    return play_model


def trial(contestant: Contestant, setting: Setting, sizes: Sizes, cores: int) -> dict[str, Any]:
    """A short training under a seed of its own; success on validation lines by each way of playing."""
    ground = Ground(TRIAL_SEED, sizes, cores)
    recorder = Recorder([], [sizes.trial_seconds], "seconds", sizes.longest)
    _ready(ground)
    threads = fastest_threads(contestant, setting, ground)
    players = trained(contestant, dataclasses.replace(setting, threads=threads), ground, recorder)
    recorder.finish()
    last = recorder.snapshots[-1]
    success = {play: ground.validated(players(last.weights, play)) for play in contestant.plays}
    rate = recorder.steps / max(recorder.ended, 1e-9)
    return {"success": success, "steps": last.steps, "steps_per_second": rate, "threads": threads}


def fastest_threads(contestant: Contestant, setting: Setting, ground: Ground) -> int:
    """Number of torch's threads that a peer is fastest with; agentpipe shares its work over the cores by itself."""
    if contestant.name == OURS:
        return 1
    rates = {}
    for threads in sorted({1, ground.cores}):
        recorder = Recorder([], [ground.sizes.thread_seconds], "seconds", ground.sizes.longest)
        trained(contestant, dataclasses.replace(setting, threads=threads), ground, recorder)
        rates[threads] = recorder.steps / max(recorder.ended, 1e-9)
    return max(rates, key=lambda threads: rates[threads])


def race(contestant: Contestant, setting: Setting, play: str, end: End, seed: int, sizes: Sizes, cores: int) -> Any:  # noqa: ANN401
    """One run to the steps, the seconds, or both: success on held-out lines at every mark on the way."""
    ground = Ground(seed, sizes, cores)
    shares = [number / sizes.grid for number in range(1, sizes.grid + 1)]
    recorder = Recorder(
        [share * sizes.steps for share in shares] if end != "seconds" else [],
        [share * sizes.seconds for share in shares] if end != "steps" else [],
        end,
        sizes.longest,
    )
    _ready(ground)
    players = trained(contestant, setting, ground, recorder)
    recorder.finish()
    judged: dict[int, float] = {}

    def success(snapshot: Snapshot) -> float:
        if snapshot.steps not in judged:
            judged[snapshot.steps] = ground.held_out(players(snapshot.weights, play))
        return judged[snapshot.steps]

    curve = [
        {"axis": kept.axis, "at": kept.at, "steps": kept.steps, "seconds": kept.seconds, "success": success(kept)}
        for kept in sorted(recorder.snapshots, key=lambda kept: (kept.axis, kept.at))
    ]
    return {"seed": seed, "curve": curve, "steps_per_second": recorder.steps / max(recorder.ended, 1e-9)}


def as_run(seed: int, axis: str, rates: dict[str, float], sizes: Sizes, cores: int) -> dict[str, Any]:
    """What ``agentpipe run`` trains, sized for the steps or the seconds."""
    from agentpipe.learning.policy.player import PolicyPlayer
    from benchmarks import peers_own

    ground = Ground(seed, sizes, cores)
    _ready(ground)
    package, cost = peers_own.train_as_run(ground, rates, axis)
    success = ground.held_out(PolicyPlayer(package, name="peer"))
    at = sizes.steps if axis == "steps" else sizes.seconds
    point = {"axis": axis, "at": at, "steps": cost["steps"], "seconds": cost["seconds"], "success": success}
    return {"seed": seed, "curve": [point], "steps_per_second": cost["steps"] / cost["seconds"], **cost}


def probe(sizes: Sizes, cores: int) -> dict[str, Any]:
    """How fast agentpipe's default training goes."""
    from benchmarks import peers_own

    ground = Ground(TRIAL_SEED, sizes, cores)
    _ready(ground)
    return peers_own.probe(ground)


def _ready(ground: Ground) -> None:
    """Statistics are gathered and kernels compiled before anybody's clock starts."""
    import numpy as np

    from agentpipe.environments.layout import Purpose

    assert ground.statistics.count > 0
    pool = ground.scene.pool(ground.scene.train[:16], Purpose.HEALTH)
    pool.step(np.asarray(pool.mask.argmax(axis=1), np.int64))
    pool.close()
