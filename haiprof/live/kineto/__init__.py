"""Traces on demand through Kineto's daemon protocol: of jobs with KINETO_USE_DAEMON."""
