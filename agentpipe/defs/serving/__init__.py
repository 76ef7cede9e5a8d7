"""Assets and checks of the serving package."""
