"""The causal trajectory buffer: episodes as checksummed step records with their graphs, in shards.

A writer appends whole episodes to an open shard (:mod:`~agentpipe.experience.writer`), where they count at once and
survive the end of its process; sealed (:mod:`~agentpipe.experience.shard`), they never change again and any number of
processes read them. Samplers, figures and care build on sealed shards.
"""
