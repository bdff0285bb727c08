"""The node agent beside the job: samplers, step watch, relayed requests, Kineto's daemon."""
