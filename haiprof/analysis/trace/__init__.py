"""Questions asked of traces: one module each, a pure function of one rank's trace to a frame."""
