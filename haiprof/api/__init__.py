"""The public classes: what is recorded and traced as frames, and shown where the reader is."""
