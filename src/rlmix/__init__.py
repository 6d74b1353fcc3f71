"""rlmix: RL on agentic coding with one BF16 trainer and samplers on mixed accelerators.

Importing the package prints nothing, reads no environment and creates no file.
"""

__version__ = "0.1.0"
