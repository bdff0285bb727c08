"""Figures: frames in, plotly figures out; the same in notebook, web page and file."""
