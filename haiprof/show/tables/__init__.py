"""Rows of cells that terminal and page share."""
