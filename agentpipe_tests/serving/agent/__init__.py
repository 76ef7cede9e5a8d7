"""Tests of the agent runtime."""
