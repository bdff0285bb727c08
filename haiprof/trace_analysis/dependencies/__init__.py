"""What depends on what in one rank's trace: one model for critical path, what-if and link."""
