"""Before the job: its command line and environment; beside it: the node agent."""
