"""The causal trajectory buffer: episodes as checksummed step records with their graphs, in shards.

- here: recording a pool's episodes, their graphs and figures, playing them again from their actions;
- :mod:`~agentpipe.experience.store`: the durable files, their one writer and any number of readers;
- :mod:`~agentpipe.experience.sampling`: drawing steps from any set of sealed shards;
- :mod:`~agentpipe.experience.care`: checking, repairing, shrinking, merging, exporting, deciding which go.
"""
