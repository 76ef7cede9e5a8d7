"""Measurements: ratios side by side in one run, written to ``RESULTS.md`` from what each script stored."""
