"""What an update learns from: live rollouts, their recording, and recorded steps that are drawn again."""
