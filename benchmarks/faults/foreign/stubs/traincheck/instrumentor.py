"""Variables that TrainCheck would read."""

meta_vars = {}
