"""Recorded episodes: fixed-size step records in sealed shards."""
