"""What scores of rollouts come to: estimates with intervals, rewards computed again, audits. No torch, no files."""
