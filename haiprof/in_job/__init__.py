"""Inside the job: times phases per step; needs nothing but the standard library and torch.

Nothing here may raise into the job, block it, print to its streams or change a result. A hook that
breaks switches itself off and says so once in the run directory.
"""
