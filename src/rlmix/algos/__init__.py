"""The mathematics of the policy update: pure functions of tensors and numbers.

Nothing here knows a config object, a clock, a file or a device. Modules import torch; the package
itself does not, and `advantages` works on numpy arrays as well, so that the driver needs no torch.
"""
