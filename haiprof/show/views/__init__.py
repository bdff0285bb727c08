"""What each command shows in the terminal, one module per command."""
