"""The folder that goes in front of PYTHONPATH; it holds sitecustomize alone."""
