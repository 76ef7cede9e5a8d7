"""Learning: the training run, its options, its checkpoints and gates; what it is made of has folders of its own."""
