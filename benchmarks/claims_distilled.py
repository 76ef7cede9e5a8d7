"""The arm that goes on after its training: its policy is fine-tuned on the hardest training environments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.learning.aids.distillation import Distilled
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.result import TrainingResult
    from benchmarks.buffer_learning import Scene

_EPISODES = 4
"""of each hard environment, to judge what was gained there"""
_STEPS = 50
"""steps of each environment in the training before, for each episode that must be known of it"""


def distilled(
    main: TrainingResult, options: TrainingOptions, scene: Scene, folder: Path
) -> tuple[PolicyPackage, dict[str, Any]]:
    """Fine-tunes the policy of ``main``.

    Args:
        main: with the book of difficulty in its checkpoint.
        options: of ``main``.
        scene: whose training environments were side by side in ``main``.
        folder: of the fine-tuning.

    Returns:
        The policy that is kept, and success on the hard environments before and after, whether the fine-tuned policy
        was kept, and its steps.

    Raises:
        KeyboardInterrupt: it was told to end.
    """
    from agentpipe.environments.layout import Purpose
    from agentpipe.learning.aids.distillation import distil

    known = options.budget_steps // len(scene.train) // _STEPS
    aids = dataclasses.replace(options.aids, least_episodes=max(1, min(options.aids.least_episodes, known)))

    def of(rows: npt.NDArray[np.int64]) -> list[EnvironmentSpec]:
        return [scene.train[row] for row in rows]

    found = distil(
        main,
        dataclasses.replace(options, warm_up=None, aids=aids),
        names=[environment.environment_id for environment in scene.train],
        pool_for=lambda rows: scene.pool(of(rows), Purpose.COLLECT),  # other episodes than those of the training
        judge_for=lambda rows: _judge(scene, of(rows)),
        validate=scene.validate,
        directory=folder,
    )
    if not found.finished:
        raise KeyboardInterrupt
    return found.package, _figures(found)


def _judge(scene: Scene, environments: list[EnvironmentSpec]) -> Callable[[PolicyPackage], float]:
    from agentpipe.environments.layout import Purpose
    from agentpipe.evaluation.rollout import play_first_episodes
    from agentpipe.learning.policy.player import PolicyPlayer

    names = [environment.environment_id for environment in environments]

    def success(package: PolicyPackage) -> float:
        pool = scene.pool(environments, Purpose.HEALTH)
        played = play_first_episodes(pool, PolicyPlayer(package), _EPISODES, environment_ids=names)
        pool.close()
        return float(played["success"].mean())

    return success


def _figures(found: Distilled) -> dict[str, Any]:
    return {
        "hard_before": found.hard_before,
        "hard_after": found.hard_after,
        "distillation_kept": found.kept,
        "distillation_steps": found.trained.environment_steps,
    }
