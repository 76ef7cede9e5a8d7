"""Looking after shards: checking, repairing, shrinking, merging, exporting them, and deciding which go."""
