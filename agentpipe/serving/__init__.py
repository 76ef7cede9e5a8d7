"""From a policy package to a checked Triton bundle, and to the decisions that it serves."""
