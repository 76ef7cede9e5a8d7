"""Segment-wise clipped policy gradient (S9): rewards, advantages, losses, and the update."""
