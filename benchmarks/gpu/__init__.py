"""What only a GPU can show, measured in one command: `scripts/gpu-check`, docs/gpu-check.md."""
