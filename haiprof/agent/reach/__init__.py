"""Requests to nodes without a shared file system: agents connect to a controller by TCP."""
