"""Train, evaluate, predict: typed recipes, data sources, an engine on Accelerate and timm, checkpoints without pickle.

config → task (data, model, loss, metrics) → engine → run folder (checkpoints, log, summary)
"""
