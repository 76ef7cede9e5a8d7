"""Dagster and nothing else: every asset is a few lines that call one domain package."""

import warnings

import dagster as dg

warnings.filterwarnings("ignore", category=dg.BetaWarning)  # multi-dimensional partition mappings: used on purpose
warnings.filterwarnings("ignore", category=dg.PreviewWarning)  # partitions of asset checks: used on purpose
