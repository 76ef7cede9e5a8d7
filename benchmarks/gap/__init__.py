"""Where the points between a policy and the oracle are lost."""
