"""agentpipe: trains, judges and ships an industrial maintenance agent, as a Dagster project."""

__version__ = "0.1.0"
