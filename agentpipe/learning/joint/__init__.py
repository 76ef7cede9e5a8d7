"""Perception and memory, trained beside the policy: own parameters, own losses, own optimisers (S12)."""
