"""Assets and checks of the experience package."""
