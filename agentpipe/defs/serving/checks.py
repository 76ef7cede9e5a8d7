"""Gate 6: the bundle, by itself and in a server."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.gates import specs

BUNDLE = ("checkpoint_size", "latency", "operators", "parity")
SERVER = (
    "server_available",
    "server_loads",
    "server_configuration",
    "server_values",
    "server_empty_mask",
    "server_refusals",
    "server_batching",
)


def bundle_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``triton_bundle``."""
    return specs("triton_bundle", BUNDLE)


def server_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``bundle_server_check``."""
    return specs("bundle_server_check", SERVER)
