"""``python -m agentpipe``."""

from agentpipe.cli.main import main

if __name__ == "__main__":
    main()
