"""Questions asked of traces: one module each, a pure function of one rank's trace to a frame.

Its arguments, unless it says otherwise, are `trace`, one rank's, and `steps`, the first profiler
step and the one after the last: what was launched in them counts; None takes everything.
"""
