"""What ``docker/`` says, held against the programs that it names; no container engine is needed."""
