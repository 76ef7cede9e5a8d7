"""The durable store: what the files of one shard hold, their one writer and any number of readers."""
