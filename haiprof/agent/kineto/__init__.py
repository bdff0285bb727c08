"""Kineto's daemon protocol: traces of jobs that run with KINETO_USE_DAEMON, without dynolog."""
