"""The marks that TrainCheck's workloads set: they do nothing here."""


def annotate_stage(name):
    return None
