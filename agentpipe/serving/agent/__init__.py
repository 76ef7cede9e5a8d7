"""The agent at a line: it asks a policy what to do, keeps working as things break, and records every decision."""
