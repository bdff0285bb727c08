"""The report page: one self-contained file, or served on this machine."""
