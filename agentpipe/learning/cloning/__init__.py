"""Behaviour cloning before the policy gradient: of an expert that plays without end, or of recorded episodes (S10)."""
