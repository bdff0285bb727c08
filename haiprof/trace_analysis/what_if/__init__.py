"""What-if: a job's step replayed from its dependencies, as it was and with something faster."""
