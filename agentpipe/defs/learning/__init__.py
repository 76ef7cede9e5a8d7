"""Assets and checks of the learning package."""
