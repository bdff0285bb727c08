"""A machine with a GPU that has none: torch.cuda, its allocator, its profiles, NVIDIA's tools."""
