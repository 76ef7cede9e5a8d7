"""Assets and checks of the environments package."""
