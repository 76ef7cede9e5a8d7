"""Learning: networks, advantages, segment-wise clipped policy gradient, checkpoints, policy package, champion store."""
