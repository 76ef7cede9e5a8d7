"""Drawing steps from sets of shards."""
