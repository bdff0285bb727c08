"""What a trace can support: faults of the recording, found and corrected when a trace is read."""
