"""What tests of feedback share."""

from __future__ import annotations

from agentpipe_tests.feedback.examples import home

__all__ = ["home"]
