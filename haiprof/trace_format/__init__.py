"""Formats of traces: Kineto, execution traces, Chakra, the Flight Recorder; read and written."""
