"""Running jobs: found, asked, and looked into while they run."""
