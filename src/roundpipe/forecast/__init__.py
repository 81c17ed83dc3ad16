"""Says what training takes and how long a step is before anything is loaded: the engine's
own planner over layers that ran on the meta device.

Imports `presets`, `autoplan`, `plan`, `optim`, `kernels`, `memory`, `device`, `trace` and what
these may import; Hugging Face libraries when a model is read.
"""
