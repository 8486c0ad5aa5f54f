"""Kubernetes: a PersiaJob planned, written as objects of an engine, and kept running.

document --spec--> PersiaJob --plan--> Plan --+-- native    Services, Jobs
                                              +-- jobset    a JobSet
                                              +-- trainjob  a TrainingRuntime, a TrainJob

Plan, children --reconcile--> actions --operator--> API
"""
