"""Assets and checks of the feedback package."""
