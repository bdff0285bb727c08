"""The folder whose copy goes in front of PYTHONPATH; it holds sitecustomize alone."""
