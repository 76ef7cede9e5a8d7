"""The policy network as compiled code: forward and backward pass of a block of samples without a step of Python."""
