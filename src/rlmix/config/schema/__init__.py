"""The types of the YAML under `conf/`. Values live there; the rules are in `config.rules`.

Fields have no defaults, so that a value has one home and a missing one is reported. `slots=True`
makes Hydra refuse an undeclared key. Not frozen: OmegaConf has to fill them.
"""
