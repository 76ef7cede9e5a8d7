"""What helps a training along beside the policy gradient, each in a file of its own; see :mod:`.base`."""
