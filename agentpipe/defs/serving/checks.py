"""Gate 6: the bundle."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.gates import specs

BUNDLE = ("checkpoint_size", "latency", "operators", "parity")


def bundle_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``triton_bundle``."""
    return specs("triton_bundle", BUNDLE)
