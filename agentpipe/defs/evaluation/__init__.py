"""Assets and checks of the evaluation package."""
