"""Dagster and nothing else: every asset is a few lines that call one domain package."""
