"""Statistics of the analyses: tests, intervals, trends; each from a named source."""
